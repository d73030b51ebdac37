"""Polynomials in the micro-batch size `b` and other sizes, the form of all stored formulas. Numbers are exact.

>>> activations = Polynomial.in_b(64, 100352)
>>> print(activations)
100352*b + 64
>>> activations(8)
802880
>>> print(Polynomial.of({(("b", 1), ("s", 2)): 4}) + activations)
4*b*s**2 + 100352*b + 64

`fit_counts` fits a polynomial to counts at a few sizes, and `polynomial_bound` (`polynomial_bound.py`) converts sympy
expressions. Files use `to_json` and `from_json`, because sympy's parser executes code.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.errors import ArgumentError
from fxpipe.utils.units import with_article

if TYPE_CHECKING:
    import sympy

Number = int | Fraction
Monomial = tuple[tuple[str, int], ...]  # variables and their powers, `b` first, then by name; (): the constant

MAX_DEGREE = 16
MAX_DIGITS = 60  # digits of a number, far more than a size has

_FRACTION = re.compile(rf"-?[0-9]{{1,{MAX_DIGITS}}}/[0-9]{{1,{MAX_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of exact numbers times powers of sizes. Equal polynomials have equal terms."""

    terms: tuple[tuple[Monomial, Number], ...] = ()  # by ascending degree; no number is 0

    @classmethod
    def of(cls, numbers: Mapping[Monomial, Any]) -> Polynomial:
        """Creates a polynomial from a dict of monomials to finite numbers."""
        exact: dict[Monomial, Number] = {}
        for monomial, number in numbers.items():  # `b*s` and `s*b` are one monomial
            exact[_ordered(monomial)] = exact.get(_ordered(monomial), 0) + _exact(number)
        terms = ((monomial, _exact(number)) for monomial, number in exact.items() if number)
        return cls(tuple(sorted(terms, key=lambda term: (_degree(term[0]), term[0]))))

    @classmethod
    def in_b(cls, *coefficients: Any) -> Polynomial:
        """Creates the polynomial in `b` with these coefficients, from the constant upwards."""
        return cls.of({_power_of_b(power): c for power, c in enumerate(coefficients)})

    def __call__(self, b: int, **sizes: int) -> int:
        """Returns the value, rounded up, for micro-batches of `b` samples, and other sizes by name.

        Raises:
            ArgumentError: a size that the polynomial depends on is missing.
        """
        return self.at(sizes | {"b": b})

    def at(self, sizes: Mapping[str, int]) -> int:
        """Returns the value, rounded up, for sizes by name, including `b`."""
        return math.ceil(self.value(sizes))

    def value(self, sizes: Mapping[str, int]) -> Number:
        """Returns the exact value for sizes by name."""
        total: Number = 0
        try:
            for powers, c in self.terms:
                total += c * math.prod([sizes[name] ** p for name, p in powers])
            return total
        except KeyError as error:
            name = error.args[0]
            raise ArgumentError(f"{self} depends on the size {name!r}: give it, as in {name}=128") from None

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __add__(self, other: Polynomial) -> Polynomial:
        return polynomial_sum((self, other))

    def __mul__(self, number: Number) -> Polynomial:
        return Polynomial.of({monomial: number * c for monomial, c in self.terms})

    @property
    @functools.lru_cache(maxsize=4096)  # noqa: B019 - compared by value, and small
    def formula(self) -> sympy.Expr:
        import sympy

        products = []
        for powers, c in self.terms:
            sizes = (sympy.Symbol(name, integer=True, positive=True) ** power for name, power in powers)
            products.append(sympy.Mul(sympy.Rational(c.numerator, c.denominator), *sizes))
        return sympy.Add(*products)

    def __str__(self) -> str:
        texts = []
        for monomial, c in reversed(self.terms):
            number = str(c) if isinstance(c, int) else f"{float(c):g}"
            powers = "*".join(name if power == 1 else f"{name}**{power}" for name, power in monomial)
            texts.append("*".join(filter(None, ("" if powers and number == "1" else number, powers))))
        return " + ".join(texts).replace("+ -", "- ") or "0"

    def to_json(self) -> list[Any]:
        """Returns exact JSON values: coefficients for a polynomial in `b`, else numbers with their monomials.

        >>> Polynomial.in_b(64, Fraction(1, 2)).to_json()
        [64, '1/2']
        >>> Polynomial.of({(): 64, (("b", 1), ("s", 2)): 4}).to_json()
        [[64, {}], [4, {'b': 1, 's': 2}]]
        """
        numbers = {powers: c if isinstance(c, int) else f"{c.numerator}/{c.denominator}" for powers, c in self.terms}
        in_b = [_power_of_b(power) for power in range(1 + max(map(_degree, numbers), default=-1))]
        if numbers.keys() <= {*in_b}:
            return [numbers.get(power, 0) for power in in_b]
        return [[number, dict(powers)] for powers, number in numbers.items()]

    @classmethod
    def from_json(cls, value: Any) -> Polynomial:
        """Reads the output of `to_json`. Raises `ArgumentError` if `value` has another form."""
        if isinstance(value, list) and value and all(isinstance(term, list) for term in value):
            return cls.of(dict(map(_term_from_json, value)))
        if not isinstance(value, list) or len(value) > MAX_DEGREE + 1:
            raise ArgumentError(f"expected a list of at most {MAX_DEGREE + 1} coefficients, got {shortened(value)}")
        return cls.in_b(*map(_number_from_json, value))


