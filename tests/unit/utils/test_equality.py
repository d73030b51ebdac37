"""Equality of values, by its examples and of what `==` does not say in one word."""

import doctest
import math

import numpy as np

import fxpipe.utils.batch_split
import fxpipe.utils.equality
from fxpipe.utils.equality import equal_values


def test_arrays_are_equal_item_by_item_and_of_one_shape() -> None:
    assert equal_values(np.ones(3), np.ones(3))
    assert not equal_values(np.ones(3), np.ones(1))
    assert not equal_values((np.ones(3), 1), (np.zeros(3), 1))


def test_examples_in_the_texts_are_true() -> None:
    for module in (fxpipe.utils.equality, fxpipe.utils.batch_split):
        assert doctest.testmod(module).attempted > 0
        assert doctest.testmod(module).failed == 0


def test_answers_are_of_one_kind_and_nan_is_itself():
    assert equal_values(2, 2)
    assert not equal_values(2, 2.0)
    assert not equal_values(1, True)
    assert equal_values(float("nan"), float("nan"))  # two objects
    assert not equal_values(math.nan, 1.0)
    assert equal_values([1.0, math.nan], [1.0, math.nan])
    assert not equal_values([1.0], [1.0, 1.0])
