"""Polynomials in the micro-batch size `b`, by their coefficients: what a plan keeps of the formulas of its stages.

>>> activations = Polynomial((64, 100352))
>>> print(activations)
100352*b + 64
>>> activations(8)
802880
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients from the constant upwards, whole numbers but where a size is halved; none: 0."""

    coefficients: tuple[float, ...] = ()

    def __call__(self, b: int) -> int:
        """The value for micro-batches of `b` samples, rounded up."""
        total: float = sum(c * b**power for power, c in enumerate(self.coefficients))
        return math.ceil(total)

    def __add__(self, other: Polynomial) -> Polynomial:
        pairs = zip_longest(self.coefficients, other.coefficients, fillvalue=0)
        return Polynomial(tuple(one + two for one, two in pairs))

    def __mul__(self, number: float) -> Polynomial:
        return Polynomial(tuple(number * c for c in self.coefficients))

    @property
    def formula(self) -> sympy.Expr:
        """The same for sympy."""
        import sympy

        b = sympy.Symbol("b", integer=True, positive=True)
        numbers = (sympy.Rational(*c.as_integer_ratio()) for c in self.coefficients)
        return sympy.Add(*(number * b**power for power, number in enumerate(numbers)))

    def __str__(self) -> str:
        powers = [f"{c:g}" if isinstance(c, float) else str(c) for c in self.coefficients]
        terms = [
            text if power == 0 else f"{'' if text == '1' else f'{text}*'}b{'' if power == 1 else f'**{power}'}"
            for power, text in enumerate(powers)
            if text != "0"
        ]
        return " + ".join(reversed(terms)).replace("+ -", "- ") or "0"


ZERO = Polynomial()


def polynomial_sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    """Returns the sum of these polynomials."""
    return functools.reduce(operator.add, polynomials, ZERO)


def polynomial_of(coefficients: Iterable[Any]) -> Polynomial:
    """Makes a polynomial of any numbers, whole ones as ints."""
    numbers = [int(c) if c == int(c) else float(c) for c in coefficients]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return Polynomial(tuple(numbers))
