"""Values on their way between ranks: a list of values is a layout and a payload.

The receiver must know what comes before it can receive it: sizes, strides, which values are tensors at all. That is the
*layout*. It is the same in each step, as a rule, so both ends remember that of the step before:

    control     24 bytes: is the layout that of the last step, or how many bytes has the new one; and a note
    payload     the memory of all tensors in one message, expected early where the layout is known
    layout      where it is a new one; then the payload once more, with the sizes that it says

A sender whose layout has changed cannot call back what the receiver expects, so it sends that many bytes of nothing
first. What is remembered changes at the end of a step only, so both ends always agree on it. Nothing is predicted:
sizes that depend on values, gradients that are missing, flags and None are layouts like any others, and strides are
those of the sender, as within one process (`runtime.transport`).
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxpipe.distributed.connection import Connection
from fxpipe.errors import InternalError
from fxpipe.runtime.transport import PackedTensor, is_packable, pack

CONTROL_BYTES = 24
ALIGNMENT = 64  # bytes, of each tensor in a payload
MAX_KEYS = 4096  # of layouts that are remembered


class PacketValue(NamedTuple):
    """A value, and whether it requires grad where it was made."""

    value: Any
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A plain tensor in a payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int  # of its memory
    is_gathered: bool
    is_conj: bool
    is_neg: bool
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PickledLayout:
    """Anything else: the layout holds the value itself."""

    content: bytes
    requires_grad: bool


Layout = tuple[TensorLayout | PickledLayout, ...]


def payload_bytes(layout: Layout) -> int:
    end = 0
    for one in layout:
        if isinstance(one, TensorLayout):
            end = _next_start(end) + one.bytes
    return end


def _next_start(end: int) -> int:
    """Returns the place behind `end` where another tensor may begin."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def encode(values: Sequence[PacketValue]) -> tuple[Layout, torch.Tensor]:
    """Returns the layout and the payload, in memory of the CPU."""
    layout: list[TensorLayout | PickledLayout] = []
    memories: list[torch.Tensor] = []
    for value, requires_grad in values:
        if isinstance(value, torch.Tensor) and is_packable(value):
            packed = pack(value)
            memory = packed.memory
            layout.append(
                TensorLayout(
                    memory.dtype,
                    packed.shape,
                    tuple(packed.stride),
                    memory.numel(),
                    packed.is_gathered,
                    packed.is_conj,
                    packed.is_neg,
                    requires_grad,
                )
            )
            memories.append(memory.view(torch.uint8) if memory.numel() else memory.new_empty(0, dtype=torch.uint8))
        else:
            value = value.detach() if isinstance(value, torch.Tensor) else value
            layout.append(PickledLayout(pickle.dumps(value), requires_grad))
    if len(memories) == 1:
        return tuple(layout), memories[0].to("cpu")
    payload = torch.empty(payload_bytes(tuple(layout)), dtype=torch.uint8, device="cpu")
    end = 0
    for memory in memories:
        start = _next_start(end)
        end = start + memory.numel()
        payload[start:end] = memory
    return tuple(layout), payload


def decode(layout: Layout, payload: torch.Tensor, device: torch.device) -> list[PacketValue]:
    """Returns the values, on a device; tensors of one packet share its memory."""
    payload = payload.to(device)
    values, start = [], 0
    for one in layout:
        if isinstance(one, PickledLayout):
            value = pickle.loads(one.content)
            value = value.to(device) if isinstance(value, torch.Tensor) else value
        else:
            memory = payload[start : start + one.bytes].view(one.dtype)
            packed = PackedTensor(memory, one.shape, one.stride, one.is_gathered, one.is_conj, one.is_neg)
            value = packed.unpack()
            start = _next_start(start + one.bytes)
        values.append(PacketValue(value, one.requires_grad))
    return values


class Mailbox:
    """Sends packets to other ranks and receives theirs. `key` says what a packet is, and is the same at both ends."""

    def __init__(self, connection: Connection, device: torch.device, layouts: dict[Hashable, Layout]):
        """`layouts`: of the last steps, by key; those of this step are put there by `remember`."""
        self._connection, self._device, self._known = connection, device, layouts
        self._new: dict[Hashable, Layout] = {}
        self.note = 0  # of the packet that was received last

    def send(self, key: Hashable, tag: int, peer: int, values: Sequence[PacketValue], note: int = 0) -> None:
        """Begins to send a packet. `note`: a number that goes with it; see `RankRow`."""
        connection, known = self._connection, self._known_layout(key)
        layout, payload = encode(values)
        self._note_layout(key, layout)
        is_known = layout == known
        content = b"" if is_known else pickle.dumps(layout)
        control = torch.tensor([is_known, len(content), note], dtype=torch.int64).view(torch.uint8)
        connection.send(key, peer, 4 * tag, control)
        if not is_known:
            if known is not None and payload_bytes(known):
                connection.send(key, peer, 4 * tag + 1, torch.empty(payload_bytes(known), dtype=torch.uint8))
            connection.send(key, peer, 4 * tag + 2, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if payload.numel():
            connection.send(key, peer, 4 * tag + (1 if is_known else 3), payload)

    def finish_send(self, key: Hashable, what: str) -> None:
        """Returns when a packet has been taken; its memory can be given back."""
        self._connection.finish_sends(key, what)

    def expect(self, key: Hashable, tag: int, peer: int) -> None:
        """Begins to receive a packet."""
        self._connection.expect(peer, 4 * tag, CONTROL_BYTES)
        known = self._known_layout(key)
        if known is not None and payload_bytes(known):
            self._connection.expect(peer, 4 * tag + 1, payload_bytes(known))

    def receive(self, key: Hashable, tag: int, peer: int, what: str) -> list[PacketValue]:
        """Returns a packet that was expected, when it has come."""
        connection, known = self._connection, self._known_layout(key)
        control = connection.receive(peer, 4 * tag, what).view(torch.int64)
        is_known, size, self.note = control.tolist()
        payload = torch.empty(0, dtype=torch.uint8)
        if known is not None and payload_bytes(known):
            payload = connection.receive(peer, 4 * tag + 1, what)
        if is_known:
            if known is None:
                raise InternalError(f"the layout of {what} was taken for known, and is not")
            layout = known
        else:
            connection.expect(peer, 4 * tag + 2, size)
            layout = pickle.loads(bytes(connection.receive(peer, 4 * tag + 2, what).tolist()))
            payload = torch.empty(0, dtype=torch.uint8)
            if payload_bytes(layout):
                connection.expect(peer, 4 * tag + 3, payload_bytes(layout))
                payload = connection.receive(peer, 4 * tag + 3, what)
        self._note_layout(key, layout)
        return decode(layout, payload, self._device)

    def _known_layout(self, key: Hashable) -> Layout | None:
        """Returns the layout that both ends take a packet to have before it has come."""
        return self._known.get(key)

    def _note_layout(self, key: Hashable, layout: Layout) -> None:
        self._new[key] = layout

    def remember(self) -> None:
        """Remembers the layouts of a step that has ended well on all ranks."""
        self._known.update(self._new)
