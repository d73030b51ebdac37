"""The simulation of discrete events: when every action of a schedule starts and ends, and what it waited for.

An action *begins* when its device is free and everything that it needs has arrived, and *ends* when it has computed;
its outputs then occupy links, in order of time. All workers of an interpreter with a lock also take turns at the host,
in the order in which they ask:

    host      |F0a F0b ....          If the host runs ahead of a device, the worker's thread queues the next action once
    device a     |F0a====== |        it has queued this one and the actions that the next one needs are queued, too.
    device b         |F0b====== |

An action of such a device begins and ends no sooner than the host begins and ends queueing it. A worker on a CPU asks
for the host when its action begins; the action ends no sooner than the host releases the lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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


def action_durations(schedule: Schedule, stages: Sequence[StageCost]) -> dict[Action, float]:
    split = schedule.split_backwards
    trained = {action.stage for row in schedule.rows for action in row if action.kind is ActionKind.BACKWARD}
    weight = [float(s.backward / 2 if s.weight is None else s.weight) for s in stages]
    own = {
        ActionKind.FORWARD: [float(s.forward) for s in stages],
        ActionKind.RECOMPUTE: [float(s.forward if s.recompute is None else s.recompute) for s in stages],
        ActionKind.BACKWARD: [float(s.backward) for s in stages],
        ActionKind.WEIGHT: weight,
    }
    own = {kind: [time + s.action for time, s in zip(times, stages, strict=True)] for kind, times in own.items()}
    own[ActionKind.UPDATE] = [float(s.update) for s in stages]
    apart = [float(s.backward) - w + s.action for s, w in zip(stages, weight, strict=True)]  # B if W is separate
    seconds = {
        action: apart[j] if kind is ActionKind.BACKWARD and (j, i) in split else own[kind][j]
        for row in schedule.rows
        for action in row
        for kind, j, i in (action,)
    }
    for j in trained:
        count = stages[j].joint
        for i in range(count - 1, schedule.micro_batches, count) if stages[j].loss else ():
            seconds[Action(ActionKind.FORWARD, j, i)] += stages[j].loss * count
    return seconds


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
    # The job at whose end or release of the lock it started, or (device, place) of the action at whose end it started.
    before: HostJob | tuple[int, int] | None = None
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
    """A simulation of discrete events over the rows of a valid schedule."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageCost],
        transfers: Sequence[Transfer],
        overlaps: bool,  # transfers overlap computation; else the receiving device copies before it computes
        one_interpreter: bool,  # all workers share one host; else each device has its own host
    ):
        d = len(schedule.rows)
        self.schedule, self.overlaps, self.one_interpreter = schedule, overlaps, one_interpreter
        self.seconds, self.hosts = action_durations(schedule, stages), [stage.host for stage in stages]
        self.begun: list[list[StartedAction]] = [[] for _ in range(d)]  # by device
        self._device_of = schedule.row_of  # by stage and micro-batch
        # By kind and stage: the edges that leave it, the seconds to pack and unpack its transfers, and the copies that
        # the receiving device makes before it computes: their seconds, and the shared resources, each once.
        self._ways: defaultdict[tuple[ActionKind, int], list[DependencyEdge]] = defaultdict(list)
        self._handling: defaultdict[tuple[ActionKind, int], float] = defaultdict(float)
        self._copying: defaultdict[tuple[ActionKind, int], float] = defaultdict(float)
        self._copied_over: defaultdict[tuple[ActionKind, int], dict[str, None]] = defaultdict(dict)
        self._connect(transfers)
        # By action: the number of unmet dependencies, the number that are not queued, and the last arrival so far.
        self._missing: defaultdict[Action, int] = defaultdict(int)
        for (kind, _), leaving in self._ways.items():
            for way in leaving:
                for i in range(schedule.micro_batches):
                    self._missing[Action(kind, way.user, i)] += 1
        self._unqueued = dict(self._missing)
        self._users: defaultdict[Action, list[Action]] = defaultdict(list)  # by awaited action
        for user, needed in schedule.awaited.items():
            self._missing[user] += len(needed)
            for one in needed:
                self._users[one].append(user)
        self._last: dict[Action, Arrival] = {}
        self._free: defaultdict[Hashable, float] = defaultdict(float)  # when a link becomes free
        self._is_due = [False] * d  # by device: its next action has an event
        self._events: list[tuple[float, int, int, int, int]] = []  # (time, order, event, device, place)
        self._order = 0
        self._runs_ahead = [False] * d  # by device
        for (j, _), device in self._device_of.items():
            host = self.hosts[j]
            self._runs_ahead[device] |= host is not None and host.runs_ahead
        self._jobs: list[list[HostJob]] = [[] for _ in range(d)]  # by device, if the host runs ahead of it
        self._is_asking = [False] * d  # by device: its next job has an event
        self._holder = [_IDLE_HOST] * d  # by interpreter: the last job that took its lock
        self._last_queued: dict[Action, tuple[float, HostJob | tuple[int, int]]] = {}
        self._split = {*schedule.split_backwards}  # (stage, micro-batch) with W

    def _connect(self, transfers: Sequence[Transfer]) -> None:
        """Collects the edges between stages; neighbours have an edge even if nothing is sent."""
        device_of = device_by_stage(self.schedule)  # for micro-batch 0; the same stages share a device for the others
        for kind, step in NEIGHBOUR_STEP.items():
            for user in range(self.schedule.stages):
                if user + step in range(self.schedule.stages):
                    self._ways[kind, user + step].append(DependencyEdge(user))
        for one in transfers:
            kind = ActionKind.BACKWARD if one.is_gradient else ActionKind.FORWARD
            if device_of[one.source] == device_of[one.target]:
                self._ways[kind, one.source].append(DependencyEdge(one.target))
                continue
            self._ways[kind, one.source].append(DependencyEdge(one.target, float(one.seconds), True, one.over))
            self._handling[kind, one.source] += one.handling
            self._handling[kind, one.target] += one.handling
            if not self.overlaps and one.seconds:
                self._copying[kind, one.target] += one.seconds
                self._copied_over[kind, one.target] |= dict.fromkeys(one.over)

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
                job, self._is_asking[device] = self._jobs[device][place], False
                self._pass_on(self.schedule.rows[device][place], job.end, job)
                self._ask(device)
        return self.begun

    def _next(self, device: int) -> None:
        """Adds the event that begins the next action of a device, if its dependencies are met."""
        row, before = self.schedule.rows[device], self.begun[device]
        if self._is_due[device] or len(before) == len(row):
            return
        action = row[len(before)]
        if self._missing.get(action):
            return
        came = self._last.get(action)
        free = before[-1].span.end if before else 0.0
        if self._runs_ahead[device]:
            if len(self._jobs[device]) == len(before):
                return
            free = max(free, self._jobs[device][len(before)].start)
        self._is_due[device] = True
        self._put(free if came is None else max(free, came.arrived), _BEGIN, device)

    def _begin(self, device: int, time: float) -> None:
        before = self.begun[device]
        action = self.schedule.rows[device][len(before)]
        kind, j, _ = action
        shared, copying = self._copied_over[kind, j], self._copying[kind, j]
        start = max([time, *(self._free[way] for way in shared)])
        for way in shared:
            self._free[way] = start + copying
        came, free = self._last.get(action), before[-1].span.end if before else 0.0
        if came is not None and before and came.arrived <= free:
            came = None  # the device became free later
        end = start + copying + self.seconds[action]
        job, on_host = None, False
        if self._runs_ahead[device]:
            job = self._jobs[device][len(before)]
            on_host = job.start > max(came.arrived if came is not None else 0.0, free)
        elif self.hosts[j] is not None:
            job = self._take_host(device, len(before), start, None)
        last = end if job is None else job.end if job.runs_ahead else job.unlocked
        span = Span(action, device, start, max(end, last) + self._handling[kind, j], copying)
        before.append(StartedAction(span, time, came, job, on_host, last > end))
        self._put(span.end, _END, device, len(before) - 1)
        self._is_due[device] = False
        self._next(device)

    def _end(self, device: int, place: int) -> None:
        span = self.begun[device][place].span
        kind, stage, i = span.action
        for way in self._ways.get((kind, stage), ()):
            left = arrived = span.end
            if self.overlaps and way.is_sent:
                taken = ((device, self._device_of[way.user, i]), *way.over)  # each carries one transfer at a time
                left = max(span.end, *(self._free[one] for one in taken))
                arrived = left + way.seconds
                for one in taken:
                    self._free[one] = arrived
            self._arrive(Action(kind, way.user, i), Arrival(device, place, left, arrived))
        for waiting in self._users.get(span.action, ()):
            self._arrive(waiting, Arrival(device, place, span.end, span.end))
        if not self._runs_ahead[device]:
            self._pass_on(span.action, span.end, (device, place))

    def _arrive(self, user: Action, arrival: Arrival) -> None:
        """Records that one of an action's dependencies is met."""
        last = self._last.get(user)
        if last is None or last.arrived < arrival.arrived:
            self._last[user] = arrival
        self._missing[user] -= 1
        if not self._missing[user]:
            self._next(self._device_of[user.stage, user.micro_batch])

    def _ask(self, device: int) -> None:
        """Adds the event in which a worker's thread queues its next action, if all dependencies are queued."""
        row, jobs = self.schedule.rows[device], self._jobs[device]
        if not self._runs_ahead[device] or self._is_asking[device] or len(jobs) == len(row):
            return
        action = row[len(jobs)]
        if self._unqueued.get(action):
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

    def _pass_on(self, action: Action, time: float, source: HostJob | tuple[int, int]) -> None:
        """Records that an action is queued, and lets workers queue the actions that depend on it."""
        kind, stage, i = action
        for way in self._ways.get((kind, stage), ()):
            user = Action(kind, way.user, i)
            self._unqueued[user] -= 1
            if self._last_queued.get(user, (0.0, None))[0] <= time:
                self._last_queued[user] = time, source
            self._ask(self._device_of[way.user, i])

    def _take_host(self, device: int, place: int, time: float, before: HostJob | tuple[int, int] | None) -> HostJob:
        """Takes the host for an action; if the job needs the lock, once the lock is free."""
        action = self.schedule.rows[device][place]
        is_split = (action.stage, action.micro_batch) in self._split
        locked, unlocked = host_seconds(self.hosts[action.stage], action.kind, is_split)
        interpreter = 0 if self.one_interpreter else device
        holder, start = self._holder[interpreter], time
        if locked and holder.unlocked > time:
            start, before = holder.unlocked, holder
        free = start + locked
        job = HostJob(device, place, start, free, free + unlocked, before, self._runs_ahead[device])
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
    last: dict[int, tuple[float, int, int]] = {}  # by stage: when its last gradients are made, the device and the place
    for device, row in enumerate(begun):
        for place, one in enumerate(row):
            if one.span.action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
                stage = one.span.action.stage
                last[stage] = max(last.get(stage, (0.0, 0, 0)), (one.span.end, device, place))
    reductions, free = list[ReductionSpan](), [0.0] * len(begun)
    for stage, (_, device, place) in sorted(last.items(), key=lambda item: item[1][1:]):
        cost, span = stages[stage], begun[device][place].span
        if not cost.reduction:
            continue
        each, begin = cost.reduction / cost.reduction_buckets, span.start + span.receiving
        first_full = begin + (span.end - begin) / cost.reduction_buckets
        start = max(free[device], first_full)
        end = max(start + cost.reduction, span.end + each)
        since = start if start + cost.reduction >= span.end + each else span.end
        follows = free[device] > first_full and since == start
        free[device] = end
        reductions.append(
            ReductionSpan(stage, device, cost.gradient_bytes, start, end, cost.reduction, place, since, follows)
        )
    return tuple(reductions)
