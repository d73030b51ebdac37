"""Targets: `module:factory` and `path/to/file.py:factory`, the functions of the user's that make models and inputs.

Everything that goes wrong here is the user's to mend, so it is an `ArgumentError` of one line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.inspect.values import check_keywords
from fxpipe.inspect.words import an, close_to, describe

if TYPE_CHECKING:
    from torch import nn

FORMS = "module:factory or path/to/file.py:factory"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Target:
    """The name of something in a module or in a file."""

    where: str  # a module's name, or a path that ends in .py
    name: str  # may have dots: `Models.small`

    def __str__(self) -> str:
        return f"{self.where}:{self.name}"

    @property
    def is_file(self) -> bool:
        return self.where.endswith(".py")


def parse_target(text: str) -> Target:
    """`models:make` -> `Target("models", "make")`. The last colon divides: paths may have one of their own."""
    where, _, name = text.rpartition(":")
    target = Target(where, name)
    if not _is_dotted(name) or not (target.is_file or _is_dotted(where)):
        raise ArgumentError(f"{text!r}: expected {FORMS}")
    return target


def load_target(target: Target) -> Any:
    """Import the target's module, or run its file, and return what the name stands for."""
    module = _load_file(Path(target.where)) if target.is_file else _import_module(target.where)
    found: Any = module
    for part in target.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ArgumentError(f"{target.where} has no {target.name!r}{_suggestion(part, found)}") from None
        except Exception as error:  # of a module that imports its parts when they are asked for
            raise ArgumentError(f"loading {target} raised {describe(error)}") from error
    return found


def call_target(target: Target, kwargs: Mapping[str, Any] = NOTHING) -> Any:
    """Load the target and call it with these keyword arguments."""
    found = load_target(target)
    if not callable(found):
        raise ArgumentError(f"{target} is {an(found)}, not a function that can be called")
    check_keywords(found, str(target), kwargs)
    try:
        return found(**kwargs)
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"calling {target} raised {describe(error)}{_place(error)}") from error


def load_model(target: Target, kwargs: Mapping[str, Any] = NOTHING) -> nn.Module:
    """The module that the target makes, or that it is."""
    from torch import nn

    found = load_target(target)
    # A model made when its file is run is no factory; to call it would be to run it.
    is_made = isinstance(found, nn.Module)
    if is_made and kwargs:
        raise ArgumentError(f"--kwargs {next(iter(kwargs))}=...: {target} is a model, not a function that makes one")
    model = found if is_made else call_target(target, kwargs)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{target} returned {an(model)}, expected a torch.nn.Module")
    return model


def _import_module(name: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the target itself is what is missing; a module that it imports is an error in it.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            close = close_to(name, (path.stem for path in Path.cwd().glob("*.py")))
            looked = "looked in the current directory and where Python looks"
            raise ArgumentError(f"no module named {error.name!r} ({looked}){close}") from None
        raise ArgumentError(f"importing {name} raised {describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"importing {name} raised {describe(error)}") from error


@functools.cache  # a model and its inputs often come from one file, which runs once
def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        close = close_to(path.name, (other.name for other in path.parent.glob("*.py")))
        raise ArgumentError(f"no file {str(path)!r}{close}")
    path = path.resolve()
    # As for a script, the modules beside the file can be imported. Its own name has a number in it, so that a file
    # called queue.py stands in nobody's way.
    _put_on_path(str(path.parent))
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, among others, look their own module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ArgumentError(f"running {path.name} raised {describe(error)}") from error
    return module


def _put_on_path(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _suggestion(name: str, holder: object) -> str:
    """Names like this one or, where none is, those the holder's author gave."""
    public = [other for other in dir(holder) if not other.startswith("_")]
    close = close_to(name, public)
    if close:
        return close
    # By `vars`: a module may import its parts when they are asked for, and they are not asked for here.
    here, held = getattr(holder, "__name__", None), getattr(holder, "__dict__", {})
    own = [name for name in public if callable(held.get(name)) and getattr(held[name], "__module__", None) == here]
    return f"; it has {', '.join(own[:8])}{', ...' if len(own) > 8 else ''}" if own else ""


def _place(error: BaseException) -> str:
    """Where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
