"""Packets between ranks: values of F, gradients of B, tensors of the model.

*Content.* The *layout* (sizes, strides, which values are tensors) is usually the same in each step, so both ends
remember the last one of each packet, until a failure.

    control     24 bytes: whether the layout is the remembered one, the length of a new layout, and a note
    payload     the memory of all tensors in one message, expected early if the layout is known
    layout      if it is new; then the payload again, with the sizes of the layout

With a backend for devices (`device_transfers`), the payload on a device is a second message, which goes through CPU
memory after a new layout. A sender whose layout has changed first sends as many placeholder bytes as are expected.

*Names and order.* F of stage j sends what crosses the cut between stages j and j + 1, B what crosses the cut before
stage j: a packet has the name of the action that produces it. A row receives packets before its actions, from each rank
in the order of that rank's row, since communicators of devices match messages only by order.

*Memory.* The sender keeps a packet until it has been received. For values, the gradients that return confirm it; for
gradients, a number in later packets of values. (gloo reports it only by waiting.)
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fxpipe.distributed.connection import Connection, content_of, pickled
from fxpipe.distributed.device_transfers import DeviceTransfers
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.errors import InternalError
from fxpipe.runtime.run import Fences, Run
from fxpipe.runtime.transport import MemoryForm, is_packable, pack
from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.streams import StreamSchedule

CONTROL_BYTES = 24
ALIGNMENT = 64  # bytes; of each tensor in a payload
Key = tuple[Any, ...]


class PacketValue(NamedTuple):
    """A value, and whether it requires grad on its sender."""

    value: Any
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class TensorLayout:
    dtype: torch.dtype
    bytes: int
    form: MemoryForm
    is_on_device: bool  # True if it is sent from device to device


Layout = tuple[PacketValue, ...]  # with a `TensorLayout` or the pickled value, as bytes, in place of each value
Payload = tuple[torch.Tensor, torch.Tensor | None]  # bytes of tensors: through the host, and from device to device


def payload_bytes(layout: Layout) -> tuple[int, int]:
    """Returns the sizes in bytes of both parts of a payload."""
    ends = [0, 0]
    for one, _ in layout:
        if isinstance(one, TensorLayout):
            ends[one.is_on_device] = _next_start(ends[one.is_on_device]) + one.bytes
    return ends[0], ends[1]


def _next_start(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


def encode(values: Sequence[PacketValue], device: torch.device | None = None) -> tuple[Layout, Payload]:
    """Returns the layout and the payload. Tensors on `device` stay there; the others move to CPU memory."""
    layout: list[PacketValue] = []
    memories: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for value, requires_grad in values:
        content: Any
        if isinstance(value, torch.Tensor) and is_packable(value):
            (memory, form), is_on_device = pack(value), value.device == device
            content = TensorLayout(memory.dtype, memory.nbytes, form, is_on_device)
            memories[is_on_device].append(memory.view(torch.uint8))
        else:
            content = pickled(value.detach() if isinstance(value, torch.Tensor) else value)
        layout.append(PacketValue(content, requires_grad))
    host = _joined(memories[0], torch.device("cpu"))
    return tuple(layout), (host, None if device is None else _joined(memories[1], device))


def _joined(memories: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Joins pieces of memory into one on a device, without a copy if a single piece is already there."""
    if len(memories) == 1:
        return memories[0].to(device)
    ends = [0]
    for memory in memories:
        ends.append(_next_start(ends[-1]) + memory.numel())
    payload = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    for end, memory in zip(ends[1:], memories, strict=True):
        payload[end - memory.numel() : end] = memory
    return payload


def decode(layout: Layout, payload: Payload, device: torch.device) -> list[PacketValue]:
    """Returns the values on a device; tensors of one packet share its memory."""
    parts, ends, values = (payload[0].to(device), payload[1]), [0, 0], []
    for one, requires_grad in layout:
        if isinstance(one, TensorLayout):
            part, start = parts[one.is_on_device], _next_start(ends[one.is_on_device])
            assert part is not None
            ends[one.is_on_device] = start + one.bytes
            value = one.form.unpack(part[start : start + one.bytes].view(one.dtype))
        else:
            value = pickle.loads(one)
            value = value.to(device) if isinstance(value, torch.Tensor) else value
        values.append(PacketValue(value, requires_grad))
    return values


