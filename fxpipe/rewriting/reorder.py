"""Reorders the nodes of a graph so that few bytes cross any cut; results stay the same, bit for bit.

    traced = reorder_nodes(traced)

`OrderConstraints` holds the required order, `linear_order` optimizes within it. The result depends on the graph alone,
not on the number of samples or on measured times: the same model gets the same order in every run, so a plan finds its
graph again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.rewriting.cut_points import VIEW_FUNCTIONS
from fxpipe.rewriting.linear_order import Items, ItemValue, arrange_items
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.node_info import bytes_formula, info, random_draws_of, update_info
from fxpipe.tracing.traced import Traced, TracedGraph
from fxpipe.tracing.verify.effects import Effects

# -- Constraints on the order of a graph, in addition to makers before users ------------------------------------------
#
# - Nodes that touch memory which is written to: all nodes of one alias class keep their order. So reads see the same
#   values, and the views that autograd creates after a write are created in the same order.
# - Nodes that use one value or parameter that requires grad. Autograd runs backward in the reverse order of forward,
#   and sums the gradients of a value as they arrive: in another order the last bits differ.
# - Nodes that may have side effects: opaque Python (modules, hooks, functions that are not torch's), compared values,
#   numbers drawn for decisions.
#
# A random function of torch is free: its seed is made from its recorded ordinal.
#
# Nodes that move together are a *unit*: a node with the parts of its result, and after it each *pinned* node, which
# stays next to the node before it. A node is pinned if no node needs its result, or if it touches a buffer that forward
# changes or sets, whose users should stay together.

_PURE_MODULES = ("torch", "_operator", "builtins", "math")  # modules of functions without side effects


@dataclass(frozen=True, slots=True)
class OrderConstraints:
    """The units of a graph, and the constraints on their order."""

    nodes: tuple[tuple[fx.Node, ...], ...]  # by unit
    of: dict[fx.Node, int]
    after: tuple[tuple[int, ...], ...]  # by unit: the units that must run after it, ascending

    @classmethod
    def of_graph(cls, traced: Traced) -> OrderConstraints:
        effects = traced.effects
        assert effects is not None
        written = written_alias_classes(effects)
        nodes = _units(effects.nodes, set(_pinned_nodes(traced, effects, written)))
        of = {node: unit for unit, members in enumerate(nodes) for node in members}
        after: list[set[int]] = [set() for _ in nodes]
        for node in effects.nodes:
            for user in node.users:
                if user in of and of[user] != of[node]:
                    after[of[node]].add(of[user])
        is_print = {n for n in effects.nodes if not n.users and _module_name_of(n) == "builtins"}
        with_side_effects = [n for n in effects.nodes if n in is_print or has_side_effects(n)]
        for row in (*_memory_chains(effects, written), *_gradient_chains(effects), with_side_effects):
            places = list(dict.fromkeys(of[node] for node in row))
            for one, other in itertools.pairwise(places):
                after[one].add(other)
        return cls(nodes, of, tuple(tuple(sorted(later)) for later in after))


def _units(nodes: Sequence[fx.Node], pinned: Collection[fx.Node]) -> tuple[tuple[fx.Node, ...], ...]:
    """Groups consecutive nodes: each with its parts, and with the pinned nodes after it."""
    units: list[list[fx.Node]] = []
    for node in nodes:
        if units and (container_of(node) in units[-1] or node in pinned):
            units[-1].append(node)
        else:
            units.append([node])
    return tuple(map(tuple, units))


def written_alias_classes(effects: Effects) -> set[int]:
    """Returns the alias classes that nodes change. Methods may change more than values: `requires_grad_`, `detach_`."""
    classes = set[int]().union(*effects.written_classes)
    for node in effects.nodes:
        name = opname(node.target)
        if name.endswith("_") and not name.endswith("__") and node.args and isinstance(first := node.args[0], fx.Node):
            alias = effects.alias[first]
            classes |= {alias} if alias is not None else set()
    return classes


def _memory_chains(effects: Effects, written: set[int]) -> Iterable[list[fx.Node]]:
    """Finds for each alias class that is written to the nodes that create, read or change it."""
    chains: dict[int, list[fx.Node]] = {alias: [] for alias in sorted(written)}
    classes = touched_alias_classes(effects)
    for place, node in enumerate(effects.nodes):
        for alias in sorted(classes[node] & written | effects.written_classes[place]):
            chains[alias].append(node)
    return chains.values()


def touched_alias_classes(effects: Effects) -> dict[fx.Node, frozenset[int]]:
    """Finds for each node the alias classes of its result and inputs, including parts of tuples that it reads."""
    of: dict[fx.Node, set[int]] = {n: set() if alias is None else {alias} for n, alias in effects.alias.items()}
    for node in reversed(effects.nodes):  # parts of parts first
        if (first := container_of(node)) is not None:
            of[first] |= of[node]
    return {n: frozenset(of[n].union(*map(of.__getitem__, n.all_input_nodes))) for n in effects.nodes}


def _gradient_chains(effects: Effects) -> Iterable[list[fx.Node]]:
    """Finds for each value that requires grad the users that also require grad."""
    one: dict[fx.Node, fx.Node] = {}  # node -> the first node that returned the same tensor, or the tuple it is in
    users: dict[fx.Node, list[fx.Node]] = {}
    for place, node in enumerate(effects.nodes):
        sources = dict.fromkeys(one.get(n, n) for n in node.all_input_nodes if effects.requires_grad.get(n))
        if (first := container_of(node)) is not None:
            one[node] = one.get(first, first)
        elif (same := _returned_argument(effects, node)) is not None:
            one[node] = one.get(same, same)
        if effects.requires_grad.get(node) or effects.written_classes[place]:
            for source in sources:
                users.setdefault(source, []).append(node)
    return users.values()


def _returned_argument(effects: Effects, node: fx.Node) -> fx.Node | None:
    """Returns the argument that a node returns, at least at some sizes (`contiguous`, `to`)."""
    if node in effects.same:
        return effects.same[node]
    alias = effects.alias.get(node)
    if alias is None or opname(node.target) in VIEW_FUNCTIONS:
        return None
    return next((n for n in node.all_input_nodes if effects.alias[n] == alias), None)


def has_side_effects(node: fx.Node) -> bool:
    """Returns whether a node may have side effects, or must not be reordered with nodes that do."""
    known = info(node)
    if known.opaque is not None or known.is_scalar_draw:
        return True
    return node.op == "call_function" and _module_name_of(node) not in _PURE_MODULES


def _module_name_of(node: fx.Node) -> str:
    """Returns the top-level module of a node's function; torch if it has no module (methods of tensors)."""
    return str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]


