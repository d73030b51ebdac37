"""The walk from event to event: when every action of a schedule starts and ends, and what it waited for.

An action *begins* when its device is free and all that it needs has arrived; if the device copies what it was sent, it
takes the shared links then. It *ends* when it has computed; what it made takes its links then, in order of time.

All workers of an interpreter with a lock also take turns at the host, in the order in which they ask:

    host      |F0a F0b ....          F of a worker whose device runs behind: its thread goes on to the next action as
    device a     |F0a====== |        soon as it has queued this one, and as those that it needs have been queued, too
    device b         |F0b====== |

An action of such a device begins and ends no sooner than the host begins and ends to queue it. A worker on a CPU asks
for the host when its action begins, which ends no sooner than the host had time for it.
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

# What the actions of a schedule need and how long they take: for each kind and stage the ways that lead from there.


@dataclass(frozen=True, slots=True)
class DependencyEdge:
    """The dependency of an action on one of the same kind and micro-batch."""

    user: int  # stage
    seconds: float = 0.0
    is_sent: bool = False  # from device to device, over a link of theirs
    over: tuple[str, ...] = ()  # what the link shares with others


DependencyEdges = dict[ActionKind, list[list[DependencyEdge]]]  # for F and B, for each stage: to those who need it


@dataclass(slots=True)
class ReceiveCopies:
    """The copies that the receiving device makes before it computes, where transfers do not overlap computation."""

    seconds: float = 0.0
    over: dict[str, None] = field(default_factory=dict)  # shared ways that it takes, each once


def dependency_edges(schedule: Schedule, transfers: Sequence[Transfer]) -> DependencyEdges:
    """Collects the ways between stages; between neighbours there is one also where nothing is sent."""
    device_of = device_by_stage(schedule)  # of the first micro-batch: of others it is the same or another for the same
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


def handling_seconds(schedule: Schedule, transfers: Sequence[Transfer]) -> dict[tuple[ActionKind, int], float]:
    """Computes what actions of a kind and stage take to unpack what other devices send, and to pack for them."""
    device_of = device_by_stage(schedule)
    handling: defaultdict[tuple[ActionKind, int], float] = defaultdict(float)
    for one in transfers:
        if one.handling and device_of[one.source] != device_of[one.target]:
            kind = ActionKind.BACKWARD if one.is_gradient else ActionKind.FORWARD
            handling[kind, one.source] += one.handling
            handling[kind, one.target] += one.handling
    return dict(handling)


def host_seconds(cost: HostCost | None, kind: ActionKind, is_split: bool) -> tuple[float, float]:
    """Returns the seconds of the host for an action: under the interpreter's lock, and after that without it."""
    if cost is None or kind is ActionKind.UPDATE:
        return 0.0, 0.0
    if kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE):
        return cost.forward + cost.action, 0.0
    if kind is ActionKind.WEIGHT:
        return cost.action, cost.weight
    return cost.action, cost.backward - (cost.weight if is_split else 0.0)


