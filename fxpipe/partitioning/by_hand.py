"""Cuts that the user makes: by numbers of nodes, or by the names of nodes and modules behind which a stage ends.

places    0     1          2          3          4          5
nodes     x     stem_conv  stem_relu  body_conv  body_relu  head
modules   -     stem.conv  stem.relu  body.conv  body.relu  head

[3, 3]             stages 0-2 and 3-5
["stem"]           the same: a cut stands behind the last node of the module
["stem"], 3 stages the same cut, and one more where costs say: what is left free is for the solver
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from fxpipe.errors import ArgumentError, ArgumentTypeError, PartitionError
from fxpipe.partitioning.nodes import Nodes


def is_by_names(balance: Sequence[int] | Sequence[str], stages: int) -> bool:
    """Tells names from numbers of nodes. An empty list has no wishes: it is names, of which one stage needs none."""
    try:
        entries: list[int | str] = [*balance]
    except TypeError:
        raise ArgumentTypeError(
            f"balance={balance!r} is of type {type(balance).__name__}; expected a str, or a list of ints or of strings"
        ) from None
    return all(isinstance(entry, str) for entry in entries) and (bool(entries) or stages == 1)


def _count(entry: int | str, entries: Sequence[int] | Sequence[str]) -> int:
    try:
        if isinstance(entry, bool | str):
            raise TypeError
        return operator.index(entry)
    except TypeError:
        raise ArgumentTypeError(
            f"balance={entries}: {entry!r} is of type {type(entry).__name__}; expected ints only (numbers of nodes) or "
            "strings only (names of nodes or modules)"
        ) from None


def starts_by_counts(entries: Sequence[int] | Sequence[str], stages: int, nodes: Nodes) -> tuple[int, ...]:
    """The place at which each stage begins, from a number of nodes for each."""
    counts, n = [_count(entry, entries) for entry in entries], len(nodes.costs)
    if len(counts) != stages:
        raise ArgumentError(
            f"balance={counts} has {len(counts)} entries for {stages} stages: "
            f"give {stages} numbers of nodes that sum to {n}"
        )
    if min(counts) < 1:
        raise ArgumentError(f"balance={counts} has the entry {min(counts)}: each stage needs at least 1 node")
    if sum(counts) != n:
        raise PartitionError(f"balance={counts} sums to {sum(counts)}, but there are {n} nodes: it must sum to {n}")
    starts = tuple(accumulate(counts[:-1], initial=0))
    _refuse(nodes.why_no_cut(place) for place in starts if place in nodes.forbidden)
    return starts


def cuts_by_names(given: Sequence[int] | Sequence[str], stages: int, nodes: Nodes) -> tuple[int, ...]:
    """The places before which a cut must stand: behind the last node of each name. At most one less than stages."""
    names = [str(name) for name in given]
    if len(names) > stages - 1:
        raise ArgumentError(
            f"balance={names} has {len(names)} names for {stages} stages: give {stages - 1} or fewer, a stage ends "
            f"behind each; or give {stages} numbers of nodes that sum to {len(nodes.costs)}"
        )
    found = [(name, find(name, nodes)) for name in names]
    _refuse(unknown(name, nodes) for name, places in found if not places and nodes.empty.get(name) is None)
    ends = [(name, places[-1] + 1 if places else nodes.empty[name] or 0) for name, places in found]
    _refuse(f"{name!r} ends before the first node, where no stage can end: leave it out" for name, p in ends if p == 0)
    _refuse(_nothing_behind(name) for name, place in ends if place == len(nodes.costs))
    _refuse(_out_of_order(*one, *two, nodes) for one, two in pairwise(ends) if two[1] <= one[1])
    _refuse(f"{name!r}: {nodes.why_no_cut(place)}" for name, place in ends if place in nodes.forbidden)
    return tuple(place for _, place in ends)


def find(name: str, nodes: Nodes) -> list[int]:
    """The places of the node of this name or, where there is none, of the nodes in this module."""
    by_name = [place for place, node in enumerate(nodes.names) if node == name]
    within = [place for place, path in enumerate(nodes.modules) if path == name or path.startswith(name + ".")]
    return within or by_name


def unknown(name: str, nodes: Nodes) -> str:
    """What is wrong with a name that `find` does not find, and which are close to it."""
    if name in nodes.inside:
        return f"the module {name!r} runs in {nodes.inside[name]!r}, which is one node: name that"
    if name in nodes.empty:
        return f"the module {name!r} has no nodes: forward does not call it, or it computes nothing; name another one"
    paths = {path[: len(path) - cut] for path in set(nodes.modules) for cut in _ends(path)}
    known = list(dict.fromkeys([*sorted(paths - {""}), *nodes.names]))
    if not known:
        return f"{name!r} is given, but the nodes have no names here: cut by numbers of nodes"
    close = difflib.get_close_matches(name, known)
    listing = ", ".join(map(repr, close or known[:5])) + ("" if close or len(known) <= 5 else ", ...")
    return f"no node or module is named {name!r}; {'close to it' if close else 'there'} are {listing}"


def _ends(path: str) -> Iterable[int]:
    """How much to take from the end of "a.b.c" for itself and for each module that holds it: 0, 2, 4."""
    yield 0
    yield from (len(path) - at for at, letter in enumerate(path) if letter == ".")


def _nothing_behind(name: str) -> str:
    return f"{name!r} ends with the last node, where the last stage ends without being named: leave it out"


def _out_of_order(before: str, end: int, name: str, place: int, nodes: Nodes) -> str:
    return (
        f"{name!r} ends with {nodes.label(place - 1)}, which is not behind {nodes.label(end - 1)}, where {before!r} "
        "ends: name each end once, in the order in which they run"
    )


def _refuse(problems: Iterable[str]) -> None:
    """Says all that is wrong at once."""
    match list(problems):
        case []:
            return
        case [problem]:
            raise PartitionError(problem)
        case several:
            raise PartitionError("the nodes cannot be cut so:" + "".join(f"\n- {problem}" for problem in several))
