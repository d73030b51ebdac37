"""Cuts of the nodes of a graph by their costs, and the user's cuts between which these are made.

Users cut by numbers of nodes, or by the names of nodes and modules with which stages end:

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
from itertools import accumulate, pairwise

from fxpipe.errors import ArgumentError, ArgumentTypeError, PartitionError, TooManyStagesError
from fxpipe.partitioning.block import exact_integers, partition_integers

# -- The nodes of a graph for cutting, and their names in errors -------------------------------------------------------


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


def _node_count(entry: int | str, entries: Sequence[int] | Sequence[str]) -> int:
    try:
        if isinstance(entry, bool | str):
            raise TypeError
        return operator.index(entry)
    except TypeError:
        raise ArgumentTypeError(
            f"balance={entries}: {entry!r} is of type {type(entry).__name__}; expected ints only (numbers of nodes) or "
            "strings only (names of nodes or modules)"
        ) from None


def starts_by_counts(entries: Sequence[int] | Sequence[str], nodes: NodeSequence) -> tuple[int, ...]:
    counts, n = [_node_count(entry, entries) for entry in entries], len(nodes.costs)
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
    _raise_problems(_nothing_behind_message(name) for name, place in ends if place == len(nodes.costs))
    _raise_problems(_out_of_order_message(*one, *two, nodes) for one, two in pairwise(ends) if two[1] <= one[1])
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


def _nothing_behind_message(name: str) -> str:
    return f"{name!r} ends with the last node, where the last stage ends without being named: leave it out"


def _out_of_order_message(before: str, end: int, name: str, place: int, nodes: NodeSequence) -> str:
    return (
        f"{name!r} ends with {nodes.label(place - 1)}, which is not behind {nodes.label(end - 1)}, where {before!r} "
        "ends: name each end once, in the order in which they run"
    )


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
    costs = exact_integers(nodes.costs)
    parts = [_ItemRun.of(start, stop, costs, nodes) for start, stop in pairwise([0, *required, len(costs)])]
    if len(parts) == 1:
        return parts[0].in_stages(stages).starts
    for _ in range(stages - len(parts)):
        at = max((p for p, part in enumerate(parts) if part.can_be_cut), key=lambda p: parts[p].bottleneck)
        parts[at] = parts[at].in_stages(len(parts[at].lengths) + 1)
    return tuple(start for part in parts for start in part.starts)


@dataclass(frozen=True, slots=True)
class _ItemRun:
    """The items between two required cuts, grouped into stages."""

    items: tuple[int, ...]
    costs: tuple[int, ...]
    lengths: tuple[int, ...]  # length of each stage, in items

    @classmethod
    def of(cls, start: int, stop: int, costs: Sequence[int], nodes: NodeSequence) -> _ItemRun:
        items = tuple(place for place in nodes.items() if start <= place < stop)
        sums = tuple(sum(costs[one:two]) for one, two in pairwise([*items, stop]))
        return cls(items, sums, (len(items),))

    def in_stages(self, number: int) -> _ItemRun:
        return replace(self, lengths=partition_integers(self.costs, number))

    @property
    def can_be_cut(self) -> bool:
        return len(self.lengths) < len(self.items)

    @property
    def bottleneck(self) -> int:
        ends = accumulate(self.lengths, initial=0)
        return max(sum(self.costs[start:stop]) for start, stop in pairwise(ends))

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(self.items[first] for first in accumulate(self.lengths[:-1], initial=0))


# -- Cuts a graph like another one: each node goes to the stage that has its parameters, if possible -------------------


def cut_least_misplaced(misplaced: Sequence[Sequence[float]], forbidden: Mapping[int, str]) -> tuple[int, ...]:
    """Finds starts of stages with the least sum of `misplaced[place][stage]`, exactly, by dynamic programming.

    Args:
        misplaced: for each place, the cost of its node in each stage.
        forbidden: place -> reason why no cut is allowed before it.

    Returns:
        The place of the first node of each stage; every stage has at least one node. Ties go to the earlier cut.

    Raises:
        PartitionError: there are fewer places for cuts than needed.
    """
    stages = len(misplaced[0]) if misplaced else 0
    infinite = float("inf")
    # best[j]: least cost of the places so far, with the last one in stage j, and its starts
    best: list[tuple[float, tuple[int, ...]]] = [(infinite, ())] * stages
    for place, costs in enumerate(misplaced):
        before = best
        best = []
        for j in range(stages):
            stay = before[j]
            if place == 0:
                enter: tuple[float, tuple[int, ...]] = (0.0, (0,)) if j == 0 else (infinite, ())
            elif j > 0 and place not in forbidden and before[j - 1][0] < infinite:
                enter = (before[j - 1][0], (*before[j - 1][1], place))
            else:
                enter = (infinite, ())
            cost, starts = min(stay, enter)
            best.append((cost + costs[j], starts))
    if not best or best[-1][0] == infinite:
        raise PartitionError(
            f"the graph has {len(misplaced)} nodes, and fewer than {stages} blocks of them can be separated; "
            "use fewer devices"
        )
    return best[-1][1]