class Mailbox:
    """Sends packets to other ranks and receives their packets. A `key` identifies a packet on both ends."""

    # The last part of a key is a counter: a packet should have the layout of the last one whose other parts are equal.

    def __init__(
        self,
        connection: Connection,
        device: torch.device,
        layouts: dict[Key, Layout],
        transfers: DeviceTransfers | None = None,
    ):
        """Creates the mailbox of a step. `layouts`: the last ones, by key without its counter."""
        self._connection, self._device, self._known, self._transfers = connection, device, layouts, transfers
        self.note = 0  # note of the last packet received

    def send(self, key: Key, tag: int, peer: int, values: Sequence[PacketValue], note: int = 0) -> None:
        """Begins to send a packet. `note`: a number sent with it; see `PacketLink`."""
        connection, known = self._connection, self._known.get(key[:-1])
        layout, payload = encode(values, None if self._transfers is None else self._device)
        self._known[key[:-1]] = layout
        is_known = layout == known
        content = b"" if is_known else pickle.dumps(layout)
        control = torch.tensor([is_known, len(content), note], dtype=torch.int64).view(torch.uint8)
        connection.send(key, peer, 4 * tag, control)
        if is_known:
            self._send_expected(key, tag, peer, payload)
            return
        if known is not None:
            size, on_device = payload_bytes(known)
            placeholder = torch.empty(on_device, dtype=torch.uint8, device=self._device)
            self._send_expected(key, tag, peer, (torch.empty(size, dtype=torch.uint8), placeholder))
        connection.send(key, peer, 4 * tag + 2, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        host, of_device = payload
        whole = host if of_device is None else torch.cat([host, of_device.to("cpu")])
        if whole.numel():
            connection.send(key, peer, 4 * tag + 3, whole)

    def _send_expected(self, key: Key, tag: int, peer: int, payload: Payload) -> None:
        host, of_device = payload
        if host.numel():
            self._connection.send(key, peer, 4 * tag + 1, host)
        if self._transfers is not None and of_device is not None and of_device.numel():
            self._transfers.send(key, peer, of_device)

    def finish_send(self, key: Key, what: str) -> None:
        """Waits until the peer has received a packet, and frees its memory."""
        self._connection.finish_sends(key, what)
        if self._transfers is not None:
            self._transfers.finish_sends(key, what)

    def settle(self) -> None:
        """Waits until all packets are sent, and the device memory of received packets is complete."""
        self._connection.finish_all_sends()
        if self._transfers is not None:
            self._transfers.settle()

    def expect(self, key: Key, tag: int, peer: int) -> None:
        self._connection.expect(peer, 4 * tag, CONTROL_BYTES)
        size, on_device = payload_bytes(self._known.get(key[:-1]) or ())
        if size:
            self._connection.expect(peer, 4 * tag + 1, size)
        if on_device:
            assert self._transfers is not None
            self._transfers.expect(key, peer, on_device)

    def receive(self, key: Key, tag: int, peer: int, what: str) -> list[PacketValue]:
        """Waits for an expected packet and returns it."""
        connection, known = self._connection, self._known.get(key[:-1])
        is_known, length, self.note = connection.receive(peer, 4 * tag, what).view(torch.int64).tolist()
        if is_known and known is None:
            raise InternalError(f"the layout of {what} was taken for known, and is not")
        layout: Layout = known or ()
        host, device = torch.empty(0, dtype=torch.uint8), None
        size, on_device = payload_bytes(layout)
        if size:  # placeholder bytes if the layout is new
            host = connection.receive(peer, 4 * tag + 1, what)
        if on_device:
            assert self._transfers is not None
            device = self._transfers.receive(key, what)
        if not is_known:
            connection.expect(peer, 4 * tag + 2, length)
            layout = pickle.loads(content_of(connection.receive(peer, 4 * tag + 2, what)))
            size, on_device = payload_bytes(layout)
            host = torch.empty(0, dtype=torch.uint8)
            if size + on_device:
                connection.expect(peer, 4 * tag + 3, size + on_device)
                host = connection.receive(peer, 4 * tag + 3, what)
            host, device = host[:size], host[size:].to(self._device, copy=True)
        self._known[key[:-1]] = layout
        return decode(layout, (host, device), self._device)


TAGGED_PACKETS = 1 << 20  # tags repeat after this number, far more than packets in flight
_TAGS = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 1}
JOB_TAG = 2
FIRST_FREE_TAG = 3 * TAGGED_PACKETS


