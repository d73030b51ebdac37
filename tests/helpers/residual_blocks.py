"""A model of small residual blocks, its mini-batches and how streams train it, and an optimizer that fails once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.optim import StageOptimizer
from helpers.layered import Layered

WIDTH = 5


class Block(Layered, linear=WIDTH, norm=lambda: nn.LayerNorm(WIDTH), extra=lambda: None):
    """Adds a normed layer to its input; `extra` takes what comes of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(torch.tanh(self.linear(x)))
        return x if self.extra is None else self.extra(x)


def blocks(count: int, extra: Callable[[], nn.Module | None] = lambda: None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(extra=extra()) for _ in range(count)))


def batches(count: int, size: int = 6, seed: int = 1, fewer_in_last: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Returns so many inputs with their targets."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [size - fewer_in_last]
    return [(torch.randn(b, WIDTH, generator=generator), torch.randn(b, WIDTH, generator=generator)) for b in sizes]


class Stumbling(torch.optim.SGD):
    """Raises in its fifth step of a block, behind the gradients that the step was for."""

    steps = 0

    def step(self, closure=None):
        Stumbling.steps += any(WIDTH in p.shape for group in self.param_groups for p in group["params"])
        if Stumbling.steps == 5:
            raise OSError("stumbled")
        super().step()


class Faulty(Layered):
    """Raises for values over 1,000, in forward or in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return faulty(x, self.where)


@fxpipe.leaf
def faulty(x: Tensor, where: str) -> Tensor:
    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("too large")

    x = x.clone()
    if (x.abs() > 1e3).any() and where in ("forward", "backward"):
        fail(x) if where == "forward" else x.register_hook(fail)
    return x


class Rows(Layered, linear=WIDTH):
    """Another graph for inputs of three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * x.shape[1] if x.dim() == 3 else torch.tanh(self.linear(x))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sgd(pipe, **options):
    return StageOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9, **options)


def train(pipe, data, optimizer=None, loss_fn=F.mse_loss, **options):
    """A stream that has ended, and its losses."""
    stream = pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer or sgd(pipe), **options)
    return stream, list(stream)


def assert_same(model, plain):
    for (name, have), want in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(have, want), name
    assert all(parameter.grad is None for parameter in model.parameters())
