"""Weights, buffers and inputs that change between forward and backward.

Plain torch raises where backward needs what was changed. With `checkpoint="always"` backward computes forward again,
and needs all of it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.case_steps import set_options
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError

CHANGED = r"inplace operation|written to between forward and backward"


class Model(nn.Module):
    """Weights, a frozen weight, a buffer, a shared weight and a value that goes past a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x)).tanh()
        return self.third(self.frozen(self.second(h).tanh()) * self.scale * mask) + h


def by(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[..., None]:
    def change(model: nn.Module, *_: Any) -> None:
        make([p for p in model.parameters() if p.requires_grad]).step()

    return change


def clamp(model: Any, *_: Any) -> None:
    for p in model.parameters():
        p.clamp_(-0.01, 0.01)


def replace_data(model: Any, *_: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 2  # other memory: what forward used stays as it was


# Each is given the model, its inputs and the output; no gradients are taken of it.
CHANGES: dict[str, Any] = {
    "nothing": lambda *_: None,
    "SGD": by(lambda p: torch.optim.SGD(p, lr=0.1)),
    "Adam, one by one": by(lambda p: torch.optim.Adam(p, foreach=False)),
    "Adam, together": by(lambda p: torch.optim.Adam(p, foreach=True)),
    "weights are clamped": clamp,
    "a bias": lambda model, *_: model.second.bias.add_(1),
    "a frozen weight": lambda model, *_: model.frozen.weight.mul_(2),
    "load_state_dict": lambda model, *_: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
    "a buffer": lambda model, *_: model.scale.mul_(3),
    "the input": lambda model, x, *_: x.zero_(),
    "an input of a later stage": lambda model, x, mask, y: mask.zero_(),
    "the output": lambda model, x, mask, y: y.mul_(2),
    "other data": replace_data,
    "another parameter": lambda model, *_: setattr(model.second, "bias", nn.Parameter(torch.ones(8))),
    "running statistics": lambda model, *_: model.norm.reset_running_stats(),
    "requires_grad": lambda model, *_: model.second.weight.requires_grad_(False),
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.ones(4, 8)


def gradients(model: Any, change: Callable[..., None], parts: int) -> dict[str, torch.Tensor | None] | str:
    """The gradients of a step in which something changes before backward, by name, or what is raised."""
    x, mask = inputs()
    runs = zip(x.tensor_split(parts), mask.tensor_split(parts), strict=True)
    outputs = [model(one, other) for one, other in runs]
    y = torch.cat(outputs) if parts > 1 else outputs[0]
    loss = F.mse_loss(y, torch.ones_like(y))
    named = dict(model.named_parameters())
    for p in named.values():
        p.grad = torch.ones_like(p) if p.requires_grad else None  # for optimizers
    with torch.no_grad():
        change(model, x, mask, y)
    for p in named.values():
        p.grad = None
    try:
        loss.backward()
    except FxpipeError as error:
        return f"fxpipe: {error}"
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "torch"
    return {name: p.grad for name, p in named.items()}


def difference(have: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None] | str) -> float:
    """The largest difference of two sets of gradients; infinite if there is none to compare with."""
    if isinstance(want, str):
        return float("inf")
    assert list(have) == list(want)
    pairs = [(torch.zeros(()) if g is None else g for g in (have[name], want[name])) for name in want]
    return max(float((g - h).abs().max()) for g, h in pairs)


@pytest.fixture(scope="module")
def pipe():
    with fxpipe.pipeline(Model(), ["cpu", "cpu"], 2, example_args=inputs(), progress=False) as pipe:
        pipe(*inputs())  # its workers start
        yield pipe


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_what_changes_between_forward_and_backward(pipe, checkpoint, name):
    """A pipe raises, or its gradients are the plain model's, or those of a step in which nothing changes."""
    plain, other = Model(), Model()
    other.load_state_dict(plain.state_dict())
    pipe.load_state_dict(plain.state_dict())
    want, unchanged = gradients(plain, CHANGES[name], 2), gradients(other, CHANGES["nothing"], 2)
    set_options(pipe, checkpoint=checkpoint)
    bias = pipe.second.bias
    try:
        have = gradients(pipe, CHANGES[name], 1)
    finally:
        pipe.second.bias = bias
        pipe.second.requires_grad_(True)
    if isinstance(have, str):
        assert isinstance(want, str) or "was written to between forward and backward" in have, have
    else:
        assert min(difference(have, want), difference(have, unchanged)) < 1e-6


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_generator_and_a_discriminator(pipe, checkpoint):
    """The discriminator's update between the forward of its loss for the generator and the backward of that."""
    set_options(pipe, checkpoint=checkpoint)
    x, mask = inputs()
    generator = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    fake = generator(x)
    loss = pipe(fake, mask).square().mean()
    pipe(fake.detach(), mask).mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    assert generator.weight.grad is None
    pipe(generator(x), mask).square().mean().backward()  # the next call works
    assert generator.weight.grad.abs().sum() > 0


def test_the_message_has_name_and_remedy(pipe):
    set_options(pipe, checkpoint="always")
    loss = pipe(*inputs()).sum()
    with torch.no_grad():
        pipe.frozen.weight.mul_(2)
    with pytest.raises(fxpipe.errors.StateError, match=r"'frozen\.weight'.*written.*optimizer\.step\(\)"):
        loss.backward()


def test_a_loss_function_that_writes_to_the_model(pipe):
    """As one that clamps a critic's weights: the micro-batches before it have other values."""

    def loss_fn(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            clamp(pipe)
        return y.square().mean()

    for checkpoint in ("never", "always"):
        set_options(pipe, checkpoint=checkpoint)
        with torch.no_grad():
            pipe.first.weight.fill_(1.0)
        with pytest.raises(RuntimeError, match=CHANGED):
            pipe.forward_backward(*inputs(), loss_fn=loss_fn)
