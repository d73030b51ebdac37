"""Computes pieces of combinations that depend on inputs only (labels, masks) for the mini-batch, before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.tracing.guards import input_program
from fxpipe.tracing.interpreter import NodeValues, run_node_without_grad, run_nodes
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.batch_reductions import dependencies_of
from fxpipe.tracing.traced import Traced, attribute_tensor


@dataclass(frozen=True, slots=True, eq=False)
class InputPieces:
    """The program that computes the pieces which depend on inputs only."""

    traced: Traced
    device: torch.device  # the device of the loss
    program: tuple[fx.Node, ...]
    pieces: Mapping[int, fx.Node]  # by index among the values that micro-batches return

    @classmethod
    def of(cls, traced: Traced, device: torch.device) -> InputPieces:
        handed_out = traced.handed_out
        places = {
            place
            for combination in traced.combinations
            for place, is_known in zip(combination.pieces, combination.is_known, strict=True)
            if is_known
        }
        used = {node for place in places for node in dependencies_of(handed_out[place])}
        program, copies = input_program(traced, used, _is_size, device)
        return cls(traced, device, program, {place: copies[handed_out[place]] for place in places})

    def __call__(self, leaves: Sequence[Any], batch: int) -> dict[int, Any]:
        sizes = {**dict(self.traced.dynamic.lengths_of(leaves) or ()), self.traced.batch: batch}

        def placeholder(node: fx.Node) -> Any:
            number = info(node).number
            if number is not None:
                return int(number.subs(sizes))
            return leaves[self.traced.place_of(node)].detach().to(self.device)

        def attribute(node: fx.Node) -> torch.Tensor:
            return attribute_tensor(self.traced, node).detach().to(self.device)

        if not self.pieces:
            return {}
        values: NodeValues = {}
        for _ in run_nodes(self.program, values, placeholder, attribute, run_node_without_grad):
            pass
        return {place: values[node] for place, node in self.pieces.items()}


def _is_size(node: fx.Node) -> bool:
    return info(node).number is not None and not info(node).is_float_number
