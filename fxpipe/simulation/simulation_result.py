"""The results of a simulation, the critical path, and the comparison of a simulated step with a measured one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.cluster import Cluster
from fxpipe.errors import ArgumentError
from fxpipe.scheduling import Action, ActionKind, Schedule
from fxpipe.simulation import events, timeline
from fxpipe.simulation.costs import StageCost, Transfer
from fxpipe.simulation.timeline import HasTimeline, MemoryTimeline, Span, StepTimeline, TransferRecord
from fxpipe.utils.text_table import bytes_of_limit, show_as_printed, text_table, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

# -- The critical path: the chain of actions and transfers that determines the end of a step, found backwards ----------
#
#     device 0  |F0 F1 F2 .........B0=== ...       F0, the transfer to device 1, F0 there, B0 there, the transfer
#     device 1  |...F0 B0===F1 B1=== ...           back, and so on: a step is shorter if one of these is
#
# Its legs have no gaps, from the start of the step to its end. Among equally long chains, it is the chain that stays on
# its device.

SENDING, WAITING = "sending", "waiting"  # in transfer, or waiting for the transfers before on the link
HOST = "host"  # a device idles, or is slower, until the host has reached the action
REDUCING = "reducing"  # gradients are reduced over replicas


@dataclass(frozen=True, slots=True)
class CriticalLeg:
    """A piece of the critical path."""

    # An action ("F", "R", "B", "W", "U"), "sending" or "waiting" for its inputs, "host", or "reducing".
    kind: str
    start: float  # seconds since the step began
    end: float
    span: Span  # the action that runs, that needs the transfer, or that made the gradients

    @property
    def seconds(self) -> float:
        return self.end - self.start


def critical_legs(
    begun: Sequence[Sequence[events.StartedAction]], reductions: Sequence[events.ReductionSpan] = ()
) -> tuple[CriticalLeg, ...]:
    """Returns the legs of the critical path, in order of time."""
    legs: list[CriticalLeg] = []
    device = max((d for d, row in enumerate(begun) if row), key=lambda d: begun[d][-1].span.end)
    place = len(begun[device]) - 1
    until = begun[device][place].span.end
    number = max(range(len(reductions)), key=lambda k: reductions[k].end, default=-1)
    is_reducing = number >= 0 and reductions[number].end > until
    while is_reducing:
        reduced = reductions[number]
        device, place, until = reduced.device, reduced.place, reduced.since
        legs.append(CriticalLeg(REDUCING, until, reduced.end, begun[device][place].span))
        is_reducing, number = reduced.follows, number - 1
    point: tuple[int, int, bool] | None = (device, place, False)
    while point is not None and point[1] >= 0:
        device, place, is_start = point
        one = begun[device][place]
        span, received, end = one.span, one.span.start + one.span.receiving, min(until, one.span.end)
        if not is_start and one.ends_on_host and one.job is not None and end == span.end:
            point = _host_legs(legs, begun, one.job, span.end)
            continue
        if not is_start:
            legs.append(CriticalLeg(str(span.action.kind), received, end, span))
            _add_leg(legs, SENDING, span.start, received, span)
        _add_leg(legs, WAITING, one.could, span.start, span)
        if one.starts_on_host and one.job is not None:
            point = _host_legs(legs, begun, one.job, one.job.start)
        elif one.after is None:
            point = (device, place - 1, False)
        else:
            maker = begun[one.after.device][one.after.place].span
            _add_leg(legs, SENDING, one.after.left, one.after.arrived, span)
            _add_leg(legs, WAITING, maker.end, one.after.left, span)
            point = (one.after.device, one.after.place, False)
    return tuple(reversed(legs))


def _host_legs(
    legs: list[CriticalLeg], begun: Sequence[Sequence[events.StartedAction]], job: events.HostJob, end: float
) -> tuple[int, int, bool] | None:
    """Adds the legs of the host that lead to `end`, a time of `job`."""
    # Returns device and place of the action before them, and True for its start, False for its end; None: no action.
    while True:
        _add_leg(legs, HOST, job.start, end, begun[job.device][job.place].span)
        if job.before is None:
            return None if job.runs_ahead else (job.device, job.place, True)
        if isinstance(job.before, tuple):
            return (*job.before, False)
        job, end = job.before, job.start


def _add_leg(legs: list[CriticalLeg], kind: str, start: float, end: float, span: Span) -> None:
    if end > start:
        legs.append(CriticalLeg(kind, start, end, span))


HOST_BOUND_SHARE = 0.1  # share of the critical path from which `host_note` gives advice
QUIET_CORE_SHARE = 0.95  # share of their time in which actions have a core if no other process needs it


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure, measured and simulated: seconds, or a share from 0 to 1."""

    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        """The simulated figure divided by the measured figure."""
        return self.simulated / self.measured if self.measured else float("nan")


