"""What autograd saves, counted by its hooks."""

import functools
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.profiling.memory import GraphCounts, count_flops_and_bytes
from fxpipe.tracing import Traced
from fxpipe.tracing.fake_tensors import with_fake_tensors


def counted(traced: Traced, leaves: list[Any], samples: int) -> GraphCounts:
    with with_fake_tensors(traced.model, leaves) as leaves:
        return count_flops_and_bytes(traced, traced.effects, leaves, samples)


@functools.cache
def value(formula: sympy.Expr, batch: sympy.Symbol, samples: int) -> int:
    found = formula.subs(batch, samples)
    assert found.is_integer
    return int(found)


def number(formula: sympy.Expr, traced: Traced, samples: int) -> int:
    return value(formula, traced.batch, samples)


def of_stages(counts: GraphCounts, traced: Traced, starts: tuple[int, ...], samples: int) -> list[int]:
    """The bytes that each stage saves, by the formulas."""
    ends = (*starts[1:], len(traced.nodes))
    return [
        sum(number(s.bytes, traced, samples) for s in counts.saved if any(start <= p < end for p in s.savers))
        for start, end in zip(starts, ends, strict=True)
    ]


class Of(nn.Module):
    """`function(module, x)` with a linear layer, a parameter, one that is frozen, and a buffer to use."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class Pictures(nn.Module):
    """Convolutions, batch norm, in-place activations, pooling, a skip: masks, places and statistics are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = (self.block(i, o) for i, o in ((3, 4), (4, 6)))
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Sequential(self.block(8, 4), nn.Dropout2d(0.2), nn.Conv2d(4, 2, 1))

    @staticmethod
    def block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down1(x)
        y = self.up(self.down2(F.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, y], 1)) + F.avg_pool2d(x, 3, 1, 1)[:, :2]
