"""Packets: what is sent comes out as it was, to the strides; layouts are sent when they are new, and only then."""

from collections import deque

import pytest
import torch

from fxpipe.distributed.packets import Mailbox, PacketValue, decode, encode, payload_bytes
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
        assert payload.numel() == payload_bytes(layout)
        received = decode(layout, payload.clone(), CPU)[-len(values) :][1 if len(values) > 1 else 0]
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
    assert payload.data_ptr() == BASE.data_ptr()
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


class Pair:
    def __init__(self):
        self.wire, self.layouts = Wire(), ({}, {})

    def step(self, *packets):
        """A step, in which packets are sent, and expected before they are; returns what arrives."""
        self.wire.sizes.clear()
        sender, receiver = (Mailbox(self.wire, CPU, known) for known in self.layouts)
        for i in range(len(packets)):
            receiver.expect(("values", i), i, 0)
        for i, values in enumerate(packets):
            sender.send(("values", i), i, 1, [PacketValue(value) for value in values])
        arrived = [[one.value for one in receiver.receive(("values", i), i, 0, "it")] for i in range(len(packets))]
        assert not self.wire.expected
        assert not any(self.wire.messages.values())
        for mailbox in (sender, receiver):
            mailbox.remember()
        return arrived


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