@dataclass(frozen=True, slots=True)
class DeviceComparison:
    name: str
    busy: ComparedFigure
    bubble: ComparedFigure


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A measured step and its simulation; `print` shows a table."""

    schedule: str
    step: ComparedFigure
    devices: tuple[DeviceComparison, ...]
    kinds: dict[ActionKind, ComparedFigure]  # total seconds of the actions of each kind
    # Seconds of all actions, measured only while their workers had a core; None on GPUs.
    on_core: ComparedFigure | None = None
    loss: ComparedFigure | None = None  # seconds of the loss in all F of the last stage
    learns_loss: bool = False  # the plan has no time of the loss: simulated with the measured time

    @property
    def core_share(self) -> float:
        """The share of the actions' seconds in which their workers had a core; below 1 on a busy machine."""
        took = sum(pair.measured for pair in self.kinds.values())
        return 1.0 if self.on_core is None or not took else self.on_core.measured / took

    def __str__(self) -> str:
        rows = [("step", *_figure_cells(self.step), "", "", "")]
        for k, one in enumerate(self.devices):
            shares = (percent(one.bubble.measured), percent(one.bubble.simulated))
            rows.append((f"device {k} {one.name}".rstrip(), *_figure_cells(one.busy), "", *shares))
        rows += [(f"all {kind}", *_figure_cells(pair), "", "", "") for kind, pair in self.kinds.items()]
        if self.loss is not None:
            rows.append(("loss, in F", *_figure_cells(self.loss), "", "", ""))
        headers = ("seconds", "measured", "simulated", "ratio", "", "bubble", "simulated")
        table = text_table(rows, headers, left=("seconds", ""))
        lines = [self.schedule, table]
        if self.learns_loss:
            lines.append(
                "The plan does not know the loss: simulated with what it took in this step. Plan with loss_fn and "
                "target to have it before."
            )
        if self.on_core is not None and self.core_share < QUIET_CORE_SHARE:
            measured, simulated, ratio = _figure_cells(self.on_core)
            lines.append(f"The actions had a core for {self.core_share:.0%} of their time: others wanted it, too.")
            lines.append(f"On it they took {measured}, simulated {simulated}: {ratio}")
        return "\n".join(lines)


def compare_steps(simulated: StepTimeline, measured: StepTimeline) -> StepComparison:
    """Compares a simulated step with a measured step; without updates of weights, unless both have them.

    Raises:
        ArgumentError: the steps ran different actions.
    """
    updating = [any(span.action.kind is ActionKind.UPDATE for span in of.spans) for of in (simulated, measured)]
    if any(updating) and not all(updating):
        simulated, measured = simulated.without_updates(), measured.without_updates()
    thought, ran = (Counter(span.action for span in of.spans) for of in (simulated, measured))
    if ran != thought:
        raise ArgumentError(
            f"the step ran {measured.schedule} with {_describe_actions(ran)}, the simulation is of "
            f"{simulated.schedule} with {_describe_actions(thought)}: simulate with the schedule, chunks, batch and "
            "checkpoint of the step"
        )
    busy = map(ComparedFigure, measured.busy, simulated.busy)
    bubble = map(ComparedFigure, measured.bubble, simulated.bubble)
    devices = tuple(map(DeviceComparison, measured.devices, busy, bubble))
    was, will_be = (
        {kind: sum(span.seconds for span in step.spans if span.action.kind is kind) for kind in ActionKind}
        for step in (measured, simulated)
    )
    kinds = {kind: ComparedFigure(was[kind], will_be[kind]) for kind in ActionKind if was[kind] or will_be[kind]}
    on_core = ComparedFigure(sum(measured.on_core), sum(will_be.values())) if measured.on_core else None
    pair = ComparedFigure(measured.loss_seconds, simulated.loss_seconds)
    loss = pair if pair.measured or pair.simulated else None
    return StepComparison(
        measured.schedule, ComparedFigure(measured.seconds, simulated.seconds), devices, kinds, on_core, loss
    )


