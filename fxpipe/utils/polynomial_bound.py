"""Polynomial upper bounds of sympy expressions: bytes and FLOPs from shapes, for plans and files.

Nearly all formulas are polynomials in the sizes. Others are replaced by a polynomial upper bound for sizes >= 1:
`floor(b/2)` by `b/2`. So a file may state slightly more memory than the saved profile, never less.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from fxpipe.errors import ArgumentError
from fxpipe.utils.polynomial import MAX_DEGREE, MAX_DIGITS, Polynomial

_ROUNDED = ("FloorDiv", "CleanDiv", "IntTrueDiv")  # in torch's symbolic shapes: a / b, rounded down or exact
_ROUNDED_DOWN = ("floor", "FloorToInt", "TruncToInt")
_ROUNDED_UP = ("ceiling", "CeilToInt")
_REMAINDER = ("Mod", "PythonMod")

Sizes = tuple[sympy.Symbol, ...]


def polynomial_bound(expression: sympy.Expr, *sizes: sympy.Symbol) -> Polynomial:
    """Converts an expression to a polynomial or an upper bound. Raises `ArgumentError` if no bound is known."""
    try:
        bound = sympy.Poly(_polynomial_bound(sympy.sympify(expression), sizes, above=True), *sizes)
        if bound.total_degree() > MAX_DEGREE:
            raise _NoBound
        names = [size.name for size in sizes]
        return Polynomial.of(
            {
                tuple((name, power) for name, power in zip(names, powers, strict=True) if power): _exact_number(number)
                for powers, number in bound.terms()
            }
        )
    except (_NoBound, sympy.SympifyError, sympy.PolynomialError):
        raise ArgumentError(
            f"the formula {expression} is no polynomial in {', '.join(map(str, sizes))}, nor is one known that bounds "
            "it: it cannot be saved"
        ) from None


class _NoBound(Exception):
    pass


def _exact_number(coefficient: sympy.Expr) -> sympy.Rational:
    if isinstance(coefficient, sympy.Float) and coefficient.is_finite:
        coefficient = sympy.Rational(*float(coefficient).as_integer_ratio())
    if not isinstance(coefficient, sympy.Rational) or max(abs(coefficient.p), coefficient.q) >= 10**MAX_DIGITS:
        raise _NoBound
    return coefficient


def _polynomial_bound(expression: sympy.Expr, sizes: Sizes, above: bool) -> sympy.Expr:
    """Returns a polynomial upper (`above`) or lower bound of the expression for all sizes >= 1."""
    if expression.is_polynomial(*sizes):
        return expression
    if isinstance(expression, sympy.Add):
        return sympy.Add(*(_polynomial_bound(a, sizes, above) for a in expression.args))
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        if number != 1:
            return number * _polynomial_bound(rest, sizes, above == (number > 0))
        _all_at_least_zero(expression.args)
        return sympy.Mul(*(_polynomial_bound(a, sizes, above) for a in expression.args)) if above else sympy.Integer(0)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
        _all_at_least_zero((expression.base,))
        return _polynomial_bound(expression.base, sizes, above) ** expression.exp if above else sympy.Integer(0)
    kind, args = type(expression).__name__, expression.args
    if kind in _ROUNDED and args[1].is_number and args[1] > 0:
        return _polynomial_bound(args[0], sizes, above) / args[1] - (0 if above else 1)
    if kind in _ROUNDED_DOWN:
        return _polynomial_bound(args[0], sizes, above) - (0 if above else 1)
    if kind in _ROUNDED_UP:
        return _polynomial_bound(args[0], sizes, above) + (1 if above else 0)
    if kind in _REMAINDER and args[1].is_number and args[1] > 0:
        return args[1] if above else sympy.Integer(0)
    if kind == "Max":
        if not above:
            return _polynomial_bound(args[0], sizes, above)
        _all_at_least_zero(args)
        return sympy.Add(*(_polynomial_bound(a, sizes, above) for a in args))
    if kind == "Min":
        if above:
            return _polynomial_bound(args[0], sizes, above)
        _all_at_least_zero(args)
        return sympy.Integer(0)
    raise _NoBound


def _all_at_least_zero(expressions: Sequence[sympy.Expr]) -> None:
    if not all(e.is_nonnegative for e in expressions):
        raise _NoBound
