"""What is worth knowing about a cut beside its figures: tied parameters, modules kept whole, the heaviest node."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from torch import fx

from fxpipe.plans import HeavyNode, Tied, Whole
from fxpipe.tracing.containers import bytes_in
from fxpipe.tracing.source import UNKNOWN
from fxpipe.tracing.traced import lookup, whole_name

if TYPE_CHECKING:
    from fxpipe.deciding.outcomes import Cut
    from fxpipe.rewriting import Program
    from fxpipe.tracing import Traced


def line_of(node: fx.Node) -> str:
    """The user's line that made the node; empty where it is not known."""
    line = str(node.meta.get("source", ""))
    return "" if line == UNKNOWN else line


def tied(traced: Traced, program: Program) -> tuple[Tied, ...]:
    """Parameters that have several names, or that several stages use."""
    names: dict[int, list[str]] = {}
    for name, parameter in traced.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    nodes = {str(node.target): node for node in traced.graph.nodes if node.op == "get_attr"}
    users: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for j, stage in enumerate(program.stages):
        for name in stage.attributes:
            tensor = lookup(traced, nodes[name])
            users.setdefault(id(tensor), []).append(j)
            sizes[id(tensor)] = bytes_in(tensor)
    return tuple(
        Tied(tuple(found), tuple(dict.fromkeys(users[key])), sizes[key])
        for key, found in names.items()
        if key in users and (len(found) > 1 or len({*users[key]}) > 1)
    )


def whole(traced: Traced) -> tuple[Whole, ...]:
    """Modules that are one node of the graph; of one that is called several times, the first call."""
    found: dict[str, Whole] = {}
    for node in traced.nodes:
        if "whole" in node.meta:
            name = whole_name(node) if "continued" in node.meta else node.meta["whole"]
            found.setdefault(name, Whole(name, node.meta["why"], line_of(node)))
    return tuple(found.values())


def heaviest(cut: Cut, samples: int) -> HeavyNode:
    """The node that takes the longest where it runs, of several the first."""
    by_kind = [{cost.name: cost for cost in profile.nodes} for profile in cut.profiles]
    found = []
    for place, node in enumerate(cut.traced.nodes):
        stage = min(bisect_right(cut.starts, place), len(cut.sites)) - 1
        cost = by_kind[cut.sites[stage].kind][node.name]
        seconds = cost.forward + cost.backward
        found.append(HeavyNode(node.name, stage, seconds.at(samples), line_of(node), seconds.fixed))
    return max(found, key=lambda node: node.seconds)
