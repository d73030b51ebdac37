"""Packets: what is sent comes out as it was, to the strides, and every schedule comes to its end with them."""

from collections import defaultdict, deque
from itertools import product

import pytest
import torch
from helpers.torch_tables import V_SHAPED, torch_table

from fxpipe.distributed.packets import Mailbox, PacketLink, PacketValue, decode, encode, neighbour, payload_bytes
from fxpipe.errors import InternalError
from fxpipe.scheduling import SCHEDULES, Action, ActionKind, Schedule, make_schedule

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
        assert payload[0].numel() == payload_bytes(layout)[0]
        received = decode(layout, (payload[0].clone(), None), CPU)[-len(values) :][1 if len(values) > 1 else 0]
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
    assert payload[0].data_ptr() == BASE.data_ptr()
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
            receiver.expect(("values", i, 0), i, 0)
        for i, values in enumerate(packets):
            sender.send(("values", i, 0), i, 1, [PacketValue(value) for value in values])
        arrived = {
            i: [one.value for one in receiver.receive(("values", i, 0), i, 0, "it")]
            for i in reversed(range(len(packets)))
        }
        assert not self.wire.expected
        assert not any(self.wire.messages.values())
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
    """Packets are numbered, in the last part of their keys."""
    wire = Wire()
    ends = [Mailbox(wire, CPU, {}) for _ in range(2)]
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


COUNTS = (1, 2, 5, 8)


class Messages:
    """The messages of all ranks: by sender and receiver, as they were sent and as they were expected."""

    def __init__(self):
        self.sent, self.expected, self.kept = defaultdict(list), defaultdict(list), 0


class WireMailbox:
    """The mailbox of one rank."""

    def __init__(self, wire, rank):
        self.wire, self.rank, self.note, self.held = wire, rank, 0, {}

    def send(self, key, tag, peer, values, note):
        self.wire.sent[self.rank, peer].append((key, tag, note))
        assert key not in self.held
        self.held[key] = peer
        self.wire.kept = max(self.wire.kept, len(self.held))

    def expect(self, key, tag, peer):
        self.wire.expected[peer, self.rank].append((key, tag))

    def receive(self, key, tag, peer, what):
        (self.note,) = [note for sent, _, note in self.wire.sent[peer, self.rank] if sent == key]
        assert (key, tag) in self.wire.expected[peer, self.rank]
        return []

    def has_come(self, key, peer):
        return any(sent == key for sent, *_ in self.wire.sent[peer, self.rank])

    def finish_send(self, key, what):
        del self.held[key]


def run(schedule):
    """Runs the rows of all ranks, each as far as it comes; returns the wire."""
    placement = tuple(schedule.row_of[j, 0] for j in range(schedule.stages))
    wire = Messages()
    ranks = range(len(schedule.rows))
    links = [PacketLink(None, WireMailbox(wire, rank), placement, ("step",)) for rank in ranks]
    for rank, link in enumerate(links):
        link.queue(schedule.rows, rank)
    rows = [[*row] for row in schedule.rows]
    while any(rows):
        before = sum(map(len, rows))
        for link, row in zip(links, rows, strict=True):
            while row:
                maker = neighbour(row[0], -1, placement)
                if maker is not None:
                    if not link.mailbox.has_come(link._address(maker)[0], placement[maker.stage]):
                        break
                    link.receive(maker)
                action = row.pop(0)
                if neighbour(action, 1, placement) is not None:
                    link.send(action, [])
        assert sum(map(len, rows)) < before, rows
    for pair, sent in wire.sent.items():
        assert wire.expected[pair] == [(key, tag) for key, tag, _ in sent]
        assert len({tag for _, tag, _ in sent}) == len(sent)
    return wire


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_schedule_comes_to_its_end(name, devices):
    recipe = SCHEDULES[name]
    for each in {recipe.stages_per_device, 2} if recipe.most is None else {recipe.stages_per_device}:
        for count in COUNTS:
            for checkpoint in ("never", "always") if name != "inference" else ("never",):
                placement = recipe.placement(devices, each)
                run(make_schedule(name, devices * each, count, checkpoint, placement))


@pytest.mark.parametrize("name", V_SHAPED)
def test_each_table_of_torch_comes_to_its_end(name):
    for devices, is_merged in product((2, 3), (False, True)):
        table = torch_table(name, devices, 2, 2 * devices + 1, is_merged)
        assert table is not None
        run(table)


def test_messages_are_received_in_the_order_of_the_sender_also_if_they_are_needed_in_another():
    table = "0F0 2F0 0F1 2F1 2B0 2B1 0B0 0B1\n1F1 1F0 1B1 1B0"
    with pytest.raises(AssertionError):  # rank 0 waits for 1F0 before it sends 0F1
        run(make_table(table))
    run(make_table("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F1 1F0 1B1 1B0"))


def make_table(text):
    rows = tuple(tuple(map(Action.parse, row.split())) for row in text.splitlines())
    return Schedule("table", 3, 2, rows)


def test_a_rank_begins_to_receive_one_packet_ahead():
    rows, placement = make_schedule("gpipe", 2, 4).rows, (0, 1)
    wire = Messages()
    link = PacketLink(None, WireMailbox(wire, 1), placement, ())
    link.queue(rows, 1)
    first = Action(ActionKind.FORWARD, 0, 0)
    assert len(wire.expected[0, 1]) == 1
    wire.sent[0, 1].append((*link._address(first), 0))
    assert link.receive(first) == []
    assert len(wire.expected[0, 1]) == 2
