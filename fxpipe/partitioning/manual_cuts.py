"""Cuts of the nodes of a graph by their costs, and the user's cuts, by numbers of nodes or names of nodes and modules.

places    0     1          2          3          4          5
nodes     x     stem_conv  stem_relu  body_conv  body_relu  head
modules   -     stem.conv  stem.relu  body.conv  body.relu  head

[3, 3]             stages 0-2 and 3-5
["stem"]           the same: a cut after the last node of the module
["stem"], 3 stages the same cut, and one more that the solver chooses
"""

from __future__ import annotations

import difflib
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from fxpipe.errors import ArgumentError, ArgumentTypeError, PartitionError, TooManyStagesError
from fxpipe.partitioning.block import exact_integers, partition_integers


@dataclass(frozen=True, slots=True)
class NodeSequence:
    """The nodes in execution order; a node's index here is its *place*."""

    costs: tuple[float, ...]
    names: tuple[str, ...]  # one for each node, or empty
    modules: tuple[str, ...]  # the dotted path of each node's module, or empty
    forbidden_cuts: Mapping[int, str]  # place -> reason why no cut is allowed before it
    empty: Mapping[str, int | None] = field(default_factory=dict)  # module without nodes -> the place after it
    inside: Mapping[str, str] = field(default_factory=dict)  # module -> the enclosing module that is a node

    def label(self, place: int) -> str:
        return f"node {self.names[place]!r} (place {place})" if self.names else f"the node at place {place}"

    def items(self) -> list[int]:
        """Returns the first place of each indivisible run of nodes."""
        return [place for place in range(len(self.costs)) if place not in self.forbidden_cuts]

    def too_many_stages_error(self, stages: int, remedy: str = "") -> TooManyStagesError:
        n, possible = len(self.costs), len(self.items())
        if n == 0:
            return TooManyStagesError(f"stages={stages}, but there are no nodes to cut", 0)
        text = f"stages={stages}, but the {n} nodes can be cut into {possible} at most"
        if self.forbidden_cuts:
            first = min(self.forbidden_cuts)
            stuck = len(self.forbidden_cuts.keys() | {place - 1 for place in self.forbidden_cuts})
            text += (
                f": {stuck} of the nodes cannot be separated from a neighbour, first {self.label(first)} from the one "
                f"before it: {self.forbidden_cuts[first]}"
            )
        return TooManyStagesError(text, possible, remedy)

    def forbidden_cut_message(self, place: int) -> str:
        allowed = self.items()[1:]  # the first item begins without a cut
        after = bisect_left(allowed, place)
        nearest = " or ".join(map(self.label, allowed[max(after - 1, 0) : after + 1]))
        remedy = f"the nearest allowed: before {nearest}" if nearest else "no cut is allowed anywhere"
        return f"no cut can stand before {self.label(place)}: {self.forbidden_cuts[place]}; {remedy}"


def is_by_names(balance: Sequence[int] | Sequence[str], stages: int) -> bool:
    """Returns True for names, False for numbers of nodes. An empty list counts as names: a single stage needs none."""
    return all(isinstance(entry, str) for entry in balance) and (len(balance) > 0 or stages == 1)


def starts_by_counts(entries: Sequence[Any], nodes: NodeSequence) -> tuple[int, ...]:
    counts, n = list[int](), len(nodes.costs)
    for entry in entries:
        try:
            if isinstance(entry, bool):
                raise TypeError
            counts.append(operator.index(entry))
        except TypeError:
            raise ArgumentTypeError(
                f"balance={entries}: {entry!r} is of type {type(entry).__name__}; expected ints only (numbers of "
                "nodes) or strings only (names of nodes or modules)"
            ) from None
    if min(counts) < 1:
        raise ArgumentError(f"balance={counts} has the entry {min(counts)}: each stage needs at least 1 node")
    if sum(counts) != n:
        raise PartitionError(f"balance={counts} sums to {sum(counts)}, but there are {n} nodes: it must sum to {n}")
    starts = tuple(accumulate(counts[:-1], initial=0))
    _raise_problems(nodes.forbidden_cut_message(place) for place in starts if place in nodes.forbidden_cuts)
    return starts


def cuts_by_names(balance: Sequence[int] | Sequence[str], nodes: NodeSequence) -> tuple[int, ...]:
    """Returns the places of cuts after the last node of each name; at most the number of stages less one."""
    names = [str(name) for name in balance]
    places_of = [(name, places_of_name(name, nodes)) for name in names]
    _raise_problems(
        unknown_name_message(name, nodes) for name, places in places_of if not places and nodes.empty.get(name) is None
    )
    ends = [(name, places[-1] + 1 if places else nodes.empty[name] or 0) for name, places in places_of]
    _raise_problems(
        f"{name!r} ends before the first node, where no stage can end: leave it out" for name, p in ends if p == 0
    )
    _raise_problems(
        f"{name!r} ends with the last node, where the last stage ends without being named: leave it out"
        for name, place in ends
        if place == len(nodes.costs)
    )
    _raise_problems(
        f"{name!r} ends with {nodes.label(place - 1)}, which is not behind {nodes.label(end - 1)}, where {before!r} "
        "ends: name each end once, in the order in which they run"
        for (before, end), (name, place) in pairwise(ends)
        if place <= end
    )
    _raise_problems(
        f"{name!r}: {nodes.forbidden_cut_message(place)}" for name, place in ends if place in nodes.forbidden_cuts
    )
    return tuple(place for _, place in ends)


