"""A model of small residual blocks, its mini-batches, and an optimizer that fails once, for tests of streams."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 5


class Block(nn.Module):
    """Adds a normed layer to its input; `extra` takes what comes of it."""

    def __init__(self, extra: nn.Module | None = None):
        super().__init__()
        self.linear, self.norm, self.extra = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), extra

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(torch.tanh(self.linear(x)))
        return x if self.extra is None else self.extra(x)


def blocks(count: int, extra: Callable[[], nn.Module | None] = lambda: None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(extra()) for _ in range(count)))


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
