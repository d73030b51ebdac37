"""The processor time of actions, from which the benchmark computes an undisturbed step."""

import torch
from helpers.paths import ROOT, module_at
from torch import nn

import fxpipe
from fxpipe.runtime.run import Run
from fxpipe.scheduling import ActionKind

processor_time = module_at(ROOT / "tools" / "bench" / "processor_time.py")
CHUNKS = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def rows() -> torch.Tensor:
    return torch.randn(2 * CHUNKS, 4)


def planned() -> fxpipe.Plan:
    return fxpipe.plan(model(), 2, example_args=(rows(),), chunks=CHUNKS, schedule="1f1b", hardware="cpu")


def test_the_work_of_every_action_is_noted_and_steps_are_as_before_afterwards() -> None:
    work: dict[tuple[ActionKind, int], list[float]] = {}
    perform, x = Run.perform, rows()
    with fxpipe.pipeline(model(), ["cpu"] * 2, CHUNKS, example_args=(x,), profile_budget=0.1) as pipe:
        with processor_time.noted(work):
            pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
        assert Run.perform is perform
        pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
    assert {action: len(seconds) for action, seconds in work.items()} == {
        (kind, stage): CHUNKS for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in range(2)
    }
    assert all(seconds >= 0 for of_action in work.values() for seconds in of_action)


def test_a_disturbed_action_does_not_count() -> None:
    quiet = {(kind, stage): [1.0] * 8 for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for stage in range(2)}
    step = processor_time.undisturbed(planned(), quiet)
    assert step == 2 * CHUNKS + 2  # of two stages that both take 1 and 1
    disturbed = {action: [*seconds[:-3], 2.0, 3.0, 50.0] for action, seconds in quiet.items()}
    assert processor_time.undisturbed(planned(), disturbed) == step
