"""Every mechanism of a step with sizes that change: schedules, recompute, batch norm, random numbers and portals."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import on_cpu, workers
from helpers.oracle import accumulate_gradients, assert_same_gradients, assert_same_state, draw_seed, train_step
from torch import nn

import fxpipe

D = 6
LENGTHS = (5, 9, 4)  # the last one is of no recording


class Everything(nn.Module):
    """Batch norm, dropout, and a value that skips stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.last = (nn.Linear(D, D) for _ in range(4))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x) + torch.arange(x.shape[1])[:, None]
        h = self.norm(skip.transpose(1, 2)).transpose(1, 2)
        h = self.third(F.dropout(torch.relu(self.second(h)), 0.3))
        return self.last(h + skip)


class Statistics:
    """Running statistics as deferred batch norm has them: those of all values of a step."""

    def __init__(self, model: Everything):
        self.norm, self.inputs = copy.deepcopy(model.norm), list[torch.Tensor]()
        self.handle = model.norm.register_forward_pre_hook(lambda module, args: self.inputs.append(args[0].detach()))

    def of_step(self) -> nn.Module:
        self.norm(torch.cat([x.transpose(1, 2).flatten(0, 1) for x in self.inputs]))
        self.inputs.clear()
        return self.norm


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "deferred"),
    [
        ("gpipe", "never", False),
        ("1f1b", "always", False),
        ("interleaved_1f1b", "except_last", True),
        pytest.param("zero_bubble", "always", True, marks=pytest.mark.anywhere),
        ("zero_bubble_2p", "never", True),
        pytest.param("zbv", "except_last", False, marks=pytest.mark.anywhere),
    ],
)
def test_steps_of_any_size_are_the_plain_models(schedule: str, checkpoint: str, deferred: bool) -> None:
    model = Everything()
    plain = copy.deepcopy(model)
    statistics = Statistics(plain)
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    example = (torch.randn(4, LENGTHS[0], D),)
    with fxpipe.pipeline(
        model, workers(2), 2, stages_per_device=2, example_args=example, hardware="cpu", **options
    ) as pipe:
        assert pipe.plan.portals
        for step, length in enumerate(LENGTHS):
            for run in (cut_step, handed_over_step):
                pipe.zero_grad()
                plain.zero_grad()
                torch.manual_seed(step)
                have, want = run(pipe, plain, length, "gpipe" if schedule == "gpipe" else "1f1b")
                torch.testing.assert_close(on_cpu(have), want)
                assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
                of_all = statistics.of_step()
                assert_same_state(model.norm, of_all if deferred else plain.norm, exact=False)
        assert len(pipe._fxpipe.graphs) == 2


def cut_step(pipe: Any, plain: nn.Module, length: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A mini-batch; the loss of the pipe and of the plain model."""
    x, target = torch.randn(5, length, D), torch.randn(5, length, D)
    state = torch.get_rng_state()
    have = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
    torch.set_rng_state(state)
    seed = draw_seed(True)
    return have, train_step(plain, (x,), {}, target, F.mse_loss, chunks=2, order=order, seed=seed, batch=5)


def handed_over_step(pipe: Any, plain: nn.Module, length: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batches of their own lengths."""
    sizes = [(2, length), (3, length + 2), (1, length)]
    micro_batches = [(torch.randn(*size, D), torch.randn(*size, D)) for size in sizes]
    state = torch.get_rng_state()
    have = pipe.forward_backward(micro_batches=micro_batches, loss_fn=F.mse_loss)
    torch.set_rng_state(state)
    return have, accumulate_gradients(plain, micro_batches, F.mse_loss, seed=draw_seed(True))[0]
