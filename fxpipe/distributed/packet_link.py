"""Packets between stages on different ranks: a row receives them before its actions and sends them after.

F of stage j sends what crosses the cut between stages j and j + 1, B what crosses the cut between j - 1 and j. A packet
has the name of the action that produces it.

*Order.* A rank receives the packets of another rank in the order of that rank's row, since communicators of devices
match messages only by order. Both rows are known. A receive begins early: as soon as the row has taken the previous
packet of that rank.

*Memory.* The sender keeps a packet until it has been received. For values, the gradients that return confirm it; for
gradients, a number in later packets of values. (gloo reports it only by waiting.)
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fxpipe.distributed.packets import Mailbox, PacketValue
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.scheduling.actions import Action, ActionKind, Rows

TAGGED_PACKETS = 1 << 20  # tags repeat after this number, far more than packets in flight
_TAGS = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 1}
JOB_TAG = 2
FIRST_FREE_TAG = 3 * TAGGED_PACKETS


def tag_of(number: int, kind: int) -> int:
    """Returns the tag of a packet. `number`: unique among the packets of this kind in flight."""
    return 3 * (number % TAGGED_PACKETS) + kind


def cut_of(maker: Action) -> int:
    return maker.stage if maker.kind is ActionKind.FORWARD else maker.stage - 1


def maker_before(action: Action, placement: Sequence[int]) -> Action | None:
    """Returns the action on another rank whose packet an action needs; None if it needs none."""
    return _neighbour(action, -1, placement)


def reader_after(maker: Action, placement: Sequence[int]) -> Action | None:
    """Returns the action on another rank that needs the packet of an action; None if it sends none."""
    return _neighbour(maker, 1, placement)


def _neighbour(action: Action, step: int, placement: Sequence[int]) -> Action | None:
    kind, j, i = action
    other = j + step if kind is ActionKind.FORWARD else j - step
    if kind not in _TAGS or not 0 <= other < len(placement) or placement[other] == placement[j]:
        return None
    return Action(kind, other, i)


@dataclass(frozen=True, slots=True)
class PacketOrder:
    """The packets that one rank sends and receives in some rows."""

    coming: tuple[tuple[int, Action], ...]  # source rank and maker; each rank's in the order of its row
    needed: tuple[tuple[int, Action], ...]  # the same packets in the order of this rank's row
    returned: tuple[Action, ...]  # gradients that this rank sends; for each cut in the order of receipt

    @classmethod
    def of(cls, rows: Rows, placement: Sequence[int], rank: int) -> PacketOrder:
        coming, needed, returned = [], [], []
        for action in (action for row in rows for action in row):
            reader, maker = reader_after(action, placement), maker_before(action, placement)
            if reader is not None and placement[reader.stage] == rank:
                coming.append((placement[action.stage], action))
            if maker is not None and placement[action.stage] == rank:
                needed.append((placement[maker.stage], maker))
            elif maker is not None and maker.kind is ActionKind.BACKWARD and placement[maker.stage] == rank:
                returned.append(maker)
        return cls(tuple(coming), tuple(needed), tuple(returned))


order_of_step = lru_cache(maxsize=32)(PacketOrder.of)


class PacketLink:
    """The packets of one rank in a step."""

    def __init__(self, mailbox: Mailbox, routes: RelayRoutes, name: tuple[Any, ...] = ()):
        """`name`: equal for steps whose packets usually have equal layouts: graph and input sizes."""
        self.mailbox, self.placement, self._name = mailbox, routes.placement, name
        self._coming: defaultdict[int, deque[Action]] = defaultdict(deque)  # by rank, packets not expected yet
        self._needed: defaultdict[int, deque[Action]] = defaultdict(deque)  # by rank, packets not received yet
        self._expected: set[Action] = set()
        self._taken: Counter[int] = Counter()  # by cut, number of packets of gradients received
        self._returned: defaultdict[int, deque[Action]] = defaultdict(deque)  # by cut, sent gradients still kept here
        self._freed: Counter[int] = Counter()  # by cut, number of packets of gradients freed

    def queue(self, order: PacketOrder) -> None:
        """Adds the packets of the next rows; begins to receive the first of them."""
        for source, maker in order.coming:
            self._coming[source].append(maker)
        for source, maker in order.needed:
            self._needed[source].append(maker)
        for maker in order.returned:
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

    def maker_before(self, action: Action) -> Action | None:
        """Returns the action whose packet must arrive before an action, if any."""
        return maker_before(action, self.placement)

    def receive(self, maker: Action) -> list[PacketValue]:
        source, what = self.placement[maker.stage], self._words(maker)
        values = self.mailbox.receive(*self._address(maker), source, what)
        self._needed[source].popleft()
        self._expected.remove(maker)
        self._expect(source)
        cut = cut_of(maker)
        if maker.kind is ActionKind.FORWARD:
            self._free_gradients(cut, self.mailbox.note)
        else:
            self._taken[cut] += 1
            self._free_values(Action(ActionKind.FORWARD, cut, maker.micro_batch), what)
        return values

    def _free_values(self, maker: Action, what: str) -> None:
        """Frees the packet of values whose gradients have arrived."""
        self.mailbox.finish_send(self._address(maker)[0], what)

    def _free_gradients(self, cut: int, taken: int) -> None:
        """Frees the first packets of gradients through a cut, up to the number that the peer has received."""
        while self._freed[cut] < taken:
            self.mailbox.finish_send(self._address(self._returned[cut].popleft())[0], "its gradients to be taken")
            self._freed[cut] += 1

    def is_sent(self, action: Action) -> bool:
        """Returns whether another rank needs the result of an action."""
        return reader_after(action, self.placement) is not None

    def send(self, maker: Action, values: Iterable[PacketValue]) -> None:
        reader = reader_after(maker, self.placement)
        assert reader is not None
        self.mailbox.send(
            *self._address(maker), self.placement[reader.stage], tuple(values), self._taken[cut_of(maker)]
        )

    def _address(self, maker: Action) -> tuple[tuple[Any, ...], int]:
        number = maker.micro_batch * len(self.placement) + cut_of(maker)
        return self._key(maker), tag_of(number, _TAGS[maker.kind])

    def _key(self, maker: Action) -> tuple[Any, ...]:
        return (*self._name, maker.kind, cut_of(maker), maker.micro_batch)

    def _words(self, maker: Action) -> str:
        return f"the result of {maker} (stage {maker.stage}, micro-batch {maker.micro_batch})"
