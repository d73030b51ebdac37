"""Expressions of sympy as polynomials, or as polynomials that are nowhere less."""

from fractions import Fraction
from itertools import product

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from fxpipe.errors import ArgumentError
from fxpipe.utils.polynomial import Polynomial
from fxpipe.utils.polynomial_bound import polynomial_bound

b, s = (sympy.Symbol(name, integer=True, positive=True) for name in "bs")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (sympy.Integer(0), ()),
        (100352 * b + 64, (64, 100352)),
        (4 * b * (b - 1), (0, -4, 4)),
        (b / 2, (0, Fraction(1, 2))),
        (sympy.Float(0.5) * b, (0, Fraction(1, 2))),
    ],
)
def test_a_polynomial_keeps_its_coefficients(expression, expected):
    assert polynomial_bound(expression, b) == Polynomial.in_b(*expected)


ROUNDED = [
    sympy.floor(b / 2),
    4 * b - 2 * sympy.floor(b / 3),
    sympy.ceiling(b / 3) * 8,
    12 * FloorDiv(b + 1, 2) + 7,
    b * FloorDiv(b, 2),
    sympy.floor(b / 3) ** 2,
    sympy.Max(b, 4) * 8,
    sympy.Min(b, 100),
    64 - sympy.Min(b, 4) + b,
    sympy.Mod(b, 3) * 4,
    9 - sympy.Mod(b, 3) * 4,
]


@pytest.mark.parametrize("expression", ROUNDED, ids=str)
def test_what_is_no_polynomial_is_bounded_by_one(expression):
    bound = polynomial_bound(expression, b)
    for size in range(1, 200):
        exact, kept = expression.subs(b, size), bound(size)
        assert exact <= kept
        assert kept <= 4 * exact + 100 * size  # near enough to be of use


@pytest.mark.parametrize(
    "expression",
    [
        100352 * b * s,
        4 * b * s**2 + 64,
        8 * b * sympy.ceiling(s / 16),
        12 * FloorDiv(b * s, 2) - b,
        sympy.Max(b, s) * 8,
    ],
    ids=str,
)
def test_a_formula_in_several_sizes_is_bounded_at_all_of_them(expression):
    bound = polynomial_bound(expression, b, s)
    for samples, length in product(range(1, 20), range(1, 40, 3)):
        exact, kept = expression.subs({b: samples, s: length}), bound(samples, s=length)
        assert exact <= kept
        assert expression.is_polynomial(b, s) <= (exact == kept)


@pytest.mark.parametrize(
    "expression", [1 / b, sympy.sqrt(b), b * sympy.Symbol("u0"), b**30, sympy.nan, sympy.oo, (b - 3) * FloorDiv(b, 2)]
)
def test_a_formula_without_a_bound_is_refused(expression):
    with pytest.raises(ArgumentError, match="cannot be saved"):
        polynomial_bound(expression, b)
