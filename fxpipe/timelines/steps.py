"""A step as it is drawn and written down: in one form what was simulated and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fxpipe.errors import ArgumentTypeError
from fxpipe.scheduling import Action, Kind
from fxpipe.simulation import Simulation
from fxpipe.timelines import Memory, Span

if TYPE_CHECKING:
    from fxpipe.runtime.record import StepRecord

Source: TypeAlias = "Simulation | StepRecord"


@dataclass(frozen=True, slots=True)
class Arrow:
    """From the action that makes a value, or its gradient, to one of another stage that needs it."""

    maker: Action
    user: Action
    bytes: float
    value: str = ""  # its name, where it has one

    @property
    def is_gradient(self) -> bool:
        return self.user.kind is not Kind.FORWARD


@dataclass(frozen=True, slots=True)
class Step:
    """When each device did what."""

    schedule: str  # its name
    is_simulated: bool
    devices: tuple[str, ...]  # the name of each; empty where it has none
    spans: tuple[Span, ...]  # in order of their start
    waited: tuple[float, ...]  # seconds before each span in which its device had nothing to do
    seconds: float
    memory: tuple[Memory, ...] = ()  # by device; empty where it is not known
    limits: tuple[float | None, ...] = ()  # bytes, by device, where memory is known; None: not known
    away: float = 0.0  # seconds between forward and backward of a drop-in, which are left out of all times

    @property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """For each device its spans, in order."""
        rows: list[list[Span]] = [[] for _ in self.devices]
        for span in self.spans:
            rows[span.device].append(span)
        return tuple(map(tuple, rows))

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each device."""
        return tuple(sum(span.seconds for span in row) for row in self.rows)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each device the share of the step, 0 to 1, in which it idles."""
        return tuple(max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        return sum(self.bubble) / len(self.devices) if self.devices else 0.0

    @property
    def stages(self) -> int:
        return len({span.action.stage for span in self.spans})

    @property
    def micro_batches(self) -> int:
        return len({span.action.micro_batch for span in self.spans})


def step_of(source: Source, *, has_memory: bool = True) -> Step:
    """The common form; without memory over time, which takes the longest to find out, where nobody asks for it.

    Raises:
        ArgumentTypeError: it is neither a simulation nor the record of a step.
    """
    if isinstance(source, Simulation):
        return _simulated(source, has_memory)
    from fxpipe.runtime.record import StepRecord

    if isinstance(source, StepRecord):
        return _measured(source)
    raise ArgumentTypeError(
        f"a timeline is that of a Simulation or a StepRecord (pipe.last_step), not of {type(source).__name__}"
    )


def arrows_of(source: Source) -> Iterator[Arrow]:
    """All that goes from stage to stage."""
    if not isinstance(source, Simulation):
        yield from (Arrow(one.maker, one.user, one.bytes, one.value) for one in source.transfers)
        return
    kinds = {span.action.kind for span in source.spans}
    for transfer in source.transfers:
        kind = Kind.BACKWARD if transfer.is_gradient else Kind.FORWARD
        if kind in kinds:
            for i in range(source.schedule.micro_batches):
                yield Arrow(Action(kind, transfer.source, i), Action(kind, transfer.target, i), transfer.bytes)


def _simulated(found: Simulation, has_memory: bool) -> Step:
    has_bytes = any(
        cost.static_bytes or cost.saved_bytes or cost.input_bytes or cost.portal_bytes or cost.working_bytes
        for cost in found.stages
    )
    spans = tuple(sorted(found.spans, key=lambda span: (span.start, span.device)))
    return Step(
        schedule=found.schedule.name,
        is_simulated=True,
        devices=found.devices,
        spans=spans,
        waited=_gaps(spans),
        seconds=found.step_seconds,
        memory=found.memory if has_memory and has_bytes else (),
        limits=found.limits,
    )


def _measured(record: StepRecord) -> Step:
    return Step(
        schedule=record.schedule,
        is_simulated=False,
        devices=tuple(device.name for device in record.devices),
        spans=record.spans,
        waited=tuple(one.waited for one in record.actions),
        seconds=record.seconds,
        away=record.away,
    )


def _gaps(spans: Sequence[Span]) -> tuple[float, ...]:
    ended: dict[int, float] = {}
    gaps = []
    for span in spans:
        gaps.append(max(0.0, span.start - ended.get(span.device, 0.0)))
        ended[span.device] = span.end
    return tuple(gaps)
