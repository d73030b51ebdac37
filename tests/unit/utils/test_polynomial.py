"""Polynomials in the micro-batch size: their values, sums and products, and the formulas that they print."""

from __future__ import annotations

import doctest
import math
from fractions import Fraction

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

import fxpipe.utils.polynomial
from fxpipe.utils.polynomial import ZERO, Polynomial, polynomial_of

whole = st.integers(-(10**9), 10**9)
halves = st.integers(-(10**6), 10**6).map(lambda number: number / 2)
polynomials = st.lists(st.one_of(whole, halves), max_size=4).map(polynomial_of)
sizes = st.integers(1, 1000)


def exact(one: Polynomial, b: int) -> Fraction:
    return sum((Fraction(c) * b**power for power, c in enumerate(one.coefficients)), Fraction(0))


@given(polynomials, sizes)
def test_a_value_is_rounded_up(one: Polynomial, b: int) -> None:
    assert one(b) == math.ceil(exact(one, b))
    assert type(one(b)) is int


@given(polynomials, polynomials, st.integers(0, 64), sizes)
def test_sums_and_products_are_those_of_the_values(one: Polynomial, other: Polynomial, number: int, b: int) -> None:
    assert exact(one + other, b) == exact(one, b) + exact(other, b)
    assert exact(one * number, b) == number * exact(one, b)
    assert exact(one + ZERO, b) == exact(one, b)


@given(polynomials, sizes)
def test_the_formula_and_the_text_say_the_same(one: Polynomial, b: int) -> None:
    symbol = sympy.Symbol("b", integer=True, positive=True)
    assert one.formula.free_symbols <= {symbol}
    assert Fraction(str(one.formula.subs(symbol, b))) == exact(one, b)
    # Not more than six digits of what is not whole are printed.
    if all(isinstance(c, int) for c in one.coefficients):
        assert eval(str(one), {"b": b}) == one(b)


@pytest.mark.parametrize(
    ("coefficients", "text"),
    [
        ((), "0"),
        ((0, 0), "0"),
        ((7,), "7"),
        ((0, 1), "b"),
        ((64, 100352), "100352*b + 64"),
        ((-64, 2), "2*b - 64"),
        ((0, 0, 3), "3*b**2"),
        ((1, 1, 1), "b**2 + b + 1"),
        ((5, 0.5), "0.5*b + 5"),
    ],
)
def test_it_prints_as_a_person_would_write_it(coefficients: tuple[float, ...], text: str) -> None:
    assert str(Polynomial(coefficients)) == text


def test_numbers_of_any_kind_become_plain_ones_and_zeros_at_the_end_go() -> None:
    found = polynomial_of([Fraction(4), sympy.Integer(3), Fraction(1, 2), 0, 0.0])
    assert found == Polynomial((4, 3, 0.5))
    assert [type(c) for c in found.coefficients] == [int, int, float]
    assert polynomial_of([0, 0]) == ZERO


def test_examples_in_the_text_are_true() -> None:
    assert doctest.testmod(fxpipe.utils.polynomial).attempted > 0
    assert doctest.testmod(fxpipe.utils.polynomial).failed == 0
