"""What the rewriter hands to the runtime: stages as pure functions, and who sends what to whom.

Nothing here is a graph node: values go by name. The runtime needs no more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxpipe.rewriting.weight_gradients import StageTaps

PIPE_INPUT = -1  # as a source: the inputs of the pipe


@dataclass(frozen=True, slots=True)
class ReceivedValue:
    """A value that a stage, or the loss, gets from elsewhere."""

    name: str
    source: int  # stage that made it, or the last one before the receiver that changed it in place; or INPUT


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where a node comes from."""

    module: str  # dotted path
    source: str  # the user's line: `path/unet.py:31`


@dataclass(frozen=True, slots=True)
class Stage:
    """A pure function of (parameters and buffers..., received values...).

    It returns the values of `sends`, then the new values of `assigns`, then what deferred batch norm has found: for
    each of its nodes a tuple of `fxpipe.rewriting.deferred_batch_norm.Found`. Buffers named in `changes` are written in
    place: give it copies, but for those in `tracks`.
    """

    run: Callable[..., tuple[Any, ...]]
    attributes: tuple[str, ...]
    receives: tuple[ReceivedValue, ...]
    sends: tuple[str, ...]
    assigns: tuple[str, ...]
    changed_buffers: tuple[str, ...]
    tracked_statistics: tuple[
        str, ...
    ]  # of those in `changes`: running statistics, which it leaves to the end of the step
    counters: tuple[str, ...]  # of those in `changes` and `assigns`: what counts mini-batches, not micro-batches
    locations: dict[str, SourceLocation]  # by node name
    code: str  # for people
    split_parameters: frozenset[str] = (
        frozenset()
    )  # attributes whose gradients W computes; if any, `run` takes a `WeightGradientTape` first
    # of a stage that will be compiled; `run` then takes taps in place of the `WeightGradientTape`
    taps: StageTaps | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """A value that goes past the next stage through a portal."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """An output of the model that is the same for every step."""

    value: Any


@dataclass(frozen=True, slots=True)
class Program:
    """All stages. `outputs` are the leaves of the model's output in order."""

    stages: tuple[Stage, ...]
    inputs: tuple[str | None, ...]  # by input leaf: its name as a received value; None where it is no tensor
    outputs: tuple[ReceivedValue | ConstantOutput, ...]
    skips: tuple[Skip, ...]
    is_random: bool
    # By place among the input leaves, of those that forward writes to: what is in them after it.
    written_inputs: Mapping[int, ReceivedValue] = field(default_factory=dict)
    # By name, of attributes that forward leaves for each sample: what they are set to.
    left: Mapping[str, ReceivedValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n\n".join(stage.code for stage in self.stages)


def sent_bytes(program: Program, sizes: Mapping[str, float]) -> float:
    """What stages send to each other for one micro-batch, by the bytes of each value; what goes to two counts twice."""
    return sum(sizes[value.name] for stage in program.stages for value in stage.receives if value.source != PIPE_INPUT)
