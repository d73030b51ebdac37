"""Formulas in the batch size that fit the numbers recorded at several sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

Number = int | float
# The batch size ("b"), a number, or a function with its operands: (operator.mul, 2, "b").
SizeFormula = str | int | float | tuple[Any, ...]
SizePoint = tuple[int, Number]  # batch size, number

_PRECISION = 1e-12  # relative; allows for another order of Python's operations
_DIVISORS = (2, 3, 4, 6, 8, 16)


def formula_value(formula: SizeFormula, batch: Any) -> Any:
    """Evaluates a formula at a batch size, which may be symbolic."""
    if isinstance(formula, tuple):
        return formula[0](*(formula_value(part, batch) for part in formula[1:]))
    return batch if isinstance(formula, str) else formula


def simplest_formula(points: Sequence[SizePoint]) -> SizeFormula | None:
    """Returns a constant, or a linear integer formula with floor division, that fits all points; None if none does."""
    if all(_same(number, points[0][1]) for _, number in points):
        return points[0][1]
    if not all(type(number) is int for _, number in points):
        return None
    return next((formula for formula in _integer_candidates(points) if formula_fits(formula, points)), None)


def polynomial_through(points: Sequence[SizePoint]) -> SizeFormula:
    coefficients = [Fraction(0)] * len(points)
    for size, number in points:
        basis = [Fraction(number)]
        for other, _ in points:
            if other != size:  # times (b - other) / (size - other)
                shifted, lowered = [Fraction(0), *basis], [*(-other * c for c in basis), Fraction(0)]
                basis = [(c + d) / (size - other) for c, d in zip(shifted, lowered, strict=True)]
        coefficients = [c + d for c, d in zip(coefficients, basis, strict=True)]
    if any(type(number) is float for _, number in points):
        return _horner([float(c) for c in coefficients])
    divisor = math.lcm(*(c.denominator for c in coefficients))
    whole = _horner([int(c * divisor) for c in coefficients])
    return whole if divisor == 1 else (operator.floordiv, whole, divisor)


def formula_fits(formula: SizeFormula, points: Sequence[SizePoint]) -> bool:
    try:
        return all(_same(formula_value(formula, size), number) for size, number in points)
    except ArithmeticError:
        return False


def _same(left: Any, right: Number) -> bool:
    if type(left) is not type(right):
        return False
    if type(right) is int:
        return bool(left == right)
    return left == right or (left != left and right != right) or math.isclose(left, right, rel_tol=_PRECISION)


def _horner(coefficients: Sequence[Number]) -> SizeFormula:
    """Returns the polynomial with the coefficients of 1, b, b², ... in Horner form."""
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients = coefficients[:-1]
    *rest, last = coefficients
    formula: SizeFormula = last
    for coefficient in reversed(rest):
        formula = _plus(_times(formula, "b"), coefficient)
    return formula


def _times(left: SizeFormula, right: SizeFormula) -> SizeFormula:
    if left == 1 and type(left) is int:
        return right
    if left == 0 and type(left) is int:
        return 0
    return (operator.mul, right, left) if isinstance(left, (int, float)) else (operator.mul, left, right)


def _plus(left: SizeFormula, right: Number) -> SizeFormula:
    if right == 0:
        return left
    return left + right if isinstance(left, (int, float)) else (operator.add, left, right)


def _line_through(points: Sequence[tuple[int, Fraction]]) -> tuple[Fraction, Fraction]:
    (x, v), (y, w) = points[0], points[1]
    slope = (w - v) / (y - x)
    return slope, v - slope * x


def _integer_candidates(points: Sequence[SizePoint]) -> Iterator[SizeFormula]:
    slope, start = _line_through([(size, Fraction(number)) for size, number in points])
    if slope.denominator == start.denominator == 1:
        yield _horner([int(start), int(slope)])
    for divisor in _DIVISORS:
        for size, number in points[:1]:
            for over in range(divisor):
                whole: SizeFormula = (operator.floordiv, _plus("b", over), divisor)
                yield _plus(whole, int(number) - int(formula_value(whole, size)))
    divisor = math.lcm(slope.denominator, start.denominator)
    yield (operator.floordiv, _horner([int(start * divisor), int(slope * divisor)]), divisor)
