"""What torch's functions are called, and what an overload says that it changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def opname(target: Any) -> str:
    """The name of a function; that of an overload (`aten.add.Tensor`) without the overload's."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._opname)
    return str(getattr(target, "__name__", target))


def written_by(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an overload writes to, as its schema says."""
    for place, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
