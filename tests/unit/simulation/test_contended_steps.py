"""Devices that share memory and caches are slower while others are at work, and only then."""

from dataclasses import replace

import pytest
import torch
from helpers.plan_hardware import without_host
from helpers.plan_models import Deep, planned, rows

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.scheduling import make_schedule
from fxpipe.simulation import Simulation, StageCost, simulate_schedule


def forwards(stages: int, m: int, contention: float) -> Simulation:
    costs = [StageCost(1, 1, contention=contention)] * stages
    return simulate_schedule(make_schedule("inference", stages, m), costs)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_of_two_devices_the_first_and_the_last_action_are_alone(m: int) -> None:
    assert forwards(2, m, 1.5).step_seconds == 1 + 1.5 * (m - 1) + 1
    assert forwards(2, m, 1.0).step_seconds == m + 1


def test_half_of_the_others_at_work_cost_half() -> None:
    """Of three devices two are at work in the second place, and in the last but one."""
    assert forwards(3, 4, 1.5).step_seconds == 1 + 1.25 + 1.5 + 1.5 + 1.25 + 1


def test_one_device_alone_is_as_fast_as_ever() -> None:
    schedule = make_schedule("1f1b", 2, 4, placement=(0, 0))
    assert simulate_schedule(schedule, [StageCost(1, 2, contention=2)] * 2).step_seconds == 4 * 2 * 3


def test_only_what_shares_memory_is_slower() -> None:
    """A CPU beside an accelerator, and a copy that the device makes before it computes."""
    schedule = make_schedule("inference", 2, 4)
    mixed = simulate_schedule(schedule, [StageCost(1, 1, contention=1.5), StageCost(1, 1)])
    assert mixed.step_seconds == 5


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"stages\[0\]\.contention=0\.5 is no factor"):
        forwards(2, 2, 0.5)


def test_a_plan_keeps_it_and_steps_heed_it(tmp_path) -> None:
    plan = replace(without_host(planned()), contention=1.25)  # such short stages wait for the host
    plan.save(tmp_path / "plan.json")
    assert fxpipe.Plan.load(tmp_path / "plan.json").contention == 1.25
    alone = replace(plan, contention=1.0)
    assert fxpipe.simulate(plan).step_seconds > fxpipe.simulate(alone).step_seconds
    assert [s.forward_seconds for s in plan.stages] == [s.forward_seconds for s in alone.stages]
    assert "slow each other down by 1.25×" in " ".join(str(plan).split())
    assert "slow each other down" not in str(alone)
    elsewhere = [fxpipe.simulate(one, hardware="h100").step_seconds for one in (plan, alone)]
    assert elsewhere[0] == elsewhere[1]


def test_a_plan_of_a_profile_has_what_was_measured() -> None:
    x = rows()
    model = Deep()
    profile = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), micro_batch=2)
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=4, profile=replace(profile, contention=1.5))
    assert plan.contention == 1.5
    assert torch.get_num_threads() == 1
