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
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError

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
        known = sizes | {"b": b}
        try:
            total: Number = sum(c * math.prod(known[name] ** p for name, p in powers) for powers, c in self.terms)
            return math.ceil(total)
        except KeyError as error:
            name = error.args[0]
            raise ArgumentError(f"{self} depends on the size {name!r}: give it, as in {name}=128") from None

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __add__(self, other: Polynomial) -> Polynomial:
        total: dict[Monomial, Number] = dict(self.terms)
        for monomial, number in other.terms:
            total[monomial] = total.get(monomial, 0) + number
        return Polynomial.of(total)

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
            raise ArgumentError(f"expected a list of at most {MAX_DEGREE + 1} coefficients, got {_short(value)}")
        return cls.in_b(*map(_number_from_json, value))


ZERO = Polynomial()


def polynomial_sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    """Returns the sum of these polynomials."""
    return functools.reduce(operator.add, polynomials, ZERO)


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
    raise ArgumentError(f'expected a coefficient, a whole number or a fraction such as "3/2", got {_short(value)}')


def _term_from_json(value: list[Any]) -> tuple[Monomial, Number]:
    if len(value) == 2 and isinstance(value[1], dict):
        names_and_powers = value[1].items()
        if all(name.isidentifier() and type(p) is int and 1 <= p <= MAX_DEGREE for name, p in names_and_powers):
            return _ordered(tuple(names_and_powers)), _number_from_json(value[0])
    raise ArgumentError(f'expected a coefficient and powers of sizes, such as [4, {{"b": 1}}], got {str(value)[:40]}')


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"


# -- Polynomials through what was counted at some sizes ----------------------------------------------------------------

# of the polynomials: nothing that is usual grows faster (the batch against itself, in contrastive losses)
MAX_FIT_DEGREE = 2


@functools.lru_cache(maxsize=4096)
def fit_counts(counted: tuple[tuple[int, int], ...], samples: int) -> Polynomial:
    """The polynomial of least degree in `b` through what was counted, as pairs of (number of samples, count).

    One point more than it needs must lie on it, but for a line through two. Where there is none up to degree 2 (another
    kernel for another size, memory that is allotted in pages), the count for `samples` samples is taken to grow with
    the batch: right there, a guess elsewhere.
    """
    fitted = polynomial_through(counted)
    return Polynomial.in_b(0, Fraction(dict(counted)[samples], samples)) if fitted is None else fitted


def polynomial_through(counted: Sequence[tuple[int, int]]) -> Polynomial | None:
    """The polynomial of least degree through these points; None where there is none that one may trust."""
    if len(counted) == 1:
        return ZERO if counted[0][1] == 0 else None
    for degree in range(MAX_FIT_DEGREE + 1):
        if len(counted) < degree + 2 and not (degree == 1 and len(counted) == 2):
            return None
        coefficients = _interpolate(counted[: degree + 1])
        if all(sum(c * size**k for k, c in enumerate(coefficients)) == count for size, count in counted):
            return Polynomial.in_b(*coefficients)
    return None


def _interpolate(points: Sequence[tuple[int, int]]) -> tuple[Fraction, ...]:
    """Coefficients of the polynomial through so many points: Newton's divided differences, multiplied out."""
    sizes = [size for size, _ in points]
    divided = [Fraction(count) for _, count in points]
    for order in range(1, len(points)):
        for k in range(len(points) - 1, order - 1, -1):
            divided[k] = (divided[k] - divided[k - 1]) / (sizes[k] - sizes[k - order])
    coefficients = [Fraction(0)]
    for k in range(len(points) - 1, -1, -1):  # coefficients * (b - sizes[k]) + divided[k]
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - sizes[k] * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
        coefficients[0] += divided[k]
    return tuple(coefficients[: len(points)])
