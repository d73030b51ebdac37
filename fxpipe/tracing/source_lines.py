"""Source lines of the user's code."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

UNKNOWN_LINE = "unknown"  # a missing line, as in torch's own modules when fxpipe calls them

# With the separator: torchvision is next to torch, but counts as user code.
_TORCH, _FXPIPE = (os.path.join(d, "") for d in (torch.__path__[0], os.path.dirname(os.path.dirname(__file__))))
_DISPATCH_FILES = (_FXPIPE, f"{_TORCH}_tensor", f"{_TORCH}overrides")


def is_user_file(file: str) -> bool:
    """Returns whether a file belongs neither to torch nor to fxpipe, nor to a decorator between them."""
    return not file.startswith((_TORCH, _FXPIPE, contextlib.__file__, "<frozen "))  # decorators, and `python -m`


def user_line() -> str:
    """Returns the innermost source line outside torch and fxpipe: `path/unet.py:31`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else UNKNOWN_LINE


def is_check() -> bool:
    """Returns whether a value is read only to raise if it is another one.

    So read the distributions and checks of torch, `assert` and an `if` with a branch that raises.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_DISPATCH_FILES):
        frame = frame.f_back
    if frame is None:
        return False
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    is_of_torch = file == torch.__file__ and name.startswith("_check")
    is_of_torch |= file.startswith(os.path.join(_TORCH, "distributions", ""))
    return is_of_torch or is_line_of_check(f"{file}:{frame.f_lineno}")


def is_line_of_check(where: str) -> bool:
    """Returns whether a source line is the condition of a check: another value raises."""
    file, _, line = where.rpartition(":")
    return line.isdigit() and int(line) in _lines_of_checks("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=256)
def _lines_of_checks(text: str) -> frozenset[int]:
    """Returns the lines of conditions that raise if they are true, or if they are false; and of `check(...)`."""
    lines = set[int]()
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.If, ast.Assert, ast.Expr))]
    except (SyntaxError, ValueError):
        return frozenset()
    for node in nodes:
        if isinstance(node, ast.Expr):
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            is_check = "check" in called.replace("checkpoint", "")
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1) if is_check else ())
        elif isinstance(node, ast.Assert) or _ends_in_raise(node.body) or _ends_in_raise(node.orelse):
            test = node.test
            if not any(isinstance(part, (ast.BoolOp, ast.IfExp, ast.NamedExpr)) for part in ast.walk(test)):
                lines.update(range(test.lineno, (test.end_lineno or test.lineno) + 1))
    return frozenset(lines)


def _ends_in_raise(statements: list[ast.stmt]) -> bool:
    *before, last = statements or [ast.Pass()]
    return isinstance(last, ast.Raise) and all(isinstance(one, (ast.Assign, ast.Expr)) for one in before)


def line_of_function(function: Callable[..., Any]) -> str:
    code = code_of_function(function)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else UNKNOWN_LINE


def code_of_function(function: Callable[..., Any]) -> CodeType | None:
    """Returns the code of a Python function; if it wraps another user function, the code of the wrapped function.

    A function that wraps one of torch or fxpipe counts itself: `functools.wraps(type(pipe).forward)`.
    """

    def wraps_library(wrapper: Any) -> bool:
        code = getattr(wrapper.__wrapped__, "__code__", None)
        return code is not None and not is_user_file(code.co_filename)

    plain = inspect.unwrap(getattr(function, "__func__", function), stop=wraps_library)
    result: CodeType | None = getattr(plain, "__code__", None)
    return result


def warn_user(message: str) -> None:
    """Warns at the innermost line of the stack outside torch and fxpipe."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def line_of_error(error: BaseException) -> str:
    """Returns the innermost line of an exception's traceback outside torch and fxpipe."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    lines = [f"{file}:{line}" for file, line in frames if not file.startswith((_TORCH, _FXPIPE, "<"))]
    return lines[-1] if lines else UNKNOWN_LINE
