"""Cuts that the user makes: by numbers of nodes, or by the names at which the later stages begin."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from fxpipe.errors import ArgumentError, ArgumentTypeError, PartitionError
from fxpipe.partitioning.nodes import Nodes


def starts_by_hand(balance: Sequence[int] | Sequence[str], stages: int, nodes: Nodes) -> tuple[str, tuple[int, ...]]:
    """Tells numbers of nodes from names; returns "counts" or "names", and the place at which each stage begins."""
    try:
        entries: list[int | str] = [*balance]
    except TypeError:
        raise ArgumentTypeError(
            f"balance={balance!r} is of type {type(balance).__name__}; expected a str, or a list of ints or of strings"
        ) from None
    names = [entry for entry in entries if isinstance(entry, str)]
    if len(names) == len(entries) and (entries or stages == 1):
        return "names", _starts_by_names(names, stages, nodes)
    return "counts", _starts_by_counts([_count(entry, entries) for entry in entries], stages, nodes)


def _count(entry: int | str, entries: Sequence[int | str]) -> int:
    try:
        if isinstance(entry, bool | str):
            raise TypeError
        return operator.index(entry)
    except TypeError:
        raise ArgumentTypeError(
            f"balance={entries}: {entry!r} is of type {type(entry).__name__}; expected ints only (numbers of nodes) or "
            "strings only (names of nodes or modules)"
        ) from None


def _starts_by_counts(counts: Sequence[int], stages: int, nodes: Nodes) -> tuple[int, ...]:
    n = len(nodes.costs)
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


def _starts_by_names(names: Sequence[str], stages: int, nodes: Nodes) -> tuple[int, ...]:
    if len(names) != stages - 1:
        raise ArgumentError(
            f"balance={names} has {len(names)} names for {stages} stages: give {stages - 1}, since the first stage "
            f"needs none; or give {stages} numbers of nodes that sum to {len(nodes.costs)}"
        )
    found = [(name, _find(name, nodes)) for name in names]
    _refuse(_unknown(name, nodes) for name, place in found if place is None)
    begins = [("", 0)] + [(name, place) for name, place in found if place is not None]
    _refuse(_out_of_order(*one, *two, nodes) for one, two in pairwise(begins) if two[1] <= one[1])
    _refuse(f"{name!r}: {nodes.why_no_cut(place)}" for name, place in begins if place in nodes.forbidden)
    return tuple(place for _, place in begins)


def _find(name: str, nodes: Nodes) -> int | None:
    """The first place of this node or of a node in this module."""
    by_name = (place for place, node in enumerate(nodes.names) if node == name)
    by_module = (place for place, path in enumerate(nodes.modules) if path == name or path.startswith(name + "."))
    return min((place for place in (next(by_name, None), next(by_module, None)) if place is not None), default=None)


def _unknown(name: str, nodes: Nodes) -> str:
    paths = {path[: len(path) - cut] for path in set(nodes.modules) for cut in _ends(path)}
    known = list(dict.fromkeys([*sorted(paths - {""}), *nodes.names]))
    if not known:
        return f"balance names {name!r}, but the nodes have no names here: cut by numbers of nodes"
    close = difflib.get_close_matches(name, known)
    listing = ", ".join(map(repr, close or known[:5])) + ("" if close or len(known) <= 5 else ", ...")
    return f"no node or module is named {name!r}; {'close to it' if close else 'there'} are {listing}"


def _ends(path: str) -> Iterable[int]:
    """How much to take from the end of "a.b.c" for itself and for each module that holds it: 0, 2, 4."""
    yield 0
    yield from (len(path) - at for at, letter in enumerate(path) if letter == ".")


def _out_of_order(before: str, start: int, name: str, place: int, nodes: Nodes) -> str:
    if place == 0:
        return f"{name!r} begins at the first node, where stage 0 begins without being named: leave it out"
    return (
        f"{name!r} begins at {nodes.label(place)}, which is not behind {nodes.label(start)}, where {before!r} begins: "
        "name each beginning once, in the order in which they run"
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
