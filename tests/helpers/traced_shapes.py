"""Shapes of traced values as text."""

from typing import Any

import torch
from torch import nn

from fxpipe import trace
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import info


class Forward(nn.Module):
    def __init__(self, forward: Any):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.function = forward

    def forward(self, *args: Any) -> Any:
        return self.function(self.lin, *args)


def traced(forward: Any, *args: Any, **options: Any) -> Traced:
    return trace(Forward(forward), args or (torch.randn(4, 6),), **options)


def shapes(result: Traced) -> list[str]:
    return [str(shape) for output in result.outputs for shape in info(output).shapes]
