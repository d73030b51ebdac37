"""Values on their way between ranks: a packet is a layout and a payload.

The receiver must know the *layout* first: sizes, strides, which values are tensors. As a rule it is the same in each
step, so both ends remember it:

    control     24 bytes: is the layout that of the last step, or the length of a new one; and a note
    payload     the memory of all tensors in one message, expected early if the layout is known
    layout      if it is new; then the payload again, with the sizes of the layout

If the devices of the ranks have a backend (`device_transfers`), the payload of what is on a device is a second message,
from device to device. A payload after a new layout always goes through memory of the CPU, since communicators of
devices match messages by their order alone.

A sender whose layout has changed cannot call back what the receiver expects, so it first sends that many bytes of
nothing. What is remembered changes only at the end of a step, so both ends agree. Nothing is predicted: sizes that
depend on values, missing gradients, flags and None are layouts like any others, and strides are those of the sender.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxpipe.distributed.connection import Connection, content_of, pickled
from fxpipe.distributed.device_transfers import DeviceTransfers
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
    is_on_device: bool  # it goes from device to device

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PickledLayout:
    """Anything else: the layout holds the value itself."""

    content: bytes
    requires_grad: bool


Layout = tuple[TensorLayout | PickledLayout, ...]


def payload_bytes(layout: Layout, on_device: bool = False) -> int:
    """Returns the bytes of a payload: of the tensors that go through memory of the CPU, or of the others."""
    end = 0
    for one in layout:
        if isinstance(one, TensorLayout) and one.is_on_device == on_device:
            end = _next_start(end) + one.bytes
    return end


def _next_start(end: int) -> int:
    """Returns the place behind `end` where another tensor may begin."""
    return -(-end // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Payload:
    """The memory of the tensors of a packet, as bytes."""

    host: torch.Tensor
    device: torch.Tensor | None = None  # of those that go from device to device


def encode(values: Sequence[PacketValue], device: torch.device | None = None) -> tuple[Layout, Payload]:
    """Returns the layout and the payload. `device`: whose tensors stay there; the others are in memory of the CPU."""
    layout: list[TensorLayout | PickledLayout] = []
    memories: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for value, requires_grad in values:
        if isinstance(value, torch.Tensor) and is_packable(value):
            packed = pack(value)
            memory, is_on_device = packed.memory, value.device == device
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
                    is_on_device,
                )
            )
            memories[is_on_device].append(
                memory.view(torch.uint8) if memory.numel() else memory.new_empty(0, dtype=torch.uint8)
            )
        else:
            value = value.detach() if isinstance(value, torch.Tensor) else value
            layout.append(PickledLayout(pickled(value), requires_grad))
    host = _joined(memories[False], torch.device("cpu"))
    return tuple(layout), Payload(host, None if device is None else _joined(memories[True], device))


def _joined(memories: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns pieces of memory as one, on a device: itself, if there is one, which is there."""
    if len(memories) == 1:
        return memories[0].to(device)
    starts, end = [], 0
    for memory in memories:
        starts.append(_next_start(end))
        end = starts[-1] + memory.numel()
    payload = torch.empty(end, dtype=torch.uint8, device=device)
    for start, memory in zip(starts, memories, strict=True):
        payload[start : start + memory.numel()] = memory
    return payload


def decode(layout: Layout, payload: Payload, device: torch.device) -> list[PacketValue]:
    """Returns the values, on a device; tensors of one packet share its memory."""
    parts = {False: payload.host.to(device), True: payload.device}
    ends = {False: 0, True: 0}
    values = []
    for one in layout:
        if isinstance(one, PickledLayout):
            value = pickle.loads(one.content)
            value = value.to(device) if isinstance(value, torch.Tensor) else value
        else:
            part, start = parts[one.is_on_device], _next_start(ends[one.is_on_device])
            assert part is not None
            ends[one.is_on_device] = start + one.bytes
            memory = part[start : start + one.bytes].view(one.dtype)
            packed = PackedTensor(memory, one.shape, one.stride, one.is_gathered, one.is_conj, one.is_neg)
            value = packed.unpack()
        values.append(PacketValue(value, one.requires_grad))
    return values


