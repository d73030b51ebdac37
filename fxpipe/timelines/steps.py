"""A step as it is drawn and written down: in one form what was simulated and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fxpipe.scheduling import Action, Kind
from fxpipe.timelines.spans import Memory, Span


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
    on_core: tuple[float, ...] = ()  # seconds of each span in which its worker had a core; empty where not known
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


@runtime_checkable
class Timed(Protocol):
    """What knows when each action of a step ran, and says it in the common form: a `Simulation`, a `StepRecord`."""

    def as_step(self, *, has_memory: bool = True) -> Step:
        """The step; without memory over time, which takes the longest to find out, where nobody asks for it."""
        ...

    def arrows(self) -> Iterator[Arrow]:
        """All that goes from stage to stage."""
        ...
