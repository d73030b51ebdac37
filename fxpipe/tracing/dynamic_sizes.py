"""Sizes that may differ from batch to batch: the number of samples, and dimensions of inputs that are dynamic.

A graph is recorded on inputs of certain sizes. It holds for any number of samples `b` that meets its conditions. Other
dimensions are fixed, unless they are *dynamic*: then their sizes are symbols (`s0`, `s1`, ...) as well, and the graph
holds for all that meet the conditions, which are what forward and torch concluded from sizes (`s0 < 512`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

InputDim = tuple[int, int]  # place of an input leaf, dimension
Lengths = tuple[tuple[sympy.Symbol, int], ...]  # symbols of dynamic sizes, and their values


@dataclass(frozen=True, slots=True)
class DynamicDims:
    """Dimensions of inputs that are to be dynamic."""

    dims: frozenset[InputDim] = frozenset()
    seen: tuple[Mapping[InputDim, int], ...] = ()  # sizes that inputs had


NO_DYNAMIC_DIMS = DynamicDims()


class FixedSizeError(Exception):
    """The size of a dimension that was to be dynamic is a number in the graph. Never reaches the caller."""

    def __init__(self, why: str, dims: frozenset[InputDim] = frozenset()):
        super().__init__(why)
        self.dims = dims  # those that cannot be dynamic; none: all of them


@dataclass(frozen=True, slots=True)
class SizeCondition:
    """forward asked whether `condition` holds for its sizes and went on as if it were so for all of them."""

    condition: sympy.Basic
    where: str
    is_of_torch: bool = False  # a function of torch asked, and may do the same where it does not hold

    def holds(self, batch: int, lengths: Lengths = ()) -> bool:
        """Returns whether it holds for so many samples. `lengths`: of the dynamic sizes, where it is about any."""
        return _holds(self.condition, batch, lengths)


@functools.lru_cache(maxsize=4096)
def _holds(condition: sympy.Basic, batch: int, lengths: Lengths) -> bool:
    values = dict(lengths)
    return bool(condition.subs({s: values.get(s, batch) for s in condition.free_symbols}))


@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """The dynamic dimensions of a graph's inputs."""

    formulas: Mapping[InputDim, sympy.Expr]  # the size of each, in the symbols
    symbols: Mapping[sympy.Symbol, InputDim]  # the dimension whose size a symbol is
    example: Lengths  # of the recording
    conditions: tuple[SizeCondition, ...]
    fixed: Mapping[InputDim, str]  # dimensions that were to be dynamic and are not, and why

    def lengths_of(self, leaves: Sequence[Any]) -> Lengths | None:
        """Returns the dynamic sizes of flattened inputs; None where some do not fit together (a shorter mask)."""
        lengths = tuple((symbol, leaves[place].shape[dim]) for symbol, (place, dim) in self.symbols.items())
        values = dict(lengths)
        for (place, dim), formula in self.formulas.items():
            if leaves[place].shape[dim] != (values[formula] if formula in values else formula.subs(values)):
                return None
        return lengths

    def is_far_from(self, lengths: Lengths, compared: Collection[Lengths]) -> bool:
        """Returns whether a size is more than twice, or less than half, of those that graph and model were compared at.

        Forward may go by a size in a way that nobody sees, at a threshold beyond those.
        """
        known = [dict(one) for one in compared]
        return any(
            size > 2 * max(one[symbol] for one in known) or 2 * size < min(one[symbol] for one in known)
            for symbol, size in lengths
        )

    def within(self, compared: Collection[Lengths]) -> DynamicSizes:
        """These, for sizes between those compared only."""
        known = [dict(one) for one in compared]
        ranges = [
            sympy.And(symbol >= min(one[symbol] for one in known), symbol <= max(one[symbol] for one in known))
            for symbol in self.symbols
        ]
        bounds = SizeCondition(sympy.And(*ranges), "where graph and model were compared, and found to differ beyond")
        return replace(self, conditions=(*self.conditions, bounds))

    def failing(self, batch: int, lengths: Lengths) -> tuple[SizeCondition, ...]:
        """Returns the conditions that do not hold."""
        return tuple(condition for condition in self.conditions if not condition.holds(batch, lengths))

    def hold(self, batch: int, lengths: Lengths | None = None) -> bool:
        """Returns whether the conditions hold for so many samples. `lengths`: default: those of the recording."""
        lengths = self.example if lengths is None else lengths
        return all(condition.holds(batch, lengths) for condition in self.conditions)


FIXED_SIZES = DynamicSizes({}, {}, (), (), {})