def tag_of(number: int, kind: int) -> int:
    """Returns the tag of a packet. `number`: unique among the packets of this kind in flight."""
    return 3 * (number % TAGGED_PACKETS) + kind


def cut_of(maker: Action) -> int:
    return maker.stage if maker.kind is ActionKind.FORWARD else maker.stage - 1


def neighbour(action: Action, step: int, placement: Sequence[int]) -> Action | None:
    """Returns the action on another rank whose packet an action needs (`step` -1), or that needs its packet (1)."""
    kind, j, i = action
    other = j + step if kind is ActionKind.FORWARD else j - step
    if kind not in _TAGS or not 0 <= other < len(placement) or placement[other] == placement[j]:
        return None
    return Action(kind, other, i)


Received = tuple[tuple[int, Action], ...]  # packets: source rank and maker


@lru_cache(maxsize=32)
def packet_order(rows: Rows, placement: tuple[int, ...], rank: int) -> tuple[Received, Received, tuple[Action, ...]]:
    """Returns the packets of one rank in some rows.

    First those that it receives, each rank's in the order of its row; then the same in the order of this rank's row;
    then the gradients that it sends, for each cut in the order of receipt.
    """
    coming, needed, returned = [], [], []
    for action in (action for row in rows for action in row):
        reader, maker = neighbour(action, 1, placement), neighbour(action, -1, placement)
        if reader is not None and placement[reader.stage] == rank:
            coming.append((placement[action.stage], action))
        if maker is not None and placement[action.stage] == rank:
            needed.append((placement[maker.stage], maker))
        elif maker is not None and maker.kind is ActionKind.BACKWARD and placement[maker.stage] == rank:
            returned.append(maker)
    return tuple(coming), tuple(needed), tuple(returned)


class LossReport(NamedTuple):
    """The loss of a mini-batch of a stream, from the rank of the last stage: values of a packet, with CPU tensors."""

    loss: torch.Tensor  # over all replicas, as the divisor
    divisor: Any  # divides gradients; or None
    shares: torch.Tensor  # by micro-batch
    is_verified: bool  # True if the loss of all outputs together was compared with the sum over micro-batches


