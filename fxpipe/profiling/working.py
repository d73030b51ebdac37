"""Memory that a stage needs for a moment, beside parameters, their gradients and what autograd keeps.

Two answers to one question. `peak` goes through the nodes of a stage, forward and backward, and says how much memory is
taken at most: exact as far as its figures are, but for one stage at a time. `working` is a number for each node,
whatever the cut, for planning; a stage is taken to need all that it saves and the most that one of its nodes works on:

    forward    what the node reads and returns, where nothing keeps it so far for backward, and its temporary
    backward   the gradients of these, and its temporary
    working    the larger of both

This is too much as saved storages are not all there at the moment that counts, and too little where other values are
alive beside the node (the residual of a block, while its branch runs).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import sympy

from fxpipe.tracing.sizing.shapes import bytes_for


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage that is not the model's own, from the node that makes it to the last that needs it."""

    bytes: sympy.Expr
    maker: int  # place of the node that made it; -1: an input that no node writes to
    users: tuple[int, ...]  # places of the nodes that read it, ascending; the number of nodes: the model's output
    savers: tuple[int, ...] = ()  # places of the nodes whose backward needs it, ascending
    returns: bool = False  # does a gradient come back to it
    writers: tuple[int, ...] = ()  # places of the nodes that write to it, ascending; a stage does so to a clone


@dataclass(frozen=True, slots=True)
class Temporary:
    """Bytes that a node takes for a moment."""

    forward: sympy.Expr
    backward: sympy.Expr


def working(
    storages: Sequence[Storage], temporaries: Sequence[Temporary], batch: sympy.Symbol, samples: int
) -> tuple[sympy.Expr, ...]:
    """For each node bytes held for a moment, by the rule above; in doubt the formula that is right for `samples`."""
    forward: dict[int, list[sympy.Expr]] = defaultdict(list)
    backward: dict[int, list[sympy.Expr]] = defaultdict(list)
    end = len(temporaries)
    for storage in storages:
        for place in {storage.maker, *storage.users} - {-1, end}:
            if storage.maker >= 0 and not (storage.savers and storage.savers[0] <= place):
                forward[place].append(storage.bytes)
            if storage.returns:
                backward[place].append(storage.bytes)
    return tuple(
        larger(
            total((*forward[place], temporary.forward)), total((*backward[place], temporary.backward)), batch, samples
        )
        for place, temporary in enumerate(temporaries)
    )


def peak(
    storages: Sequence[Storage],
    temporaries: Sequence[Temporary],
    start: int,
    stop: int,
    batch: sympy.Symbol,
    samples: int,
) -> tuple[int, int]:
    """Most bytes at one time of one micro-batch in the stage of the places `start` to `stop` - 1: forward, backward.

    Counted are values (those that are sent until the end), what autograd keeps, gradients of values (those that come
    from a later stage from the start on) and temporaries. What is received is there as long as forward runs, and if it
    gets a gradient until the end of backward: it is a leaf, and autograd holds its leaves. Parameters, their gradients
    and the inputs of the model are not counted.
    """
    ahead, back = _Level(start, stop), _Level(start, stop)
    for s in storages:
        savers, users = ([p for p in places if start <= p < stop] for places in (s.savers, s.users))
        is_made = start <= s.maker < stop
        if s.maker < 0 or not (is_made or savers or users):
            continue
        size = bytes_for(s.bytes, batch, samples)
        first = s.maker if is_made else start
        last = max((first, *users, *savers))
        is_own = is_made or any(start <= p < stop for p in s.writers)  # or a clone of what is received
        is_sent = is_own and any(p >= stop for p in s.users)
        is_leaf = not is_made and s.returns
        if not is_made:
            ahead.add(size, start, stop - 1)
        if is_leaf:
            back.add(size, start, stop - 1)
        if is_own:
            ahead.add(size, first, stop - 1 if savers or is_sent else last)
        if savers and (is_own or not is_leaf):
            back.add(size, savers[0], stop - 1)
        if s.returns:
            back.add(size, first, stop - 1 if is_sent else last)
    for place in range(start, stop):
        ahead.add(bytes_for(temporaries[place].forward, batch, samples), place, place)
        back.add(bytes_for(temporaries[place].backward, batch, samples), place, place)
    return ahead.most(), back.most()


class _Level:
    """Bytes over the places of a stage."""

    def __init__(self, start: int, stop: int):
        self.start = start
        self.change = [0] * (stop - start + 1)

    def add(self, size: int, first: int, last: int) -> None:
        self.change[first - self.start] += size
        self.change[last + 1 - self.start] -= size

    def most(self) -> int:
        return max(accumulate(self.change))


# -- sums of formulas --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def total(formulas: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """Their sum. Equal nodes ask for equal sums."""
    return sympy.Add(*formulas)


@functools.lru_cache(maxsize=8192)
def larger(left: sympy.Expr, right: sympy.Expr, batch: sympy.Symbol, samples: int) -> sympy.Expr:
    """A formula that is never smaller than both, if they are polynomials; else the one that is larger for `samples`."""
    if left == right or right == 0:
        return left
    if left.is_polynomial(batch) and right.is_polynomial(batch):
        both = [sympy.Poly(formula, batch).as_dict() for formula in (left, right)]
        degrees = sorted({*both[0], *both[1]})
        return sympy.Add(*(max(side.get(d, sympy.Integer(0)) for side in both) * batch ** d[0] for d in degrees))
    return max(left, right, key=lambda formula: bytes_for(formula, batch, samples))
