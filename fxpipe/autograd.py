"""Graphs of autograd: where they end, and where there is no way back."""

from __future__ import annotations

from typing import Any

import torch

# What autograd raises at a function without a derivative. No training step goes back through it, so that planning,
# which goes back through every node, takes its backward to cost nothing.
NoDerivative = NotImplementedError


def leaves_under(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a tensor hangs on: of a loss, the outputs and whatever parameters its function uses."""
    found: dict[int, torch.Tensor] = {}
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found[id(node.variable)] = node.variable
        todo.extend(n for n, _ in node.next_functions)
    return list(found.values())