class PacketLink(Fences):
    """The packets of one rank in a step or in a stream. Only one row runs here, so nothing else is waited for."""

    def __init__(
        self,
        group: RankGroup,
        mailbox: Mailbox,
        placement: tuple[int, ...],
        name: Key,
        order: StreamSchedule | None = None,
    ):
        """`name`: equal for steps whose packets usually have equal layouts: graph, input sizes. `order`: a stream's."""
        self.mailbox, self.placement, self._name, self._order = mailbox, placement, name, order
        super().__init__()
        self._group = group
        self._coming: defaultdict[int, deque[Action]] = defaultdict(deque)  # by rank, packets not expected yet
        self._needed: defaultdict[int, deque[Action]] = defaultdict(deque)  # by rank, packets not received yet
        self._expected: set[Action] = set()
        self._taken: Counter[int] = Counter()  # by cut, number of packets of gradients received
        self._returned: defaultdict[int, deque[Action]] = defaultdict(deque)  # by cut, sent gradients still kept here
        self._freed: Counter[int] = Counter()  # by cut, number of packets of gradients freed

    def queue(self, rows: Rows, rank: int) -> None:
        """Adds the packets of this rank in the next rows; begins to receive the first of them."""
        coming, needed, returned = packet_order(rows, self.placement, rank)
        for source, maker in coming:
            self._coming[source].append(maker)
        for source, maker in needed:
            self._needed[source].append(maker)
        for maker in returned:
            self._returned[cut_of(maker)].append(maker)
        for source in self._needed:
            self._expect(source)

    def _expect(self, source: int) -> None:
        """Begins to receive packets, in the order in which they are sent, up to the next one that is needed."""
        needed, coming = self._needed[source], self._coming[source]
        while needed and needed[0] not in self._expected:
            maker = coming.popleft()
            self.mailbox.expect(*self._address(maker), source)
            self._expected.add(maker)

    def wait(self, run: Run, action: Action) -> None:
        """Receives the packet that an action needs."""
        if run.failure is not None:
            return
        maker = neighbour(action, -1, self.placement)
        if maker is not None:
            values = self.receive(maker)
            t, k = run.order.place(maker.micro_batch)
            one = run.mini_batches[t]
            if maker.kind is ActionKind.BACKWARD and k == 0:  # the next stage has taken the job of a stream before
                self.mailbox.finish_send(("job", action.stage, t), f"mini-batch {t} of the stream to be taken")
            if more := one.exchange.enter_packet(maker._replace(micro_batch=k), values):
                one.report = LossReport(*(each.value for each in more))
        self._group.doing = str(action)

    def passed(self, run: Run, action: Action) -> None:
        """Sends the packet of an action; the last B of a mini-batch also sends the report of its loss, if any."""
        if neighbour(action, 1, self.placement) is not None:
            t, k = run.order.place(action.micro_batch)
            one = run.mini_batches[t]
            values = one.exchange.take_packet(action._replace(micro_batch=k))
            if one.report is not None and action.kind is ActionKind.BACKWARD and k == one.micro_batches - 1:
                values += map(PacketValue, one.report)
            self.send(action, values)

    def receive(self, maker: Action) -> list[PacketValue]:
        (t, k), source = self._place(maker.micro_batch), self.placement[maker.stage]
        of_mini_batch = "" if t is None else f" of mini-batch {t}"
        what = f"the result of {maker} (stage {maker.stage}, micro-batch {k}{of_mini_batch})"
        values = self.mailbox.receive(*self._address(maker), source, what)
        self._needed[source].popleft()
        self._expected.remove(maker)
        self._expect(source)
        cut = cut_of(maker)
        if maker.kind is ActionKind.FORWARD:
            while self._freed[cut] < self.mailbox.note:  # gradients that the peer has received
                self.mailbox.finish_send(self._address(self._returned[cut].popleft())[0], "its gradients to be taken")
                self._freed[cut] += 1
        else:
            self._taken[cut] += 1
            values_of = Action(ActionKind.FORWARD, cut, maker.micro_batch)
            self.mailbox.finish_send(self._address(values_of)[0], what)
        return values

    def send(self, maker: Action, values: Iterable[PacketValue]) -> None:
        reader = neighbour(maker, 1, self.placement)
        assert reader is not None
        peer, note = self.placement[reader.stage], self._taken[cut_of(maker)]
        self.mailbox.send(*self._address(maker), peer, tuple(values), note)

    def _address(self, maker: Action) -> tuple[Key, int]:
        (kind, _, i), cut = maker, cut_of(maker)
        key = (*self._name, kind, cut, self._place(i)[1], i)
        return key, tag_of(i * len(self.placement) + cut, _TAGS[kind])

    def _place(self, i: int) -> tuple[int | None, int]:
        """Returns the mini-batch of a micro-batch in a stream, and its number there."""
        return (None, i) if self._order is None else self._order.place(i)
