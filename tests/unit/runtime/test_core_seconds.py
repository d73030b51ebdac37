"""How long actions had a core: beside a simulation it says whether a slow step is the plan's fault or the machine's."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.runtime.step_record import ActionRecord, DeviceRecord, StepRecord
from fxpipe.scheduling import make_schedule
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
