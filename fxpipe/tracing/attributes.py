"""The tensors of a model that a graph reads: which they must go on to be for the graph to hold.

Values may change, and so may the objects: a graph finds them by name. Another shape or dtype is another graph. And
where one tensor stood under two names, the graph reads it by one of them: these must stay one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.tracing.snapshot import slots_of


@dataclass(frozen=True, slots=True)
class Attribute:
    """A tensor as it was when the model was traced."""

    store: dict[str, Any]  # of its module
    key: str
    shape: torch.Size
    dtype: torch.dtype
    others: tuple[tuple[dict[str, Any], str], ...]  # where it stood as well

    def is_as_before(self) -> bool:
        now = self.store.get(self.key)
        return (
            isinstance(now, torch.Tensor)
            and now.shape == self.shape
            and now.dtype == self.dtype
            and all(store.get(key) is now for store, key in self.others)
        )


def are_as_before(attributes: Sequence[Attribute]) -> bool:
    """Are they, and still different tensors? Ties made later are other ones."""
    apart = len({id(a.store.get(a.key)) for a in attributes}) == len(attributes)
    return apart and all(attribute.is_as_before() for attribute in attributes)


def requires_grad(model: nn.Module) -> tuple[bool, ...]:
    """Which of its parameters do: another graph for a forward that asks, no matter for any other."""
    return tuple(p.requires_grad for p in model.parameters())


def attributes_of(model: nn.Module, names: Iterable[str]) -> tuple[Attribute, ...]:
    """Those of these names that the model holds."""
    wanted = set(names)
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    found = slots_of(model)
    for slot, tensor in found.items():
        places.setdefault(id(tensor), []).append((slot.store(model), slot.key))
    return tuple(
        Attribute(
            slot.store(model),
            slot.key,
            tensor.shape,
            tensor.dtype,
            tuple((s, k) for s, k in places[id(tensor)] if s is not slot.store(model) or k != slot.key),
        )
        for slot, tensor in found.items()
        if slot.name in wanted
    )
