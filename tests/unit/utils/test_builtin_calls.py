"""Calls of builtins in code are exchanged, and nothing else is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import pytest

from fxpipe.utils.builtin_calls import calling_codes, exchange_calls, functions_of, uses_builtins


def negative(value: Any) -> Any:
    return -value


def exchanged(function: Any) -> Any:
    code = exchange_calls(function.__code__, {"int": negative})
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def calling(values: list[float]) -> Any:
    if isinstance(values, int) or type(values) is int:
        return int
    whole = {"a": int(values[0]), **{str(i): int(value) for i, value in enumerate(values)}}
    return whole, [*map(int, values)], (lambda: int(values[1]))(), int.__name__


def test_what_is_called_is_exchanged_and_the_name_stays() -> None:
    assert calling([1.5, 2.5]) == ({"a": 1, "0": 1, "1": 2}, [1, 2], 2, "int")
    assert exchanged(calling)([1.5, 2.5]) == ({"a": -1.5, "0": -1.5, "1": -2.5}, [1, 2], -2.5, "int")


def test_other_calls_are_the_same_code() -> None:
    def others(value: Any) -> Any:
        return float(value), isinstance(value, int)

    assert exchange_calls(others.__code__, {"int": negative}) is others.__code__


def test_lines_and_handlers_stay_as_they_are() -> None:
    def raising(value: Any) -> Any:
        try:
            return int(value).missing  # type: ignore[attr-defined]
        except AttributeError as error:
            return error.__traceback__.tb_lineno, int(value)  # type: ignore[union-attr]

    assert exchanged(raising)(3)[0] == raising(3)[0]
    assert exchanged(raising)(3)[1] == -3


def test_code_with_more_constants_than_an_instruction_can_name_stays() -> None:
    text = "def many(x):\n    return int(x), " + ", ".join(f"'{number}'" for number in range(300))
    text = text.replace("int(x), ", "int(x), x, ").replace("'0'", "x.real")
    space: dict[str, Any] = {}
    exec(text.replace(", '", ", x + '"), space)
    code = space["many"].__code__
    assert len(code.co_consts) > 255
    assert exchange_calls(code, {"int": negative}) is code


@pytest.mark.parametrize("change", [gc.unfreeze, gc.freeze])
def test_functions_are_found_by_their_code(change: Callable[[], None]) -> None:
    try:
        change()
        is_frozen = gc.get_freeze_count() > 0
        assert functions_of({calling.__code__}) == [calling]
        assert (gc.get_freeze_count() > 0) is is_frozen
    finally:
        gc.freeze()  # as `conftest` has it
    assert functions_of(set()) == []


@pytest.mark.parametrize(("name", "is_builtin"), [("int", True), ("negative", False)])
def test_a_name_that_a_module_gives_another_meaning_is_no_builtin(name: str, is_builtin: bool) -> None:
    space: dict[str, Any] = {} if is_builtin else {"int": negative}
    exec("def function(x): return int(x)", space)
    assert uses_builtins(space["function"], ["int"]) is is_builtin


def test_the_function_around_a_closure_is_found_with_it() -> None:
    codes: list[CodeType] = []

    def outer() -> None:
        def inner() -> None:
            codes.extend(calling_codes(("no_such_package.",)))

        inner()

    outer()
    assert [code.co_name for code in codes[:2]] == ["inner", "outer"]
    assert sys._getframe().f_code in codes
