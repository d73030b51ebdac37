"""Lines of the user's code at which something happens."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

# in place of a line: there is none, as in a model of torch's own modules that fxpipe itself calls
UNKNOWN_LINE = "unknown"

# With the separator: torchvision lives beside torch, and is the user's.
_LIBRARY_DIRS = tuple(
    os.path.join(directory, "") for directory in (torch.__path__[0], os.path.dirname(os.path.dirname(__file__)))
)

_DISPATCH_FILES = (
    _LIBRARY_DIRS[1],
    os.path.join(_LIBRARY_DIRS[0], "_tensor"),
    os.path.join(_LIBRARY_DIRS[0], "overrides"),
)
_DISTRIBUTIONS = os.path.join(_LIBRARY_DIRS[0], "distributions", "")


def is_user_file(file: str) -> bool:
    """Returns whether this is a file that is neither torch's nor fxpipe's, nor of a decorator in between."""
    return not file.startswith((*_LIBRARY_DIRS, contextlib.__file__, "<frozen "))  # decorators, and `python -m`


def user_line() -> str:
    """The innermost source line that is neither torch's nor fxpipe's: `path/unet.py:31`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else UNKNOWN_LINE


def is_argument_validation() -> bool:
    """Returns whether it is a distribution of torch that asks for a value, to raise where its arguments are wrong."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_DISPATCH_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTIONS)


def line_of_function(function: Callable[..., Any]) -> str:
    """Returns the line at which a function of Python begins."""
    code = code_of_function(function)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else UNKNOWN_LINE


def code_of_function(function: Callable[..., Any]) -> CodeType | None:
    """Returns the code of a function of Python; if that wraps another function of the user, the code of that one.

    A function that wraps one of torch or fxpipe counts itself: `functools.wraps(type(pipe).forward)`.
    """

    def wraps_library(wrapper: Any) -> bool:
        code = getattr(wrapper.__wrapped__, "__code__", None)
        return code is not None and not is_user_file(code.co_filename)

    result: CodeType | None = getattr(
        inspect.unwrap(getattr(function, "__func__", function), stop=wraps_library), "__code__", None
    )
    return result


def warn_user(message: str) -> None:
    """Warns at the innermost line of the stack that is neither torch's nor fxpipe's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def line_in_stack(text: str) -> str:
    """The innermost line of a formatted stack that is neither torch's nor fxpipe's, or ""."""
    entries = re.findall(r'File "([^"]+)", line (\d+)', text)
    users = [(file, line) for file, line in entries if not file.startswith((*_LIBRARY_DIRS, "torch/", "<"))]
    return ":".join(users[-1]) if users else ""


def line_of_error(error: BaseException) -> str:
    """Finds the user's line that an exception came from: the innermost that is neither torch's nor fxpipe's."""
    line, entry = UNKNOWN_LINE, error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith((*_LIBRARY_DIRS, "<")):
            line = f"{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"
        entry = entry.tb_next
    return line
