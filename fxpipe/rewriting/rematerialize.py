"""Cheap values that stages compute for themselves instead of receiving them: masks, position ids, tables of angles.

`rematerializable_nodes` says which nodes may be computed again, and of what: a node is a *copy* in a stage that is not
its own. `choose_rematerialization` says for which that takes less time than to receive their values;
`split_into_stages` does it.

    stage 0     ids ─▶ mask ─▶ bias ──────────────▶ attention        receives nothing; sends `hidden` alone
    stage 1     ids ─▶ mask ─▶ bias (copies) ─────▶ attention        `ids` is an input of the model and comes by itself

A copy must be the same whenever and wherever it is computed: it has no gradient, draws nothing, touches no memory that
is written to, does nothing but return, and depends only on model inputs, on buffers that do not change, on plain
numbers (sizes of any tensor, which cost nothing), and on other such nodes. Not on parameters: a stage would need the
weight in its memory.

For one stage, what to receive and what to compute is a minimum cut. A value that is needed costs the time to receive
it, or the time to compute it and all that it needs in turn; what two values need is paid for once. This is the
selection problem of J. Rhys, "A Selection Problem of Shared Fixed Costs and Network Flows", Management Science 17
(1970), and the answer is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

import torch
from torch import fx

from fxpipe.rewriting.program import PIPE_INPUT, Program
from fxpipe.rewriting.reorder import has_side_effects, touched_alias_classes, written_alias_classes
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import Traced, attribute_tensor

ReceiveSeconds = Callable[[float], float]  # bytes -> seconds until a stage has them


def rematerializable_nodes(traced: Traced) -> dict[str, tuple[str, ...]]:
    """The nodes that may be computed again in any stage, and what each is computed from, in the order of the graph.

    What is not itself a key is an input of the model, a buffer by the name of its node, or a number.
    """
    effects = traced.effects
    assert effects is not None
    changing = written_alias_classes(effects)
    touched = touched_alias_classes(effects)
    everywhere: set[fx.Node] = set()  # what any stage can have as it is, or compute
    sources_of: dict[str, tuple[str, ...]] = {}
    for node in traced.graph.nodes:
        if effects.requires_grad.get(node) or effects.alias.get(node) in changing:
            continue
        if node.op == "placeholder" or (node.op == "get_attr" and _is_constant(traced, node)):
            everywhere.add(node)
        elif node in effects.place and everywhere.issuperset(node.all_input_nodes):
            does_more = info(node).is_random or info(node).is_compared_read or has_side_effects(node)
            if not does_more and touched[node].isdisjoint(changing):
                everywhere.add(node)
                sources_of[node.name] = tuple(source.name for source in node.all_input_nodes)
        elif info(node).number is not None:
            everywhere.add(node)
    return sources_of


def _is_constant(traced: Traced, node: fx.Node) -> bool:
    """Returns whether this is a buffer or a constant that no forward changes, as far as one can see."""
    is_set = str(node.target) in traced.assigned
    may_change = any(info(user).opaque_module is not None for user in node.users)
    return not (is_set or may_change or isinstance(attribute_tensor(traced, node), torch.nn.Parameter))


def choose_rematerialization(
    traced: Traced,
    program: Program,
    seconds: Mapping[str, float],
    sizes: Mapping[str, float],
    receive: Sequence[ReceiveSeconds | None],
) -> tuple[tuple[str, ...], ...]:
    """Chooses for each stage the nodes of other stages that it had better compute itself, in the order of the graph.

    Args:
        traced: the graph.
        program: its stages, without copies.
        seconds: by name of a working node: of its forward, on one micro-batch.
        sizes: by name of any node: bytes of its value for one micro-batch.
        receive: for each stage the seconds that it takes until a value of so many bytes is there, an input of the
            model as well; None where a value is handed over and takes no time.
    """
    again = rematerializable_nodes(traced)
    attributes = {str(n.target): n.name for n in traced.graph.nodes if n.op == "get_attr"}
    containers = {container.name for node in traced.nodes if (container := container_of(node)) is not None}
    numbers = {n.name for n in traced.nodes if info(n).number is not None}
    chosen_names: list[tuple[str, ...]] = []
    for stage, arrival in zip(program.stages, receive, strict=True):
        if arrival is None:
            chosen_names.append(())
            continue
        at_hand = numbers | {r.name for r in stage.receives if r.source == PIPE_INPUT}
        at_hand |= {attributes[name] for name in stage.attributes}
        needed = [r.name for r in stage.receives if r.source != PIPE_INPUT]
        wanted = _with_sources([name for name in needed if name in again], again)
        prices = {
            name: 0.0 if name in at_hand else math.inf if name in containers else arrival(sizes[name])
            for name in wanted
        }
        chosen = cheapest_rematerialization([n for n in needed if n in again], again, prices, seconds)
        chosen_names.append(tuple(name for name in again if name in chosen))
    return tuple(chosen_names)


def _with_sources(names: Sequence[str], again: Mapping[str, Sequence[str]]) -> list[str]:
    """These values and all from which they are computed."""
    closure = dict.fromkeys(names)
    waiting = [*closure]
    while waiting:
        for source in again.get(waiting.pop(), ()):
            if source not in closure:
                closure[source] = None
                waiting.append(source)
    return [*closure]


def cheapest_rematerialization(
    needed: Collection[str],
    again: Mapping[str, Sequence[str]],
    receive: Mapping[str, float],
    compute: Mapping[str, float],
) -> frozenset[str]:
    """Chooses the values to compute so that all of `needed` are there in the least time; in a tie, the fewest.

    Args:
        needed: values that the stage uses.
        again: value -> what it is computed from, for those that can be computed.
        receive: value -> seconds to receive it, of all that may be needed; infinite where it cannot be.
        compute: value -> seconds to compute it.
    """
    if not needed:
        return frozenset()
    import networkx  # takes a moment; many models have no such values

    # As a cut: on the side of the source are the values that have to be there and, as (value,), those that are
    # computed for it. An arc out of a value is cut where it is received, an arc to the sink where it is computed.
    # Of equal cuts networkx returns the one nearest to where the flow ends. So that as little as possible is computed,
    # all arcs run backwards here: that one is then the cut nearest to the source.
    arcs = networkx.DiGraph()

    def add_arc(start: object, stop: object, seconds: float) -> None:
        # Fractions are exact: whether an arc is full is told by comparing. One without a capacity has no end of it.
        arcs.add_edge(stop, start, **({} if math.isinf(seconds) else {"capacity": Fraction(seconds)}))

    for value in needed:
        add_arc(_SOURCE, value, math.inf)
    for value in _with_sources([*needed], again):
        if value not in again:
            add_arc(value, _SINK, receive[value])
            continue
        add_arc(value, (value,), receive[value])
        add_arc((value,), _SINK, compute[value])
        for source in again[value]:
            add_arc((value,), source, math.inf)
    _, (_, source_side) = networkx.minimum_cut(arcs, _SINK, _SOURCE)
    return frozenset(value for value in again if (value,) in source_side)


_SOURCE, _SINK = object(), object()