def places_of_name(name: str, nodes: NodeSequence) -> list[int]:
    """Returns the places of the nodes in the module of this name or, if there are none, of the node of this name."""
    by_name = [place for place, node in enumerate(nodes.names) if node == name]
    within = [place for place, path in enumerate(nodes.modules) if path == name or path.startswith(name + ".")]
    return within or by_name


def unknown_name_message(name: str, nodes: NodeSequence) -> str:
    if name in nodes.inside:
        return f"the module {name!r} runs in {nodes.inside[name]!r}, which is one node: name that"
    if name in nodes.empty:
        return f"the module {name!r} has no nodes: forward does not call it, or it computes nothing; name another one"
    known = list(dict.fromkeys([*sorted(enclosing_paths(nodes.modules) - {""}), *nodes.names]))
    if not known:
        return f"{name!r} is given, but the nodes have no names here: cut by numbers of nodes"
    close = difflib.get_close_matches(name, known)
    listing = ", ".join(map(repr, close or known[:5])) + ("" if close or len(known) <= 5 else ", ...")
    return f"no node or module is named {name!r}; {'close to it' if close else 'there'} are {listing}"


def enclosing_paths(modules: Iterable[str]) -> set[str]:
    """Returns the paths of modules and of all modules around them: a.b.c, a.b and a."""
    return {path[:end] for path in {*modules} for end, letter in enumerate(f"{path}.") if letter == "."}


def _raise_problems(problems: Iterable[str]) -> None:
    match list(problems):
        case []:
            return
        case [problem]:
            raise PartitionError(problem)
        case several:
            raise PartitionError("the nodes cannot be cut so:" + "".join(f"\n- {problem}" for problem in several))


def cut_by_block(nodes: NodeSequence, stages: int, required: Sequence[int] = ()) -> tuple[int, ...]:
    """Finds the starts of stages: at required places, and elsewhere to minimize the largest cost of a stage.

    A forbidden cut does not separate its two nodes; a run of inseparable nodes is an *item*.

        place      0   1   2   3   4   5          forbidden={1: "...", 4: "..."}
        cost       1   2   1   5   0   1
        items     [1   2] [1] [5   0] [1]         sums 3, 1, 5, 1
        stages    [        ] [          ]         sums 4, 6

    One more stage never raises a part's largest cost, so adding stages one at a time to the part with the largest cost
    leads to the least bottleneck.
    """
    costs, parts = exact_integers(nodes.costs), list[_ItemRun]()
    for start, stop in pairwise([0, *required, len(costs)]):
        items = tuple(place for place in nodes.items() if start <= place < stop)
        sums = tuple(sum(costs[one:two]) for one, two in pairwise([*items, stop]))
        parts.append(_ItemRun(items, sums, (len(items),)))
    if len(parts) == 1:
        parts[0] = parts[0].in_stages(stages)
    else:
        for _ in range(stages - len(parts)):
            divisible = [p for p, part in enumerate(parts) if len(part.lengths) < len(part.items)]
            at = max(divisible, key=lambda p: parts[p].bottleneck)
            parts[at] = parts[at].in_stages(len(parts[at].lengths) + 1)
    return tuple(part.items[first] for part in parts for first in accumulate(part.lengths[:-1], initial=0))


@dataclass(frozen=True, slots=True)
class _ItemRun:
    """The items between two required cuts, grouped into stages."""

    items: tuple[int, ...]
    costs: tuple[int, ...]
    lengths: tuple[int, ...]  # length of each stage, in items

    def in_stages(self, number: int) -> _ItemRun:
        return replace(self, lengths=partition_integers(self.costs, number))

    @property
    def bottleneck(self) -> int:
        ends = accumulate(self.lengths, initial=0)
        return max(sum(self.costs[start:stop]) for start, stop in pairwise(ends))


def cut_least_misplaced(misplaced: Sequence[Sequence[float]], forbidden: Mapping[int, str]) -> tuple[int, ...]:
    """Finds starts of stages with the least sum of `misplaced[place][stage]`, exactly, by dynamic programming."""
    # For another graph of a model, whose nodes go to the stages of their parameters. Every stage has a node;
    # ties go to the earlier cut. `forbidden`: place -> reason, for an error.
    stages, infinite = len(misplaced[0]) if misplaced else 0, float("inf")
    none: tuple[float, tuple[int, ...]] = (infinite, ())
    best = [none] * stages  # by stage: least cost of the places so far, with the last one in this stage, and its starts
    for place, costs in enumerate(misplaced):
        before = [(0.0, ()) if place == 0 else none, *best[:-1]]
        enter = [
            none if place in forbidden or cost == infinite else (cost, (*starts, place)) for cost, starts in before
        ]
        best = [(cost + more, starts) for (cost, starts), more in zip(map(min, best, enter), costs, strict=True)]
    if not best or best[-1][0] == infinite:
        raise PartitionError(
            f"the graph has {len(misplaced)} nodes, and fewer than {stages} blocks of them can be separated; "
            "use fewer devices"
        )
    return best[-1][1]