def _pinned_nodes(traced: Traced, effects: Effects, written: set[int]) -> Iterator[fx.Node]:
    attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
    states = {effects.alias[n] for n in attributes} & written
    assigned = traced.carried_state
    reassigned = {n for n in attributes if str(n.target) in assigned}
    outputs = {o for o in (*traced.handed_out, *traced.left.values()) if isinstance(o, fx.Node)}
    classes = touched_alias_classes(effects)
    for node in effects.nodes:
        is_unused = not node.users.keys() - {traced.graph.output_node()} and node not in outputs
        if is_unused and container_of(node) is None:
            yield node
        if not states.isdisjoint(classes[node]) or not reassigned.isdisjoint(node.all_input_nodes):
            yield node
        if node in assigned.values():
            yield node


ASSUMED_SAMPLES = 8  # samples of a micro-batch, to compare values with and without a batch dimension


def reorder_nodes(traced: Traced) -> Traced:
    """Returns the graph in a better order, as a new `Traced`; `traced` itself if none is found.

    Gradients keep their bits, and random numbers stay the same. Model inputs and parameters cost nothing, since every
    stage has them.
    """
    units = OrderConstraints.of_graph(traced)
    order = arrange_items(_order_items(traced, units))
    if order == tuple(range(len(order))):
        return traced
    return with_node_order(traced, [node for unit in order for node in units.nodes[unit]])


def with_node_order(traced: Traced, nodes: Sequence[fx.Node]) -> Traced:
    """Returns the same graph with its working nodes in this order, in which makers must come before users."""
    graph = TracedGraph()
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
        update_info(copies[node], rng=replace(random_draws_of(node), ordinal=ordinal))
    assert traced.effects is not None
    return replace(traced, graph=graph, effects=_effects_of_copies(traced.effects, nodes, copies))


def random_ordinals(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Returns the number of each random node, for its seed: in the order in which the nodes were recorded."""
    numbered = enumerate((n, random_draws_of(n)) for n in nodes if info(n).is_random)
    return {n: at if draws.ordinal is None else draws.ordinal for at, (n, draws) in numbered}


def _effects_of_copies(effects: Effects, nodes: Sequence[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> Effects:
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
        [effects.written_classes[effects.place[node]] for node in nodes],
        {copies[node]: requires for node, requires in effects.requires_grad.items()},
    )


def _order_items(traced: Traced, units: OrderConstraints) -> Items:
    effects, outputs = traced.effects, {o for o in traced.handed_out if isinstance(o, fx.Node)}
    assert effects is not None
    values = []
    for node in effects.nodes:
        users = sorted({units.of[user] for user in node.users if user in units.of} - {units.of[node]})
        if users or node in outputs:
            values.append(ItemValue(_node_bytes(node), units.of[node], tuple(users), node in outputs))
    weights = [sum(_node_work(effects, node) for node in members) for members in units.nodes]
    return Items(tuple(weights), tuple(values), units.after)


def _node_work(effects: Effects, node: fx.Node) -> int:
    """Estimates a node's work by the bytes that it reads and writes; views do no work."""
    alias = effects.alias[node]
    shared = alias is not None and alias in {effects.alias[n] for n in node.all_input_nodes}
    if shared and not effects.written_classes[effects.place[node]]:
        return 1
    read = (n for n in node.all_input_nodes if n.op != "get_attr")
    return 1 + sum(_node_bytes(n) for n in (node, *read))


def _node_bytes(node: fx.Node) -> int:
    return _assumed_bytes(bytes_formula(info(node).shapes))


@functools.lru_cache(maxsize=4096)
def _assumed_bytes(formula: sympy.Expr) -> int:
    """Computes the bytes at ASSUMED_SAMPLES, which also replaces sizes that depend on values."""
    return int(formula.subs(dict.fromkeys(formula.free_symbols, ASSUMED_SAMPLES)))
