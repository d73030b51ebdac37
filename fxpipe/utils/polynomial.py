"""Polynomials in the micro-batch size `b` and other sizes: the one form of a formula that is kept, added and written.

>>> activations = Polynomial.in_b(64, 100352)
>>> print(activations)
100352*b + 64
>>> activations(8)
802880
>>> scores = Polynomial.of({(("b", 1), ("s", 2)): 4})
>>> print(scores + activations)
4*b*s**2 + 100352*b + 64
>>> scores(8, s=3)
288

What was counted at a few sizes becomes one by `fit_counts`, an expression of sympy by `polynomial_bound`
(`polynomial_bound.py`), and `to_json` and `from_json` are its form in files: sympy's own parser runs code and is never
given text. All numbers are exact.
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
MAX_DIGITS = 60  # of a number: far more than any size has

_FRACTION = re.compile(rf"-?[0-9]{{1,{MAX_DIGITS}}}/[0-9]{{1,{MAX_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of exact numbers times powers of sizes. Equal polynomials have equal terms."""

    terms: tuple[tuple[Monomial, Number], ...] = ()  # the constant first, the highest power last; no number is 0

    @classmethod
    def of(cls, numbers: Mapping[Monomial, Any]) -> Polynomial:
        """Makes a polynomial of any exact or finite numbers by what they multiply."""
        exact: dict[Monomial, Number] = {}
        for monomial, number in numbers.items():  # `b*s` may stand there as `s*b`, too
            exact[_ordered(monomial)] = exact.get(_ordered(monomial), 0) + _exact(number)
        terms = ((monomial, _exact(number)) for monomial, number in exact.items() if number)
        return cls(tuple(sorted(terms, key=lambda term: (_degree(term[0]), term[0]))))

    @classmethod
    def in_b(cls, *coefficients: Any) -> Polynomial:
        """Makes the polynomial in `b` alone with these coefficients, from the constant upwards."""
        return cls.of({_power_of_b(power): c for power, c in enumerate(coefficients)})

    def __call__(self, b: int, **sizes: int) -> int:
        """The value for micro-batches of `b` samples, and other sizes by name, rounded up.

        Raises:
            ArgumentError: a size that it depends on is missing.
        """
        return self.at(sizes | {"b": b})

    def at(self, sizes: Mapping[str, int]) -> int:
        """The same for sizes by name, `b` among them."""
        return math.ceil(self.value(sizes))

    def value(self, sizes: Mapping[str, int]) -> Number:
        """The same, not rounded."""
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
    def formula(self) -> sympy.Expr:
        """The same for sympy."""
        return _sympy_formula(self)

    def __str__(self) -> str:
        texts = [_term_text(monomial, c) for monomial, c in reversed(self.terms)]
        return " + ".join(texts).replace("+ -", "- ") or "0"

    # -- Files -----------------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        """Makes what JSON keeps exactly: in `b` alone its coefficients, else numbers with what they multiply.

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
        """Reads what `to_json` made, or what plans had before: an object with the coefficients, not all exact.

        Raises:
            ArgumentError: it made nothing of the kind.
        """
        if isinstance(value, dict) and value.keys() == {"coefficients"} and isinstance(value["coefficients"], list):
            value = [_exact_json(c) if type(c) is float else c for c in value["coefficients"]]
        if isinstance(value, list) and value and all(isinstance(term, list) for term in value):
            return cls.of(dict(map(_term_from_json, value)))
        if not isinstance(value, list) or len(value) > MAX_DEGREE + 1:
            raise ArgumentError(f"expected a list of at most {MAX_DEGREE + 1} coefficients, got {shortened(value)}")
        return cls.in_b(*map(_number_from_json, value))


ZERO = Polynomial()


def polynomial_sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    """Returns the sum of these polynomials."""
    numbers: dict[Monomial, Number] = {}
    for monomial, number in (term for one in polynomials for term in one.terms):
        numbers[monomial] = numbers.get(monomial, 0) + number
    return Polynomial.of(numbers)


