"""Packets around rows: every schedule comes to its end, and messages are received in the order of the sender."""

from collections import defaultdict
from itertools import product

import pytest
from helpers.torch_tables import V_SHAPED, torch_table

from fxpipe.distributed.packet_link import PacketLink, PacketOrder
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.scheduling import SCHEDULES, Action, ActionKind, Schedule, make_schedule

COUNTS = (1, 2, 5, 8)


class Wire:
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
    placement = [schedule.row_of[j, 0] for j in range(schedule.stages)]
    wire, routes = Wire(), RelayRoutes(tuple(placement), (), ())
    ranks = range(len(schedule.rows))
    links = [PacketLink(WireMailbox(wire, rank), routes, ("step",)) for rank in ranks]
    for rank, link in enumerate(links):
        link.queue(PacketOrder.of(schedule.rows, placement, rank))
    rows = [[*row] for row in schedule.rows]
    while any(rows):
        before = sum(map(len, rows))
        for link, row in zip(links, rows, strict=True):
            while row:
                maker = link.maker_before(row[0])
                if maker is not None:
                    if not link.mailbox.has_come(link._address(maker)[0], placement[maker.stage]):
                        break
                    link.receive(maker)
                action = row.pop(0)
                if link.is_sent(action):
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


def test_memory_is_freed_while_the_step_goes_on():
    assert run(make_schedule("1f1b", 2, 16)).kept == 2


def test_a_rank_begins_to_receive_one_packet_ahead():
    rows, placement = make_schedule("gpipe", 2, 4).rows, (0, 1)
    wire = Wire()
    link = PacketLink(WireMailbox(wire, 1), RelayRoutes(placement, (), ()), ())
    link.queue(PacketOrder.of(rows, placement, 1))
    first = Action(ActionKind.FORWARD, 0, 0)
    assert len(wire.expected[0, 1]) == 1
    wire.sent[0, 1].append((*link._address(first), 0))
    assert link.receive(first) == []
    assert len(wire.expected[0, 1]) == 2
