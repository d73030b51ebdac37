"""Output files: paths checked before long work, atomic writes, and dataclasses as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

from fxpipe.errors import ArgumentError, ArgumentTypeError, FileError
from fxpipe.utils.polynomial import Polynomial, shortened


def check_output_path(path: str | Path, formats: Sequence[str], what: str) -> str:
    """Returns the format of the suffix of `path`, in lower case, or raises if it is not known or cannot be written."""
    place = _as_path(path)
    known = ", ".join(f".{name}" for name in formats)
    form = place.suffix.removeprefix(".").lower()
    if form not in formats:
        problem = f"the suffix {place.suffix!r} names no format" if place.suffix else "a suffix must name the format"
        raise ArgumentError(f"{what} cannot be saved to {str(path)!r}: {problem}; give one of {known}")
    folder = place.parent
    if place.is_dir():
        raise _file_error(what, path, "it is a directory; give the path of a file")
    if not folder.exists():
        raise _file_error(what, path, f"there is no directory {str(folder)!r}; make it first, or give another path")
    if not folder.is_dir():
        raise _file_error(what, path, f"{str(folder)!r} is no directory; give another path")
    if not os.access(place.resolve().parent, os.W_OK | os.X_OK):
        raise _file_error(what, path, f"the directory {str(folder)!r} may not be written to; give another path")
    if place.exists() and not os.access(place, os.W_OK):
        raise _file_error(what, path, "the file may not be written to; give another path")
    return form


def write_atomically(path: str | Path, content: bytes, what: str) -> None:
    """Writes to a temporary file in the same folder and renames it, so readers see the old or the new content."""
    place = _as_path(path).resolve()  # replaces the target of a link, not the link
    part = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
        os.replace(part, place)
    except OSError as error:
        raise _file_error(what, path, f"{error.strerror or error}; give another path") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _as_path(path: str | Path) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"path={path!r}: expected the path of a file, as str or pathlib.Path")
    return Path(path)


def _file_error(what: str, path: str | Path, why: str) -> FileError:
    return FileError(f"{what} cannot be saved to {str(path)!r}: {why}")


# -- Frozen dataclasses to JSON and back: each value read is checked against the type of its field -------------------

T = TypeVar("T")


def dataclass_to_json(value: Any, polynomial_of: Callable[[Any], Polynomial] | None = None) -> Any:
    """Converts a dataclass to JSON values: its fields by name, or its `to_json`. `polynomial_of` converts formulas."""
    if polynomial_of is not None and hasattr(value, "free_symbols"):
        value = polynomial_of(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: dataclass_to_json(getattr(value, field.name), polynomial_of) for field in fields}
    if isinstance(value, tuple | list):
        return [dataclass_to_json(item, polynomial_of) for item in value]
    return value


def dataclass_from_json(kind: type[T], value: Any, where: str) -> T:
    """Reads a dataclass from the output of `dataclass_to_json`; fields with a default may be missing.

    Raises `ArgumentError` with the location, the value and what was expected.
    """
    result: T = _read(kind, value, where)
    return result


def _read(kind: Any, value: Any, where: str) -> Any:
    if getattr(kind, "__name__", "") == "Expr":  # by name: avoids importing sympy here
        return _read(Polynomial, value, where).formula
    if hasattr(kind, "from_json"):
        try:
            return kind.from_json(value)
        except ArgumentError as error:
            raise ArgumentError(f"{where}: {error}") from None
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        problems = []
        for one in inner:
            try:
                return _read(one, value, where)
            except ArgumentError as error:
                problems.append(str(error))
        raise ArgumentError(" or ".join(problems))
    if origin is tuple:
        if not isinstance(value, list):
            raise ArgumentError(f"{where} is {shortened(value)}: expected a list")
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) != len(value):
            raise ArgumentError(f"{where} has {len(value)} entries: expected {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(_read(one, item, f"{where}[{i}]") for i, (one, item) in pairs)
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ArgumentError(f"{where} is {value}: expected a finite number")
        return value
    if kind is type(None) and value is None:
        return None
    if type(value) is not kind:
        raise ArgumentError(f"{where} is {shortened(value)}: expected {getattr(kind, '__name__', kind)}")
    return value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {shortened(value)}: expected an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := value.keys() - fields.keys():
        raise ArgumentError(f"{where} has the unknown field {min(unknown)!r}")
    for name, field in fields.items():
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_needed and name not in value:
            raise ArgumentError(f"{where} has no field {name!r}")
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})