@functools.lru_cache(maxsize=4096)
def _sympy_formula(polynomial: Polynomial) -> sympy.Expr:
    import sympy

    def power_of(name: str, power: int) -> sympy.Expr:
        return sympy.Symbol(name, integer=True, positive=True) ** power

    return sympy.Add(
        *(
            sympy.Mul(sympy.Rational(c.numerator, c.denominator), *(power_of(*pair) for pair in powers))
            for powers, c in polynomial.terms
        )
    )


def _exact(number: Any) -> Number:
    exact = Fraction(number) if isinstance(number, int | float | Fraction) else Fraction(int(number.p), int(number.q))
    return exact.numerator if exact.denominator == 1 else exact


def _ordered(monomial: Monomial) -> Monomial:
    return tuple(sorted(monomial, key=lambda power: (power[0] != "b", power)))


def _degree(monomial: Monomial) -> int:
    return sum(power for _, power in monomial)


def _power_of_b(power: int) -> Monomial:
    return (("b", power),) if power else ()


def _monomial_text(monomial: Monomial) -> str:
    return "*".join(name if power == 1 else f"{name}**{power}" for name, power in monomial)


def _term_text(monomial: Monomial, c: Number) -> str:
    number, powers = str(c) if isinstance(c, int) else f"{float(c):g}", _monomial_text(monomial)
    if not powers:
        return number
    return powers if number == "1" else f"{number}*{powers}"


def _exact_json(number: float) -> Any:
    return "{}/{}".format(*number.as_integer_ratio()) if math.isfinite(number) else number


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
    """What an error shows of a value that was read from a file."""
    return repr(value)[:40] if isinstance(value, str | int | float | None) else with_article(value)


# -- Polynomials through what was counted at some sizes ----------------------------------------------------------------


class SizePoint(NamedTuple):
    """A number of samples, and other sizes by name: where something was counted."""

    b: int
    others: tuple[tuple[str, int], ...] = ()

    @property
    def values(self) -> dict[str, int]:
        return {"b": self.b, **dict(self.others)}


# of the polynomials in each size: nothing that is usual grows faster (the batch against itself, in contrastive losses)
MAX_FIT_DEGREE = 2


@functools.lru_cache(maxsize=4096)
def fit_counts(counted: tuple[tuple[int | SizePoint, int], ...], here: int | SizePoint) -> Polynomial:
    """The polynomial of least degree through what was counted, as pairs of (sizes, count).

    A number of samples stands for a point without other sizes. One point more than it needs must lie on it, but for a
    line through two. Where there is none up to degree 2 in each size (another kernel for another size, memory that is
    allotted in pages), the count `here` is taken to grow with all sizes: right there, a guess elsewhere.
    """
    fitted = polynomial_through(counted)
    return (
        _growing_from(tuple((_point(at), count) for at, count in counted), _point(here)) if fitted is None else fitted
    )


def polynomial_through(counted: Sequence[tuple[int | SizePoint, int]]) -> Polynomial | None:
    """The polynomial of least degree through these points; None where there is none that one may trust.

    >>> print(polynomial_through([(SizePoint(b, (("s", s),)), 3 * b * s + b) for b in (1, 2) for s in (4, 5, 7)]))
    3*b*s + b
    """
    if not any(count for _, count in counted):
        return ZERO
    points = tuple(tuple(_point(at).values.values()) for at, _ in counted)
    names = tuple(_point(counted[0][0]).values)
    if any(len(set(values)) == 1 for values in zip(*points, strict=True)) and len(names) > 1:
        return None  # nobody has seen how it goes with that size
    counts = [count for _, count in counted]
    for degrees in _degrees(len(names)):
        monomials = math.prod(degree + 1 for degree in degrees)
        if len(points) <= monomials and not (degrees == (1,) and len(points) == 2):
            continue
        basis = _basis(points, degrees)
        if basis is not None and (numbers := basis.coefficients(counts)) is not None:
            return Polynomial.of(
                {
                    tuple((name, power) for name, power in zip(names, powers, strict=True) if power): number
                    for powers, number in zip(basis.powers, numbers, strict=True)
                }
            )
    return None


