"""The walk from event to event: when every action of a schedule starts and ends, and what it started on.

Two kinds of events. An action *begins* when its device is free and all that it needs is there; what several links share
is taken then, by a device that copies what it was sent. It *ends* when it has computed; what it made is handed over to
links then, in order of time. Whoever lacked only that begins in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fxpipe.scheduling import Kind, Schedule
from fxpipe.simulation.needs import Receiving, Ways, counts_of, devices_of, receiving_of
from fxpipe.timelines import Span


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an action has waited for, on its way from another."""

    device: int  # of the action that it comes from
    place: int  # of that action in its row
    left: float  # when the link took it
    arrived: float


@dataclass(frozen=True, slots=True)
class Begun:
    """An action, and what held it up."""

    span: Span
    could: float  # when it could have started, had it not waited for what links share
    after: Arrival | None  # None: the action before on its device, or nothing


@dataclass(slots=True)
class Walk:
    """Discrete events over the rows of a schedule that is known to run."""

    schedule: Schedule
    seconds: dict[Kind, list[float]]
    ways: Ways
    overlaps: bool  # do transfers run beside computation, or does the receiving device copy before it computes
    begun: list[list[Begun]] = field(init=False)  # by device
    _device_of: list[int] = field(init=False)
    _receiving: dict[Kind, list[Receiving]] = field(init=False)
    _missing: dict[Kind, list[list[int]]] = field(init=False)  # by stage and micro-batch: needs not met yet
    _last: dict[Kind, list[list[Arrival | None]]] = field(init=False)  # of those met, what arrived last
    _free: defaultdict[Hashable, float] = field(init=False)  # when a link has carried all it was given
    _is_due: list[bool] = field(init=False)  # by device: has its next action an event
    _events: list[tuple[float, int, int, int | None]] = field(init=False)  # (time, order, device, place if it ends)
    _order: int = 0

    def run(self) -> list[list[Begun]]:
        """For each device its actions in order."""
        schedule = self.schedule
        m, d = schedule.micro_batches, len(schedule.rows)
        self._device_of = devices_of(schedule)
        self._receiving = {} if self.overlaps else receiving_of(self.ways)
        self._missing = {kind: counts_of(by_stage, m) for kind, by_stage in self.ways.items()}
        self._last = {kind: [[None] * m for _ in by_stage] for kind, by_stage in self.ways.items()}
        self._free, self._events = defaultdict(float), []
        self._is_due, self.begun = [False] * d, [[] for _ in range(d)]
        for device in range(d):
            self._next(device)
        while self._events:
            time, _, device, place = heappop(self._events)
            if place is None:
                self._begin(device, time)
            else:
                self._end(device, place)
        return self.begun

    def _next(self, device: int) -> None:
        """The next action of a device is due as soon as nothing is missing and the one before has ended."""
        row, before = self.schedule.rows[device], self.begun[device]
        if self._is_due[device] or len(before) == len(row):
            return
        action = row[len(before)]
        kind, j, i = action.kind, action.stage, action.micro_batch
        if kind in self._missing and self._missing[kind][j][i]:
            return
        came = self._last[kind][j][i] if kind in self._last else None
        free = before[-1].span.end if before else 0.0
        self._is_due[device] = True
        self._put(free if came is None else max(free, came.arrived), device, None)

    def _begin(self, device: int, time: float) -> None:
        row, before = self.schedule.rows[device], self.begun[device]
        action = row[len(before)]
        kind, j, i = action.kind, action.stage, action.micro_batch
        start, copying = time, 0.0
        if kind in self._receiving:
            receiving = self._receiving[kind][j]
            copying = receiving.seconds
            start = max((self._free[way] for way in receiving.over), default=time)
            start = max(start, time)
            for way in receiving.over:
                self._free[way] = start + copying
        came = self._last[kind][j][i] if kind in self._last else None
        if came is not None and before and came.arrived <= before[-1].span.end:
            came = None  # the device was not free before
        span = Span(action, device, start, start + copying + self.seconds[kind][j], copying)
        before.append(Begun(span, time, came))
        self._put(span.end, device, len(before) - 1)
        self._is_due[device] = False
        self._next(device)

    def _end(self, device: int, place: int) -> None:
        span = self.begun[device][place].span
        kind, i = span.action.kind, span.action.micro_batch
        for way in self.ways[kind][span.action.stage] if kind in self.ways else ():
            left = arrived = span.end
            if self.overlaps and way.link is not None:
                left = max(span.end, *(self._free[one] for one in way.takes))
                arrived = left + way.seconds
                for one in way.takes:
                    self._free[one] = arrived
            last = self._last[kind][way.user][i]
            if last is None or last.arrived < arrived:
                self._last[kind][way.user][i] = Arrival(device, place, left, arrived)
            self._missing[kind][way.user][i] -= 1
            if not self._missing[kind][way.user][i]:
                self._next(self._device_of[way.user])

    def _put(self, time: float, device: int, place: int | None) -> None:
        heappush(self._events, (time, self._order, device, place))
        self._order += 1