class Mailbox:
    """Sends packets to other ranks and receives theirs. `key` says what a packet is, and is the same at both ends."""

    def __init__(
        self,
        connection: Connection,
        device: torch.device,
        layouts: dict[Hashable, Layout],
        transfers: DeviceTransfers | None = None,
    ):
        """Makes the mailbox of a step.

        Args:
            layouts: of the last steps, by key; those of this step are put there by `remember`.
            transfers: from device to device, if this rank and all others have them.
        """
        self._connection, self._device, self._known, self._transfers = connection, device, layouts, transfers
        self._new: dict[Hashable, Layout] = {}
        self.note = 0  # of the packet that was received last

    def send(self, key: Hashable, tag: int, peer: int, values: Sequence[PacketValue], note: int = 0) -> None:
        """Begins to send a packet. `note`: a number that goes with it; see `packet_link`."""
        connection, known = self._connection, self._known_layout(key)
        layout, payload = encode(values, None if self._transfers is None else self._device)
        self._note_layout(key, layout)
        is_known = layout == known
        content = b"" if is_known else pickle.dumps(layout)
        control = torch.tensor([is_known, len(content), note], dtype=torch.int64).view(torch.uint8)
        connection.send(key, peer, 4 * tag, control)
        if is_known:
            self._send_expected(key, tag, peer, payload)
            return
        if known is not None:
            nothing = torch.empty(payload_bytes(known), dtype=torch.uint8)
            of_device = torch.empty(payload_bytes(known, True), dtype=torch.uint8, device=self._device)
            self._send_expected(key, tag, peer, Payload(nothing, of_device))
        connection.send(key, peer, 4 * tag + 2, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        whole = payload.host if payload.device is None else torch.cat([payload.host, payload.device.to("cpu")])
        if whole.numel():
            connection.send(key, peer, 4 * tag + 3, whole)

    def _send_expected(self, key: Hashable, tag: int, peer: int, payload: Payload) -> None:
        """Begins to send what the receiver expects."""
        if payload.host.numel():
            self._connection.send(key, peer, 4 * tag + 1, payload.host)
        if self._transfers is not None and payload.device is not None and payload.device.numel():
            self._transfers.send(key, peer, payload.device)

    def finish_send(self, key: Hashable, what: str) -> None:
        """Returns when a packet has been taken; its memory can be given back."""
        self._connection.finish_sends(key, what)
        if self._transfers is not None:
            self._transfers.finish_sends(key, what)

    def settle(self) -> None:
        """Returns when all packets have been taken, and all that were received are there."""
        self._connection.finish_all_sends()
        if self._transfers is not None:
            self._transfers.settle()

    def expect(self, key: Hashable, tag: int, peer: int) -> None:
        """Begins to receive a packet."""
        self._connection.expect(peer, 4 * tag, CONTROL_BYTES)
        known = self._known_layout(key) or ()
        if size := payload_bytes(known):
            self._connection.expect(peer, 4 * tag + 1, size)
        if size := payload_bytes(known, True):
            assert self._transfers is not None
            self._transfers.expect(key, peer, size)

    def receive(self, key: Hashable, tag: int, peer: int, what: str) -> list[PacketValue]:
        """Returns a packet that was expected, when it has come."""
        connection, known = self._connection, self._known_layout(key)
        control = connection.receive(peer, 4 * tag, what).view(torch.int64)
        is_known, size, self.note = control.tolist()
        payload = self._received(key, tag, peer, known or (), what)
        if is_known:
            if known is None:
                raise InternalError(f"the layout of {what} was taken for known, and is not")
            layout = known
        else:
            connection.expect(peer, 4 * tag + 2, size)
            layout = pickle.loads(content_of(connection.receive(peer, 4 * tag + 2, what)))
            payload = self._received_late(tag, peer, layout, what)
        self._note_layout(key, layout)
        return decode(layout, payload, self._device)

    def _known_layout(self, key: Hashable) -> Layout | None:
        """Returns the layout that both ends take a packet to have before it has come."""
        return self._known.get(key)

    def _note_layout(self, key: Hashable, layout: Layout) -> None:
        self._new[key] = layout

    def _received(self, key: Hashable, tag: int, peer: int, known: Layout, what: str) -> Payload:
        """Returns what was expected. (It is nothing, where the layout is a new one.)"""
        host, device = torch.empty(0, dtype=torch.uint8), None
        if payload_bytes(known):
            host = self._connection.receive(peer, 4 * tag + 1, what)
        if payload_bytes(known, True):
            assert self._transfers is not None
            device = self._transfers.receive(key, what)
        return Payload(host, device)

    def _received_late(self, tag: int, peer: int, layout: Layout, what: str) -> Payload:
        """Returns the payload behind a new layout."""
        size, rest = payload_bytes(layout), payload_bytes(layout, True)
        whole = torch.empty(0, dtype=torch.uint8)
        if size + rest:
            self._connection.expect(peer, 4 * tag + 3, size + rest)
            whole = self._connection.receive(peer, 4 * tag + 3, what)
        return Payload(whole[:size], whole[size:].to(self._device, copy=True))

    def remember(self) -> None:
        """Remembers the layouts of a step that has ended well on all ranks."""
        self._known.update(self._new)
