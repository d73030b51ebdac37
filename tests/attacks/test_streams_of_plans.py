"""A stream of PipeDream over a plan made for steps: measured times must not decide which weights a mini-batch has.

The number of micro-batches decides how many mini-batches make an update, and which updates a mini-batch has. A plan for
another schedule may have chosen that number by measured times, which differ from run to run.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.delayed_updates import rounds_of_replicas, rule_of_replicas, train_delayed
from helpers.oracle import closing
from helpers.plan_hardware import SLOW, hardware
from helpers.residual_blocks import WIDTH, assert_same, batches, blocks, momentum, train
from torch import nn

import fxpipe

STAGES = 3
QUICK = {"progress": False, "check": False}
BY_BLOCKS = {"balance": [str(j) for j in range(STAGES - 1)]}


def _planned(model, devices=STAGES, size=6, **options):
    slow = {"hardware": replace(hardware(), flops_per_second={"float32": 1e6}), **BY_BLOCKS}  # more samples take longer
    return fxpipe.plan(
        model, devices=["cuda:0"] * devices, example_args=(torch.ones(size, WIDTH),), **slow | options | QUICK
    )


# By name: options of the plan, of which each has several micro-batches, and options of the stream.
WAYS = {
    "1f1b": ({"chunks": 3}, {}),
    "gpipe": ({"chunks": 2, "schedule": "gpipe"}, {}),
    "zero bubble": ({"chunks": 4, "schedule": "zero_bubble"}, {}),
    "double buffering": ({"chunks": 6, "schedule": "pipedream_2bw"}, {}),
    "chosen by times": ({"chunks": "auto"}, {}),
    "schedule chosen by times": ({"chunks": 2, "schedule": "auto", "stages_per_device": 1}, {}),
    "vertical sync": ({"chunks": 3}, {"vertical_sync": True}),
    "replicas of the pipe": ({"chunks": 3, "data_parallel": 2, "devices": 2 * STAGES, "size": 12}, {}),
    "vertical sync of replicas": (
        {"chunks": 2, "data_parallel": 2, "devices": 2 * STAGES, "size": 12},
        {"vertical_sync": True},
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_mini_batch_runs_as_a_whole_over_a_plan_for_another_schedule(name, tmp_path):
    options, of_stream = WAYS[name]
    plain = blocks(STAGES)
    plan = _planned(plain, **options)
    assert plan.micro_batches > 1
    assert fxpipe.simulate(plan, schedule="pipedream").steady.micro_batches == 1
    plan.save(tmp_path / "plan.json")
    losses, model = _streamed(plain, fxpipe.Plan.load(tmp_path / "plan.json"), **of_stream)
    counts = (options.get("data_parallel", 1),) * STAGES
    rule = rule_of_replicas(counts)
    if of_stream:  # all stages have the versions of the first one
        rule = lambda n, j, t, first=rule: first(n, 0, t)  # noqa: E731
    _assert_trained(losses, model, plain, rule, counts)


def test_a_mini_batch_runs_as_a_whole_over_replicas_that_the_planner_has_chosen():
    """Stages that send little and have few weights get more devices than the last one, with many weights."""
    wide = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(15)), *wide)
    plan = _planned(plain, 4, 24, chunks=4, balance="pipedream", hardware=hardware(replace(SLOW, bytes_per_second=1e8)))
    assert len(plan.replicas) == 2
    assert plan.replicas[0] > 1
    losses, model = _streamed(plain, plan)
    cut, counts = len(plan.stages[0].nodes), plan.replicas
    _assert_trained(losses, model, plain, rule_of_replicas(counts), counts, cuts=[plain[:cut], plain[cut:]])


@pytest.mark.parametrize("asked", ["with the plan", "with the pipe"])
def test_a_number_that_was_given_is_followed(asked):
    plain, given = blocks(STAGES), {"chunks": 3}
    plan = _planned(plain, schedule="pipedream", **given if asked == "with the plan" else {})
    losses, model = _streamed(plain, plan, **{} if asked == "with the plan" else given)
    counts = (1,) * STAGES
    _assert_trained(losses, model, plain, rule_of_replicas(counts, 3), counts, 3)


def _streamed(plain, plan, chunks="auto", **options):
    model = copy.deepcopy(plain)
    devices = ["cpu"] * (plan.data_parallel * len(plan.row_devices))
    with closing(fxpipe.pipeline(model, devices, chunks, plan=plan, schedule="pipedream", **QUICK)) as pipe:
        return train(pipe, batches(9), **options)[1], model


def _assert_trained(losses, model, plain, rule, counts, chunks=1, cuts=None):
    """Compares with a plain loop of delayed updates, bit for bit; afterwards `plain` is trained."""
    how = rule, chunks, counts, rounds_of_replicas(counts, chunks)
    want, _ = train_delayed(cuts or [*plain], batches(9), F.mse_loss, momentum, *how)
    assert torch.equal(torch.stack(losses), torch.stack(want))
    assert_same(model, plain)
