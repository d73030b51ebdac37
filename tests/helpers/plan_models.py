"""A deep model on estimated hardware, and what its plans are held to."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state, draw_seed, train_step

BATCH, CHUNKS = 8, 4


class Deep(Layered, layers=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(6))):
    """Equal layers that keep much more than they send."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin() * 2
        return x


def rows() -> torch.Tensor:
    return torch.randn(BATCH, 4, 8)


def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, t)


@functools.cache
def deep_profile() -> fxpipe.Profile:
    """Estimated, so that no noise decides the cut. Each layer: 5 + 3 * 5 microseconds forward, 30 or 35 back."""
    model, x = Deep(), rows()
    return fxpipe.profile(fxpipe.trace(model, (x,), chunks=CHUNKS), (x,), micro_batch=2, hardware="cpu")


def planned(stages: int = 3, **options: Any) -> fxpipe.Plan:
    options = {"chunks": CHUNKS, "profile": deep_profile(), "optimizer_state": 1.0} | options
    return fxpipe.plan(Deep(), stages, example_args=(rows(),), **options)


def needs(plan: fxpipe.Plan) -> list[int]:
    return [int(plan.memory(stage.index, b=plan.micro_batch)) for stage in plan.stages]


def bottleneck(plan: fxpipe.Plan) -> dict[str, float]:
    return {found.balance: found.seconds for found in plan.bottlenecks}


def assert_within(plan: fxpipe.Plan) -> None:
    """No stage needs more than it may take, by the plan's own word."""
    limits = [stage.memory_limit for stage in plan.stages]
    assert all(limit is None or need <= limit for need, limit in zip(needs(plan), limits, strict=True))


def assert_trains_like(
    plain: nn.Module,
    pipe: Any,
    inputs: Callable[[], tuple[torch.Tensor, ...]],
    chunks: int = CHUNKS,
    loose: Sequence[str] = (),
) -> None:
    """Three steps of Adam: every gradient, and every parameter in the end, bit for bit, gradients of `loose` nearly."""
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (plain, pipe)]
    for step in range(3):
        args = inputs()
        with torch.no_grad():
            target = torch.randn_like(plain(*args))
        for model in (plain, pipe):
            model.zero_grad()
        torch.manual_seed(step)
        seed = draw_seed(pipe._fxpipe.first.program.is_random)
        train_step(plain, args, {}, target, loss, chunks=chunks, order="1f1b", seed=seed, batch=len(args[0]))
        torch.manual_seed(step)
        pipe.forward_backward(*args, target=target, loss_fn=loss)
        assert_same_gradients(pipe, plain, loose)
        for optimizer in optimizers:
            optimizer.step()
        if loose:
            pipe.load_state_dict(plain.state_dict())
    assert_same_state(pipe, plain)
