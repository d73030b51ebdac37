"""Transfers between stages: a value from its maker to each user, a gradient to the previous user or to the maker.

One worker fills an entry of the tables, and starts the copy to the reader's device; after a fence another worker reads
and removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fxpipe._torch.autograd import takes_gradient
from fxpipe.errors import InternalError
from fxpipe.rewriting.program import PIPE_INPUT, ReceivedValue
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.step_inputs import StepInputs, TrainedInput
from fxpipe.runtime.transport import PendingCopy, Transport
from fxpipe.runtime.wiring import ValueLink
from fxpipe.scheduling.replicas import replica_of


@dataclass(slots=True)
class BoundaryValue:
    """A value that one stage sends to another."""

    value: Any  # a detached tensor, or another value; in the tables it may be packed for transport
    requires_grad: bool


# Recorded when a value or gradient arrives at a stage or the loss: name, source (None for a gradient), user,
# micro-batch, bytes. A plain tuple, since every action creates some, and few are read.
TransferNote: TypeAlias = tuple[str, int | None, int, int, int]


class Exchange:
    """The values and gradients of one step between stages."""

    def __init__(self, inputs: StepInputs, transport: Transport, grad: bool, has_loss: bool = True):
        """`has_loss`: the last stage computes the loss; else outputs are sent to the device of its parameters."""
        self.bounds, self.transport = inputs.bounds, transport
        stages = inputs.bounds[0].stage_devices
        # By micro-batch and user: the loss is on the device of the last stage.
        self._devices = [
            tuple(own[replica_of(i, len(own))] for own in (*stages, stages[-1] if has_loss else stages[-1][:1]))
            for i in range(len(inputs.bounds))
        ]
        self._may_move = transport.may_copy
        self._values: dict[tuple[int, int, str, int], BoundaryValue] = {}
        self._gradients: dict[tuple[int, str, int], Any] = {}
        self.moved: list[TransferNote] = []
        # For inputs that require grad, by name and micro-batch: the devices and sizes of their gradients.
        self._parts: dict[tuple[str, int], torch.Tensor] = {}
        trained = {(one.place, i) for one in inputs.trained for i in one.micro_batches} if grad else set()
        for i, (bound, leaves) in enumerate(zip(inputs.bounds, inputs.parts, strict=True)):
            for place, name in enumerate(bound.program.inputs):
                if name is not None:
                    self._enter(name, i, leaves[place], (place, i) in trained)

    def _enter(self, name: str, i: int, part: Any, wants: bool) -> None:
        """Enters an input, which is sent when it is requested."""
        part = part.detach() if isinstance(part, torch.Tensor) else part
        for user in self.bounds[i].wiring.users.get((PIPE_INPUT, name), ()):
            self._values[user, PIPE_INPUT, name, i] = BoundaryValue(part, wants)
        if wants:
            self._parts[name, i] = part

    def send(self, maker: int, name: str, i: int, value: Any) -> None:
        wants = False
        if isinstance(value, torch.Tensor):
            wants, value = takes_gradient(value), value.detach()
        sent: dict[torch.device, Any] = {}
        for user in self.bounds[i].wiring.users[maker, name]:
            device = self._devices[i][user]
            if device not in sent:
                sent[device] = self.transport.start_copy(value, device) if self._may_move else value
            self._values[user, maker, name, i] = BoundaryValue(sent[device], wants)

    def take(self, user: int, link: ValueLink, i: int) -> BoundaryValue:
        """Removes a value that `user` receives, on its device; there is no other reader."""
        source, name = link.value.source, link.value.name
        value = self._values.pop((user, source, name, i))
        if self._may_move and (source == PIPE_INPUT or isinstance(value.value, PendingCopy)):
            value.value = self.transport.open(value.value, self._devices[i][user])
        if source != PIPE_INPUT:
            self.moved.append((name, source, user, i, boundary_value_bytes(value.value)))
        return value

    def send_gradient(self, link: ValueLink, i: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        key = (link.gradient_target, link.value.name, i)
        if key in self._gradients:
            raise InternalError(f"two gradients for {link.value.name} at stage {link.gradient_target}, micro-batch {i}")
        if self._may_move:
            is_input = link.gradient_target == PIPE_INPUT
            target = self._parts[link.value.name, i].device if is_input else self._devices[i][link.gradient_target]
            gradient = self.transport.start_copy(gradient, target)
        self._gradients[key] = gradient

    def take_gradient(self, user: int, name: str, i: int) -> torch.Tensor | None:
        """Removes the gradient of a value that stage `user` computes or uses, on its device."""
        gradient: torch.Tensor | None = self._gradients.pop((user, name, i), None)
        if gradient is not None:
            gradient = self.transport.open(gradient, self._devices[i][user]) if self._may_move else gradient
            self.moved.append((name, None, user, i, boundary_value_bytes(gradient)))
        return gradient

    def enter_gradients(self, output: ReceivedValue, gradients: Sequence[torch.Tensor | None]) -> None:
        """Enters the gradients of a drop-in's output, by micro-batch. They are sent when requested."""
        link = next(link for link in self.bounds[0].wiring.links[-1] if link.value == output)
        for i, gradient in enumerate(gradients):
            key = (link.gradient_target, link.value.name, i)
            if gradient is not None:  # a value may occur in the output twice
                self._gradients[key] = add_gradient(self._gradients.get(key), gradient)

    def input_gradients(self, trained: TrainedInput) -> torch.Tensor | None:
        parts, gradients, dim = [], [], trained.dim
        for i in trained.micro_batches:
            name = self.bounds[i].program.inputs[trained.place]
            assert name is not None
            parts.append(self._parts.pop((name, i)))
            gradients.append(self._gradients.pop((PIPE_INPUT, name, i), None))
        if self._may_move:
            device = trained.tensor.device
            gradients = [None if g is None else self.transport.open(g, device) for g in gradients]
        if all(g is None for g in gradients):
            return None
        if dim is None:
            return sum(g for g in gradients if g is not None)  # type: ignore[no-any-return]
        return torch.cat([torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parts, strict=True)], dim)


_WITH_VALUES = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)


def boundary_value_bytes(value: Any) -> int:
    """Returns the bytes of a tensor, or of the values of a sparse or jagged tensor; otherwise 0."""
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is torch.strided:
        return value.nbytes
    if value.layout is torch.sparse_coo:
        return value._values().nbytes
    return value.values().nbytes if value.layout in _WITH_VALUES else 0
