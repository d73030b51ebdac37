"""`zero_bubble_auto` in plans: made of their figures, within their memory, and the same wherever it is asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drawn_plans import MIB, drawn_plan
from helpers.oracle import closing
from helpers.plan_models import Deep, deep_profile, loss, planned, rows
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.plans import Plan
from fxpipe.plans.simulate_plan import vary_plan
from fxpipe.scheduling import CHECKPOINTS, Rows
from fxpipe.scheduling.zero_bubble_search import MIN_GAIN, schedule_rows
from fxpipe.simulation import StageCost
from fxpipe.simulation.costs import stage_times_of
from fxpipe.tuning.candidates import SAME_STEP_TOLERANCE

AUTO = "zero_bubble_auto"


def uneven(stages: int = 4, limit: int | None = 200 * MIB, **options: Any) -> Plan:
    plan = drawn_plan(stages, **{"schedule": AUTO, "batch": 16} | options)
    return replace(plan, stages=tuple(replace(stage, memory_limit=limit) for stage in plan.stages))


def step(plan: Plan, **options: Any) -> float:
    return fxpipe.simulate(plan, **options).step_seconds


def ran(pipe: fxpipe.Pipeline) -> Rows:
    """What the devices of a pipe did in its last step, in order."""
    actions = pipe.last_step.actions
    return tuple(
        tuple(one.action for one in sorted((a for a in actions if a.device == d), key=lambda one: one.start))
        for d in range(len(pipe.last_step.devices))
    )


# -- one order ---------------------------------------------------------------------------------------------------------


def test_a_plan_that_is_read_again_has_the_same_order(tmp_path: Path) -> None:
    plan = uneven()
    assert plan.schedule == AUTO
    plan.save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found.as_schedule() == plan.as_schedule() == fxpipe.simulate(plan).schedule
    assert plan.as_schedule().rows != replace(plan, schedule="zero_bubble").as_schedule().rows


def test_other_micro_batches_have_the_order_of_their_own_figures() -> None:
    """From a plan of another schedule as from one of this; with as many samples in each as there then are."""
    plan, other = uneven(chunks=8), uneven(chunks=8, schedule="1f1b")
    for chunks in (2, 4, 16):
        mine, yours = fxpipe.simulate(plan, chunks=chunks), fxpipe.simulate(other, schedule=AUTO, chunks=chunks)
        assert mine.schedule == yours.schedule == vary_plan(plan, chunks=chunks).as_schedule()
        assert mine.schedule.micro_batches == chunks
    demands = [vary_plan(plan, chunks=chunks).demands() for chunks in (4, 8)]
    assert demands[0][0].forward_memory == 2 * demands[1][0].forward_memory
    assert demands[0][0].forward > demands[1][0].forward


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_pipe_runs_the_order_of_its_plan(checkpoint: str) -> None:
    """Also of mini-batches that have fewer samples, as fewer micro-batches or smaller ones."""
    x = rows()
    with closing(
        fxpipe.pipeline(
            Deep(), ["cpu"] * 3, 4, schedule=AUTO, example_args=(x,), profile=deep_profile(), checkpoint=checkpoint
        )
    ) as pipe:
        for batch in (8, 5, 4, 3, 1):
            pipe.forward_backward(x[:batch], target=torch.zeros_like(x[:batch]), loss_fn=loss)
            assert ran(pipe) == fxpipe.simulate(pipe.plan, batch=batch).schedule.rows
        assert pipe.last_step.schedule == AUTO
        given = pipe.plan
    with closing(fxpipe.pipeline(Deep(), schedule=AUTO, plan=given)) as again:
        again.forward_backward(x, target=torch.zeros_like(x), loss_fn=loss)
        assert ran(again) == given.as_schedule().rows
        assert again.plan.as_schedule() == given.as_schedule()


# -- within memory -----------------------------------------------------------------------------------------------------


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    """Uneven, limited or not, with stages that recompute."""
    n, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    modes = tuple(draw(st.sampled_from(CHECKPOINTS)) for _ in range(n))
    plan = uneven(n, chunks=chunks, seed=draw(st.integers(0, 99)))
    samples = -(-16 // chunks)
    limits = st.none() | st.integers(60 + 7 * samples, 60 + 60 * samples).map(lambda mib: mib * MIB)
    stages = tuple(replace(stage, memory_limit=draw(limits)) for stage in plan.stages)
    received = tuple(replace(s, bytes=replace(s.bytes, received=s.sent)) for s in stages)
    ways = tuple(replace(way, seconds=draw(st.sampled_from([0.0, 1e-3, 5e-3]))) for way in plan.sendings)
    return replace(plan, stages=received, checkpoint=modes, sendings=ways)


@settings(max_examples=100, deadline=None)
@given(any_plan())
def test_what_a_plan_may_take_is_kept_to(plan: Plan) -> None:
    """And a step is no longer than one in an order made by hand that fits, unless the last micro-batch is spared R."""
    found = fxpipe.simulate(plan)
    assert all(fits is not False for fits in found.fits)
    for name in ("zero_bubble", "zero_bubble_2p"):
        by_hand = fxpipe.simulate(plan, schedule=name)
        unlimited = [stage.memory_limit is None for stage in plan.stages]
        if all(fits is not False for fits in by_hand.fits) and "except_last" not in plan.checkpoint:
            assert found.step_seconds <= by_hand.step_seconds * (1 + 2 * MIN_GAIN)
        if name == "zero_bubble_2p":
            peaks = zip(found.memory, by_hand.memory, unlimited, strict=True)
            assert all(mine.peak <= hand.peak for mine, hand, is_free in peaks if is_free)


@settings(max_examples=100, deadline=None)
@given(any_plan())
def test_what_a_plan_demands_is_what_is_simulated(plan: Plan) -> None:
    """Played by the demands, a step takes as long as the simulator says: devices copy what they receive."""
    plan = replace(plan, checkpoint=tuple("always" if mode == "always" else "never" for mode in plan.modes))
    found = fxpipe.simulate(plan)
    without = tuple(tuple(a for a in row if str(a.kind) != "R") for row in found.schedule.rows)
    assert schedule_rows(without, plan.micro_batches, plan.demands()).seconds == pytest.approx(found.step_seconds)


def test_a_limit_that_nothing_meets_is_told_by_the_simulation() -> None:
    found = fxpipe.simulate(uneven(3, limit=MIB))
    assert found.fits == (False, False, False)
    assert max(memory.peak for memory in found.memory) == min(
        memory.peak for memory in found.memory
    )  # of one at a time


def test_of_bytes_that_nobody_knows_micro_batches_are_counted() -> None:
    cost = StageCost(1, 2, weight=1)
    for limit in (None, 10):
        (demand,) = stage_times_of([cost], limits=[limit])
        assert (demand.forward_memory, demand.recompute_memory, demand.limit) == (1, 0, None)


def test_more_memory_is_used_where_it_is_of_use() -> None:
    """From what one micro-batch takes to more than enough."""
    limits = [(62 + 5 * k) * MIB for k in range(1, 12)]
    steps = [step(uneven(4, chunks=16, limit=limit)) for limit in limits]
    assert all(after <= (1 + SAME_STEP_TOLERANCE) * before for before, after in itertools.pairwise(steps))
    assert steps[0] > 1.5 * steps[-1]
    assert steps[-1] < 0.98 * step(uneven(4, chunks=16), schedule="zero_bubble")


# -- where it is asked for ---------------------------------------------------------------------------------------------


def test_tuning_finds_it_and_says_what_it_comes_to() -> None:
    """Between the memory of `zero_bubble` and of `zero_bubble_2p` it is the best. Its plan has the limits that were
    asked for, and takes as long as its row says."""
    plan = uneven(4, schedule="1f1b")
    tuning = fxpipe.tune(plan, chunks=[8, 16], memory_limit=125 * MIB)
    assert tuning.best.schedule == AUTO
    for row in (tuning.best, *(row for row in tuning.rows if row.schedule == AUTO)):
        assert row.step_seconds == fxpipe.simulate(row.plan).step_seconds
        assert row.memory == tuple(memory.peak for memory in fxpipe.simulate(row.plan).memory)
        assert row.fits
    others = [row.step_seconds for row in tuning.rows if row.fits and row.schedule != AUTO]
    assert tuning.best.step_seconds < min(others)
    found = fxpipe.tune(Deep(), ["cpu"] * 3, example_args=(rows(),), profile=deep_profile(), schedules=[AUTO])
    assert found.best.step_seconds == fxpipe.simulate(found.best.plan).step_seconds
    assert {row.stages_per_device for row in found.rows} == {1}


def test_planned_for_it_stages_fit_with_it() -> None:
    """Memory that holds what `zero_bubble` keeps is enough, and some stages recompute where there is less."""
    free = planned(schedule="zero_bubble")
    needed = int(max(free.memory(j, b=free.micro_batch) for j in range(3)))
    for limit, recomputes in ((needed, False), (int(0.9 * needed), True)):
        plan = planned(schedule=AUTO, memory_limit=limit, checkpoint="auto")
        assert all(fxpipe.simulate(plan).fits)
        assert any(mode != "never" for mode in plan.modes) == recomputes


@pytest.mark.parametrize("options", [{"stages_per_device": 2}, {"devices": ["cpu"] * 2, "stages_per_device": 3}])
def test_several_stages_on_a_device_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"'zero_bubble_auto' needs 1 stage on each device, .* or use '1f1b'"):
        fxpipe.plan(Deep(), example_args=(rows(),), schedule=AUTO, **{"devices": ["cpu"] * 3} | options)
    shared = planned(stages=6, devices=["cpu"] * 3, stages_per_device=2)
    with pytest.raises(ArgumentError, match="'zero_bubble_auto' cannot run over this plan"):
        fxpipe.simulate(shared, schedule=AUTO)