MAX_WAYS = 16  # maximum number of placements for pins to compare


@dataclass(frozen=True, slots=True)
class PinnedPlacement:
    """A placement and the bounds that follow from pins."""

    placement: tuple[int, ...]  # by stage: the device
    first_stages: tuple[int, ...]  # by place: the first stage that may have the node
    last_stages: tuple[int, ...]  # by place: the last stage that may have the node


def placements_for_pins(
    pins: Mapping[str, int], placement: Sequence[int], nodes: NodeSequence
) -> tuple[PinnedPlacement, ...]:
    """Returns the placements that satisfy `pins` (node name or module path -> device), the fewest stages first.

    Stages are placed on the devices in order. A node pinned to an earlier device than a preceding node needs another
    stage; between pins the solver decides:

        devices    0, 1                    pins {"embedding": 0, "head": 0}
        stages     0 on 0, 1 on 1, 2 on 0  since the head is after nodes that are on 1

        place         0          1      2      3      4
        node          embedding  ...    ...    ...    head
        first stage   0          0      0      0      2
        last stage    0          2      2      2      2

    A pinned node can be in an existing stage or in a new one. A module's pin holds for its submodules unless they have
    their own pins. A module that computes nothing needs no place.
    """
    device_of: dict[int, int] = {}
    for name in sorted(pins, key=len):  # longer paths are inner modules, and override
        places = places_of_name(name, nodes) if name else list(range(len(nodes.costs)))
        is_elsewhere = name in nodes.inside and pins.get(nodes.inside[name]) != pins[name]
        if not places and (is_elsewhere or not (name in nodes.inside or name in nodes.empty)):
            raise PartitionError(unknown_name_message(name, nodes))
        device_of |= dict.fromkeys(places, pins[name])
    n, first = len(nodes.costs), device_of.get(0, placement[0])
    rest = [*placement]
    if first in rest:
        rest.remove(first)
    begin = (first, *rest)  # as given, but first the device of the first node; no device without nodes
    if len(device_of) == n:  # a map of all modules: one stage per run, unless the given placement matches
        runs = tuple(device for device, _ in groupby(device_of[place] for place in range(n)))
        begin = tuple(placement) if tuple(device for device, _ in groupby(placement)) == runs else runs
    ways = [_StagesForPins(begin, ())]
    for place, device in sorted(device_of.items()):
        ways = [longer for way in ways for longer in way.with_pin(place, device)][:MAX_WAYS]
    placements = (way.bounded(n) for way in sorted(ways, key=lambda way: len(way.placement)))
    possible = tuple(way for way in placements if way is not None)
    if not possible:
        raise PartitionError(
            f"pin={dict(pins)!r}: the {n} nodes are too few for the stages that this takes; use fewer "
            "devices, or pin less"
        )
    return possible


@dataclass(frozen=True, slots=True)
class _StagesForPins:
    """Stages for the first pinned places."""

    placement: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]  # (place, first stage, last stage), ascending; the stages are on one device

    def with_pin(self, place: int, device: int) -> list[_StagesForPins]:
        before, first, last = self.spans[-1] if self.spans else (-2, 0, 0)
        if before == place - 1 and self.placement[first] == device:
            return [_StagesForPins(self.placement, (*self.spans, (place, first, last)))]  # the same span continues
        ways = []
        for _, run in groupby(range(len(self.placement)), self.placement.__getitem__):
            stages = [stage for stage in run if self.placement[stage] == device and stage >= first]
            if stages:  # adjacent stages on one device: the solver chooses among them
                ways.append(_StagesForPins(self.placement, (*self.spans, (place, stages[0], stages[-1]))))
        if self.placement[-1] != device:
            stage = len(self.placement)
            ways.append(_StagesForPins((*self.placement, device), (*self.spans, (place, stage, stage))))
        return ways

    def bounded(self, n: int) -> PinnedPlacement | None:
        """Returns the bounds of all `n` nodes; None if they leave a stage without a node."""
        end = len(self.placement) - 1
        firsts = {place: first for place, first, _ in self.spans}
        lasts = {place: last for place, _, last in self.spans}
        low = tuple(accumulate((firsts.get(place, 0) for place in range(n)), max))
        high = tuple(accumulate((lasts.get(place, end) for place in reversed(range(n))), min))[::-1]
        stage = -1
        for first, last in zip(low, high, strict=True):
            stage = min(stage + 1, last)  # the earliest stage possible
            if stage < first:
                return None
        return PinnedPlacement(self.placement, low, high) if stage == end else None
