"""Polynomials in sizes: values, sums, products, text, files, fits through counts, and bounds of sympy expressions."""

import json
import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from fxpipe.errors import ArgumentError
from fxpipe.utils.polynomial import ZERO, Polynomial, fit_counts, polynomial_through
from fxpipe.utils.polynomial_bound import polynomial_bound

numbers = st.one_of(st.integers(-(10**20), 10**20), st.fractions(max_denominator=10**6))
in_b = st.lists(numbers, max_size=6).map(lambda coefficients: Polynomial.in_b(*coefficients))
powers = st.dictionaries(st.sampled_from(["b", "s", "height"]), st.integers(1, 4))
anywhere = st.lists(st.tuples(powers, numbers), max_size=4).map(
    lambda terms: Polynomial.of({tuple(names.items()): number for names, number in terms})
)
polynomials = st.one_of(in_b, anywhere)
sizes = st.fixed_dictionaries({name: st.integers(1, 1000) for name in ("b", "s", "height")})


def exact(one: Polynomial, at: dict[str, int]) -> Fraction:
    return sum((Fraction(c) * math.prod(at[name] ** p for name, p in names) for names, c in one.terms), Fraction(0))


@given(polynomials, sizes)
def test_a_value_is_rounded_up(one: Polynomial, at: dict[str, int]) -> None:
    assert one(**at) == math.ceil(exact(one, at))
    assert type(one(**at)) is int


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"4\*b\*s depends on the size 's': give it, as in s=128"):
        Polynomial.of({(("b", 1), ("s", 1)): 4})(8)


def test_what_the_same_sizes_multiply_in_another_order_is_one_term() -> None:
    assert Polynomial.of({(("s", 1), ("b", 1)): 1, (("b", 1), ("s", 1)): 2}).terms == (((("b", 1), ("s", 1)), 3),)


@given(polynomials, polynomials, st.integers(0, 64), sizes)
def test_sums_and_products_are_those_of_the_values(
    one: Polynomial, other: Polynomial, number: int, at: dict[str, int]
) -> None:
    assert exact(one + other, at) == exact(one, at) + exact(other, at)
    assert exact(one * number, at) == number * exact(one, at)
    assert one + ZERO == one
    assert one + one * -1 == ZERO
    assert one + other == other + one


@given(polynomials, sizes)
def test_the_formula_and_the_text_say_the_same(one: Polynomial, at: dict[str, int]) -> None:
    symbols = {sympy.Symbol(name, integer=True, positive=True): size for name, size in at.items()}
    assert one.formula.free_symbols <= symbols.keys()
    assert Fraction(str(one.formula.subs(symbols))) == exact(one, at)
    # Not more than six digits of what is not whole are printed.
    if all(isinstance(c, int) for _, c in one.terms):
        assert eval(str(one), dict(at)) == one(**at)


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
    assert str(Polynomial.in_b(*coefficients)) == text


def test_equal_ones_are_equal_however_they_are_made() -> None:
    assert Polynomial.in_b(Fraction(4), sympy.Integer(3), 0.5, 0.0) == Polynomial.in_b(4, 3, Fraction(1, 2))
    assert [type(c) for _, c in Polynomial.in_b(Fraction(4), 0.5).terms] == [int, Fraction]
    assert Polynomial.in_b(0, 0) == ZERO
    assert not ZERO
    assert Polynomial.of({(("s", 1), ("b", 2)): 1}) == Polynomial.of({(("b", 2), ("s", 1)): 1})


@given(polynomials)
def test_what_is_read_is_what_was_written(one: Polynomial) -> None:
    assert Polynomial.from_json(json.loads(json.dumps(one.to_json()))) == one


NO_COEFFICIENTS = [1, "1", None, {}, [1.0], [True], ["1"], [[1]], [None], [1] * 99, [10**100], {"coefficients": [1]}]
NO_FRACTIONS = ["1/0", "1/-2", "__import__('os')/1", "1/2/3", "1" * 5000 + "/1", "²/1", " 1/2", "1/2\n"]
NO_TERMS = [[[1, {"b": 0}]], [[1, {"b": 99}]], [[1, {"b*c": 1}]], [[1, {"b": True}]], [[1.5, {"b": 1}]], [[1, {}], 2]]
NOT_FINITE = [[float("nan")], [float("inf")]]


@pytest.mark.parametrize(
    "value",
    [*NO_COEFFICIENTS, *([text] for text in NO_FRACTIONS), *NO_TERMS, *NOT_FINITE],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_polynomial_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a"):
        Polynomial.from_json(value)


@pytest.mark.parametrize(
    ("coefficients", "at"),
    [((7,), (3, 2)), ((0, 5), (8, 2, 3)), ((-2, 3), (1, 2, 4)), ((1, Fraction(-1, 2), Fraction(1, 2)), (8, 2, 3, 4))],
)
def test_polynomials_are_found_exactly(coefficients: tuple[Any, ...], at: tuple[int, ...]) -> None:
    one = Polynomial.in_b(*coefficients)
    counted = tuple((size, one(size)) for size in at)
    assert polynomial_through(counted) == one
    assert fit_counts(counted, at[0]) == one


@pytest.mark.parametrize("counted", [((4, 10),), ((4, 10), (2, 3), (3, 5)), ((4, 10), (2, 3), (3, 5), (5, 9))])
def test_what_is_no_polynomial_is_right_where_it_was_counted(counted: tuple[tuple[int, int], ...]) -> None:
    assert polynomial_through(counted) is None
    assert fit_counts(counted, 4) == Polynomial.in_b(0, Fraction(5, 2))
    assert fit_counts(((4, 0),), 4) == ZERO


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
