"""The simulation of discrete events: when every action of a schedule starts and ends, and what it waited for.

An action *begins* when its device is free and everything that it needs has arrived. If the device copies its inputs,
they occupy shared links then. An action *ends* when it has computed; its outputs then occupy links, in order of time.

All workers of an interpreter with a lock also take turns at the host, in the order in which they ask:

    host      |F0a F0b ....          If the host runs ahead of a device, the worker's thread queues the next action once
    device a     |F0a====== |        it has queued this one and the actions that the next one needs are queued, too.
    device b         |F0b====== |

An action of such a device begins and ends no sooner than the host begins and ends queueing it. A worker on a CPU asks
for the host when its action begins; the action ends no sooner than the host releases the lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fxpipe.scheduling import Action, ActionKind, Schedule
from fxpipe.scheduling.validation import NEIGHBOUR_STEP
from fxpipe.simulation.costs import HostCost, StageCost, Transfer
from fxpipe.simulation.timeline import Span


@dataclass(frozen=True, slots=True)
class DependencyEdge:
    """An edge from an action to an action of the same kind and micro-batch that depends on it."""

    user: int  # stage
    seconds: float = 0.0
    is_sent: bool = False  # goes from device to device, over their link
    over: tuple[str, ...] = ()  # resources that the link shares with other links


DependencyEdges = dict[ActionKind, list[list[DependencyEdge]]]  # for F and B: by stage, the edges that leave it


@dataclass(slots=True)
class ReceiveCopies:
    """The copies that the receiving device makes before it computes, if transfers do not overlap computation."""

    seconds: float = 0.0
    over: dict[str, None] = field(default_factory=dict)  # shared resources, each once


def dependency_edges(schedule: Schedule, transfers: Sequence[Transfer]) -> DependencyEdges:
    """Collects the edges between stages; neighbours have an edge even if nothing is sent."""
    device_of = device_by_stage(schedule)  # for micro-batch 0; the same stages share a device for the others
    ways: DependencyEdges = {kind: [[] for _ in device_of] for kind in NEIGHBOUR_STEP}
    for kind, step in NEIGHBOUR_STEP.items():
        for user in range(schedule.stages):
            if user + step in range(schedule.stages):
                ways[kind][user + step].append(DependencyEdge(user))
    for transfer in transfers:
        kind = ActionKind.BACKWARD if transfer.is_gradient else ActionKind.FORWARD
        way = (
            DependencyEdge(transfer.target, float(transfer.seconds), True, transfer.over)
            if device_of[transfer.source] != device_of[transfer.target]
            else DependencyEdge(transfer.target)
        )
        ways[kind][transfer.source].append(way)
    return ways


def receive_copies(ways: DependencyEdges) -> dict[ActionKind, list[ReceiveCopies]]:
    """Sums the copies that each stage receives before F and before B."""
    copies = {kind: [ReceiveCopies() for _ in by_stage] for kind, by_stage in ways.items()}
    for kind, by_stage in ways.items():
        for way in (way for leaving in by_stage for way in leaving):
            copies[kind][way.user].seconds += way.seconds
            if way.seconds:
                copies[kind][way.user].over |= dict.fromkeys(way.over)
    return copies


def dependency_counts(by_stage: list[list[DependencyEdge]], m: int) -> list[list[int]]:
    """Counts the incoming edges of each stage and micro-batch."""
    counts = [0] * len(by_stage)
    for way in (way for leaving in by_stage for way in leaving):
        counts[way.user] += 1
    return [[count] * m for count in counts]


def action_durations(schedule: Schedule, stages: Sequence[StageCost]) -> dict[Action, float]:
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
    apart = [float(s.backward) - w + s.action for s, w in zip(stages, weight, strict=True)]  # B if W is separate
    return {
        action: apart[j] if kind is ActionKind.BACKWARD and (j, i) in split else own[kind][j]
        for row in schedule.rows
        for action in row
        for kind, j, i in (action,)
    }


def handling_seconds(schedule: Schedule, transfers: Sequence[Transfer]) -> dict[tuple[ActionKind, int], float]:
    """Computes the seconds per kind and stage to pack and unpack transfers between devices."""
    device_of = device_by_stage(schedule)
    handling: defaultdict[tuple[ActionKind, int], float] = defaultdict(float)
    for one in transfers:
        if one.handling and device_of[one.source] != device_of[one.target]:
            kind = ActionKind.BACKWARD if one.is_gradient else ActionKind.FORWARD
            handling[kind, one.source] += one.handling
            handling[kind, one.target] += one.handling
    return dict(handling)


def host_seconds(cost: HostCost | None, kind: ActionKind, is_split: bool) -> tuple[float, float]:
    """Returns the host seconds of an action: with the interpreter's lock, and then without it."""
    if cost is None or kind is ActionKind.UPDATE:
        return 0.0, 0.0
    if kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE):
        return cost.forward + cost.action, 0.0
    if kind is ActionKind.WEIGHT:
        return cost.action, cost.weight
    return cost.action, cost.backward - (cost.weight if is_split else 0.0)


