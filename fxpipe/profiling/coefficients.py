"""Formulas in the batch size as coefficients, for files: sympy's own parser runs code and is never given text.

    coefficients(100352*b + b/2, b)           (0, Fraction(200705, 2))    from the constant upwards; of 0: ()
    as_json((0, Fraction(200705, 2)))         [0, "200705/2"]
    from_json([0, "200705/2"])                (0, Fraction(200705, 2))
    formula((0, Fraction(200705, 2)), b)      200705*b/2

Nearly all formulas are polynomials in `b`. One that is not is kept as a polynomial that is nowhere less for `b` >= 1:
`floor(b/2)` as `b/2`. So what is read from a file may say a little more memory than the profile that was saved, never
less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy

from fxpipe.errors import ArgumentError

MAX_DEGREE = 16
MAX_DIGITS = 60  # of a number: far more than any size has

_FRACTION = re.compile(rf"-?[0-9]{{1,{MAX_DIGITS}}}/[0-9]{{1,{MAX_DIGITS}}}")
_ROUNDED = ("FloorDiv", "CleanDiv", "IntTrueDiv")  # of torch's symbolic shapes: a / b, rounded down or exact
_ROUNDED_DOWN = ("floor", "FloorToInt", "TruncToInt")
_ROUNDED_UP = ("ceiling", "CeilToInt")
_REMAINDER = ("Mod", "PythonMod")


def coefficients_of(expression: sympy.Expr, batch: sympy.Symbol) -> tuple[int | Fraction, ...]:
    """The coefficients of a formula, or of a polynomial that bounds it from above.

    Raises:
        ArgumentError: nothing is known that bounds it, or it is too large to be a size.
    """
    try:
        bound = _polynomial_bound(sympy.sympify(expression), batch, above=True)
        polynomial = sympy.Poly(bound, batch)
        if polynomial.degree() > MAX_DEGREE:
            raise _NoBound
        coefficients = [_exact_number(c) for c in reversed(polynomial.all_coeffs())]
    except (_NoBound, sympy.SympifyError, sympy.PolynomialError):
        raise ArgumentError(
            f"the formula {expression} is no polynomial in {batch}, nor is one known that bounds it: it cannot be saved"
        ) from None
    while coefficients and coefficients[-1] == 0:
        coefficients.pop()
    return tuple(coefficients)


def formula_of(coefficients: Sequence[int | Fraction], batch: sympy.Symbol) -> sympy.Expr:
    """The polynomial with these coefficients, from the constant upwards."""
    numbers = (sympy.Rational(c.numerator, c.denominator) for c in coefficients)
    return sympy.Add(*(number * batch**power for power, number in enumerate(numbers)))


def coefficients_to_json(coefficients: Sequence[int | Fraction]) -> list[int | str]:
    """Makes numbers that JSON keeps as they are: a fraction becomes text."""
    return [c if isinstance(c, int) else f"{c.numerator}/{c.denominator}" for c in coefficients]


def coefficients_from_json(values: Any) -> tuple[int | Fraction, ...]:
    """Reads what `coefficients_to_json` made.

    Raises:
        ArgumentError: it made nothing of the kind.
    """
    if not isinstance(values, list) or len(values) > MAX_DEGREE + 1:
        raise ArgumentError(f"expected a list of at most {MAX_DEGREE + 1} coefficients, got {_short(values)}")
    return tuple(map(_coefficient_from_json, values))


def _coefficient_from_json(value: Any) -> int | Fraction:
    if type(value) is int and abs(value) < 10**MAX_DIGITS:
        return value
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        above, below = map(int, value.split("/"))
        if below:
            return Fraction(above, below)
    raise ArgumentError(f'expected a coefficient, a whole number or a fraction such as "3/2", got {_short(value)}')


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"


# -- polynomials that bound others -------------------------------------------------------------------------------------


class _NoBound(Exception):
    pass


def _exact_number(coefficient: sympy.Expr) -> int | Fraction:
    if isinstance(coefficient, sympy.Float) and coefficient.is_finite:
        number = Fraction(float(coefficient))
    elif isinstance(coefficient, sympy.Rational):
        number = Fraction(int(coefficient.p), int(coefficient.q))
    else:
        raise _NoBound
    if max(abs(number.numerator), number.denominator) >= 10**MAX_DIGITS:
        raise _NoBound
    return int(number) if number.denominator == 1 else number


def _polynomial_bound(expression: sympy.Expr, batch: sympy.Symbol, above: bool) -> sympy.Expr:
    """A polynomial that is nowhere less (`above`) or nowhere more than the expression, for all `batch` >= 1."""
    if expression.is_polynomial(batch):
        return expression
    if isinstance(expression, sympy.Add):
        return sympy.Add(*(_polynomial_bound(a, batch, above) for a in expression.args))
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        if number != 1:
            return number * _polynomial_bound(rest, batch, above == (number > 0))
        _all_at_least_zero(expression.args)
        return sympy.Mul(*(_polynomial_bound(a, batch, above) for a in expression.args)) if above else sympy.Integer(0)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
        _all_at_least_zero((expression.base,))
        return _polynomial_bound(expression.base, batch, above) ** expression.exp if above else sympy.Integer(0)
    return _bound_of_function(expression, batch, above)


def _bound_of_function(expression: sympy.Expr, batch: sympy.Symbol, above: bool) -> sympy.Expr:
    kind, args = type(expression).__name__, expression.args
    if kind in _ROUNDED and args[1].is_number and args[1] > 0:
        return _polynomial_bound(args[0], batch, above) / args[1] - (0 if above else 1)
    if kind in _ROUNDED_DOWN:
        return _polynomial_bound(args[0], batch, above) - (0 if above else 1)
    if kind in _ROUNDED_UP:
        return _polynomial_bound(args[0], batch, above) + (1 if above else 0)
    if kind in _REMAINDER and args[1].is_number and args[1] > 0:
        return args[1] if above else sympy.Integer(0)
    if kind == "Max":
        if not above:
            return _polynomial_bound(args[0], batch, above)
        _all_at_least_zero(args)
        return sympy.Add(*(_polynomial_bound(a, batch, above) for a in args))
    if kind == "Min":
        if above:
            return _polynomial_bound(args[0], batch, above)
        _all_at_least_zero(args)
        return sympy.Integer(0)
    raise _NoBound


def _all_at_least_zero(expressions: Sequence[sympy.Expr]) -> None:
    if not all(e.is_nonnegative for e in expressions):
        raise _NoBound
