"""The timeline of a step, simulated or measured: the spans of its actions, and its memory over time.

All views start from a `StepTimeline`: lines of text, here, and pictures and pages (`fxpipe.inspect`).
"""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

from fxpipe.scheduling import Action, ActionKind, split_backwards
from fxpipe.simulation.costs import StageCost


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which a device runs an action."""

    action: Action
    device: int
    start: float  # seconds since the step began
    end: float
    receiving: float = 0.0  # seconds at its start in which the device copies its inputs

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The bytes that a device holds at one time, by what they are for."""

    parameters: float = 0  # and buffers
    gradients: float = 0  # for parameters
    optimizer: float = 0
    activations: float = 0  # saved for backward, with the inputs from the stage before
    portals: float = 0  # inputs from portals, saved for backward
    working: float = 0  # temporary, while an action runs

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.portals + self.working


MEMORY_PARTS = tuple(field.name for field in fields(MemoryParts))


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The bytes in use over time."""

    steps: tuple[tuple[float, MemoryParts], ...]  # (seconds since the step began, memory from then on), in order

    @property
    def peak(self) -> float:
        """The most bytes in use at one time."""
        return self.at_peak.total

    @property
    def at_peak(self) -> MemoryParts:
        """The memory by part at the (first) peak."""
        return max((parts for _, parts in self.steps), key=lambda parts: parts.total)


def memory_timeline_of(spans: Sequence[Span], stages: Sequence[StageCost]) -> MemoryTimeline:
    """Computes the memory over time of some stages; `spans` has all of their actions, which do not overlap."""
    # A micro-batch holds its inputs from F, and its saved activations from F (or R, if recomputed), to the end of its
    # last piece of backward. Without a backward, nothing is saved, and the inputs are freed when F ends.
    recomputed = {(s.action.stage, s.action.micro_batch) for s in spans if s.action.kind is ActionKind.RECOMPUTE}
    split = split_backwards(span.action for span in spans)
    trained = {span.action.stage for span in spans if span.action.kind is ActionKind.BACKWARD}
    held = sorted({span.action.stage for span in spans})

    always = (
        sum(stages[j].parameter_bytes + stages[j].version_bytes for j in held),
        sum(stages[j].gradient_bytes for j in held),
        sum(stages[j].optimizer_bytes for j in held),
    )
    activations: float = 0
    portals: float = 0
    steps = [(0.0, MemoryParts(*always))]
    for span in spans:
        (kind, j, i), cost = span.action, stages[span.action.stage]
        saved = cost.saved_bytes if j in trained else 0
        last = ActionKind.FORWARD
        if j in trained:
            last = ActionKind.WEIGHT if (j, i) in split else ActionKind.BACKWARD
        if kind is ActionKind.FORWARD:
            activations += cost.input_bytes + (0 if (j, i) in recomputed else saved)
            portals += cost.portal_bytes
        elif kind is ActionKind.RECOMPUTE:
            activations += saved
        elif kind is ActionKind.UPDATE:
            continue
        steps.append((span.start, MemoryParts(*always, activations, portals, cost.working_bytes)))
        if kind is last:
            activations -= cost.input_bytes + saved
            portals -= cost.portal_bytes
        steps.append((span.end, MemoryParts(*always, activations, portals)))
    return MemoryTimeline(tuple(steps))


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A transfer of a value or gradient between actions of two stages; nothing is copied within a device."""

    maker: Action
    user: Action
    bytes: float
    value: str = ""

    @property
    def is_gradient(self) -> bool:
        return self.user.kind is not ActionKind.FORWARD


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The timeline of a step: the spans of all devices."""

    schedule: str  # name
    is_simulated: bool
    devices: tuple[str, ...]  # the name of each device; "" if it has none
    spans: tuple[Span, ...]  # in order of their start
    seconds: float
    memory: tuple[MemoryTimeline, ...] = ()  # by device; empty: not known
    limits: tuple[float | None, ...] = ()  # bytes, by device, if memory is known; None: not known
    on_core: tuple[float, ...] = ()  # seconds of each span in which its worker had a core; empty: not known
    away: float = 0.0  # seconds between forward and backward of a drop-in, excluded from all times
    loss_seconds: float = 0.0  # seconds of the loss in all F of the last stage
    waited: tuple[float, ...] = ()  # idle seconds of its device before each span; empty: since the span before

    def without_updates(self) -> StepTimeline:
        """Returns the timeline without updates of weights, which follow all other actions of their device."""
        kept = [k for k, span in enumerate(self.spans) if span.action.kind is not ActionKind.UPDATE]
        spans = tuple(self.spans[k] for k in kept)
        return replace(
            self,
            spans=spans,
            seconds=max((span.end for span in spans), default=0.0),
            on_core=tuple(self.on_core[k] for k in kept) if self.on_core else (),
            waited=tuple(self.waited[k] for k in kept) if self.waited else (),
        )

    @property
    def busy(self) -> tuple[float, ...]:
        busy = [0.0] * len(self.devices)
        for span in self.spans:
            busy[span.device] += span.seconds
        return tuple(busy)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The share of the step, 0 to 1, in which each device idles."""
        return idle_shares(self.busy, self.seconds)

    @property
    def mean_bubble(self) -> float:
        return sum(self.bubble) / len(self.devices) if self.devices else 0.0


