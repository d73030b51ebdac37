"""Frozen dataclasses as JSON and back: what is read is checked piece by piece against the types of the fields."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar, Union

from fxpipe.errors import ArgumentError

T = TypeVar("T")


def from_document(kind: type[T], value: Any, where: str) -> T:
    """The dataclass of this kind that `dataclasses.asdict` made `value` of; fields with a default may be missing.

    Raises:
        ArgumentError: names the place, what is there and what was expected.
    """
    found: T = _read(kind, value, where)
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_one_of(inner, value, where)
    if origin is tuple:
        return _read_tuple(inner, value, where)
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ArgumentError(f"{where} is {value}: expected a finite number")
        return value
    if kind is type(None) and value is None:
        return None
    if type(value) is not kind:
        raise ArgumentError(f"{where} is {_short(value)}: expected {getattr(kind, '__name__', kind)}")
    return value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {_short(value)}: expected an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := value.keys() - fields.keys():
        raise ArgumentError(f"{where} has the unknown field {min(unknown)!r}")
    for name, field in fields.items():
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_needed and name not in value:
            raise ArgumentError(f"{where} has no field {name!r}")
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _read_tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ArgumentError(f"{where} is {_short(value)}: expected a list")
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(value):
        raise ArgumentError(f"{where} has {len(value)} entries: expected {len(kinds)}")
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _read_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return _read(kind, value, where)
        except ArgumentError as error:
            problems.append(str(error))
    raise ArgumentError(" or ".join(problems))


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
