"""Computes values of the mini-batch that depend on inputs only, before a step and without gradients.

Two kinds: pieces of outputs (counts of labels, masks), and the *head*: values that samples share and forward uses (a
scale of all series). Micro-batches receive the head as further inputs, whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpipe.tracing.fake_tensors import fake_if_active
from fxpipe.tracing.guards import input_program
from fxpipe.tracing.interpreter import NodeValues, run_node_without_grad, run_nodes
from fxpipe.tracing.node_info import NodeInfo, info, set_info
from fxpipe.tracing.shapes.batch_reductions import ReductionWalk, dependencies_of
from fxpipe.tracing.shapes.output_dims import batch_dependent_nodes
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor


@dataclass(frozen=True, slots=True, eq=False)
class InputValues:
    """The program that computes values from inputs."""

    traced: Traced
    device: torch.device
    program: tuple[fx.Node, ...]
    results: Mapping[int, fx.Node]  # by place: of a piece, among the results of micro-batches; of a further input

    @classmethod
    def of(cls, traced: Traced, results: Mapping[int, fx.Node], device: torch.device) -> InputValues:
        used = {node for result in results.values() for node in dependencies_of(result)}
        program, copies = input_program(traced.graph.nodes, used, _is_size, device)
        return cls(traced, device, program, {place: copies[node] for place, node in results.items()})

    @classmethod
    def of_pieces(cls, traced: Traced, device: torch.device) -> InputValues:
        ways = [
            (place, known) for one in traced.combinations for place, known in zip(one.pieces, one.is_known, strict=True)
        ]
        return cls.of(traced, {place: traced.handed_out[place] for place, is_known in ways if is_known}, device)

    def on(self, device: torch.device) -> InputValues:
        program, copies = input_program(self.program, self.program, _is_size, device)
        return replace(self, device=device, program=program, results={p: copies[n] for p, n in self.results.items()})

    def __call__(self, leaves: Sequence[Any], batch: int) -> dict[int, Any]:
        sizes = {**dict(self.traced.dynamic.lengths_of(leaves) or ()), self.traced.batch: batch}

        def placeholder(node: fx.Node) -> Any:
            number = info(node).number
            if number is not None:
                return int(number.subs(sizes))
            return leaves[self.traced.place_of(node)].detach().to(self.device)

        def attribute(node: fx.Node) -> torch.Tensor:
            return fake_if_active(attribute_tensor(self.traced, node)).detach().to(self.device)

        values: NodeValues = {}
        for _ in run_nodes(self.program, values, placeholder, attribute, run_node_without_grad):
            pass
        return {place: values[node] for place, node in self.results.items()}


def _is_size(node: fx.Node) -> bool:
    return info(node).number is not None and not info(node).is_float_number


def shared_values(traced: Traced) -> frozenset[fx.Node]:
    """Returns the nodes whose values depend on inputs only, and on no single sample: candidates for the head."""
    dependent = batch_dependent_nodes(traced)
    walk, known = ReductionWalk(traced, dependent), set[fx.Node]()
    for node in traced.graph.nodes:
        is_trained = node.op == "placeholder" and traced.leaves[traced.place_of(node)].requires_grad
        is_size = info(node).number is not None
        if not is_trained and walk.is_of_inputs(node) and (is_size or known.issuperset(node.all_input_nodes)):
            known.add(node)
    kept = set[fx.Node]().union(*map(dependencies_of, traced.assigned.values()))
    sizes = {n: [size for shape in info(n).shapes for size in shape.shape] for n in (known & dependent) - kept}
    return frozenset(
        n
        for n, of in sizes.items()
        if n.op in CALL_OPS and info(n).number is None and len(info(n).shapes) == 1
        if not any(size.free_symbols for size in of)
    )


def with_head(traced: Traced) -> Traced:
    """Returns the graph with further inputs for the values that samples share."""
    head = [n for n in traced.graph.nodes if n in traced.shared and not traced.shared.issuperset(n.users)]
    places = dict(enumerate(head, len(traced.leaves)))
    values = InputValues.of(traced, places, torch.device("cpu")) if head else None
    for place, node in places.items():
        first = next(n for n in traced.graph.nodes if n.op != "placeholder")
        with traced.graph.inserting_before(first):
            new = traced.graph.placeholder(f"in_{place}")
        set_info(new, NodeInfo(known_shapes=info(node).known_shapes, dynamic_shapes=info(node).dynamic_shapes))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in traced.shared)
    for node in reversed(traced.nodes):
        if node in traced.shared and not node.users:
            traced.graph.erase_node(node)
    return replace(traced, head=values, shared=frozenset())
