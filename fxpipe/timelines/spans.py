"""What can be read off the actions of a step once it is known when each runs: memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.scheduling import Action, Kind
from fxpipe.stage_costs import StageCost


def range_name(action: Action) -> str:
    """As profilers and traces call it: `1F3` -> `fxpipe F stage 1 micro-batch 3`."""
    return f"fxpipe {action.kind} stage {action.stage} micro-batch {action.micro_batch}"


@dataclass(frozen=True, slots=True)
class Span:
    """When a device runs an action."""

    action: Action
    device: int
    start: float  # seconds since the step began
    end: float
    receiving: float = 0.0  # seconds of it, at its beginning, in which the device copies what it was sent

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Parts:
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
class Memory:
    """The bytes in use over time."""

    steps: tuple[tuple[float, Parts], ...]  # (seconds since the step began, what is there from then on), in order

    @property
    def peak(self) -> float:
        """The most bytes in use at one time."""
        return self.at_peak.total

    @property
    def at_peak(self) -> Parts:
        """What is there when most is; where that happens several times, the first time."""
        return max((parts for _, parts in self.steps), key=lambda parts: parts.total)


def memory_of(spans: Sequence[Span], stages: Sequence[StageCost]) -> Memory:
    """The bytes that some stages take: `spans` has all of their actions, which run one after the other.

    A micro-batch holds what its F was given from its F on, and what autograd saves from its F or, where it is
    recomputed, from its R on; both to the end of its last piece of backward. Where nothing goes back, nothing is saved,
    and what F was given goes when F ends.
    """
    recomputed = {(s.action.stage, s.action.micro_batch) for s in spans if s.action.kind is Kind.RECOMPUTE}
    kinds = {(span.action.stage, span.action.kind) for span in spans}
    held = sorted({j for j, _ in kinds})
    order = (Kind.WEIGHT, Kind.BACKWARD, Kind.FORWARD)
    last = {j: next(kind for kind in order if (j, kind) in kinds) for j in held}

    always = (
        sum(stages[j].parameter_bytes for j in held),
        sum(stages[j].gradient_bytes for j in held),
        sum(stages[j].optimizer_bytes for j in held),
    )
    activations: float = 0
    portals: float = 0
    steps = [(0.0, Parts(*always))]
    for span in spans:
        kind, j, cost = span.action.kind, span.action.stage, stages[span.action.stage]
        saved = 0 if last[j] is Kind.FORWARD else cost.saved_bytes
        if kind is Kind.FORWARD:
            activations += cost.input_bytes + (0 if (j, span.action.micro_batch) in recomputed else saved)
            portals += cost.portal_bytes
        elif kind is Kind.RECOMPUTE:
            activations += saved
        elif kind is Kind.UPDATE:
            continue
        steps.append((span.start, Parts(*always, activations, portals, cost.working_bytes)))
        if kind is last[j]:
            activations -= cost.input_bytes + saved
            portals -= cost.portal_bytes
        steps.append((span.end, Parts(*always, activations, portals)))
    return Memory(tuple(steps))
