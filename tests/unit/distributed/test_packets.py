"""Packets: what is sent comes out as it was, to the strides; layouts are sent when they are new, and only then."""

from collections import deque

import pytest
import torch

from fxpipe.distributed.packets import Mailbox, PacketValue, Payload, decode, encode, payload_bytes
from fxpipe.distributed.rank_stream import StreamMailbox
from fxpipe.errors import InternalError

CPU = torch.device("cpu")
BASE = torch.arange(24.0).view(4, 6)
VALUES = {
    "dense": BASE,
    "transposed": BASE.t(),
    "columns": BASE[:, 1:3],
    "expanded": torch.ones(3, 1).expand(3, 5),
    "offset": BASE[2],
    "bool": BASE > 3,
    "half": BASE.bfloat16(),
    "complex": torch.complex(BASE, BASE).conj(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2),
    "sparse": torch.eye(3).to_sparse(),
    "none": None,
    "flag": True,
    "tree": (1, "a", [torch.ones(2)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_out_as_it_went_in(name):
    sent = [PacketValue(torch.ones(3)), PacketValue(VALUES[name], True), PacketValue(torch.ones(1, dtype=torch.bool))]
    for values in (sent, sent[1:2]):
        layout, payload = encode(values)
        assert payload.host.numel() == payload_bytes(layout)
        received = decode(layout, Payload(payload.host.clone()), CPU)[-len(values) :][1 if len(values) > 1 else 0]
        assert received.requires_grad
        expected = VALUES[name]
        if not isinstance(expected, torch.Tensor):
            assert str(received.value) == str(expected)
            continue
        assert received.value.dtype == expected.dtype
        assert torch.equal(received.value.to_dense(), expected.to_dense())
        if expected.layout is torch.strided:
            assert received.value.stride() == expected.stride()
            assert received.value.is_conj() == expected.is_conj()


def test_one_dense_tensor_is_sent_from_where_it_is():
    layout, payload = encode([PacketValue(BASE), PacketValue(3)])
    assert payload.host.data_ptr() == BASE.data_ptr()
    assert decode(layout, payload, CPU)[1].value == 3


class Wire:
    """Both ends of a connection, and the sizes of all messages."""

    def __init__(self):
        self.messages, self.expected, self.sizes = {}, {}, []

    def send(self, key, peer, tag, memory):
        self.messages.setdefault(tag, deque()).append(memory.clone())
        self.sizes.append(memory.numel())

    def expect(self, peer, tag, size):
        assert tag not in self.expected
        self.expected[tag] = size

    def receive(self, peer, tag, what):
        message = self.messages[tag].popleft()
        assert self.expected.pop(tag) == message.numel()
        return message


class DeviceWire:
    """A communicator: messages come in the order in which they were sent, into what was expected in this order."""

    def __init__(self):
        self.messages, self.expected, self.sizes = deque(), {}, []

    def send(self, key, peer, memory):
        self.messages.append(memory.clone())
        self.sizes.append(memory.numel())

    def expect(self, key, peer, size):
        self.expected[key] = len(self.expected), size

    def receive(self, key, what):
        place, size = self.expected[key]
        assert self.messages[place].numel() == size
        return self.messages[place]

    def clear(self):
        for one in (self.messages, self.expected, self.sizes):
            one.clear()


class Pair:
    def __init__(self, transfers=None):
        self.wire, self.layouts, self.transfers = Wire(), ({}, {}), transfers

    def step(self, *packets):
        """A step, in which packets are sent, and expected before they are; returns what arrives."""
        self.wire.sizes.clear()
        if self.transfers is not None:
            self.transfers.clear()
        sender, receiver = (Mailbox(self.wire, CPU, known, self.transfers) for known in self.layouts)
        for i in range(len(packets)):
            receiver.expect(("values", i), i, 0)
        for i, values in enumerate(packets):
            sender.send(("values", i), i, 1, [PacketValue(value) for value in values])
        arrived = {
            i: [one.value for one in receiver.receive(("values", i), i, 0, "it")] for i in reversed(range(len(packets)))
        }
        assert not self.wire.expected
        assert not any(self.wire.messages.values())
        for mailbox in (sender, receiver):
            mailbox.remember()
        return [arrived[i] for i in range(len(packets))]


def test_the_second_step_sends_a_control_and_the_payload_alone():
    pair = Pair()
    pair.step([torch.ones(100)])
    assert len(pair.wire.sizes) == 3
    pair.step([torch.ones(100)])
    assert pair.wire.sizes == [24, 400]


def test_a_layout_that_changes_arrives_all_the_same():
    pair = Pair()
    first = [torch.ones(2), None], [torch.ones(3), 1]
    second = [None, torch.ones(5)], [torch.ones(3), True]
    for packets in (first, second, second, first, ([], [])):
        arrived = pair.step(*packets)
        for values, expected in zip(arrived, packets, strict=True):
            assert [str(value) for value in values] == [str(value) for value in expected]


def test_layouts_that_only_one_end_knows_are_an_error():
    pair = Pair()
    pair.step([torch.ones(2)])
    pair.layouts[1].clear()
    with pytest.raises(InternalError):
        pair.step([torch.ones(2)])


def test_tensors_of_a_device_go_through_the_host_once_and_then_from_device_to_device():
    pair = Pair(DeviceWire())  # here the CPU is the device
    packets = [torch.ones(100)], [torch.ones(7), torch.ones(9, dtype=torch.bool), None, torch.ones(3, 4).t()]
    pair.step(*packets)
    assert pair.transfers.sizes == []
    for _ in range(2):
        arrived = pair.step(*packets)
        assert pair.transfers.sizes == [400, 64 + 64 + 48]
        assert pair.wire.sizes == [24, 24]
        assert str(arrived) == str(list(packets))


def test_messages_of_devices_match_in_their_order_whichever_layouts_are_new():
    pair = Pair(DeviceWire())
    one, two, three = [torch.ones(2)], [torch.ones(3), 1], [torch.zeros(50)]
    steps = [(one, two, three), (one, three, three), (two, three, one), ([], [None], three), (one, two, three)]
    for packets in steps + steps[::-1]:
        arrived = pair.step(*packets)  # which are taken in another order than they were sent
        assert str(arrived) == str([list(values) for values in packets])


def test_in_a_stream_a_packet_is_taken_to_have_the_layout_of_the_one_before():
    """Packets are numbered, in the last part of their keys, and nothing is remembered at the end of a step."""
    wire = Wire()
    ends = [StreamMailbox(wire, CPU, {}) for _ in range(2)]
    counts = []
    for i, size in enumerate((3, 3, 5, 5, 5)):
        sent, key = torch.full((size,), float(i)), ("values", 0, i)
        ends[1].expect(key, i, 0)
        ends[0].send(key, i, 1, [PacketValue(sent)], note=i)
        ((received, _),) = ends[1].receive(key, i, 0, "a packet")
        assert torch.equal(received, sent)
        assert ends[1].note == i
        counts.append(len(wire.sizes))
        wire.sizes.clear()
    assert counts == [3, 2, 4, 2, 2]  # control, layout and payload; where another was expected, nothing of its size
