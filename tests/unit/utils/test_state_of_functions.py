"""What a function depends on, and whether it has changed."""

import functools

import numpy
import pytest
import torch

from fxpipe.utils.python_state import PythonState


def doubled(x):
    return 2 * x


def over(factor):
    return lambda x: factor * doubled(x)


def test_functions_that_do_the_same_have_the_same_facts():
    def facts(function):
        return PythonState(values=(function,)).facts

    assert facts(over(2.0)) == facts(over(2.0)) != facts(over(3.0))
    assert facts(functools.partial(over(2.0), 1)) != facts(functools.partial(over(2.0), 2))
    assert facts(lambda: nan) != facts(over(2.0))
    nan = float("nan")
    assert facts(over(nan)) == facts(over(float("nan")))


def test_what_grows_in_a_container_is_seen_and_code_of_libraries_is_not_followed():
    rows = [1]
    state = PythonState(values=(lambda: rows, torch.nn.functional.cross_entropy))
    rows.append(2)
    assert not state.holds()
    state.take()
    assert state.holds()


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
        (numpy.array([1, 2]), numpy.array([1, 2]), True),
        (numpy.array([1, 2]), numpy.array([1, 3]), False),
        (numpy.array([1, 2]), numpy.array([[1, 2]]), False),
    ],
)
def test_attributes_that_forward_reads(before, after, is_same):
    owner = {"x": before}
    kept = PythonState(places=[(owner, "x")])
    assert kept.holds()
    owner["x"] = after
    assert kept.holds() is is_same


def test_an_array_that_is_written_to_is_another():
    owner = {"x": numpy.zeros(3)}
    kept = PythonState(places=[(owner, "x")])
    owner["x"][1] = 1
    assert not kept.holds()