def _point(at: int | SizePoint) -> SizePoint:
    return SizePoint(at) if isinstance(at, int) else at


@functools.cache
def _degrees(sizes: int) -> list[tuple[int, ...]]:
    """Degrees in each of so many sizes, those of the fewest monomials first."""
    every = itertools.product(range(MAX_FIT_DEGREE + 1), repeat=sizes)
    return sorted(every, key=lambda degrees: (math.prod(degree + 1 for degree in degrees), degrees))


@dataclass(frozen=True, slots=True)
class _FitBasis:
    """The monomials up to some degrees, as they are at points where something was counted."""

    powers: tuple[tuple[int, ...], ...]  # of each monomial
    rows: tuple[tuple[int, ...], ...]  # by point: the value of each monomial
    chosen: tuple[int, ...]  # as many points, by which the coefficients are found
    inverse: tuple[tuple[Fraction, ...], ...]  # of their rows

    def coefficients(self, counts: Sequence[int]) -> list[Fraction] | None:
        """Returns the coefficients of the polynomial through all points; None where there is none."""
        known = [counts[place] for place in self.chosen]
        numbers = [sum((a * count for a, count in zip(row, known, strict=True)), Fraction(0)) for row in self.inverse]
        values = (sum(c * v for c, v in zip(numbers, row, strict=True)) for row in self.rows)
        return numbers if all(value == count for value, count in zip(values, counts, strict=True)) else None


@functools.lru_cache(maxsize=512)
def _basis(points: tuple[tuple[int, ...], ...], degrees: tuple[int, ...]) -> _FitBasis | None:
    """The basis of these degrees; None where the points are too few, or lie so that they do not tell the monomials."""
    powers = tuple(itertools.product(*(range(degree + 1) for degree in degrees)))
    rows = tuple(tuple(math.prod(x**p for x, p in zip(point, of, strict=True)) for of in powers) for point in points)
    size = len(powers)
    reduced: list[tuple[int, list[Fraction]]] = []  # place of the leading 1, row; beside it what it is made of
    chosen: list[int] = []
    for place, row in enumerate(rows):
        own = [Fraction(int(k == len(chosen))) for k in range(size)]
        work = [*map(Fraction, row), *own]
        for lead, other in reduced:
            if work[lead]:
                work = [a - work[lead] * b for a, b in zip(work, other, strict=True)]
        lead = next((k for k in range(size) if work[k]), -1)
        if lead < 0:
            continue
        work = [a / work[lead] for a in work]
        reduced = [(k, [a - r[lead] * b for a, b in zip(r, work, strict=True)] if r[lead] else r) for k, r in reduced]
        reduced.append((lead, work))
        chosen.append(place)
        if len(chosen) == size:
            inverse = tuple(tuple(r[size:]) for _, r in sorted(reduced))
            return _FitBasis(powers, rows, tuple(chosen), inverse)
    return None


def _growing_from(counted: Sequence[tuple[SizePoint, int]], here: SizePoint) -> Polynomial:
    """The count `here`, growing with the samples and with the other sizes: no less than was counted above."""
    count = dict(counted)[here]
    above = [(at, number) for at, number in counted if all(at.values[k] >= v for k, v in here.values.items())]
    guess = ZERO
    for degree in range(1, MAX_FIT_DEGREE + 1):
        once = math.prod(size**degree for _, size in here.others) * here.b
        guess = Polynomial.of({(("b", 1), *((name, degree) for name, _ in here.others)): Fraction(count, once)})
        if all(guess.value(at.values) >= number for at, number in above) or not here.others:
            break
    return guess
