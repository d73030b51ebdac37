"""Under which names a graph reads the tensors that it has not made: the model's, found by identity, and constants."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import nn

from fxpipe.tracing.snapshot import held_in_containers, slots_of


class Origins:
    """The names of such tensors. A tensor keeps its name while it lives: those that only this knows are held."""

    def __init__(self, model: nn.Module, held: Mapping[str, torch.Tensor]):
        """`held`: further ones, by name."""
        slots = slots_of(model)
        self._own: dict[int, str] = {}
        # A tensor of several names goes by that of the parameter, under which optimizers and `state_dict` know it.
        for slot, tensor in sorted(slots.items(), key=lambda item: item[0].kind != "parameter"):
            self._own.setdefault(id(tensor), slot.name)
        self._others: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in (*held_in_containers(model).items(), *held.items()):
            self._others.setdefault(id(tensor), (name, tensor))
        taken = {slot.name for slot in slots}.union(name for name, _ in self._others.values())
        self._free = (name for n in itertools.count() if (name := f"constant_{n}") not in taken)

    def own(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that a module holds by itself: a parameter, a buffer, an attribute."""
        return self._own.get(id(tensor))

    def other(self, tensor: torch.Tensor) -> str | None:
        """The name of one in a container of a module, of one that was given, or of a constant."""
        name, _ = self._others.get(id(tensor), (None, tensor))
        return name

    def add(self, tensor: torch.Tensor) -> str:
        """Makes a tensor a constant, and returns its name."""
        name = next(self._free)
        self._others[id(tensor)] = (name, tensor)
        return name
