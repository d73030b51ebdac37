"""When what forward has read is the same again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fxpipe.tracing.module_attributes import AttributeGuard
from fxpipe.utils.equality import equal_values


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (10**9, int("1000000000"), True),  # equal, and another object
        ("name" * 50, "".join(["name"] * 50), True),
        (1, True, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # forward may go over it
        ([1, [2, 3]], [1, [2, 3]], True),
        ([1, [2, 3]], [1, [2, 4]], False),
        ([1, 2], [1, 2, 3], False),
        ({1, 2}, {2, 1}, True),
        (np.array([1, 2]), np.array([1, 2]), True),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array([1, 2]), np.array([[1, 2]]), False),
    ],
)
def test_attributes_that_forward_reads(before, after, is_same):
    owner = {"x": before}
    kept = AttributeGuard.now(owner, "x")
    assert kept.holds()
    owner["x"] = after
    assert kept.holds() is is_same


def test_an_array_that_is_written_to_is_another():
    owner = {"x": np.zeros(3)}
    kept = AttributeGuard.now(owner, "x")
    owner["x"][1] = 1
    assert not kept.holds()


def test_answers_are_of_one_kind_and_nan_is_itself():
    assert equal_values(2, 2)
    assert not equal_values(2, 2.0)
    assert not equal_values(1, True)
    assert equal_values(float("nan"), float("nan"))  # two objects
    assert not equal_values(math.nan, 1.0)
    assert equal_values([1.0, math.nan], [1.0, math.nan])
    assert not equal_values([1.0], [1.0, 1.0])