def device_by_stage(schedule: Schedule) -> list[int]:
    """Returns the device of each stage; with replicas, the device of the first replica, which has micro-batch 0."""
    row_of = schedule.row_of
    return [row_of[j, 0] for j in range(schedule.stages)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a value or gradient that an action waited for, from an action on another device."""

    device: int  # the device of the action that sent it
    place: int  # the index of that action in its row
    left: float  # when the link took it
    arrived: float


@dataclass(frozen=True, slots=True)
class HostJob:
    """The time in which the host runs the Python of an action, or queues it."""

    device: int
    place: int  # the index of the action in its row
    start: float
    unlocked: float  # when it releases the interpreter's lock
    end: float
    before: HostJob | None = None  # the job at whose end or release of the lock it started
    after: tuple[int, int] | None = None  # (device, place) of the action at whose end it started
    runs_ahead: bool = False  # else, if nothing is before it, it started with its action


@dataclass(frozen=True, slots=True)
class StartedAction:
    """An action, and what delayed it."""

    span: Span
    could: float  # earliest start if shared links had been free
    after: Arrival | None  # None: it waited for the action before on its device, or for nothing
    job: HostJob | None = None
    starts_on_host: bool = False  # its start waited for the host
    ends_on_host: bool = False  # its end waited for the host


_BEGIN, _END, _QUEUE, _QUEUED = range(4)  # events of an action, and of its host job
_IDLE_HOST = HostJob(-1, -1, 0.0, 0.0, 0.0)


class EventSimulation:
    """A simulation of discrete events over the rows of a valid schedule.

    Args:
        overlaps: transfers overlap computation; else the receiving device copies before it computes.
        hosts: host costs, by stage.
        one_interpreter: all workers share one host; else each device has its own host.
        handling: seconds at the end of actions, by kind and stage.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: dict[Action, float],
        ways: DependencyEdges,
        overlaps: bool,
        hosts: Sequence[HostCost | None],
        one_interpreter: bool,
        handling: Mapping[tuple[ActionKind, int], float],
    ):
        m, d = schedule.micro_batches, len(schedule.rows)
        self.schedule, self.seconds, self.ways, self.overlaps = schedule, seconds, ways, overlaps
        self.hosts, self.one_interpreter, self.handling = hosts, one_interpreter, handling
        self.begun: list[list[StartedAction]] = [[] for _ in range(d)]  # by device
        self._device_of = schedule.row_of  # by stage and micro-batch
        self._receiving = {} if overlaps else receive_copies(ways)
        # By stage and micro-batch: the number of unmet dependencies, and the last arrival so far.
        self._missing = {kind: dependency_counts(by_stage, m) for kind, by_stage in ways.items()}
        self._last: dict[ActionKind, list[list[Arrival | None]]] = {
            kind: [[None] * m for _ in by_stage] for kind, by_stage in ways.items()
        }
        self._users: defaultdict[Action, list[Action]] = defaultdict(list)  # by awaited action
        self._unmet = {user: len(needed) for user, needed in schedule.awaited.items()}  # actions still awaited
        self._last_met: dict[Action, Arrival] = {}  # the last awaited action that has ended
        for user, needed in schedule.awaited.items():
            for one in needed:
                self._users[one].append(user)
        self._free: defaultdict[Hashable, float] = defaultdict(float)  # when a link becomes free
        self._is_due = [False] * d  # by device: its next action has an event
        self._events: list[tuple[float, int, int, int, int]] = []  # (time, order, event, device, place)
        self._order = 0
        self._runs_ahead = [False] * d  # by device
        for (j, _), device in self._device_of.items():
            host = hosts[j]
            self._runs_ahead[device] |= host is not None and host.runs_ahead
        self._jobs: list[list[HostJob]] = [[] for _ in range(d)]  # by device, if the host runs ahead of it
        self._is_asking = [False] * d  # by device: its next job has an event
        self._holder = [_IDLE_HOST] * d  # by interpreter: the last job that took its lock
        # By stage and micro-batch: the number of dependencies that are not queued.
        self._unqueued = {kind: [[*row] for row in rows] for kind, rows in self._missing.items()}
        self._last_queued: dict[tuple[ActionKind, int, int], tuple[float, HostJob | tuple[int, int]]] = {}
        self._split = {*schedule.split_backwards}  # (stage, micro-batch) with W

    def run(self) -> list[list[StartedAction]]:
        for device in range(len(self.schedule.rows)):
            self._ask(device)
            self._next(device)
        while self._events:
            time, _, event, device, place = heappop(self._events)
            if event == _BEGIN:
                self._begin(device, time)
            elif event == _END:
                self._end(device, place)
            elif event == _QUEUE:
                self._queue(device, time)
            else:
                self._queued(device, place)
        return self.begun

    def _next(self, device: int) -> None:
        """Adds the event that begins the next action of a device, if its dependencies are met."""
        row, before = self.schedule.rows[device], self.begun[device]
        if self._is_due[device] or len(before) == len(row):
            return
        action = row[len(before)]
        kind, j, i = action.kind, action.stage, action.micro_batch
        if (kind in self._missing and self._missing[kind][j][i]) or self._unmet.get(action):
            return
        came = self._arrived_last(action)
        free = before[-1].span.end if before else 0.0
        if self._runs_ahead[device]:
            if len(self._jobs[device]) == len(before):
                return
            free = max(free, self._jobs[device][len(before)].start)
        self._is_due[device] = True
        self._put(free if came is None else max(free, came.arrived), _BEGIN, device)

    def _arrived_last(self, action: Action) -> Arrival | None:
        """Returns the last arrival that an action depends on."""
        kind, j, i = action
        value = self._last[kind][j][i] if kind in self._last else None
        awaited = self._last_met.get(action)
        if value is None or awaited is None:
            return value or awaited
        return max(value, awaited, key=lambda one: one.arrived)

    def _begin(self, device: int, time: float) -> None:
        row, before = self.schedule.rows[device], self.begun[device]
        action = row[len(before)]
        kind, j = action.kind, action.stage
        start, copying = time, 0.0
        if kind in self._receiving:
            receiving = self._receiving[kind][j]
            copying = receiving.seconds
            start = max((self._free[way] for way in receiving.over), default=time)
            start = max(start, time)
            for way in receiving.over:
                self._free[way] = start + copying
        came = self._arrived_last(action)
        if came is not None and before and came.arrived <= before[-1].span.end:
            came = None  # the device became free later
        end = start + copying + self.seconds[action]
        job, on_host = self._job(device, len(before), start), False
        if self._runs_ahead[device]:
            free = max(came.arrived if came is not None else 0.0, before[-1].span.end if before else 0.0)
            on_host = job is not None and job.start > free
        last = end if job is None else job.end if job.runs_ahead else job.unlocked
        span = Span(action, device, start, max(end, last) + self.handling.get((kind, j), 0.0), copying)
        before.append(StartedAction(span, time, came, job, on_host, last > end))
        self._put(span.end, _END, device, len(before) - 1)
        self._is_due[device] = False
        self._next(device)

    def _end(self, device: int, place: int) -> None:
        span = self.begun[device][place].span
        kind, i = span.action.kind, span.action.micro_batch
        for way in self.ways[kind][span.action.stage] if kind in self.ways else ():
            left = arrived = span.end
            user = self._device_of[way.user, i]
            if self.overlaps and way.is_sent:
                taken = ((device, user), *way.over)  # each carries one transfer at a time
                left = max(span.end, *(self._free[one] for one in taken))
                arrived = left + way.seconds
                for one in taken:
                    self._free[one] = arrived
            last = self._last[kind][way.user][i]
            if last is None or last.arrived < arrived:
                self._last[kind][way.user][i] = Arrival(device, place, left, arrived)
            self._missing[kind][way.user][i] -= 1
            if not self._missing[kind][way.user][i]:
                self._next(user)
        for waiting in self._users.get(span.action, ()):
            self._last_met[waiting] = Arrival(device, place, span.end, span.end)
            self._unmet[waiting] -= 1
            self._next(self._device_of[waiting.stage, waiting.micro_batch])
        if not self._runs_ahead[device]:
            self._pass_on(span.action, span.end, (device, place))

    # -- the host ------------------------------------------------------------------------------------------------------

    def _ask(self, device: int) -> None:
        """Adds the event in which a worker's thread queues its next action, if all dependencies are queued."""
        row, jobs = self.schedule.rows[device], self._jobs[device]
        if not self._runs_ahead[device] or self._is_asking[device] or len(jobs) == len(row):
            return
        action = row[len(jobs)]
        kind, j, i = action
        if kind in self._unqueued and self._unqueued[kind][j][i]:
            return
        needed, _ = self._last_queued.get(action, (0.0, _IDLE_HOST))
        self._is_asking[device] = True
        self._put(max(needed, jobs[-1].end if jobs else 0.0), _QUEUE, device)

    def _queue(self, device: int, time: float) -> None:
        jobs = self._jobs[device]
        needed, maker = self._last_queued.get(self.schedule.rows[device][len(jobs)], (0.0, _IDLE_HOST))
        before: HostJob | tuple[int, int] | None = jobs[-1] if jobs else None
        if needed > (jobs[-1].end if jobs else 0.0):
            before = maker
        job = self._take_host(device, len(jobs), time, before)
        jobs.append(job)
        self._put(job.end, _QUEUED, device, len(jobs) - 1)
        self._next(device)

    def _queued(self, device: int, place: int) -> None:
        job = self._jobs[device][place]
        self._is_asking[device] = False
        self._pass_on(self.schedule.rows[device][place], job.end, job)
        self._ask(device)

    def _pass_on(self, action: Action, time: float, source: HostJob | tuple[int, int]) -> None:
        """Records that an action is queued, and lets workers queue the actions that depend on it."""
        kind, i = action.kind, action.micro_batch
        for way in self.ways[kind][action.stage] if kind in self.ways else ():
            self._unqueued[kind][way.user][i] -= 1
            if self._last_queued.get((kind, way.user, i), (0.0, None))[0] <= time:
                self._last_queued[kind, way.user, i] = time, source
            self._ask(self._device_of[way.user, i])

    def _job(self, device: int, place: int, time: float) -> HostJob | None:
        """Returns the host job of an action that begins: the queued job, or a new one; None: no host cost."""
        if self._runs_ahead[device]:
            return self._jobs[device][place]
        if self.hosts[self.schedule.rows[device][place].stage] is None:
            return None
        return self._take_host(device, place, time, None)

    def _take_host(self, device: int, place: int, time: float, before: HostJob | tuple[int, int] | None) -> HostJob:
        """Takes the host for an action; if the job needs the lock, once the lock is free."""
        action = self.schedule.rows[device][place]
        is_split = (action.stage, action.micro_batch) in self._split
        locked, unlocked = host_seconds(self.hosts[action.stage], action.kind, is_split)
        interpreter = 0 if self.one_interpreter else device
        holder, start = self._holder[interpreter], time
        if locked and holder.unlocked > time:
            start, before = holder.unlocked, holder
        job = HostJob(
            device,
            place,
            start,
            start + locked,
            start + locked + unlocked,
            before if isinstance(before, HostJob) else None,
            before if isinstance(before, tuple) else None,
            self._runs_ahead[device],
        )
        if locked:
            self._holder[interpreter] = job
        return job

    def _put(self, time: float, event: int, device: int, place: int = 0) -> None:
        heappush(self._events, (time, self._order, event, device, place))
        self._order += 1


