"""What a simulation found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.scheduling import Action, Kind, Schedule
from fxpipe.simulation.compared import Comparison, compared
from fxpipe.simulation.critical import Leg
from fxpipe.simulation.needs import devices_of
from fxpipe.stage_costs import StageCost, Transfer
from fxpipe.timelines import Memory, Span, memory_of
from fxpipe.timelines.drawn import Drawn
from fxpipe.timelines.steps import Arrow, Step, Timed
from fxpipe.timelines.text import timeline
from fxpipe.units import human_bytes, human_seconds, percent


@dataclass(frozen=True, slots=True)
class Simulation(Drawn):
    """What a simulation found. `print` draws it."""

    schedule: Schedule
    stages: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]
    spans: tuple[Span, ...]  # device after device, each in the order of its row
    step_seconds: float  # from the first start to the last end: all of the schedule, and no update that it has not
    legs: tuple[Leg, ...]  # of the critical path, which follow each other from 0 to `step_seconds`
    devices: tuple[str, ...] = ()  # the name of each; empty where it has none
    samples: int | None = None  # of the mini-batch, where it is known
    limits: tuple[float | None, ...] = ()  # bytes, by device; None, or none at all: not known

    def __post_init__(self) -> None:
        count = len(self.schedule.rows)
        object.__setattr__(self, "devices", self.devices or ("",) * count)
        object.__setattr__(self, "limits", self.limits or (None,) * count)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each device the seconds in which it computes or, where that does not overlap, copies."""
        seconds = [0.0] * len(self.schedule.rows)
        for span in self.spans:
            seconds[span.device] += span.seconds
        return tuple(seconds)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each device the share of the step, 0 to 1, in which it idles."""
        step = self.step_seconds
        return tuple(max(0.0, 1 - busy / step) if step else 0.0 for busy in self.busy)  # rounding may go below 0

    @property
    def mean_bubble(self) -> float:
        """The share of the step, 0 to 1, in which a device idles, over all devices."""
        return sum(self.bubble) / len(self.schedule.rows)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """For each device the bytes in use over time, of all its stages together."""
        spans: list[list[Span]] = [[] for _ in self.schedule.rows]
        for span in self.spans:
            spans[span.device].append(span)
        return tuple(memory_of(found, self.stages) for found in spans)

    @property
    def stage_memory(self) -> tuple[Memory, ...]:
        """For each stage the bytes in use over time."""
        spans: list[list[Span]] = [[] for _ in self.stages]
        for span in self.spans:
            spans[span.action.stage].append(span)
        return tuple(memory_of(found, self.stages) for found in spans)

    @property
    def fits(self) -> tuple[bool | None, ...]:
        """For each device whether it has the memory that it takes; None where no limit is known."""
        return tuple(
            None if limit is None else memory.peak <= limit
            for memory, limit in zip(self.memory, self.limits, strict=True)
        )

    @property
    def update_seconds(self) -> float:
        """How long the optimizer takes on the slowest device, after the step; 0 where the schedule has updates, and
        where it is not known."""
        if any(span.action.kind is Kind.UPDATE for span in self.spans):
            return 0.0
        seconds = [0.0] * len(self.schedule.rows)
        for device, cost in zip(devices_of(self.schedule), self.stages, strict=True):
            seconds[device] += cost.update
        return max(seconds)

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """The actions that the end of the step hangs on, in order; between them things are sent (see `legs`)."""
        return tuple(dict.fromkeys(leg.span for leg in self.legs))

    @property
    def critical_shares(self) -> dict[str, float]:
        """For each kind of leg ("F", "B", ..., "sending", "waiting") its share, 0 to 1, of the critical path; the
        largest first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for leg in self.legs:
            seconds[leg.kind] += leg.seconds
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        return {kind: time / self.step_seconds for kind, time in ordered if time}

    @property
    def sent(self) -> dict[tuple[int, int], float]:
        """The bytes of a step for each link, (from device, to device), that carries any."""
        device_of = devices_of(self.schedule)
        trains = any(action.kind is Kind.BACKWARD for action in self.schedule.rows[device_of[0]])
        sent: defaultdict[tuple[int, int], float] = defaultdict(int)
        for transfer in self.transfers:
            link = device_of[transfer.source], device_of[transfer.target]
            if link[0] != link[1] and (trains or not transfer.is_gradient):
                sent[link] += transfer.bytes * self.schedule.micro_batches
        return dict(sorted(sent.items()))

    def as_step(self, *, has_memory: bool = True) -> Step:
        """In one form with what is measured; without memory over time where nobody asks for it."""
        has_bytes = any(
            cost.static_bytes or cost.saved_bytes or cost.input_bytes or cost.portal_bytes or cost.working_bytes
            for cost in self.stages
        )
        spans = tuple(sorted(self.spans, key=lambda span: (span.start, span.device)))
        return Step(
            schedule=self.schedule.name,
            is_simulated=True,
            devices=self.devices,
            spans=spans,
            waited=_gaps(spans),
            seconds=self.step_seconds,
            memory=self.memory if has_memory and has_bytes else (),
            limits=self.limits,
        )

    def arrows(self) -> Iterator[Arrow]:
        """All that goes from stage to stage, micro-batch by micro-batch."""
        kinds = {span.action.kind for span in self.spans}
        for transfer in self.transfers:
            kind = Kind.BACKWARD if transfer.is_gradient else Kind.FORWARD
            if kind in kinds:
                for i in range(self.schedule.micro_batches):
                    maker, user = (Action(kind, j, i) for j in (transfer.source, transfer.target))
                    yield Arrow(maker, user, transfer.bytes)

    def compared(self, record: Timed) -> Comparison:
        """Beside a step that ran the same actions: `print(simulation.compared(pipe.last_step))`.

        Raises:
            ArgumentError: it ran others.
        """
        return compared(self.as_step(has_memory=False), record.as_step(has_memory=False))

    def __str__(self) -> str:
        head = str(self.schedule).partition("\n")[0]
        samples = f", {self.samples} samples" if self.samples else ""
        names = [f"device {d} {name}".rstrip() for d, name in enumerate(self.devices)]
        width = max(map(len, names))
        drawn = timeline(self.spans, len(self.schedule.rows), self.step_seconds)
        lines = [
            f"{name:{width}} |{line}|  busy {human_seconds(busy)}, bubble {percent(bubble)}{held}"
            for name, line, busy, bubble, held in zip(
                names, drawn, self.busy, self.bubble, self._memory_in_words(), strict=True
            )
        ]
        shares = ", ".join(f"{kind} {percent(share)}" for kind, share in self.critical_shares.items())
        total = f"step {human_seconds(self.step_seconds)}, mean bubble {percent(self.mean_bubble)}"
        update = f", updates after it {human_seconds(self.update_seconds)}" if self.update_seconds else ""
        return "\n".join([head + samples, *lines, total + update, *([f"critical path: {shares}"] if shares else [])])

    def _memory_in_words(self) -> list[str]:
        """For each device; nothing where no bytes are known."""
        peaks = [memory.peak for memory in self.memory]
        if not any(peaks):
            return [""] * len(peaks)
        return [
            f", memory {human_bytes(peak)}"
            + ("" if limit is None else f" of {human_bytes(limit)}{'' if peak <= limit else ': does not fit'}")
            for peak, limit in zip(peaks, self.limits, strict=True)
        ]


def _gaps(spans: Sequence[Span]) -> tuple[float, ...]:
    """Before each, how long its device had nothing to do."""
    ended: dict[int, float] = {}
    gaps = []
    for span in spans:
        gaps.append(max(0.0, span.start - ended.get(span.device, 0.0)))
        ended[span.device] = span.end
    return tuple(gaps)
