"""The host queues what devices compute: how long a step takes where it is too slow, and that it else costs nothing."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from helpers.cases import each_once
from torch import nn

import fxpipe
from fxpipe.planning.plans.retarget import ACTION_SECONDS, CALL_SECONDS, OPERATION_SECONDS, reckon_host
from fxpipe.planning.tuning.candidates import Tuning
from fxpipe.scheduling import make_schedule
from fxpipe.simulation import HostCost, Simulation, StageCost, simulate_schedule, transfers_of
from fxpipe.simulation.simulation_result import HOST

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


def step(name: str, stages: list[StageCost], m: int, **options: object) -> Simulation:
    return simulate_schedule(make_schedule(name, len(stages), m), stages, **options)


@pytest.mark.parametrize(("name", "p", "m"), each_once(SCHEDULES, (1, 2, 4), (3, 4, 6)))
def test_a_step_takes_the_python_of_all_stages_for_each_micro_batch(name: str, p: int, m: int) -> None:
    """The host always has something to queue, since nothing else takes time."""
    host = HostCost(forward=5, action=1, runs_ahead=True)
    simulation = step(name, [StageCost(0, 0, host=host)] * p, m)
    actions = 3 if name == "zero_bubble" else 2
    assert simulation.step_seconds == simulation.host_seconds == m * p * (5 + actions * 1)
    assert simulation.critical_shares == {HOST: 1.0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_devices_that_are_slower_than_the_host_do_not_wait_for_it(name: str) -> None:
    stages = [StageCost(40, 80, host=None)] * 3
    queued = [replace(stage, host=HostCost(5, 7, 3, 0.5, runs_ahead=True)) for stage in stages]
    assert step(name, queued, 6).spans == step(name, stages, 6).spans
    assert HOST not in step(name, queued, 6).critical_shares
    assert step(name, queued, 6).host_note == ""


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_with_a_process_for_each_device_only_its_own_python_counts(name: str) -> None:
    """Then a device is as slow as its own host, and the pipeline is one of such stages."""
    host = HostCost(forward=3, backward=5, action=1, runs_ahead=True)
    simulation = step(name, [StageCost(0, 0, host=host)] * 4, 6, one_interpreter=False)
    assert simulation.step_seconds == step(name, [StageCost(4, 6)] * 4, 6).step_seconds == (6 + 3) * 10
    assert simulation.host_seconds == 6 * (3 + 2 * 1)
    assert "DeviceMesh" not in simulation.host_note
    assert "DeviceMesh" in step(name, [StageCost(0, 0, host=host)] * 4, 6).host_note


def test_backward_is_queued_by_several_threads_at_once() -> None:
    """Two threads on devices of their own: F of both in turns, each B beside what the other does."""
    host = HostCost(backward=10, action=1, runs_ahead=True)
    alone = step("gpipe", [StageCost(0, 0, host=host)], 4).step_seconds
    both = step("gpipe", [StageCost(0, 0, host=host)] * 2, 4).step_seconds
    assert alone == 4 * 12
    assert both < 1.5 * alone  # under the lock it would be twice that


@pytest.mark.parametrize("name", SCHEDULES)
def test_workers_on_cpus_wait_for_each_other_where_all_is_python(name: str) -> None:
    python = HostCost(forward=6, action=0)
    stages = [StageCost(6, 0, host=python)] * 3
    assert step(name, [StageCost(6, 0)] * 3, 8).step_seconds == (8 + 2) * 6
    simulation = step(name, stages, 8)
    assert simulation.step_seconds == 8 * 3 * 6
    assert simulation.critical_shares[HOST] > 0.5


@pytest.mark.parametrize("name", SCHEDULES)
def test_workers_on_cpus_whose_kernels_let_the_lock_go_are_as_without_it(name: str) -> None:
    stages = [StageCost(60, 120)] * 3
    locked = [replace(stage, host=HostCost(forward=8, action=2)) for stage in stages]
    assert step(name, locked, 6).spans == step(name, stages, 6).spans


def test_no_step_is_shorter_than_the_host_or_the_devices_and_its_critical_path_has_no_gap() -> None:
    draw = random.Random(0)
    for _ in range(150):
        p, m = draw.randint(1, 4), draw.randint(1, 6)
        name, overlaps, one = draw.choice(SCHEDULES), draw.random() < 0.5, draw.random() < 0.7
        runs_ahead = [draw.random() < 0.6 for _ in range(p)]
        stages = []
        for j in range(p):
            backward = draw.random()
            cost = HostCost(draw.random(), backward, backward * draw.random(), draw.random() / 4, runs_ahead[j])
            stages.append(StageCost(draw.random(), draw.random(), host=cost if draw.random() < 0.9 else None))
        ways = [way for j in range(p - 1) for way in transfers_of(j, [j + 1], 8, seconds=lambda *_: draw.random() / 4)]
        schedule = make_schedule(name, p, m)
        have = simulate_schedule(schedule, stages, ways, overlaps=overlaps, one_interpreter=one)
        free = simulate_schedule(
            schedule, [replace(stage, host=None) for stage in stages], ways, overlaps=overlaps, one_interpreter=one
        )
        tolerance = 1e-9 * have.step_seconds
        assert have.step_seconds >= have.host_seconds - tolerance
        assert have.step_seconds >= free.step_seconds - tolerance
        assert have.legs[0].start == 0
        assert have.legs[-1].end == have.step_seconds
        for one_leg, other in itertools.pairwise(have.legs):
            assert one_leg.end == pytest.approx(other.start)


# -- plans -------------------------------------------------------------------------------------------------------------


def planned(width: int, **options: object) -> fxpipe.Plan:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    x = torch.randn(8, width)
    return fxpipe.plan(model, 2, example_args=(x,), chunks=4, schedule="1f1b", hardware="h100", **options)


def test_a_plan_whose_python_takes_longer_than_its_kernels_says_so() -> None:
    plan = planned(8)
    simulation = fxpipe.simulate(plan)
    # Each stage: two calls, of an operation each; two actions.
    of_stage = 2 * (CALL_SECONDS + OPERATION_SECONDS) + 2 * ACTION_SECONDS
    assert simulation.host_seconds == pytest.approx(4 * 2 * of_stage)
    assert simulation.step_seconds >= simulation.host_seconds
    for text in (str(simulation), str(plan)):
        assert "bound by the host" in text
        assert "compile=True" in " ".join(text.split())
    free = replace(plan, packets=tuple(replace(one, handling=0.0) for one in plan.packets))
    assert fxpipe.simulate(free, processes=True).step_seconds < simulation.step_seconds  # but for what messages cost


def test_a_tuner_says_that_the_chosen_way_waits_for_the_host() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    tuning = fxpipe.tune(model, ["cuda:0", "cuda:1"], example_args=(torch.randn(8, 8),), hardware="h100")
    assert isinstance(tuning, Tuning)
    assert "the chosen way is bound by the host" in str(tuning)


def test_on_a_cpu_python_is_no_more_than_what_was_measured() -> None:
    work = planned(8).stages[0].work
    counts = [sum(times for _, times in part) for part in (work.forward, work.backward, work.to_inputs, work.loss)]
    assert reckon_host("cpu", 100, counts, 1e-5).forward == 1e-5
    host = reckon_host("cuda:0", 100, counts, 1e-5)
    assert host.forward > 100 * CALL_SECONDS
    assert host.runs_ahead
