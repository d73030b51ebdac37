"""The seconds for which actions had a core: next to a simulation, and in the benchmark's undisturbed step."""

import pytest
import torch
from helpers.paths import ROOT, module_at
from torch import nn

import fxpipe
from fxpipe.runtime.step import Step
from fxpipe.runtime.step_record import ActionRecord, DeviceRecord, StepRecord
from fxpipe.scheduling import ActionKind, make_schedule
from fxpipe.simulation import Simulation, StageCost, simulate_schedule


def simulated() -> Simulation:
    return simulate_schedule(make_schedule("1f1b", 2, 4), [StageCost(1, 2)] * 2)


def measured(simulation: Simulation, times: float, on_core: float | None) -> StepRecord:
    """A step that took so many times as long, and its actions of a core so many times what they were thought to."""
    actions = tuple(
        ActionRecord(
            s.action,
            times * s.start,
            times * s.end,
            s.device,
            0.0,
            0,
            0,
            None if on_core is None else on_core * s.seconds,
        )
        for s in simulation.spans
    )
    return StepRecord(
        "1f1b", actions, (), tuple(DeviceRecord("cpu", times * b, 0.0, 0, 0) for b in simulation.busy), 0.0
    )


def test_a_busy_machine_is_told_from_a_wrong_plan() -> None:
    simulation = simulated()
    beside = simulation.compared(measured(simulation, 4.0, on_core=1.25))
    assert beside.core_share == pytest.approx(1.25 / 4)
    assert beside.on_core is not None
    assert beside.on_core.ratio == pytest.approx(0.8)
    assert str(beside).splitlines()[-2:] == [
        "The actions had a core for 31% of their time: others wanted it, too.",
        "On it they took 30.0 s, simulated 24.0 s: 0.80",
    ]


@pytest.mark.parametrize("on_core", [4.0, None], ids=["quiet", "gpu"])
def test_nothing_is_said_of_a_quiet_machine_nor_of_gpus(on_core: float | None) -> None:
    simulation = simulated()
    beside = simulation.compared(measured(simulation, 4.0, on_core))
    assert beside.core_share == 1
    assert "core" not in str(beside)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_last_step_knows_it_of_every_action(workers: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
    with fxpipe.pipeline(model, ["cpu"] * workers, 4, example_args=(x,), profile_budget=0.1) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
        actions = pipe.last_step.actions
    assert len(actions) == 8 * workers
    assert all(action.on_core is not None and action.on_core >= 0 for action in actions)


processor_time = module_at(ROOT / "tools" / "bench" / "processor_time.py")
CHUNKS = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def rows() -> torch.Tensor:
    return torch.randn(2 * CHUNKS, 4)


def planned(schedule: str, checkpoint: str = "never") -> fxpipe.Plan:
    return fxpipe.plan(
        model(), 2, example_args=(rows(),), chunks=CHUNKS, schedule=schedule, checkpoint=checkpoint, hardware="cpu"
    )


def test_the_work_of_every_action_is_noted_and_steps_are_as_before_afterwards() -> None:
    work: dict[tuple[ActionKind, int], list[float]] = {}
    perform, x = Step.perform, rows()
    with fxpipe.pipeline(model(), ["cpu"] * 2, CHUNKS, example_args=(x,), profile_budget=0.1) as pipe:
        with processor_time.noted(work):
            pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
        assert Step.perform is perform
        pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
    assert {action: len(seconds) for action, seconds in work.items()} == {
        (kind, stage): CHUNKS for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in range(2)
    }
    assert all(seconds >= 0 for of_action in work.values() for seconds in of_action)


def test_a_disturbed_action_does_not_count() -> None:
    quiet = {(kind, stage): [1.0] * 8 for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in range(2)}
    step = processor_time.undisturbed(planned("1f1b"), quiet)
    assert step == 2 * CHUNKS + 2  # of two stages that both take 1 and 1
    disturbed = {action: [*seconds[:-3], 2.0, 3.0, 50.0] for action, seconds in quiet.items()}
    assert processor_time.undisturbed(planned("1f1b"), disturbed) == step


def test_what_is_recomputed_counts_by_itself() -> None:
    work = {(kind, stage): [1.0] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in range(2)}
    again = {(ActionKind.RECOMPUTE, stage): [2.0] for stage in range(2)}
    plan = planned("1f1b", "always")
    assert processor_time.undisturbed(plan, work | again) > processor_time.undisturbed(plan, work)
