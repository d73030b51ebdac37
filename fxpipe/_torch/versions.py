"""The versions of torch whose private names this package uses, and the error where one of them is missing.

Each file of `fxpipe._torch` fetches the private names of one subject when it is imported:

- `required_names()` is the block around names that fxpipe cannot do without: where one is missing, importing the file
  raises a `TorchVersionError`, and so does `import fxpipe`, or the first use of what needs the file;
- `optional_name()` gives a name that only makes something faster or says more; its user has a way without it.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any

import torch

from fxpipe.errors import TorchVersionError

TESTED_VERSIONS = "2.11 to 2.14"


class required_names:
    """A block that fetches private names of torch which fxpipe cannot do without.

    Raises:
        TorchVersionError: one is missing. (No generator, so that no frame of contextlib's is in the traceback.)
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, (ImportError, AttributeError)) and not isinstance(error, TorchVersionError):
            raise missing_name(str(error)) from error


def missing_name(detail: str) -> TorchVersionError:
    """The error where torch does not have a name, of which `detail` tells."""
    return TorchVersionError(
        f"torch {torch.__version__} lacks something that fxpipe needs: it is tested with torch {TESTED_VERSIONS}; "
        f"install one of these versions, or a later fxpipe\n{detail}"
    )


def require_attributes(owner: Any, *names: str) -> None:
    """Checks that an object of torch's has these attributes, which are then used directly.

    Raises:
        TorchVersionError: one is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise missing_name(f"{getattr(owner, '__qualname__', type(owner).__qualname__)} has no attribute {name!r}")


def optional_name(module: str, name: str) -> Any:
    """`module.name`, or None where torch has none; `name` may have dots. Imports the module."""
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value
