"""The walk from event to event: when every action of a schedule starts and ends, and what it started on.

Two kinds of events. An action *begins* when its device is free and all that it needs is there; what several links share
is taken then, by a device that copies what it was sent. It *ends* when it has computed; what it made is handed over to
links then, in order of time. Whoever lacked only that begins in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fxpipe.scheduling import Action, ActionKind, Schedule
from fxpipe.scheduling.validation import NEIGHBOUR_STEP
from fxpipe.simulation.costs import StageCost, Transfer
from fxpipe.simulation.timeline import Span

# What the actions of a schedule need and how long they take: for each kind and stage the ways that lead from there.


@dataclass(frozen=True, slots=True)
class DependencyEdge:
    """The dependency of an action on one of the same kind and micro-batch."""

    user: int  # stage
    seconds: float = 0.0
    link: tuple[int, int] | None = None  # (from device, to device); None: nothing is sent
    over: tuple[str, ...] = ()  # what the link shares with others

    @property
    def links_taken(self) -> tuple[Hashable, ...]:
        """The links and shared ways that it takes, each of which carries one transfer at a time."""
        return () if self.link is None else (self.link, *self.over)


DependencyEdges = dict[ActionKind, list[list[DependencyEdge]]]  # for F and B, for each stage: to those who need it


@dataclass(slots=True)
class ReceiveCopies:
    """The copies that the receiving device makes before it computes, where transfers do not overlap computation."""

    seconds: float = 0.0
    over: dict[str, None] = field(default_factory=dict)  # shared ways that it takes, each once


def dependency_edges(schedule: Schedule, transfers: Sequence[Transfer]) -> DependencyEdges:
    """Collects the ways between stages; between neighbours there is one also where nothing is sent."""
    device_of = device_by_stage(schedule)
    ways: DependencyEdges = {kind: [[] for _ in device_of] for kind in NEIGHBOUR_STEP}
    for kind, step in NEIGHBOUR_STEP.items():
        for user in range(schedule.stages):
            if user + step in range(schedule.stages):
                ways[kind][user + step].append(DependencyEdge(user))
    for transfer in transfers:
        link = device_of[transfer.source], device_of[transfer.target]
        kind = ActionKind.BACKWARD if transfer.is_gradient else ActionKind.FORWARD
        is_sent = link[0] != link[1]
        way = (
            DependencyEdge(transfer.target, float(transfer.seconds), link, transfer.over)
            if is_sent
            else DependencyEdge(transfer.target)
        )
        ways[kind][transfer.source].append(way)
    return ways


def receive_copies(ways: DependencyEdges) -> dict[ActionKind, list[ReceiveCopies]]:
    """Sums the copies that each stage receives before F and before B: all that comes, one after the other."""
    copies = {kind: [ReceiveCopies() for _ in by_stage] for kind, by_stage in ways.items()}
    for kind, by_stage in ways.items():
        for way in (way for leaving in by_stage for way in leaving):
            copies[kind][way.user].seconds += way.seconds
            if way.seconds:
                copies[kind][way.user].over |= dict.fromkeys(way.over)
    return copies


def dependency_counts(by_stage: list[list[DependencyEdge]], m: int) -> list[list[int]]:
    """Counts for each stage and micro-batch the ways that lead there."""
    counts = [0] * len(by_stage)
    for way in (way for leaving in by_stage for way in leaving):
        counts[way.user] += 1
    return [[count] * m for count in counts]


def action_durations(schedule: Schedule, stages: Sequence[StageCost]) -> dict[Action, float]:
    """Computes the seconds of each action."""
    split = schedule.split_backwards
    trained = {action.stage for row in schedule.rows for action in row if action.kind is ActionKind.BACKWARD}
    weight = [float(s.backward / 2 if s.weight is None else s.weight) for s in stages]
    own = {
        ActionKind.FORWARD: [float(s.forward) + (s.loss if j in trained else 0.0) for j, s in enumerate(stages)],
        ActionKind.RECOMPUTE: [float(s.forward if s.recompute is None else s.recompute) for s in stages],
        ActionKind.BACKWARD: [float(s.backward) for s in stages],
        ActionKind.WEIGHT: weight,
    }
    own = {kind: [time + s.action for time, s in zip(times, stages, strict=True)] for kind, times in own.items()}
    own[ActionKind.UPDATE] = [float(s.update) for s in stages]
    apart = [float(s.backward) - w + s.action for s, w in zip(stages, weight, strict=True)]  # B where W is apart
    return {
        action: apart[j] if kind is ActionKind.BACKWARD and (j, i) in split else own[kind][j]
        for row in schedule.rows
        for action in row
        for kind, j, i in (action,)
    }


def device_by_stage(schedule: Schedule) -> list[int]:
    """Returns the device of each stage."""
    device_of = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    return [device_of[j] for j in range(schedule.stages)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a value or gradient that an action has waited for, from an action on another device."""

    device: int  # of the action that it comes from
    place: int  # of that action in its row
    left: float  # when the link took it
    arrived: float


@dataclass(frozen=True, slots=True)
class StartedAction:
    """An action, and what held it up."""

    span: Span
    could: float  # when it could have started, had it not waited for what links share
    after: Arrival | None  # None: the action before on its device, or nothing


@dataclass(slots=True)
class EventSimulation:
    """Discrete events over the rows of a schedule that is known to run."""

    schedule: Schedule
    seconds: dict[Action, float]
    ways: DependencyEdges
    overlaps: bool  # do transfers run beside computation, or does the receiving device copy before it computes
    begun: list[list[StartedAction]] = field(init=False)  # by device
    _device_of: list[int] = field(init=False)
    _receiving: dict[ActionKind, list[ReceiveCopies]] = field(init=False)
    _missing: dict[ActionKind, list[list[int]]] = field(init=False)  # by stage and micro-batch: needs not met yet
    _last: dict[ActionKind, list[list[Arrival | None]]] = field(init=False)  # of those met, what arrived last
    _free: defaultdict[Hashable, float] = field(init=False)  # when a link has carried all it was given
    _is_due: list[bool] = field(init=False)  # by device: has its next action an event
    _events: list[tuple[float, int, int, int | None]] = field(init=False)  # (time, order, device, place if it ends)
    _order: int = 0

    def run(self) -> list[list[StartedAction]]:
        """Runs the simulation, and returns the actions of each device in order."""
        schedule = self.schedule
        m, d = schedule.micro_batches, len(schedule.rows)
        self._device_of = device_by_stage(schedule)
        self._receiving = {} if self.overlaps else receive_copies(self.ways)
        self._missing = {kind: dependency_counts(by_stage, m) for kind, by_stage in self.ways.items()}
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
        span = Span(action, device, start, start + copying + self.seconds[action], copying)
        before.append(StartedAction(span, time, came))
        self._put(span.end, device, len(before) - 1)
        self._is_due[device] = False
        self._next(device)

    def _end(self, device: int, place: int) -> None:
        span = self.begun[device][place].span
        kind, i = span.action.kind, span.action.micro_batch
        for way in self.ways[kind][span.action.stage] if kind in self.ways else ():
            left = arrived = span.end
            if self.overlaps and way.link is not None:
                left = max(span.end, *(self._free[one] for one in way.links_taken))
                arrived = left + way.seconds
                for one in way.links_taken:
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
