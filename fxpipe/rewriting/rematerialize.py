"""Cheap values that stages recompute instead of receiving them: masks, position ids, tables of angles.

`rematerializable_nodes` finds the nodes that other stages may recompute, as *copies*. `choose_rematerialization`
selects those that are faster to recompute than to receive; `split_into_stages` inserts them.

    stage 0     ids ─▶ mask ─▶ bias ──────────────▶ attention        receives nothing; sends only `hidden`
    stage 1     ids ─▶ mask ─▶ bias (copies) ─────▶ attention        `ids` is an input of the model, sent to all stages

A copy must have the same value in every stage: it has no gradient, no randomness and no side effects, touches no memory
that is written to, and depends only on model inputs, on constant buffers, on plain numbers (sizes of any tensor, which
cost nothing), and on other such nodes. It does not depend on parameters, since a stage would need their memory.

The best choice for one stage is a minimum cut: a needed value costs the time to receive it, or to compute it and all of
its inputs; shared inputs count once. This is the selection problem of J. Rhys, "A Selection Problem of Shared Fixed
Costs and Network Flows", Management Science 17 (1970), and the solution is exact.
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

ReceiveSeconds = Callable[[float], float]  # bytes -> seconds until a stage has received them


def rematerializable_nodes(traced: Traced) -> dict[str, tuple[str, ...]]:
    """Returns the nodes that any stage may recompute, and the names of their inputs, in the order of the graph.

    Inputs that are not keys are inputs of the model, buffers (by the name of their node), or numbers.
    """
    effects = traced.effects
    assert effects is not None
    changing = written_alias_classes(effects)
    touched = touched_alias_classes(effects)
    everywhere: set[fx.Node] = set()  # available in any stage, or computed there
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
    """Returns whether this is a buffer or a constant that, as far as is known, no forward changes."""
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
    """Selects for each stage the nodes of other stages that it should recompute, in the order of the graph.

    Args:
        traced: the graph.
        program: its stages, without copies.
        seconds: by name of a working node: seconds of its forward on one micro-batch.
        sizes: by name of any node: bytes of its value for one micro-batch.
        receive: for each stage the function from bytes to the seconds until a value, or an input of the model, has
            arrived; None if values are passed without a transfer.
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
    """Returns these values and all values from which they are computed."""
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
    """Selects the values to compute so that all of `needed` are available in the least time; in a tie, the fewest.

    Args:
        needed: values that the stage uses.
        again: value -> its inputs, for values that can be computed.
        receive: value -> seconds to receive it, for all values that may be needed; infinite if impossible.
        compute: value -> seconds to compute it.
    """
    if not needed:
        return frozenset()
    import networkx  # slow to import; many models have no such values

    # The source side of the cut holds the values that must be available and, as (value,), those that are computed. An
    # arc out of a value is cut if it is received, an arc to the sink if it is computed. Of equal cuts networkx returns
    # the one nearest to the end of the flow. All arcs are reversed here, so this is the cut with the fewest computed.
    arcs = networkx.DiGraph()

    def add_arc(start: object, stop: object, seconds: float) -> None:
        # Fractions are exact, and full arcs are found by comparison. No capacity means infinite.
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
