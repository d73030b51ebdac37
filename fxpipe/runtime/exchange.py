"""What stages hand each other: values forward, gradients back.

The tables are filled by one worker and emptied by another, each entry behind a fence; an entry has one reader, and is
gone with it. A value goes from its maker to each user; a gradient from a user to the next earlier one or to the maker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxpipe.errors import InternalError
from fxpipe.rewriting.program import INPUT
from fxpipe.runtime.assembly import Assembly
from fxpipe.runtime.wiring import Link


@dataclass(slots=True)
class Value:
    """What one stage hands to another."""

    value: Any  # a tensor is detached
    requires_grad: bool


class Moved(NamedTuple):
    """Noted when a value, or a gradient, has come to a stage or the loss."""

    value: str
    source: int | None  # where the value was made; None for a gradient
    user: int
    micro_batch: int
    bytes: int


class Exchange:
    """The values and gradients of one step that are on their way."""

    def __init__(self, assembly: Assembly, inputs: Sequence[Sequence[Any]]):
        """`inputs`: for each micro-batch its part of the input leaves."""
        self.assembly, self.inputs = assembly, inputs
        self._places = {name: place for place, name in enumerate(assembly.program.inputs) if name is not None}
        self._values: dict[tuple[int, int, str, int], Value] = {}
        self._gradients: dict[tuple[int, str, int], torch.Tensor] = {}
        self.moved: list[Moved] = []

    # -- forward -----------------------------------------------------------------------------------------------------

    def send(self, maker: int, name: str, i: int, value: Any) -> None:
        bare = value.detach() if isinstance(value, torch.Tensor) else value
        for user in self.assembly.wiring.users[maker, name]:
            self._values[user, maker, name, i] = Value(bare, requires_grad(value))

    def take(self, user: int, link: Link, i: int) -> Value:
        """What `user` receives, on its device; nobody else will ask for it."""
        source, name = link.value.source, link.value.name
        if source == INPUT:
            given = self.inputs[i][self._places[name]]
            value = Value(given.detach(), given.requires_grad and self.assembly.state.grad)
        else:
            value = self._values.pop((user, source, name, i))
            self.moved.append(Moved(name, source, user, i, bytes_of(value.value)))
        if isinstance(value.value, torch.Tensor):
            devices = self.assembly.devices
            value.value = on(value.value, devices[min(user, len(devices) - 1)])
        return value

    # -- backward ----------------------------------------------------------------------------------------------------

    def send_gradient(self, link: Link, i: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        key = (link.earlier, link.value.name, i)
        if key in self._gradients:
            raise InternalError(f"two gradients for {link.value.name} at stage {link.earlier}, micro-batch {i}")
        self._gradients[key] = gradient

    def take_gradient(self, user: int, name: str, i: int) -> torch.Tensor | None:
        """What has come back for a value that stage `user` has made or uses, on its device."""
        gradient = self._gradients.pop((user, name, i), None)
        if gradient is None:
            return None
        self.moved.append(Moved(name, None, user, i, bytes_of(gradient)))
        return on(gradient, self.assembly.devices[user])

    def enter_gradients(self, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The drop-in: the gradients of an output, one for each micro-batch."""
        output = self.assembly.program.outputs[place]
        link = next(link for link in self.assembly.wiring.links[-1] if link.value == output)
        for i, gradient in enumerate(gradients):
            key = (link.earlier, link.value.name, i)
            if gradient is not None:  # a value may stand in the output twice
                self._gradients[key] = gradient if key not in self._gradients else self._gradients[key] + gradient

    def input_gradients(self, place: int, like: torch.Tensor) -> torch.Tensor | None:
        """Of an input that requires grad."""
        name, dim = self.assembly.program.inputs[place], self.assembly.in_dims[place]
        assert name is not None
        found = [self._gradients.pop((INPUT, name, i), None) for i in range(len(self.inputs))]
        if all(g is None for g in found):
            return None
        if dim is None:
            total: Any = sum(g.to(like.device) for g in found if g is not None)
            return total  # type: ignore[no-any-return]
        parts = [part[place] for part in self.inputs]
        filled = [torch.zeros_like(p) if g is None else g.to(like.device) for g, p in zip(found, parts, strict=True)]
        return torch.cat(filled, dim)


def on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy to a GPU need not be waited for, its stream does; one to the CPU would be read before it is there."""
    return tensor.to(device, non_blocking=device.type == "cuda")


_WITH_VALUES = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)


def bytes_of(value: Any) -> int:
    """Of a tensor; of the values of a sparse or jagged one; 0 where it has neither."""
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is torch.strided:
        return value.nbytes
    if value.layout is torch.sparse_coo:
        return value._values().nbytes
    return value.values().nbytes if value.layout in _WITH_VALUES else 0


def requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
