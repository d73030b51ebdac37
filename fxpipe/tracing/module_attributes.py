"""Attributes of modules, besides tensors, that forward reads: numbers, strings, functions, lists and dicts of these.

A graph holds where they are the same again. Lists, tuples, dicts, sets and arrays are looked into; of any other object
it only counts that it is the same one: what is changed inside of a configuration is not seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import MODULE_DICT_KEYS
from fxpipe.utils.equality import equal_values

_PLAIN = (bool, int, float, complex, str, type(None))
_MAX_ITEMS = 10_000  # of a list that is looked into
_MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class AttributeGuard:
    """An attribute as forward saw it."""

    owner: dict[str, Any]  # the `__dict__` of a module
    name: str
    value: Any

    @classmethod
    def now(cls, owner: dict[str, Any], name: str) -> AttributeGuard:
        return cls(owner, name, _copy_of(owner.get(name), _MAX_DEPTH))

    def holds(self) -> bool:
        return _is_unchanged(self.owner.get(self.name), self.value)

    def with_tensors(self, replaced: Callable[[torch.Tensor], torch.Tensor]) -> AttributeGuard:
        """The same of other tensors, in the places of those that containers had."""
        return replace(self, value=_with_tensors(self.value, replaced))


def all_attribute_guards(model: nn.Module) -> tuple[AttributeGuard, ...]:
    """All attributes of its modules that are no tensors."""
    return tuple(
        AttributeGuard.now(module.__dict__, name)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if name not in MODULE_DICT_KEYS and not isinstance(value, torch.Tensor)
    )


@dataclass(frozen=True, slots=True)
class _ContainerCopy:
    """The contents of a container as they were."""

    kind: Any
    items: Any


def _with_tensors(value: Any, replaced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return replaced(value)
    if isinstance(value, weakref.ref) and isinstance(tensor := value(), torch.Tensor):  # how nn.LSTM knows its weights
        return weakref.ref(replaced(tensor))
    if not isinstance(value, _ContainerCopy) or not isinstance(value.items, (dict, tuple)):
        return value
    if isinstance(value.items, dict):
        return replace(value, items={key: _with_tensors(item, replaced) for key, item in value.items.items()})
    return replace(value, items=tuple(_with_tensors(item, replaced) for item in value.items))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= _MAX_ITEMS


def _array_key(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


def _copy_of(value: Any, depth: int) -> Any:
    if _is_array(value):
        return _ContainerCopy(type(value), _array_key(value))
    if not depth or not isinstance(value, (list, tuple, deque, dict, set, frozenset)) or len(value) > _MAX_ITEMS:
        return value
    if isinstance(value, dict):
        return _ContainerCopy(type(value), {key: _copy_of(item, depth - 1) for key, item in value.items()})
    if isinstance(value, (set, frozenset)):
        return _ContainerCopy(type(value), frozenset(value))
    return _ContainerCopy(type(value), tuple(_copy_of(item, depth - 1) for item in value))


def _is_unchanged(now: Any, before: Any) -> bool:
    if not isinstance(before, _ContainerCopy):
        return equal_values(now, before) if type(now) in _PLAIN else now is before
    if type(now) is not before.kind:
        return False
    if _is_array(now):
        return bool(_array_key(now) == before.items)
    if len(now) != len(before.items):
        return False
    if isinstance(now, dict):
        return list(now) == list(before.items) and all(
            _is_unchanged(now[key], item) for key, item in before.items.items()
        )
    if isinstance(now, (set, frozenset)):
        return bool(now == before.items)
    return all(_is_unchanged(item, old) for item, old in zip(now, before.items, strict=True))
