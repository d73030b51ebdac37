"""The supported versions of torch, and access to its private names.

Each file of `fxpipe._torch` imports the private names of one subject:

- `required_names()` is the block around required names: if a name is missing, importing the file raises a
  `TorchVersionError`, and so does `import fxpipe` or the first use of the file;
- `optional_name()` returns a name that only makes something faster or adds information; callers work without it.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any

import torch

from fxpipe.errors import TorchVersionError

TESTED_VERSIONS = "2.11 to 2.14"


class required_names:
    """A block that imports required private names of torch. A class, to keep contextlib out of tracebacks."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, (ImportError, AttributeError)) and not isinstance(error, TorchVersionError):
            raise missing_name(str(error)) from error


def missing_name(detail: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} lacks something that fxpipe needs: it is tested with torch {TESTED_VERSIONS}; "
        f"install one of these versions, or a later fxpipe\n{detail}"
    )


def require_attributes(owner: Any, *names: str) -> None:
    """Checks that an object of torch has these attributes, which are then used directly."""
    for name in names:
        if not hasattr(owner, name):
            raise missing_name(f"{getattr(owner, '__qualname__', type(owner).__qualname__)} has no attribute {name!r}")


def optional_name(module: str, name: str) -> Any:
    """Imports `module` and returns its attribute `name`, which may have dots; None if it does not exist."""
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value