@dataclass(frozen=True, slots=True)
class ReductionSpan:
    """The reduction of the gradients of one stage over replicas, once per step, in buckets of equal size.

    The last action that makes gradients (W if backward is split, else B) fills the buckets at an even rate:

        device    ... B5====== B6====== |B7==1==2==3==4|          four buckets, full at 1, 2, 3 and 4
        link                                  |1--|2--|3--|4--|   each reduced once it is full, after the bucket before

    A device reduces one bucket at a time, in the order in which they fill, while it computes. So after its last action
    a step waits for the remaining buckets, and at least for the last bucket.
    """

    stage: int
    device: int
    bytes: float
    start: float  # the start of the first bucket
    end: float  # the end of the last bucket
    seconds: float  # the total over its buckets
    place: int  # the index in its device's row of the action that makes the last gradients
    since: float  # from then on it does not wait for gradients
    follows: bool  # it waited for the reduction before it, not for gradients


def reductions_of(begun: Sequence[Sequence[StartedAction]], stages: Sequence[StageCost]) -> tuple[ReductionSpan, ...]:
    """Computes the reductions of a step, by device and in order. Replicas in separate rows wait for the slowest one."""
    last: list[dict[int, int]] = [{} for _ in begun]  # by device and stage: the index of its last B or W
    slowest: dict[int, tuple[float, int]] = {}  # by stage: when and on which device its last gradients are made
    for device, row in enumerate(begun):
        for place, one in enumerate(row):
            if one.span.action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
                stage = one.span.action.stage
                last[device][stage] = place
                slowest[stage] = max(slowest.get(stage, (0.0, 0)), (one.span.end, device))
    return tuple(
        one
        for device, row in enumerate(begun)
        for one in _reductions_of_row(
            device, row, {j: place for j, place in last[device].items() if slowest[j][1] == device}, stages
        )
    )


def _reductions_of_row(
    device: int, row: Sequence[StartedAction], last: Mapping[int, int], stages: Sequence[StageCost]
) -> list[ReductionSpan]:
    """Computes the reductions of a device. `last`: by stage, the index of its last action that makes gradients."""
    reductions, free = list[ReductionSpan](), 0.0
    for stage, place in sorted(last.items(), key=lambda item: item[1]):
        cost, span = stages[stage], row[place].span
        if not cost.reduction:
            continue
        each, begin = cost.reduction / cost.reduction_buckets, span.start + span.receiving
        first_full = begin + (span.end - begin) / cost.reduction_buckets
        start = max(free, first_full)
        end = max(start + cost.reduction, span.end + each)
        since = start if start + cost.reduction >= span.end + each else span.end
        follows = free > first_full and since == start
        free = end
        reductions.append(
            ReductionSpan(stage, device, cost.gradient_bytes, start, end, cost.reduction, place, since, follows)
        )
    return reductions
