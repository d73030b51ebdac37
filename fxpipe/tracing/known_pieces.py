"""Pieces of combinations that come from inputs alone, labels and masks: computed of the mini-batch before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.thread_state import applied
from fxpipe.tracing.devices import on_device
from fxpipe.tracing.evaluation import Values, evaluated
from fxpipe.tracing.sizing.batch_reductions import needed
from fxpipe.tracing.traced import Traced, call, lookup


@dataclass(frozen=True, slots=True, eq=False)
class KnownPieces:
    """What computes them."""

    traced: Traced
    device: torch.device  # where the loss is
    program: tuple[fx.Node, ...]
    wanted: Mapping[int, fx.Node]  # by place among all that micro-batches hand out

    @classmethod
    def of(cls, traced: Traced, device: torch.device) -> KnownPieces:
        handed_out = traced.handed_out
        places = {
            place
            for combination in traced.combinations
            for place, is_known in zip(combination.pieces, combination.is_known, strict=True)
            if is_known
        }
        used = {node for place in places for node in needed(handed_out[place])}
        program = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in traced.graph.nodes:
            if node not in used:
                continue
            if "number" in node.meta:
                copies[node] = program.placeholder(node.name)
                copies[node].meta["number"] = node.meta["number"]
                continue
            copies[node] = program.node_copy(node, copies.__getitem__)
            on_device(copies[node], device)
        return cls(traced, device, tuple(program.nodes), {place: copies[handed_out[place]] for place in places})

    def __call__(self, leaves: Sequence[Any], batch: int) -> dict[int, Any]:
        """By place, of the mini-batch with these flattened inputs."""

        def given(node: fx.Node) -> Any:
            if "number" in node.meta:
                return int(node.meta["number"].subs(self.traced.batch, batch))
            return leaves[self.traced.place_of(node)].detach().to(self.device)

        def attribute(node: fx.Node) -> torch.Tensor:
            return lookup(self.traced, node).detach().to(self.device)

        def work(node: fx.Node, values: Values) -> Any:
            with applied(node.meta["state"]), torch.no_grad():
                return call(node, values.__getitem__)

        if not self.wanted:
            return {}
        values = evaluated(self.program, given, attribute, work)
        return {place: values[node] for place, node in self.wanted.items()}
