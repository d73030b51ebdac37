"""Puts the nodes of a graph in an order in which few bytes cross any cut, and which computes the same, bit for bit.

    traced = ordered(traced)

`constraints` says what of the order must stay, `arranging` finds the order; here the one is asked about the other. The
result hangs on the graph alone, not on the number of samples in the example, nor on measured times: the same model
gives the same order in every run, and a plan finds its graph again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import sympy
from torch import fx

from fxpipe.rewriting.arranging import arranged
from fxpipe.rewriting.constraints import Units
from fxpipe.rewriting.rows import Items, Value
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.sizing.shapes import bytes_of
from fxpipe.tracing.traced import Graph, Traced

SAMPLES = 8  # of a micro-batch, as far as the order is concerned: values with a batch against those without


def ordered(traced: Traced) -> Traced:
    """The graph in a better order, as another `Traced`; `traced` itself where none is found.

    Gradients stay those of the model bit for bit, random numbers the same; memory that is written to, and what does
    more than it returns, keeps its order. Model inputs and parameters are everywhere, and cost nothing to hold.
    """
    units = Units.of_graph(traced)
    order = arranged(_items(traced, units))
    if order == tuple(range(len(order))):
        return traced
    return in_order(traced, [node for unit in order for node in units.nodes[unit]])


def in_order(traced: Traced, nodes: Sequence[fx.Node]) -> Traced:
    """The same graph with its working nodes in this order, in which each must come after what it uses."""
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copy(node)
    for node in nodes:
        copy(node)
    for node in traced.graph.nodes:
        if node not in copies:  # the output
            copy(node)
    graph.lint()
    for node, ordinal in random_ordinals(traced.nodes).items():
        copies[node].meta["ordinal"] = ordinal
    assert traced.effects is not None
    return replace(traced, graph=graph, effects=_with_copies(traced.effects, nodes, copies))


def random_ordinals(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The number of each random node, of which its seed is made: by the order in which the nodes were recorded."""
    return {n: n.meta.get("ordinal", k) for k, n in enumerate(n for n in nodes if n.meta.get("random"))}


def _with_copies(effects: Effects, nodes: Sequence[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> Effects:
    place = {node: at for at, node in enumerate(nodes)}
    last = {
        node: len(nodes)
        if old == len(nodes)
        else max((place[user] for user in node.users if user in place), default=-1)
        for node, old in effects.last.items()
    }
    return Effects(
        [copies[node] for node in nodes],
        {copies[node]: -1 for node, at in effects.place.items() if at < 0} | {copies[n]: at for n, at in place.items()},
        {copies[node]: at for node, at in last.items()},
        {copies[node]: alias for node, alias in effects.alias.items()},
        {copies[node]: copies[source] for node, source in effects.same.items()},
        [effects.writes[effects.place[node]] for node in nodes],
        {copies[node]: requires for node, requires in effects.requires_grad.items()},
    )


def _items(traced: Traced, units: Units) -> Items:
    effects, outputs = traced.effects, {o for o in traced.handed_out if isinstance(o, fx.Node)}
    assert effects is not None
    values = []
    for node in effects.nodes:
        users = sorted({units.of[user] for user in node.users if user in units.of} - {units.of[node]})
        if users or node in outputs:
            values.append(Value(_bytes(node), units.of[node], tuple(users), node in outputs))
    weights = [sum(_work(effects, node) for node in members) for members in units.nodes]
    return Items(tuple(weights), tuple(values), units.after, units.pinned)


def _work(effects: Effects, node: fx.Node) -> int:
    """What a node reads and writes, in bytes, as a measure of its work; a view does none."""
    alias = effects.alias[node]
    shared = alias is not None and alias in {effects.alias[n] for n in node.all_input_nodes}
    if shared and not effects.writes[effects.place[node]]:
        return 1
    read = (n for n in node.all_input_nodes if n.op != "get_attr")
    return 1 + sum(_bytes(n) for n in (node, *read))


def _bytes(node: fx.Node) -> int:
    return _size(bytes_of(node.meta.get("shapes", ())))


@functools.lru_cache(maxsize=4096)
def _size(formula: sympy.Expr) -> int:
    """Bytes for SAMPLES; a size that hangs on values is taken for as many."""
    return int(formula.subs(dict.fromkeys(formula.free_symbols, SAMPLES)))
