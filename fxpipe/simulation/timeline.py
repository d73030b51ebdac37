"""The timeline of a step, simulated or measured: spans of its actions, and the memory that follows from them.

All that shows them starts from a `StepTimeline`: `text_timeline.py` as lines of text, `fxpipe.inspect` in other forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from fxpipe.scheduling import Action, ActionKind, split_backwards
from fxpipe.simulation.costs import StageCost

# -- Spans of actions, and the memory over time that follows from them -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which a device runs an action."""

    action: Action
    device: int
    start: float  # seconds since the step began
    end: float
    receiving: float = 0.0  # seconds of it, at its beginning, in which the device copies what it was sent

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The bytes that a device holds at one time, by what they are for."""

    parameters: float = 0  # and buffers
    gradients: float = 0  # of parameters
    optimizer: float = 0  # its state
    activations: float = 0  # kept for backward, what came from the stage before among them
    portals: float = 0  # kept for backward of what came through portals
    working: float = 0  # held for a moment, while an action runs

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.portals + self.working


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The bytes in use over time."""

    steps: tuple[tuple[float, MemoryParts], ...]  # (seconds since the step began, what is there from then on), in order

    @property
    def peak(self) -> float:
        """The most bytes in use at one time."""
        return self.at_peak.total

    @property
    def at_peak(self) -> MemoryParts:
        """Memory by part at the peak; at the first one where there are several."""
        return max((parts for _, parts in self.steps), key=lambda parts: parts.total)


def memory_timeline_of(spans: Sequence[Span], stages: Sequence[StageCost]) -> MemoryTimeline:
    """The bytes that some stages take: `spans` has all of their actions, which run one after the other.

    A micro-batch holds what its F was given from its F on, and what autograd saves from its F or, where it is
    recomputed, from its R on; both to the end of its last piece of backward. Where nothing goes back, nothing is saved,
    and what F was given goes when F ends.
    """
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


# -- The timeline of a step: one form for simulated and for measured ones --------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A transfer from the action that makes a value, or its gradient, to one of another stage that needs it.

    On one device nothing is copied.
    """

    maker: Action
    user: Action
    bytes: float
    value: str = ""  # its name, where it has one

    @property
    def is_gradient(self) -> bool:
        return self.user.kind is not ActionKind.FORWARD


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The timeline of a step: the spans of all devices."""

    schedule: str  # its name
    is_simulated: bool
    devices: tuple[str, ...]  # the name of each; empty where it has none
    spans: tuple[Span, ...]  # in order of their start
    waited: tuple[float, ...]  # seconds before each span in which its device had nothing to do
    seconds: float
    memory: tuple[MemoryTimeline, ...] = ()  # by device; empty where it is not known
    limits: tuple[float | None, ...] = ()  # bytes, by device, where memory is known; None: not known
    on_core: tuple[float, ...] = ()  # seconds of each span in which its worker had a core; empty where not known
    away: float = 0.0  # seconds between forward and backward of a drop-in, which are left out of all times
    loss_seconds: float = 0.0  # of all F of the last stage, those of the loss

    @property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each device, in order."""
        rows: list[list[Span]] = [[] for _ in self.devices]
        for span in self.spans:
            rows[span.device].append(span)
        return tuple(map(tuple, rows))

    @property
    def has_updates(self) -> bool:
        return any(span.action.kind is ActionKind.UPDATE for span in self.spans)

    def without_updates(self) -> StepTimeline:
        """Returns forward and backward alone: updates of weights come after all else of their device."""
        kept = [k for k, span in enumerate(self.spans) if span.action.kind is not ActionKind.UPDATE]
        spans = tuple(self.spans[k] for k in kept)
        return replace(
            self,
            spans=spans,
            waited=tuple(self.waited[k] for k in kept),
            seconds=max((span.end for span in spans), default=0.0),
            on_core=tuple(self.on_core[k] for k in kept) if self.on_core else (),
        )

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each device."""
        return tuple(sum(span.seconds for span in row) for row in self.rows)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The share of the step, 0 to 1, in which each device idles."""
        return idle_shares(self.busy, self.seconds)

    @property
    def mean_bubble(self) -> float:
        return sum(self.bubble) / len(self.devices) if self.devices else 0.0

    @property
    def stages(self) -> int:
        return len({span.action.stage for span in self.spans})

    @property
    def micro_batches(self) -> int:
        return len({span.action.micro_batch for span in self.spans})


def idle_shares(busy: Sequence[float], seconds: float) -> tuple[float, ...]:
    """The share of a step, 0 to 1, in which each device idles."""
    return tuple(max(0.0, 1 - time / seconds) if seconds else 0.0 for time in busy)  # rounding may go below 0


@runtime_checkable
class HasTimeline(Protocol):
    """Anything that gives the times of a step's actions in the common form: a `Simulation`, a `StepRecord`."""

    def as_step(self, *, has_memory: bool = True) -> StepTimeline:
        """The step, with or without memory over time, which takes the longest to compute."""
        ...

    def arrows(self) -> Iterator[TransferRecord]:
        """Yields all transfers from stage to stage."""
        ...
