"""Formulas in a size that fit the numbers observed at several sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

Number = int | float
SizePoint = tuple[int, Number]  # a size, the number observed there

_DIVISORS = (2, 3, 4, 6, 8, 16)


class SizeFormula(NamedTuple):
    """`(slope * size + start) // divisor`; with true division if the numbers are floats."""

    slope: int
    start: int
    divisor: int = 1
    is_float: bool = False

    def at(self, size: Any) -> Any:
        """Evaluates the formula at a size, which may be symbolic."""
        number = size * self.slope + self.start if self.slope else self.start
        if self.is_float:
            return number / self.divisor
        return number if self.divisor == 1 else number // self.divisor

    def fits(self, points: Sequence[SizePoint]) -> bool:
        return all(type(value := self.at(size)) is type(number) and value == number for size, number in points)


def simplest_formula(points: Sequence[SizePoint]) -> SizeFormula | None:
    """Returns a line, or a line of whole numbers with floor division, that fits all points; None if none does."""
    if len(points) < 2 or not all(math.isfinite(number) for _, number in points):
        return None
    (x, v), (y, w) = ((size, Fraction(number)) for size, number in points[:2])
    slope = (w - v) / (y - x)
    start = v - slope * x
    divisor = math.lcm(slope.denominator, start.denominator)
    is_float = type(points[0][1]) is float
    line = SizeFormula(int(slope * divisor), int(start * divisor), divisor, is_float)
    parts = [SizeFormula(1, over + of * (int(v) - (x + over) // of), of) for of in _DIVISORS for over in range(of)]
    formulas = [line] if is_float else [line, *parts] if divisor == 1 else [*parts, line]
    return next((formula for formula in formulas if formula.fits(points)), None)
