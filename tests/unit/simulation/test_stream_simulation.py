"""A simulated stream: each mini-batch takes F + B + U of the slowest stage, and schedules are compared per sample."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.inspect.step_summary import compare_schedules, schedule_outcomes, step_text, summaries_text
from fxpipe.scheduling.streams import stream_schedule
from fxpipe.simulation import StageCost, Transfer, simulate_stream
from fxpipe.simulation.simulation_result import simulate_checked

WIDTH = 64
QUICK = {"check": False, "hardware": "cpu", "progress": False}


def costs(*seconds, update=0.5):
    return [StageCost(forward=f, backward=2 * f, update=update) for f in seconds]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize(
    ("name", "m", "is_joint"),
    [("pipedream", 1, False), ("pipedream_2bw", 3, False), ("pipedream", 8, False), ("pipedream", 4, True)],
)
def test_equal_stages_take_forward_backward_and_update_for_each_mini_batch(name, n, m, is_joint):
    simulated = simulate_stream(name, costs(*[1.0] * n), micro_batches=m, is_joint=is_joint)
    if name == "pipedream" or m >= n:
        assert simulated.step_seconds == pytest.approx(3.0 * m + 0.5)
        assert simulated.mean_bubble == pytest.approx(0.0)
    assert simulated.busy == pytest.approx((3.0 * m + 0.5,) * n)
    assert simulated.steady.warm_up == pytest.approx(n - 1)
    assert simulated.micro_batches == m


@pytest.mark.parametrize("slow", range(4))
def test_a_mini_batch_takes_as_long_as_the_slowest_stage(slow):
    forward = [1.0, 1.2, 0.8, 1.1]
    forward[slow] = 2.0
    simulated = simulate_stream("pipedream", costs(*forward), micro_batches=1)
    assert simulated.step_seconds == pytest.approx(6.5)
    assert simulated.bubble == pytest.approx([1 - (3 * f + 0.5) / 6.5 for f in forward])


def test_transfers_that_take_long_bound_a_mini_batch_by_the_way_through_all_stages():
    """Of n micro-batches in flight each has to go there and back before the first device takes up another one."""
    n, sending = 3, 10.0
    transfers = [Transfer(j, j + 1, 1.0, sending) for j in range(n - 1)]
    transfers += [Transfer(j + 1, j, 1.0, sending) for j in range(n - 1)]
    simulated = simulate_stream("pipedream", costs(*[1.0] * n), transfers, micro_batches=1)
    assert simulated.step_seconds == pytest.approx((3 * n + 0.5 + 2 * (n - 1) * sending) / n, rel=0.02)
    assert simulated.sent == {(0, 1): 1.0, (1, 0): 1.0, (1, 2): 1.0, (2, 1): 1.0}


REPLICAS = [(2, 1), (1, 2), (3, 1), (2, 1, 1), (1, 3, 1), (2, 3), (3, 2, 1), (2, 1, 3), (3,), (15, 1)]


@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_that_balance_their_stages_are_all_at_work_in_the_steady_state(replicas):
    """An update comes once for each round; it is that of the slowest stage, in the row of one of its replicas."""
    stages = [StageCost(forward=count, backward=2 * count) for count in replicas]
    simulated = simulate_stream("pipedream", stages, micro_batches=1, replicas=replicas)
    assert simulated.step_seconds == pytest.approx(3.0)
    assert simulated.busy == pytest.approx((3.0,) * sum(replicas))
    updated = [replace(stage, update=0.25) for stage in stages]
    simulated = simulate_stream("pipedream", updated, micro_batches=1, replicas=replicas)
    slowest = 3.0 + 0.25 / min(replicas)
    assert slowest <= simulated.step_seconds <= slowest * 1.03
    assert sum(simulated.busy) == pytest.approx(sum(3 * count + 0.25 / count for count in replicas))


@pytest.mark.parametrize(
    ("name", "m"), [("pipedream", 1), ("pipedream", 2), ("pipedream_2bw", 4), ("pipedream_2bw", 3)]
)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2), (2, 3), (3, 2, 1)])
def test_the_steady_state_is_that_of_a_much_longer_stream(name, m, replicas):
    stages = costs(*(factor * count for factor, count in zip((1.0, 1.4, 0.7), replicas, strict=False)))
    short = simulate_stream(name, stages, micro_batches=m, replicas=replicas)
    ends = []
    for count in (60, 90):
        schedule = stream_schedule(name, len(replicas), m, count, replicas=replicas)
        ends.append(simulate_checked(schedule, tuple(stages), (), True, True).seconds)
    assert short.step_seconds == pytest.approx((ends[1] - ends[0]) / 30, rel=0.04)


def test_gradients_of_replicas_are_reduced_with_each_update():
    stages = [StageCost(forward=2.0, backward=4.0, update=0.5, reduction=0.25), StageCost(forward=1.0, backward=2.0)]
    simulated = simulate_stream("pipedream", stages, micro_batches=1, replicas=(2, 1))
    assert simulated.busy == pytest.approx((3.0, 3.375, 3.0))
    assert simulated.step_seconds == pytest.approx(3.375)


# -- of plans --------------------------------------------------------------------------------------------------------


def planned(schedule="pipedream", n=3, **options):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n)))
    options = {"balance": [str(j) for j in range(n - 1)], "checkpoint": "never"} | QUICK | options
    return fxpipe.plan(model, n, example_args=(torch.ones(12, WIDTH),), schedule=schedule, **options)


def test_a_plan_for_a_stream_tells_the_time_of_a_mini_batch():
    plan = planned()
    simulated = fxpipe.simulate(plan)
    assert simulated.steady is not None
    assert fxpipe.simulate(plan, schedule="1f1b").steady is None
    flush = fxpipe.simulate(plan, schedule="1f1b", chunks=1)
    assert simulated.step_seconds < flush.step_seconds / 1.5  # of three stages one works at a time there
    assert simulated.samples == flush.samples == 12
    spared = fxpipe.simulate(plan, updates=False)
    assert spared.step_seconds <= simulated.step_seconds
    assert "one of them in the steady state, with its update" in " ".join(str(plan).split())
    text = step_text(simulated, plan)
    assert "a mini-batch of a stream as simulated, pipedream, 1 micro-batch" in text
    assert "until all devices are at work" in text


def test_other_schedules_beside_a_stream_have_their_updates_and_enough_micro_batches():
    plan = planned(hardware="h100", n=4)
    own, *others = compare_schedules(plan)
    assert (own.schedule, own.micro_batches) == ("pipedream", 1)
    (flush,) = [run for run in others if run.schedule == "1f1b"]
    assert flush.micro_batches == 4
    step = fxpipe.simulate(plan, schedule="1f1b", chunks=4)
    assert step.update_seconds > 0
    assert flush.step_seconds == step.step_seconds + step.update_seconds
    assert "1 micro-batch; beside the stream steps with their updates, 4 micro-batches\n" in summaries_text(
        [own, flush]
    )
    runs = {variant.schedule: variant.run for variant in schedule_outcomes(plan)}
    assert (runs["pipedream"], runs["1f1b"]) == (own, flush)


def test_the_tuner_compares_a_stream_by_its_mini_batches():
    """The updates of neither count: a step has its own behind it."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(6))), torch.ones(4096, 8192)
    devices, options = [f"cuda:{k}" for k in range(3)], {"chunks": [4], "checkpoint": ["never"]}
    tuning = fxpipe.tune(
        model, devices, example_args=(x,), schedules=["pipedream", "1f1b"], **QUICK | options | {"hardware": "h100"}
    )
    (row,) = (one for one in tuning.rows if one.schedule == "pipedream")
    assert tuning.best is row
    assert row.step_seconds == fxpipe.simulate(row.plan, updates=False).step_seconds
    assert row.step_seconds < fxpipe.simulate(row.plan).step_seconds
