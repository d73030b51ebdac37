"""Cheap values that stages recompute instead of receiving them: masks, position ids, tables of angles.

    stage 0     ids ─▶ mask ─▶ bias ──────────────▶ attention        receives nothing; sends only `hidden`
    stage 1     ids ─▶ mask ─▶ bias (copies) ─────▶ attention        `ids` is an input of the model, sent to all stages

A *copy* must have the same value in every stage: it has no gradient, no randomness and no side effects, touches no
memory that is written to, and depends only on model inputs, on constant buffers, on plain numbers (sizes of any tensor,
which cost nothing), and on other such nodes; not on parameters, since a stage would need their memory.

A stage computes a value if this, with all that it lacks for it, takes less time than to receive it. Values are chosen
in the order of the graph, so that later ones find the earlier ones at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from fxpipe.rewriting.program import Program
from fxpipe.rewriting.reorder import has_side_effects, touched_alias_classes, written_alias_classes
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
    numbers = {n.name for n in traced.nodes if info(n).number is not None}
    chosen_names: list[tuple[str, ...]] = []
    for stage, arrival in zip(program.stages, receive, strict=True):
        needed = {r.name for r in stage.receives}
        at_hand = numbers | {attributes[name] for name in stage.attributes} | (needed - again.keys())
        chosen: set[str] = set()
        for value in [name for name in again if name in needed and arrival is not None]:
            missing = _missing(value, again, at_hand)
            assert arrival is not None
            cost = sum(seconds[name] if name in again else arrival(sizes[name]) for name in missing)
            if cost < arrival(sizes[value]):
                chosen |= missing & again.keys()
                at_hand |= missing
            at_hand.add(value)
        chosen_names.append(tuple(name for name in again if name in chosen))
    return tuple(chosen_names)


def _missing(value: str, again: Mapping[str, Sequence[str]], at_hand: Collection[str]) -> set[str]:
    """Returns what a stage lacks to compute a value: the value itself, and all that it is computed from."""
    missing, waiting = {value}, [value]
    while waiting:
        new = {source for source in again.get(waiting.pop(), ()) if source not in at_hand} - missing
        missing |= new
        waiting += new
    return missing