def _describe_actions(actions: Counter[Action]) -> str:
    if not actions:
        return "no actions"
    stages, m = {a.stage for a in actions}, {a.micro_batch for a in actions}
    return f"{actions.total()} actions of {len(stages)} stages and {len(m)} micro-batches"


def _figure_cells(pair: ComparedFigure) -> tuple[str, str, str]:
    return human_seconds(pair.measured), human_seconds(pair.simulated), f"{pair.ratio:.2f}"


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """The bytes of a step over links of one kind."""

    pipeline: float  # values and their gradients, between stages
    reduction: float  # gradients of parameters, between replicas

    @property
    def total(self) -> float:
        return self.pipeline + self.reduction


class MemoryFit(tuple[bool | None, ...]):
    """For each device, True if its memory suffices, else False; None if its limit is not known.

    The tuple is false if a device lacks memory; `print` shows how much.
    """

    needs: tuple[float, ...]  # bytes, by device
    limits: tuple[float | None, ...]  # bytes, by device; None: not known

    def __new__(cls, needs: Sequence[float], limits: Sequence[float | None]) -> MemoryFit:
        pairs = zip(needs, limits, strict=True)
        self = super().__new__(cls, (None if limit is None else need <= limit for need, limit in pairs))
        self.needs, self.limits = tuple(needs), tuple(limits)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.needs, self.limits

    def __bool__(self) -> bool:
        return False not in self

    @property
    def fullest(self) -> list[int]:
        """All devices, first the device closest to its limit, or furthest over it; without limits, by their needs."""
        pairs = zip(self.needs, self.limits, strict=True)
        shares = [0.0 if limit is None else need / (limit or 1) for need, limit in pairs]
        return sorted(range(len(shares)), key=lambda d: (-shares[d], -self.needs[d]))

    def __str__(self) -> str:
        needs, known = self.needs, {d: limit for d, limit in enumerate(self.limits) if limit is not None}
        if not known:
            return "memory limits are not known"
        if self:
            device = next(d for d in self.fullest if d in known)
            return f"fits: device {device} needs {bytes_of_limit(needs[device], known[device])}"
        lacking = [
            f"device {d} lacks {human_bytes(needs[d] - limit)}, it needs {bytes_of_limit(needs[d], limit)}"
            for d, limit in known.items()
            if needs[d] > limit
        ]
        return f"does not fit: {'; '.join(lacking)}"


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The state of a simulated stream between its warm-up and its drain."""

    mini_batches: int  # in the full stream
    micro_batches: int  # per mini-batch
    first: int  # measured from the update of this mini-batch on the first device
    last: int  # to the update of this mini-batch
    seconds: float  # per mini-batch
    busy: tuple[float, ...]  # seconds per mini-batch, by device
    warm_up: float  # seconds until all devices are busy
    drain: float  # seconds from when the first device has no more work


@dataclass(frozen=True, slots=True)
class Simulation(HasTimeline):
    """The result of a simulation; `print` draws it."""

    schedule: Schedule
    stages: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]
    spans: tuple[Span, ...]  # by device, in the order of its row
    # From the first start to the last end, reductions included, and updates only if the schedule has them.
    seconds: float
    legs: tuple[CriticalLeg, ...]  # the critical path, without gaps from 0 to `seconds`
    devices: tuple[str, ...] = ()  # the name of each device; "" if it has none
    samples: int | None = None  # in the mini-batch, over all replicas; None: not known
    limits: tuple[float | None, ...] = ()  # bytes, by device; None, or an empty tuple: not known
    one_interpreter: bool = True  # the workers of all devices share one interpreter
    overlaps: bool = True  # transfers run while devices compute
    reductions: tuple[events.ReductionSpan, ...] = ()  # gradients over replicas, by device and in order
    cluster: Cluster | None = None  # the nodes of the devices of all replicas; None: not known
    steady: SteadyState | None = None  # None: a step, not a stream

    def __post_init__(self) -> None:
        count = len(self.schedule.rows)
        object.__setattr__(self, "devices", self.devices or ("",) * count)
        object.__setattr__(self, "limits", self.limits or (None,) * count)

    @property
    def step_seconds(self) -> float:
        """The seconds of a mini-batch: of the full step or, for a stream, in the steady state."""
        return self.seconds if self.steady is None else self.steady.seconds

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a mini-batch."""
        return self.schedule.micro_batches if self.steady is None else self.steady.micro_batches

    @property
    def busy(self) -> tuple[float, ...]:
        """The seconds per mini-batch in which each device computes or, if copies do not overlap computation, copies."""
        if self.steady is not None:
            return self.steady.busy
        return self._by_device((span.device, span.seconds) for span in self.spans)

    def _by_device(self, seconds: Iterable[tuple[int, float]]) -> tuple[float, ...]:
        sums = [0.0] * len(self.schedule.rows)
        for device, time in seconds:
            sums[device] += time
        return tuple(sums)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The share of `step_seconds`, 0 to 1, in which each device idles."""
        return timeline.idle_shares(self.busy, self.step_seconds)

    @property
    def mean_bubble(self) -> float:
        """The mean of `bubble` over all devices."""
        return sum(self.bubble) / len(self.schedule.rows)

    @property
    def memory(self) -> tuple[MemoryTimeline, ...]:
        """The bytes in use over time on each device, for all its stages together."""
        spans: list[list[Span]] = [[] for _ in self.schedule.rows]
        for span in self.spans:
            spans[span.device].append(span)
        return tuple(timeline.memory_timeline_of(row, self.stages) for row in spans)

    @property
    def fits(self) -> MemoryFit:
        """For each device, True if it has the memory that it needs, else False; None if its limit is not known."""
        return MemoryFit([memory.peak for memory in self.memory], self.limits)

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer on the slowest device, after the step; 0 if in the schedule, or not known."""
        if any(span.action.kind is ActionKind.UPDATE for span in self.spans):
            return 0.0
        updates = (cost.update for cost in self.stages)
        return max(self._by_device(zip(events.device_by_stage(self.schedule), updates, strict=True)))

    @property
    def reduction_seconds(self) -> float:
        """Seconds of reduction on the device that reduces gradients longest; most of it overlaps computation."""
        return max(self._by_device((one.device, one.seconds) for one in self.reductions))

    @property
    def exposed_reduction_seconds(self) -> float:
        """Seconds by which reductions extend the step after its last action."""
        return self.seconds - max(span.end for span in self.spans)

    @property
    def traffic(self) -> tuple[LinkTraffic, LinkTraffic] | None:
        """The bytes per step of all replicas, within nodes and between nodes; None if no cluster is known."""
        cluster = self.cluster
        if cluster is None:
            return None
        values = [0.0, 0.0]
        for (source, target), size in self.sent.items():
            if cluster.replicas:  # the rows are all devices; replicas take micro-batches in turn
                values[source // cluster.devices_per_node != target // cluster.devices_per_node] += size
                continue
            crossings = cluster.crossings(source, target)
            values[0] += (cluster.data - crossings) * size
            values[1] += crossings * size
        reduced = [0.0, 0.0]
        groups = [(cluster.worker(one.device), one.bytes) for one in self.reductions]
        if self.steady is not None and self.schedule.replicas:
            device_of = events.device_by_stage(self.schedule)
            updates = (s.action.stage for s in self.spans if s.action.kind is ActionKind.UPDATE)
            for stage, count in Counter(updates).items():
                size = self.stages[stage].gradient_bytes * (count / self.steady.mini_batches)
                groups.append((cluster.worker(device_of[stage]), size))
        for worker, size in groups:  # bytes of gradients that its replicas reduce per mini-batch
            # In a ring, each link to the next device carries this many bytes.
            count = cluster.count(worker)
            nodes = {cluster.node(replica, worker) for replica in range(count)}
            crossings = len(nodes) if len(nodes) > 1 else 0  # links of the ring between nodes
            each = 2 * (count - 1) / count * size
            reduced[0] += (count - crossings) * each
            reduced[1] += crossings * each
        within, between = (LinkTraffic(*pair) for pair in zip(values, reduced, strict=True))
        return within, between

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """The actions that determine the end of the step, in order. `legs` also has the transfers between them."""
        return tuple(dict.fromkeys(leg.span for leg in self.legs))

    @property
    def critical_shares(self) -> dict[str, float]:
        """The share, 0 to 1, of each `CriticalLeg.kind` in the critical path, largest first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for leg in self.legs:
            seconds[leg.kind] += leg.seconds
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        return {kind: time / self.seconds for kind, time in ordered if time}

    @property
    def host_seconds(self) -> float:
        """Seconds per step in which the busiest interpreter's lock is held: no step is shorter. 0 if not known."""
        locked: defaultdict[int, float] = defaultdict(float)  # by interpreter
        for span in self.spans:
            cost, interpreter = self.stages[span.action.stage].host, 0 if self.one_interpreter else span.device
            locked[interpreter] += events.host_seconds(cost, span.action.kind, False)[0]
        return max(locked.values()) / (1 if self.steady is None else self.steady.mini_batches)

    @property
    def host_note(self) -> str:
        """A note that the step waits for the host, with advice; empty if it hardly waits."""
        share = self.critical_shares.get(HOST, 0.0)
        if share < HOST_BOUND_SHARE:
            return ""
        several = ", or a process for each device (a DeviceMesh as devices=)"
        return (
            f"bound by the host for {percent(share)} of the step: Python takes {human_seconds(self.host_seconds)} of it"
            f"{' for all devices together' if self.one_interpreter else ' for one device'}; what helps are larger "
            f"micro-batches, compile=True, fewer and larger stages{several if self.one_interpreter else ''}"
        )

    @property
    def sent(self) -> dict[tuple[int, int], float]:
        """The bytes per step of each link in use, by (from device, to device)."""
        device_of = self.schedule.row_of
        trains = any(action.kind is ActionKind.BACKWARD for action in self.schedule.rows[device_of[0, 0]])
        sent: defaultdict[tuple[int, int], float] = defaultdict(float)
        m = self.schedule.micro_batches
        for transfer in self.transfers:
            if not trains and transfer.is_gradient:
                continue
            links = Counter((device_of[transfer.source, i], device_of[transfer.target, i]) for i in range(m))
            for (source, target), count in links.items():
                if source != target:
                    sent[source, target] += transfer.bytes * count * self.micro_batches / m
        return dict(sorted(sent.items()))

    def as_step(self, *, has_memory: bool = True) -> StepTimeline:
        """Returns the step in the common form of simulated and measured steps, with or without memory over time."""
        has_bytes = any(cost.memory(1, 1) for cost in self.stages)
        trains = any(span.action.kind is ActionKind.BACKWARD for span in self.spans)
        spans = tuple(sorted(self.spans, key=lambda span: (span.start, span.device)))
        return StepTimeline(
            schedule=self.schedule.name,
            is_simulated=True,
            devices=self.devices,
            spans=spans,
            seconds=self.seconds,
            memory=self.memory if has_memory and has_bytes else (),
            limits=self.limits,
            loss_seconds=self.schedule.micro_batches * self.stages[-1].loss if trains else 0.0,
        )

    def arrows(self) -> Iterator[TransferRecord]:
        """Yields all transfers between stages, for each micro-batch."""
        kinds = {span.action.kind for span in self.spans}
        for transfer in self.transfers:
            kind = ActionKind.BACKWARD if transfer.is_gradient else ActionKind.FORWARD
            if kind in kinds:
                for i in range(self.schedule.micro_batches):
                    maker, user = (Action(kind, j, i) for j in (transfer.source, transfer.target))
                    yield TransferRecord(maker, user, transfer.bytes)

    def compared(self, record: HasTimeline) -> StepComparison:
        """Compares with a step that ran the same actions: `print(simulation.compared(pipe.last_step))`.

        If the simulation has no time of the loss, it takes the time from the step; if the step has none (in a drop-in
        it is computed between forward and backward), it is simulated without.

        Raises:
            ArgumentError: the step ran different actions.
        """
        step = record.as_step(has_memory=False)
        if bool(step.loss_seconds) == bool(self.stages[-1].loss):
            return compare_steps(self.as_step(has_memory=False), step)
        loss = step.loss_seconds / self.schedule.micro_batches
        stages = (*self.stages[:-1], replace(self.stages[-1], loss=loss))
        learnt = simulate_checked(self.schedule, stages, self.transfers, self.overlaps, self.one_interpreter)
        return replace(compare_steps(learnt.as_step(has_memory=False), step), learns_loss=loss > 0)

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        head, steady = str(self.schedule).partition("\n")[0], self.steady
        total = f"step {human_seconds(self.seconds)}"
        if steady is not None:
            each = count_text(self.micro_batches, "micro-batch", "es")
            count = count_text(steady.mini_batches, "mini-batch", "es")
            head = f"{self.schedule.name}: {self.schedule.stages} stages, {count} of {each}"
            total = (
                f"warm-up {human_seconds(steady.warm_up)}, drain {human_seconds(steady.drain)}; between them a "
                f"mini-batch takes {human_seconds(steady.seconds)}, with its update"
            )
        if self.samples:
            head += f", {self.samples} samples"
        names = [f"device {d} {name}".rstrip() for d, name in enumerate(self.devices)]
        width = max(map(len, names))
        drawn = timeline.timeline_lines(self.spans, len(self.schedule.rows), self.seconds)
        lines, peaks = [], [memory.peak for memory in self.memory]
        figures = zip(names, drawn, self.busy, self.bubble, strict=True)
        for d, (name, line, busy, bubble) in enumerate(figures):
            held = f", memory {human_bytes(peaks[d])}" if any(peaks) else ""
            if held and (limit := self.limits[d]) is not None:
                held += f" of {human_bytes(limit)}{'' if peaks[d] <= limit else ': does not fit'}"
            lines.append(f"{name:{width}} |{line}|  busy {human_seconds(busy)}, bubble {percent(bubble)}{held}")
        if exposed := self.exposed_reduction_seconds:
            total += f", of which {human_seconds(exposed)} only reduce gradients"
        total += f", mean bubble {percent(self.mean_bubble)}"
        if self.update_seconds:
            total += f", updates after it {human_seconds(self.update_seconds)}"
        shares = ", ".join(f"{kind} {percent(share)}" for kind, share in self.critical_shares.items())
        path = f"critical path: {shares}" if shares else ""
        return "\n".join([head, *lines, total, *filter(None, (path, wrap_text(self.host_note)))])


def simulate_checked(
    schedule: Schedule,
    stages: tuple[StageCost, ...],
    transfers: tuple[Transfer, ...],
    overlaps: bool,
    one_interpreter: bool,
) -> Simulation:
    """Simulates a valid schedule with valid costs; see `simulate_schedule`."""
    begun = events.EventSimulation(schedule, stages, transfers, overlaps, one_interpreter).run()
    reductions = events.reductions_of(begun, stages)
    return Simulation(
        schedule,
        stages,
        transfers,
        spans=tuple(one.span for row in begun for one in row),
        seconds=max([row[-1].span.end for row in begun if row] + [one.end for one in reductions]),
        legs=critical_legs(begun, reductions),
        one_interpreter=one_interpreter,
        overlaps=overlaps,
        reductions=reductions,
    )
