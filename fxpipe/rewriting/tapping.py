"""A stage whose backward is split and that the compiler can take: see `taps`.

The same nodes are split as in `splitting`, but for those whose output's shape is not known before they run: a tap has
to have it. It is known where it hangs on nothing but sizes of received values, as almost all do on the batch's. And
nodes whose input is written to later stay whole, so that autograd can complain of that: an output of compiled code is
what it is at the end.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.rewriting.program import Stage
from fxpipe.rewriting.splitting import Operation, Splittable, parameters_of, splittable
from fxpipe.rewriting.tape import cast_operands
from fxpipe.rewriting.taps import Measure, Tap, Taps, Weigh, lifted
from fxpipe.tracing.sizing.shapes import TensorShape


def tap_weights(stage: Stage) -> Stage:
    """The stage with `weighed` parameters and `taps`. The same stage if there are none."""
    graph: fx.Graph = stage.run.graph  # type: ignore[attr-defined]
    parameters = parameters_of(stage, graph)
    measures = _measures(graph, len(stage.attributes))
    uses = splittable(graph, parameters, functools.partial(_can_be_tapped, measures))
    if not uses:
        return stage
    run = fx.GraphModule({}, _with_taps(graph, uses), class_name=type(stage.run).__name__)
    weighed = frozenset(parameters[p] for use in uses.values() for p in use.parameters)
    taps = tuple(_tap(node, use.operation) for node, use in uses.items() if use.operation is not None)
    return replace(stage, run=run, weighed=weighed, taps=Taps(taps, tuple(measures.values())))


def _measures(graph: fx.Graph, attributes: int) -> dict[sympy.Symbol, Measure]:
    """Where each size can be read off that some dimension of a received value has, or a multiple of it."""
    received = list(graph.find_nodes(op="placeholder"))[attributes:]
    found: dict[sympy.Symbol, Measure] = {}
    for place, node in enumerate(received):
        made = _made(node)
        for dim, size in enumerate(() if made is None else made.shape):
            for symbol in size.free_symbols:
                factor = size / symbol
                if factor.is_Integer:
                    found.setdefault(symbol, Measure(symbol, place, dim, int(factor)))
    return found


def _can_be_tapped(measures: Mapping[sympy.Symbol, Measure], node: fx.Node, use: Splittable) -> bool:
    made = _made(node)
    if use.operation is None or made is None:
        return False
    x = use.operation.operands[0]
    if x.meta.get("last_write", math.inf) > node.meta.get("place", -1):
        return False
    return all(size.free_symbols <= measures.keys() for size in made.shape)


def _made(node: fx.Node) -> TensorShape | None:
    shapes: Sequence[TensorShape] = node.meta.get("shapes") or []
    return shapes[0] if len(shapes) == 1 else None


def _tap(node: fx.Node, operation: Operation) -> Tap:
    made = _made(node)
    assert made is not None
    return Tap(operation.names, made.shape, made.dtype if operation.casts else None, _weighing(operation))


def _weighing(operation: Operation) -> Weigh:
    kind, options, casts = operation.kind, operation.operands[3:], operation.casts

    def weigh(
        gradient: torch.Tensor,
        x: torch.Tensor | None,
        w: torch.Tensor,
        b: torch.Tensor | None,
        wants_w: bool,
        wants_b: bool,
    ) -> list[torch.Tensor]:
        dtype = w.dtype
        if casts and x is not None:  # to what x was cast to in F
            w = w.to(x.dtype)
        found = kind.weigh(gradient, x, w, b, wants_w, wants_b, *options)
        return [g.to(dtype) if casts else g for g in found if g is not None]

    return weigh


def _with_taps(graph: fx.Graph, uses: dict[fx.Node, Splittable]) -> fx.Graph:
    new = fx.Graph()
    taps = {node: new.placeholder(f"{node.name}_tap") for node in uses}
    made: dict[fx.Node, fx.Node] = {}
    kept: list[fx.Node] = []
    gone = {read for use in uses.values() for read in use.reads if read not in use.parameters}
    for node in graph.nodes:
        if node in gone:
            continue
        use = uses.get(node)
        if node.op == "output":
            new.output((*fx.map_arg(node.args[0], made.__getitem__), *kept))
        elif use is None:
            made[node] = new.node_copy(node, made.__getitem__)
        else:
            assert use.operation is not None
            operands = fx.map_arg(use.operation.operands, made.__getitem__)
            both = new.call_function(_tapped(use.operation), (taps[node], *operands))
            made[node], x = (new.call_function(operator.getitem, (both, place)) for place in (0, 1))
            for one in (both, made[node], x):
                one.meta = dict(node.meta)
            kept.append(x)
    new.lint()
    return new


def _tapped(operation: Operation) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The node as a function of (tap, *operands). Without a tap it is the node as it was."""
    kind, casts = operation.kind, operation.casts

    def call(
        tap: torch.Tensor | None, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_tapped = tap is not None and torch.is_grad_enabled()
        operands = (x, w.detach(), None if b is None else b.detach()) if is_tapped else (x, w, b)
        if casts:
            operands = cast_operands(*operands)
        ran = kind.run(*operands, w.requires_grad, *options)
        if tap is None or not is_tapped:
            return ran.value, None
        return ran.value + lifted(tap), None if ran.x is None else ran.x.detach()

    call.__name__ = call.__qualname__ = f"tapped_{kind.name}"
    call.__module__ = __name__
    return call