def device_by_stage(schedule: Schedule) -> list[int]:
    """Returns the device of each stage; where it has replicas, the first one's, which has the first micro-batch."""
    row_of = schedule.row_of
    return [row_of[j, 0] for j in range(schedule.stages)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a value or gradient that an action has waited for, from an action on another device."""

    device: int  # of the action that it comes from
    place: int  # of that action in its row
    left: float  # when the link took it
    arrived: float


@dataclass(frozen=True, slots=True)
class HostJob:
    """The time in which the host runs the Python of an action, or queues it."""

    device: int
    place: int  # of the action in its row
    start: float
    unlocked: float  # when it lets the interpreter's lock go
    end: float
    before: HostJob | None = None  # at whose end, or letting go, it started
    after: tuple[int, int] | None = None  # (device, place) of the action at whose end it started
    runs_ahead: bool = False  # else, where nothing is before it, it started with its action


@dataclass(frozen=True, slots=True)
class StartedAction:
    """An action, and what held it up."""

    span: Span
    could: float  # when it could have started, had it not waited for what links share
    after: Arrival | None  # None: the action before on its device, or nothing
    job: HostJob | None = None
    starts_on_host: bool = False  # was it the host that it had to wait for to start
    ends_on_host: bool = False  # and to end


_BEGIN, _END, _QUEUE, _QUEUED = range(4)  # events: of an action, and of the host's job for it
_IDLE_HOST = HostJob(-1, -1, 0.0, 0.0, 0.0)


class EventSimulation:
    """Discrete events over the rows of a schedule that is known to run.

    Args:
        overlaps: transfers run while devices compute; else the receiving device copies before it computes.
        hosts: by stage.
        one_interpreter: all workers take turns at one host; else each has its own.
        handling: seconds at the end of such actions.
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
        # by stage and micro-batch: needs that are not met, and the last arrival of those that are
        self._missing = {kind: dependency_counts(by_stage, m) for kind, by_stage in ways.items()}
        self._last: dict[ActionKind, list[list[Arrival | None]]] = {
            kind: [[None] * m for _ in by_stage] for kind, by_stage in ways.items()
        }
        self._users: defaultdict[Action, list[Action]] = defaultdict(list)  # that await an action (`Schedule.awaited`)
        self._unmet = {user: len(needed) for user, needed in schedule.awaited.items()}  # actions that one still awaits
        self._last_met: dict[Action, Arrival] = {}  # of the actions that it awaited, the last one
        for user, needed in schedule.awaited.items():
            for one in needed:
                self._users[one].append(user)
        self._free: defaultdict[Hashable, float] = defaultdict(float)  # when a link has carried all it was given
        self._is_due = [False] * d  # by device: its next action has an event
        self._events: list[tuple[float, int, int, int, int]] = []  # (time, order, event, device, place)
        self._order = 0
        # The host.
        self._runs_ahead = [False] * d  # by device
        for (j, _), device in self._device_of.items():
            host = hosts[j]
            self._runs_ahead[device] |= host is not None and host.runs_ahead
        self._jobs: list[list[HostJob]] = [[] for _ in range(d)]  # by device, of devices that run behind the host
        self._is_asking = [False] * d  # by device: its next job has an event
        self._holder = [_IDLE_HOST] * d  # by interpreter: who had its lock last
        # by stage and micro-batch: needs that are not queued
        self._unqueued = {kind: [[*row] for row in rows] for kind, rows in self._missing.items()}
        self._last_queued: dict[tuple[ActionKind, int, int], tuple[float, HostJob | tuple[int, int]]] = {}
        self._split = {*schedule.split_backwards}  # (stage, micro-batch) that have W

    def run(self) -> list[list[StartedAction]]:
        """Runs the simulation, and returns the actions of each device in order."""
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
        """The next action of a device is due as soon as nothing is missing and the one before has ended."""
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
        """Returns what has arrived last of all that an action needs of others."""
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
            came = None  # the device was not free before
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
                taken = ((device, user), *way.over)  # each of which carries one transfer at a time
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
        """The thread of a worker comes to the host with its next action, as soon as all that it needs is queued."""
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
        """Lets workers whose devices run behind queue what needs an action that is queued by now."""
        kind, i = action.kind, action.micro_batch
        for way in self.ways[kind][action.stage] if kind in self.ways else ():
            self._unqueued[kind][way.user][i] -= 1
            if self._last_queued.get((kind, way.user, i), (0.0, None))[0] <= time:
                self._last_queued[kind, way.user, i] = time, source
            self._ask(self._device_of[way.user, i])

    def _job(self, device: int, place: int, time: float) -> HostJob | None:
        """Returns the job of an action that begins: queued before, or asked for now."""
        if self._runs_ahead[device]:
            return self._jobs[device][place]
        if self.hosts[self.schedule.rows[device][place].stage] is None:
            return None
        return self._take_host(device, place, time, None)

    def _take_host(self, device: int, place: int, time: float, before: HostJob | tuple[int, int] | None) -> HostJob:
        """Takes the host for an action as soon as the lock is free, if it needs the lock."""
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
