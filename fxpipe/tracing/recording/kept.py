"""What modules keep besides tensors and forward reads: numbers, texts, functions, lists and dicts of these.

A graph holds where they are the same again. Lists, tuples and dicts are looked into; of any other object it only counts
that it is the same one: what is changed inside of a configuration or an array is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxpipe.tracing.traced import same_constant

_PLAIN = (bool, int, float, complex, str, type(None))
_MOST_ITEMS = 10_000  # of a list that is looked into
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """An attribute as forward saw it."""

    owner: dict[str, Any]  # the `__dict__` of a module
    name: str
    value: Any

    @classmethod
    def now(cls, owner: dict[str, Any], name: str) -> Kept:
        return cls(owner, name, _copied(owner.get(name), _DEEPEST))

    def is_as_before(self) -> bool:
        return _is_same(self.owner.get(self.name), self.value)


def _copied(value: Any, depth: int) -> Any:
    if not depth or type(value) not in (list, tuple, dict) or len(value) > _MOST_ITEMS:
        return value
    if type(value) is dict:
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    return type(value)(_copied(item, depth - 1) for item in value)


def _is_same(now: Any, before: Any) -> bool:
    if type(now) is not type(before):
        return False
    if type(now) in _PLAIN:
        return same_constant(now, before)
    if type(now) is dict:
        return now is before or (now.keys() == before.keys() and all(_is_same(now[k], before[k]) for k in before))
    if type(now) in (list, tuple):
        return now is before or (len(now) == len(before) and all(map(_is_same, now, before)))
    return now is before
