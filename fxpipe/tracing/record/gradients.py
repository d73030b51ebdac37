"""`torch.autograd.grad` in forward: gradient penalties, forces as gradients of an energy, gradient steps of a learner.

    energy = self.energy(x)                                                        # recorded nodes
    (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)            # one node

The node runs a copy of the nodes in between and differentiates it. Their other arguments are arguments of the node.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe._torch.saved_tensor_hooks import with_saved_tensors
from fxpipe.tracing.interpreter import NodeValues, run_node
from fxpipe.tracing.node_info import info, set_node_device
from fxpipe.tracing.record.recorder import Recorder
from fxpipe.tracing.record.unrecordable import OPAQUE_REMEDY
from fxpipe.tracing.verify.effects import running_statistics


def differentiate(
    recorder: Recorder,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,  # recording keeps it
    create_graph: bool = False,
    **options: Any,
) -> Any:
    """Runs `torch.autograd.grad` on recorded values as one node."""
    recorder.differentiates = True
    last, first = ([*map(recorder.node_of, x if isinstance(x, (tuple, list)) else [x])] for x in (outputs, inputs))
    between = _nodes_between(recorder.graph, first, last)
    used = dict.fromkeys(n for n in (*last, *(n for node in between for n in node.all_input_nodes)) if n not in between)
    starts, others = [n for n in first if n not in between], [n for n in used if n not in first]
    can_run = _may_run_again(recorder.graph, between, {*starts, *others}) and not options.get("is_grads_batched")
    if not (can_run and recorder.options.keeps_saved):
        raise recorder.refuse("runs autograd inside forward", f"do so outside forward{OPAQUE_REMEDY}")
    own = fx.Graph()
    copies = {node: own.placeholder(node.name) for node in (*starts, *others)}
    for node in between:
        copies[node] = own.node_copy(node, copies.__getitem__)

    @functools.cache
    def nodes_on(device: torch.device) -> dict[fx.Node, fx.Node]:
        placed = dict[fx.Node, fx.Node]()
        fx.Graph().graph_copy(own, placed)
        for node in between:
            set_node_device(placed[copies[node]], device)
        return placed

    @with_saved_tensors
    def grad(leaves: Sequence[torch.Tensor], others: Sequence[Any], weights: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            moved = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in leaves]
            placed = nodes_on(leaves[0].device)
            values: NodeValues = dict(zip(placed.values(), (*moved, *others), strict=False))
            for node in (placed[copies[n]] for n in between):
                values[node] = run_node(node, values)
            ends, points = ([values[placed[copies[node]]] for node in nodes] for nodes in (last, first))
            return torch.autograd.grad(ends, points, weights, create_graph=create_graph, **options)

    grad.inside = [*own.nodes]  # type: ignore[attr-defined]
    result, _ = recorder.run(torch.autograd.grad, (outputs, inputs, grad_outputs, True, create_graph), options)
    weights = recorder.node_argument([grad_outputs] if isinstance(grad_outputs, torch.Tensor) else grad_outputs)
    recorder.keep(result, recorder.add("call_function", grad, (starts, others, weights)))
    recorder.repeated.update(between)
    return result


def _nodes_between(graph: fx.Graph, first: Sequence[fx.Node], last: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Returns the nodes, in order, that compute the last of these values from the first."""
    computed, used = {*first}, {*last}
    between = list[fx.Node]()
    for node in graph.nodes:
        if not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
            between.append(node)
    for node in reversed(between):
        if node in used:
            used.update(node.all_input_nodes)
    return {node: None for node in between if node in used}


def _may_run_again(graph: fx.Graph, between: Mapping[fx.Node, None], outside: Collection[fx.Node]) -> bool:
    """Returns whether these nodes, run again at the end of the graph, compute the same values from those outside."""
    if any(info(node).is_random or info(node).opaque or running_statistics(node) for node in between):
        return False
    inside, read = ({s for n in nodes for s in info(n).storages} for nodes in (between, outside))
    later = itertools.dropwhile(lambda n: n not in between, graph.nodes)
    return all(info(n).written_storages.isdisjoint(read if n in between else read | inside) for n in later)
