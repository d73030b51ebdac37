"""Shapes of traced values as text."""

from typing import Any

import torch

from fxpipe import trace
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import info
from helpers.layered import Layered


class Forward(Layered, lin=6):
    def forward(self, *args: Any) -> Any:
        return self.function(self.lin, *args)


def traced(forward: Any, *args: Any, **options: Any) -> Traced:
    return trace(Forward(function=forward), args or (torch.randn(4, 6),), **options)


def shapes(result: Traced) -> list[str]:
    return [str(shape) for output in result.outputs for shape in info(output).shapes]
