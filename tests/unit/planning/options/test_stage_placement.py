"""A pipe for each schedule by name: where it puts stages, that planning counts what they hold, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from helpers.cases import each_once
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.planning.options.parse import TRAINING_SCHEDULES
from fxpipe.planning.plans.figures import simulate_step
from fxpipe.scheduling import make_schedule, micro_batches_in_flight
from fxpipe.scheduling.streams import steady_micro_batches

LOOPED = ["interleaved_1f1b", "interleaved_zero_bubble"]
V_SHAPED = ["zbv", "dualpipev", "v_half", "v_min"]


def _chain(layers=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)))


def _plan(schedule, model=None, devices=2, chunks=4, **options):
    return fxpipe.plan(
        model or _chain(),
        devices=["cpu"] * devices,
        chunks=chunks,
        schedule=schedule,
        example_args=(torch.randn(8, 8),),
        hardware="a100-80gb",  # no clock: the cuts are the same each time
        **options,
    )


def _timed(plan, **seconds):
    """The plan with these seconds for each stage, whatever was measured, and none on the way between them."""
    return replace(plan, stages=tuple(replace(stage, **seconds) for stage in plan.stages), sendings=())


@pytest.mark.parametrize(("schedule", "chunks"), each_once(TRAINING_SCHEDULES, [1, 3, 4]))
def test_every_schedule_is_planned_on_its_placement(schedule, chunks):
    plan = _plan(schedule, chunks=chunks, checkpoint="except_last")
    plan = _timed(plan, forward_seconds=1, backward_seconds=2, weight_seconds=1, action_seconds=0)
    want = (0, 1)
    if schedule in (*LOOPED, *V_SHAPED):
        want = (0, 1, 0, 1) if schedule in LOOPED else (0, 1, 1, 0)
    assert (plan.schedule, plan.placement) == (schedule, want)
    count = steady_micro_batches(schedule, len(want), chunks)  # of a stream others are in flight, too
    flights = micro_batches_in_flight(make_schedule(schedule, len(want), count))
    assert tuple(plan.in_flight(j) for j in range(len(want))) == flights
    assert all(plan.memory(j, b=2) > 0 for j in range(len(want)))
    assert "bubble" in str(plan)


def test_more_stages_on_each_device():
    assert _plan("interleaved_1f1b", stages_per_device=3).placement == (0, 1, 0, 1, 0, 1)
    assert _plan("zero_bubble", stages_per_device=2).placement == (0, 1, 0, 1)
    assert _plan("zbv", devices=1).placement == (0, 0)


@pytest.mark.parametrize(
    ("schedule", "per_device", "words"),
    [
        ("interleaved_1f1b", 1, "needs 2 or more stages on each device, .* is given 2 stages on 2 devices"),
        ("zbv", 3, "'zbv' needs 2 stages on each device, .* is given 6 stages"),
        ("inference", None, "schedule='inference' is unknown for training; .* call the pipe under torch.no_grad"),
    ],
)
def test_what_a_schedule_cannot_have_is_refused(schedule, per_device, words):
    with pytest.raises(ArgumentError, match=words):
        fxpipe.pipeline(_chain(), ["cpu"] * 2, schedule=schedule, stages_per_device=per_device)


def test_pins_that_leave_stages_where_the_schedule_has_them():
    """The ends are on one device in `zbv`: so a head that shares the embedding's weight is beside it."""
    plan = _plan("zbv", pin={"0": 0, "7": 0})
    assert plan.placement == (0, 1, 1, 0)
    with pytest.raises(
        ArgumentError, match="with these pins schedule 'interleaved_1f1b' needs 2 or more stages on each"
    ):
        _plan("interleaved_1f1b", pin={"0": 1, "7": 1})


def test_a_plan_brings_its_placement_and_the_schedule_must_go_with_it():
    plan = _plan("zbv")
    with fxpipe.pipeline(_chain(), plan=plan) as pipe:
        pipe(torch.randn(8, 8))
        assert (pipe.plan.schedule, pipe.plan.placement) == ("1f1b", (0, 1, 1, 0))
    with pytest.raises(ArgumentError, match="'interleaved_1f1b' needs 2 or more stages on each device"):
        fxpipe.pipeline(_chain(), plan=plan, schedule="interleaved_1f1b")
    with pytest.raises(ArgumentError, match=r"'zbv' needs 2 stages on each device, .* placed as in \(0, 1\)"):
        fxpipe.pipeline(_chain(), plan=_plan("1f1b"), schedule="zbv")


def test_a_split_backward_is_timed_in_two():
    plan = _plan("zero_bubble")
    assert all(0 < stage.weight_seconds <= stage.backward_seconds for stage in plan.stages)
    plan = _timed(plan, forward_seconds=2, backward_seconds=5, weight_seconds=1, action_seconds=0)
    assert simulate_step(plan).step_seconds == 4 * 7 + (2 + 4 - 1)
    assert simulate_step(replace(plan, schedule="1f1b")).step_seconds == 4 * 7 + 7