ZERO = Polynomial()


def polynomial_sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    numbers: dict[Monomial, Number] = {}
    for monomial, number in (term for one in polynomials for term in one.terms):
        numbers[monomial] = numbers.get(monomial, 0) + number
    return Polynomial.of(numbers)


def _exact(number: Any) -> Number:
    is_plain = isinstance(number, int | float)
    exact = Fraction(number) if is_plain else Fraction(int(number.numerator), int(number.denominator))
    return exact.numerator if exact.denominator == 1 else exact


def _ordered(monomial: Monomial) -> Monomial:
    return tuple(sorted(monomial, key=lambda power: (power[0] != "b", power)))


def _degree(monomial: Monomial) -> int:
    return sum(power for _, power in monomial)


def _power_of_b(power: int) -> Monomial:
    return (("b", power),) if power else ()


def _number_from_json(value: Any) -> Number:
    if type(value) is int and abs(value) < 10**MAX_DIGITS:
        return value
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        above, below = map(int, value.split("/"))
        if below:
            return Fraction(above, below)
    raise ArgumentError(f'expected a coefficient, a whole number or a fraction such as "3/2", got {shortened(value)}')


def _term_from_json(value: list[Any]) -> tuple[Monomial, Number]:
    if len(value) == 2 and isinstance(value[1], dict):
        names_and_powers = value[1].items()
        if all(name.isidentifier() and type(p) is int and 1 <= p <= MAX_DEGREE for name, p in names_and_powers):
            return _ordered(tuple(names_and_powers)), _number_from_json(value[0])
    raise ArgumentError(f'expected a coefficient and powers of sizes, such as [4, {{"b": 1}}], got {str(value)[:40]}')


def shortened(value: Any) -> str:
    """Returns the text that errors show for a value from a file."""
    return repr(value)[:40] if isinstance(value, str | int | float | None) else with_article(value)


class SizePoint(NamedTuple):
    """The sizes of a count: the number of samples, and other sizes by name."""

    b: int
    others: tuple[tuple[str, int], ...] = ()

    @property
    def values(self) -> dict[str, int]:
        return {"b": self.b, **dict(self.others)}


# In each size. Usual counts grow at most quadratically (contrastive losses compare the batch with itself).
MAX_FIT_DEGREE = 2


@functools.lru_cache(maxsize=4096)
def fit_counts(counted: tuple[tuple[int | SizePoint, int], ...], here: int | SizePoint) -> Polynomial:
    """Returns the polynomial of least degree through pairs of (sizes, count).

    A number of samples is a point without other sizes. The fit needs one more point than coefficients, except for a
    line through two points. If no polynomial up to degree 2 in each size fits (other kernels for other sizes, memory
    allocated in pages), the count `here` is scaled with all sizes: exact there, a guess elsewhere.
    """
    if (fitted := polynomial_through(counted)) is not None:
        return fitted
    # At the least degree that is no less than the counts at larger sizes.
    start, points = _point(here), [(_point(at), count) for at, count in counted]
    above = [(at, count) for at, count in points if all(at.values[k] >= v for k, v in start.values.items())]
    guess = ZERO
    for degree in range(1, MAX_FIT_DEGREE + 1):
        once = Fraction(dict(points)[start], math.prod(size**degree for _, size in start.others) * start.b)
        guess = Polynomial.of({(("b", 1), *((name, degree) for name, _ in start.others)): once})
        if all(guess.value(at.values) >= count for at, count in above) or not start.others:
            break
    return guess


def polynomial_through(counted: Sequence[tuple[int | SizePoint, int]]) -> Polynomial | None:
    """Returns the polynomial of least degree through these points; None if there is no reliable fit.

    >>> print(polynomial_through([(SizePoint(b, (("s", s),)), 3 * b * s + b) for b in (1, 2) for s in (4, 5, 7)]))
    3*b*s + b
    """
    from sympy import ZZ
    from sympy.polys.matrices import DomainMatrix

    if not any(count for _, count in counted):
        return ZERO
    points = tuple(tuple(_point(at).values.values()) for at, _ in counted)
    names = tuple(_point(counted[0][0]).values)
    if any(len(set(values)) == 1 for values in zip(*points, strict=True)) and len(names) > 1:
        return None  # the dependence on that size is unknown
    every = itertools.product(range(MAX_FIT_DEGREE + 1), repeat=len(names))  # degrees, one for each size
    for degrees in sorted(every, key=lambda of: (math.prod(degree + 1 for degree in of), of)):
        powers = [*itertools.product(*(range(degree + 1) for degree in degrees))]
        if len(points) <= len(powers) and not (degrees == (1,) and len(points) == 2):
            continue
        rows = [
            [*(math.prod(x**p for x, p in zip(point, of, strict=True)) for of in powers), count]
            for point, (_, count) in zip(points, counted, strict=True)
        ]
        reduced, pivots = DomainMatrix(rows, (len(rows), len(powers) + 1), ZZ).to_field().rref()
        if pivots == tuple(range(len(powers))):  # the points determine all coefficients, and no point contradicts
            return Polynomial.of(
                {
                    tuple((name, power) for name, power in zip(names, of, strict=True) if power): row[-1]
                    for of, row in zip(powers, reduced.to_list(), strict=False)
                }
            )
    return None


def _point(at: int | SizePoint) -> SizePoint:
    return SizePoint(at) if isinstance(at, int) else at
