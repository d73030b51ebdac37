"""Calls of builtins in the code of a function, made calls of others: `int(x)` as somebody else's `int`.

`int(x)` and `len(x)` return plain numbers whatever the methods of `x` return, and their names cannot stand for
something else, since `isinstance(x, int)` uses them as well. So only what is called is exchanged, in the bytecode:
CPython loads a global that is about to be called together with an empty place on the stack, and leaves room behind the
instruction, where a constant takes its place. Where CPython does otherwise, nothing is exchanged.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

Exchange = Mapping[str, Callable[..., Any]]  # name of a builtin -> what is called instead

_originals: dict[CodeType, CodeType] = {}  # by code with other calls: what it was made of
_LARGEST_ARGUMENT = 255  # of an instruction of one unit
_UNIT = 2  # bytes


def exchange_calls(code: CodeType, exchange: Exchange) -> CodeType:
    """Returns code that calls others than these builtins; the same object where it calls none of them."""
    exchanged = _exchange(code, exchange) if _is_supported() else code
    if exchanged is not code:
        _originals[exchanged] = code
    return exchanged


def original_code(code: CodeType) -> CodeType:
    """Returns the code that `exchange_calls` made this of; other code as it is."""
    return _originals.get(code, code)


def functions_of(codes: Collection[CodeType]) -> list[FunctionType]:
    """Finds the functions that have these codes."""
    if not codes:
        return []
    wanted, is_frozen = {id(code) for code in codes}, gc.get_freeze_count() > 0
    if is_frozen:  # by whoever trains or serves models: what is frozen is not looked through
        gc.unfreeze()
    try:
        return [one for one in gc.get_referrers(*codes) if isinstance(one, FunctionType) and id(one.__code__) in wanted]
    finally:
        if is_frozen:
            gc.freeze()


def uses_builtins(function: FunctionType, names: Collection[str]) -> bool:
    """Returns whether these names mean the builtins to a function."""
    return all(name not in function.__globals__ or function.__globals__[name] is vars(builtins)[name] for name in names)


def calling_codes(skipped: tuple[str, ...]) -> list[CodeType]:
    """Lists the code of the function that runs, outside of these packages, and those that have it as a constant.

    A comprehension has no function that one could find, and a closure another one each time.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(skipped):
        frame = frame.f_back
    codes: list[CodeType] = []
    while frame is not None:
        if not codes or any(const is codes[-1] for const in frame.f_code.co_consts):
            codes.append(frame.f_code)
        if not (codes[-1].co_flags & inspect.CO_NESTED or codes[-1].co_name.startswith("<")):
            break
        frame = frame.f_back
    return codes


def _exchange(code: CodeType, exchange: Exchange) -> CodeType:
    consts = [_exchange(const, exchange) if isinstance(const, CodeType) else const for const in code.co_consts]
    raw = bytearray(code.co_code)
    for offset, size, name in _called_globals(code):
        if name not in exchange or len(consts) > _LARGEST_ARGUMENT or size < 2 * _UNIT:
            continue
        load = bytes((dis.opmap["LOAD_CONST"], len(consts)))
        empty_place = bytes((dis.opmap["PUSH_NULL"], 0))
        instructions = load + empty_place if sys.version_info >= (3, 13) else empty_place + load
        rest = bytes((dis.opmap["NOP"], 0)) * ((size - len(instructions)) // _UNIT)
        raw[offset : offset + size] = instructions + rest
        consts.append(exchange[name])
    is_same = bytes(raw) == code.co_code and all(new is old for new, old in zip(consts, code.co_consts, strict=False))
    return code if is_same else code.replace(co_code=bytes(raw), co_consts=tuple(consts))


def _called_globals(code: CodeType) -> Iterator[tuple[int, int, str]]:
    """Yields offset, bytes and name of each instruction that loads a global to call it."""
    instructions = list(dis.get_instructions(code))
    ends = [one.offset for one in instructions[1:]] + [len(code.co_code)]
    for one, end in zip(instructions, ends, strict=True):
        if one.opname == "LOAD_GLOBAL" and one.arg is not None and one.arg & 1 and one.arg <= _LARGEST_ARGUMENT:
            yield one.offset, end - one.offset, one.argval


@functools.cache
def _is_supported() -> bool:
    """Returns whether this Python has the instructions that are meant here, as a function of its own shows."""

    def probe(values: Any) -> Any:
        return [int(value, *(), **{}) for value in values], int(values[0]), isinstance(len(values), int)

    try:
        code = _exchange(probe.__code__, {"int": lambda value: -value, "len": lambda values: 7})
        return bool(FunctionType(code, globals())([2.5, 3]) == ([-2.5, -3], -2.5, True))
    except Exception:
        return False
