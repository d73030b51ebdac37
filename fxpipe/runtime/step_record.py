"""The record of a step, with its times: `pipe.last_step`.

Times are seconds since the step began, without the time of the caller (`StepRecord.away`) between the forward and the
backward of a drop-in, or between the step and an update of its weights by the stages, a part of the record.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

import torch

from fxpipe.runtime.bound_program import BoundProgram, different_programs
from fxpipe.scheduling.actions import Action, ActionKind, Schedule
from fxpipe.scheduling.replicas import replica_of
from fxpipe.simulation.timeline import HasTimeline, Span, StepTimeline, TransferRecord, timeline_lines
from fxpipe.utils import accelerator
from fxpipe.utils.files import write_atomically
from fxpipe.utils.text_table import show_as_printed, text_table
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.runtime.exchange import TransferNote


# `step_record_of` evaluates them on request. A GPU runs an action after the host has queued it: events on its stream
# before and after it are read with the record. So timing never waits for a GPU during a step.

TimeMark: TypeAlias = "float | torch.Event"  # a time of the host's clock, or an event on a stream


def mark_time(stream: torch.Stream | None) -> TimeMark:
    """Returns the current time of a stream; of the host for None."""
    return time.perf_counter() if stream is None else accelerator.record_event(stream, timing=True)


@dataclass(frozen=True, slots=True)
class StepLog:
    begun: list[float] = field(default_factory=list)  # when the rows were started: a drop-in has two parts
    times: dict[Action, tuple[TimeMark, TimeMark]] = field(default_factory=dict)
    on_core: dict[Action, float] = field(default_factory=dict)  # seconds, for actions on a CPU
    losses: dict[int, tuple[TimeMark, TimeMark]] = field(default_factory=dict)  # by micro-batch
    verifications: list[float] = field(default_factory=list)  # seconds of the host
    updates: list[StepLog] = field(default_factory=list)  # updates of the weights after the step

    def now(self) -> StepLog:
        return StepLog(*(getattr(self, one.name).copy() for one in fields(self)))


@dataclass(frozen=True, slots=True)
class StepNotes:
    """The notes of a step, from which its record is computed."""

    schedule: Schedule
    bounds: Sequence[BoundProgram]  # by micro-batch
    log: StepLog
    moved: Sequence[TransferNote]
    samples: int | None = None  # in the mini-batch; None if unknown


def host_clock() -> Callable[[TimeMark], float]:
    """Returns a function from time marks to seconds of the host's clock, which synchronizes with each GPU once."""
    now: dict[torch.device, tuple[float, torch.Event]] = {}  # by GPU: one moment on both clocks

    def seconds(when: TimeMark) -> float:
        if isinstance(when, float):
            return when
        device = when.device
        if device not in now:
            accelerator.synchronize(device)
            event = accelerator.record_event(accelerator.current_stream(device), timing=True)
            event.synchronize()
            now[device] = time.perf_counter(), event
        host, event = now[device]
        return host - accelerator.seconds_between(when, event)

    return seconds


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """One action of the last step."""

    action: Action
    start: float  # on a GPU: time of the stream, not of the host
    end: float
    device: int  # index in the pipe's devices
    waited: float  # seconds before `start` in which the device was idle
    received: int  # bytes of values and gradients from other stages
    sent: int  # bytes that other stages received from it
    on_core: float | None = None  # on a CPU: seconds in which its worker had a core


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Totals of one device in a step."""

    name: str
    busy: float  # seconds
    waited: float  # seconds before actions; not after the last one
    received: int  # bytes
    sent: int
    peak_memory: int | None = None  # bytes allocated, since the last reset; None: not measured
    planned_memory: int | None = None  # bytes by the plan


@dataclass(frozen=True, slots=True)
class StepRecord(HasTimeline):
    """The last `forward_backward`, or drop-in forward and, after it has run, backward. `print` shows a summary."""

    schedule: str
    actions: tuple[ActionRecord, ...]  # in order of start
    transfers: tuple[TransferRecord, ...]
    devices: tuple[DeviceRecord, ...]
    away: float  # seconds between forward and backward of a drop-in
    losses: tuple[float, ...] = ()  # seconds of each micro-batch's loss, in F of the last stage; empty for a drop-in
    verification: float = 0.0  # seconds of verifying the loss, after all actions; 0 if not due
    transport: str = ""  # between processes: "nccl", or the reason for transfers by CPU memory
    reduction: str = ""  # between replicas: how gradients are summed, in the same words
    samples: int | None = None  # in the mini-batch; None if unknown

    @property
    def spans(self) -> tuple[Span, ...]:
        """The time spans of each device, as in a `Simulation`, without copies, which overlap with actions."""
        return tuple(Span(one.action, one.device, one.start, one.end) for one in self.actions)

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end of the last action."""
        return max((a.end for a in self.actions), default=0.0)

    def busy(self, stage: int) -> float:
        """Returns the seconds in which a stage was busy."""
        return sum(a.end - a.start for a in self.actions if a.action.stage == stage)

    @property
    def loss_seconds(self) -> float:
        """The mean seconds of a micro-batch's loss, of which a joint tail is a part; 0 for a drop-in."""
        return fmean(self.losses) if self.losses else 0.0

    def bubble(self, device: int) -> float:
        """Returns the share of the step in which a device was idle."""
        return 1 - self.devices[device].busy / self.seconds if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of the step by name, for loggers: `wandb.log(pipe.last_step.metrics())`.

        Times are in seconds. The memory of a device is included if it is measured, as on CUDA.
        """
        shares = [self.bubble(d) for d in range(len(self.devices))]
        metrics: dict[str, float | None] = {
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.samples and self.seconds else None,
            "bubble": sum(shares) / len(shares) if shares else 0.0,
            "loss_seconds": sum(self.losses),
        }
        for d, one in enumerate(self.devices):
            figures = {
                "busy_seconds": one.busy,
                "waited_seconds": one.waited,
                "bubble": shares[d],
                "peak_memory": one.peak_memory,
                "planned_memory": one.planned_memory,
            }
            metrics |= {f"device_{d}/{name}": value for name, value in figures.items()}
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def as_step(self, *, has_memory: bool = True) -> StepTimeline:
        """Converts the record to the common form of real and simulated steps, which has no memory over time here."""
        cores = tuple(one.on_core for one in self.actions if one.on_core is not None)
        return StepTimeline(
            schedule=self.schedule,
            is_simulated=False,
            devices=tuple(device.name for device in self.devices),
            spans=self.spans,
            seconds=self.seconds,
            on_core=cores if len(cores) == len(self.actions) else (),
            away=self.away,
            waited=tuple(one.waited for one in self.actions),
            loss_seconds=sum(self.losses),
        )

    def arrows(self) -> Iterator[TransferRecord]:
        yield from self.transfers

    def save_trace(self, path: str | Path) -> None:
        """Writes the step for chrome://tracing or https://ui.perfetto.dev.

        Raises:
            FileError: the file cannot be written.
        """
        from fxpipe.inspect.perfetto import perfetto_text

        write_atomically(path, perfetto_text(self).encode(), "a trace")

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        count = count_text(len(self.actions), "action")
        away = f", {human_seconds(self.away)} between forward and backward" if self.away else ""
        rows = [
            (str(d), one.name, human_seconds(one.busy), human_seconds(one.waited), percent(self.bubble(d)),
             human_bytes(one.received), human_bytes(one.sent))
            for d, one in enumerate(self.devices)
        ]  # fmt: skip
        headers = ("device", "", "busy", "waited", "bubble", "received", "sent")
        table = text_table(rows, headers, left=("",)) if rows else ""
        memory = [
            f"device {d}: peak memory {human_bytes(one.peak_memory)}"
            + ("" if one.planned_memory is None else f", planned {human_bytes(one.planned_memory)}")
            for d, one in enumerate(self.devices)
            if one.peak_memory is not None
        ]
        loss = [f"the loss took {human_seconds(sum(self.losses))} of all F of the last stage"] if self.losses else []
        if self.verification:
            loss.append(
                f"then it was verified in {human_seconds(self.verification)}: taken of the whole mini-batch, as in the "
                "1st, 10th, 100th ... step with a loss"
            )
        if self.transport:
            loss.append(f"tensors go from rank to rank by {self.transport}")
        if self.reduction:
            loss.append(f"gradients are summed over replicas by {self.reduction}")
        head = f"{self.schedule}: {count} in {human_seconds(self.seconds)}{away}"
        width = len(str(len(self.devices) - 1))
        timeline = [
            f"device {d:>{width}}: {line.rstrip()}"
            for d, line in enumerate(timeline_lines(self.spans, len(self.devices), self.seconds))
        ]
        return "\n".join([head, table, *memory, *loss, "", *timeline]).rstrip()


def step_record_of(notes: StepNotes) -> StepRecord:
    schedule, bounds, log = notes.schedule, notes.bounds, notes.log
    row_of, stage_devices, seconds = schedule.row_of, bounds[0].stage_devices, host_clock()
    names = {d: str(stage_devices[j][replica_of(i, len(stage_devices[j]))]) for (j, i), d in row_of.items()}
    parts, away = _parts_of(log, seconds)
    has_loss = len(log.begun) == 1 and any(action.kind is ActionKind.BACKWARD for action in log.times)
    transfers = tuple(_transfer_records(bounds, notes.moved, has_loss))
    received, sent = Counter[Action](), Counter[Action]()
    for transfer in transfers:
        received[transfer.user] += int(transfer.bytes)
        sent[transfer.maker] += int(transfer.bytes)

    actions: list[ActionRecord] = []
    free: dict[int, float] = {}  # by device: when it became idle
    core_seconds = log.on_core | {action: time for update in log.updates for action, time in update.on_core.items()}
    for begin, times in parts:
        free = {d: max(begin, since) for d, since in free.items()}
        for action, (start, end) in sorted(times.items(), key=lambda one: one[1]):
            d = row_of[action.stage, action.micro_batch]
            waited = max(0.0, start - free.get(d, begin))
            free[d] = end
            moved_bytes = received[action], sent[action]
            actions.append(ActionRecord(action, start, end, d, waited, *moved_bytes, core_seconds.get(action)))
    actions.sort(key=lambda a: a.start)
    devices = []
    for d in range(len(schedule.rows)):
        own = [a for a in actions if a.device == d]
        busy, waited = sum(a.end - a.start for a in own), sum(a.waited for a in own)
        devices.append(
            DeviceRecord(names.get(d, ""), busy, waited, sum(a.received for a in own), sum(a.sent for a in own))
        )
    losses = tuple(seconds(end) - seconds(start) for _, (start, end) in sorted(log.losses.items()))
    more = losses, sum(log.verifications)
    return StepRecord(schedule.name, tuple(actions), transfers, tuple(devices), away, *more, samples=notes.samples)


ActionTimes = dict[Action, tuple[float, float]]


def _parts_of(log: StepLog, seconds: Callable[[TimeMark], float]) -> tuple[list[tuple[float, ActionTimes]], float]:
    """Returns begin and actions of each part of a step, and the seconds between forward and backward of a drop-in."""
    # Updates after the step are parts, too, as if each began when earlier actions had ended.
    first, away = log.begun[0], 0.0
    times = {a: (seconds(start) - first, seconds(end) - first) for a, (start, end) in log.times.items()}
    parts = [(0.0, times)]
    if len(log.begun) > 1:
        forward = {action: time for action, time in times.items() if action.kind is ActionKind.FORWARD}
        back, end = log.begun[1] - first, max(end for _, end in forward.values())
        away = max(0.0, back - end)  # a GPU may still run the forward when the host starts the backward
        backward = {a: (start - away, end - away) for a, (start, end) in times.items() if a not in forward}
        parts = [(0.0, forward), (back - away, backward)]
    end = max((end for begin, times in parts for end in (begin, *(t for _, t in times.values()))), default=0.0)
    for update in log.updates:
        shift = end - update.begun[0]
        times = {a: (seconds(start) + shift, seconds(e) + shift) for a, (start, e) in update.times.items()}
        parts.append((end, times))
        end = max((e for _, e in times.values()), default=end)
    return parts, away


def _transfer_records(
    bounds: Sequence[BoundProgram], moved: Sequence[TransferNote], has_loss: bool
) -> Iterator[TransferRecord]:
    """Yields transfers between stages. The loss belongs to the last stage; in a drop-in it is not a transfer."""
    n = len(bounds[0].devices)
    senders = {
        (id(bound), link.gradient_target, link.value.name): user
        for bound in different_programs(bounds)
        for user, row in enumerate(bound.wiring.links)
        for link in row
    }
    for value, source, user, i, size in moved:
        kind = ActionKind.FORWARD if source is not None else ActionKind.BACKWARD
        maker = source if source is not None else senders[id(bounds[i]), user, value]
        if not has_loss and n in (maker, user):
            continue
        origin, target = (Action(ActionKind.FORWARD, n - 1, i) if j == n else Action(kind, j, i) for j in (maker, user))
        if origin.stage != target.stage:
            yield TransferRecord(origin, target, size, value)