def idle_shares(busy: Sequence[float], seconds: float) -> tuple[float, ...]:
    """Computes the share of a step, 0 to 1, in which each device idles."""
    return tuple(max(0.0, 1 - time / seconds) if seconds else 0.0 for time in busy)  # rounding may go below 0


class HasTimeline(abc.ABC):
    """A base class for objects with the timeline of a step: draws it into a file and in a notebook."""

    __slots__ = ()

    @abc.abstractmethod
    def as_step(self, *, has_memory: bool = True) -> StepTimeline:
        """Returns the step, with or without memory over time, which is the slowest part to compute."""

    @abc.abstractmethod
    def arrows(self) -> Iterator[TransferRecord]:
        """Yields all transfers between stages."""

    def save_timeline(self, path: str | Path, *, title: str = "") -> None:
        """Draws the actions of each device over time and, for a simulation, its memory.

        Args:
            path: the suffix is the format: `.svg`, or `.json` for https://ui.perfetto.dev and chrome://tracing.
            title: heading of the picture. Default: the schedule and its size.

        Raises:
            ArgumentError: the path has another suffix.
            FileError: the file cannot be written.
            ArgumentTypeError: the path has another type.
        """
        from fxpipe.inspect.gantt import save_timeline

        save_timeline(self, path, title=title)

    def _repr_html_(self) -> str:
        from fxpipe.inspect.gantt import step_html

        return step_html(self.as_step())


def timeline_lines(spans: Sequence[Span], devices: int, seconds: float, *, columns: int = 100) -> list[str]:
    """Draws a line for each device, at most `columns` wide: `F0` and `B0===` are actions, `.` is the bubble."""
    # Actions too short for a name show only their kind. If they are shorter than a column, each kind, and the bubble,
    # has columns in proportion to its time.
    names = span_names(spans)
    wanted = ((len(name) + 1) * (seconds / s.seconds) for s, name in zip(spans, names, strict=True) if s.seconds > 0)
    width = round(min(columns, max(wanted, default=0)))
    rows: list[list[int]] = [[] for _ in range(devices)]
    for k, span in enumerate(spans):
        rows[span.device].append(k)
    lines = []
    for row in rows:
        line = ""
        for shown, cells in groupby(span_per_column([spans[k] for k in row], seconds, width)):
            count = len(list(cells))
            if shown is None:
                line += "." * count
                continue
            name, kind = names[row[shown]], spans[row[shown]].action.kind
            line += name.ljust(count - 1, "=") + " " if count > len(name) else str(kind) * count
        lines.append(line)
    return lines


def span_names(spans: Sequence[Span]) -> list[str]:
    """Names each span, as briefly as is unambiguous in the row of its device."""
    # If a device has several stages, a micro-batch does not identify an action.
    if len({(span.device, span.action.stage) for span in spans}) > len({span.device for span in spans}):
        return [str(span.action) for span in spans]
    return [f"{span.action.kind}{span.action.micro_batch}" for span in spans]


def span_per_column(row: Sequence[Span], seconds: float, units: int) -> list[int | None]:
    """Cuts a step into `units` of equal length; returns the span that each unit shows, or None if the device idles."""
    # Spans shorter than a unit share it with each other and with bubbles. One of them shows, and the others are carried
    # to the next unit, so that over several units each has its share (Floyd and Steinberg, "An adaptive algorithm for
    # spatial greyscale", 1976).
    owners: list[int | None] = [None] * units
    if not seconds:
        return owners
    shares: defaultdict[int, defaultdict[ActionKind, float]] = defaultdict(lambda: defaultdict(float))
    taken: defaultdict[int, float] = defaultdict(float)  # covered share of each unit
    last: dict[tuple[int, ActionKind], int] = {}
    for k, span in enumerate(row):
        start, end = span.start / seconds * units, span.end / seconds * units
        is_short = end - start < 1
        if not is_short:
            first, behind = int(start + 0.5), int(end + 0.5)
            owners[first:behind] = [k] * (behind - first)
        for unit in {int(start), int(end)}:
            share = min(end, unit + 1) - max(start, unit)
            if is_short and share > 0 and unit < units:
                shares[unit][span.action.kind] += share
                last[unit, span.action.kind] = k
            taken[unit] += share

    # Units that each kind, or the bubble, has not shown yet.
    due: defaultdict[ActionKind | None, float] = defaultdict(float)
    for unit, owner in enumerate(owners):
        if owner is not None or unit not in shares:
            due.clear()
            continue
        due[None] += 1 - taken[unit]
        for kind, share in shares[unit].items():
            due[kind] += share
        shown = max((None, *shares[unit]), key=lambda kind: (due[kind], kind is not None))
        due[shown] -= 1
        owners[unit] = None if shown is None else last[unit, shown]
    return owners
