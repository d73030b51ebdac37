"""The interface of compiler and runtime: stages as callables, and the values that they send to each other.

Compiler and runtime meet here and nowhere else. Nothing here is a graph node: values go by name, and whatever rewrites
a graph does so behind `Stage.callable`. The other way round, a stage finds around it what the runtime runs it for:
`stage_context`, and the `WeightGradientTape` that it is given.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

PIPE_INPUT = -1  # as a source: the inputs of the pipe


@dataclass(frozen=True, slots=True)
class ReceivedValue:
    """A value that a stage, or the loss, gets from elsewhere."""

    name: str
    source: int  # stage that made it, or the last one before the receiver that changed it in place; or INPUT


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The place in the model and its source that a node comes from."""

    module: str  # dotted path
    source: str  # the user's line: `path/unet.py:31`


# What batch norm has found in one call, where its running statistics are deferred: (name of the running mean, name of
# the running variance, number of values of a channel, their mean, their unbiased variance, momentum).
BatchStatistics = tuple[str, str, int, torch.Tensor, torch.Tensor, float]


@dataclass(frozen=True, slots=True)
class StageCallable:
    """The callable that runs a stage, compiled or as it is."""

    call: Callable[..., tuple[Any, ...]]
    split_parameters: frozenset[str]  # whose gradients W computes; if any, `call` takes a `WeightGradientTape` first
    failing_node: Callable[[BaseException], str]  # the node in whose code an exception was raised; "": in none


@dataclass(frozen=True, slots=True)
class Stage:
    """A pure function of (parameters and buffers..., received values...).

    It returns the values of `sends`, then the new values of `assigns`, then what deferred batch norm has found: for
    each of its nodes a tuple of `BatchStatistics`. Buffers named in `changed_buffers` are written in place: give it
    copies, but for those in `tracked_statistics`.
    """

    run: Callable[..., tuple[Any, ...]]  # the function as it was written, a GraphModule, of which `callable` is made
    attributes: tuple[str, ...]
    receives: tuple[ReceivedValue, ...]
    sends: tuple[str, ...]
    assigns: tuple[str, ...]
    changed_buffers: tuple[str, ...]
    # Of those in `changed_buffers`: running statistics, which it leaves to the end of the step.
    tracked_statistics: tuple[str, ...]
    # Of those in `changed_buffers` and `assigns`: what counts mini-batches, not micro-batches.
    counters: tuple[str, ...]
    locations: dict[str, SourceLocation]  # by node name
    code: str  # for people
    make_callable: Callable[[Stage, bool], StageCallable]  # (the stage, is its backward split)
    host_values: frozenset[str] = frozenset()  # of the values that it receives: those that it wants on the CPU
    _callables: dict[bool, StageCallable] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def changes_in_order(self) -> bool:
        """Returns True if F leaves in the model's tensors what F of the next micro-batch is to find there."""
        return bool({*self.changed_buffers, *self.assigns} - {*self.tracked_statistics, *self.counters})

    def callable(self, is_split: bool) -> StageCallable:
        """Returns the callable that runs the stage; made when it is first asked for.

        Args:
            is_split: its weights get their gradients in W, not in B.
        """
        callable_ = self._callables.get(is_split)
        if callable_ is None:
            callable_ = self._callables[is_split] = self.make_callable(self, is_split)
        return callable_


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
    """The stages of a model. `outputs` are the leaves of its output in order."""

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


ValueKey = tuple[int, str]  # (stage that makes a value, or the input; its name)


def value_users(program: Program) -> dict[ValueKey, tuple[int, ...]]:
    """Returns the stages that receive each value; the loss, which receives the outputs, is behind the last stage."""
    users: dict[ValueKey, list[int]] = {}
    for user, row in enumerate([*(stage.receives for stage in program.stages), received_results(program)]):
        for value in row:
            users.setdefault((value.source, value.name), []).append(user)
    return {key: tuple(stages) for key, stages in users.items()}


def received_results(program: Program) -> tuple[ReceivedValue, ...]:
    """Returns the values that the loss, or the gathering of outputs, receives, each once."""
    results = (*program.outputs, *program.written_inputs.values(), *program.left.values())
    return tuple(dict.fromkeys(one for one in results if isinstance(one, ReceivedValue)))


def sent_bytes(program: Program, sizes: Mapping[str, float]) -> float:
    """Sums the bytes that stages send to each other for one micro-batch; a value that goes to two counts twice."""
    return sum(sizes[value.name] for stage in program.stages for value in stage.receives if value.source != PIPE_INPUT)


# -- The context in which a stage runs -------------------------------------------------------------------------------


class StageContext(threading.local):
    """Settings of the stage that runs in this thread; set by the runtime, read by functions in stage code."""

    seed = 0  # of the step and micro-batch
    recomputes = False  # does the step run something twice, which must come to the same then?


stage_context = StageContext()


# -- Backward in two: what F leaves for W ----------------------------------------------------------------------------


class WeightGradientTask(NamedTuple):
    """A split node that has run."""

    names: tuple[str, ...]  # of the parameters that it used and that want a gradient
    weight_gradients: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # gradient at the edge -> those of `names`


@dataclass(slots=True)
class WeightGradientTape:
    """The weight-gradient tasks that the split nodes of a stage leave of one micro-batch, in the order of running."""

    uses: list[WeightGradientTask] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)  # for B; gone with it
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # at the edges, for W
    # Detached parameters; one dict for all tapes of a stage.
    detached_parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, edge: GradientEdge, use: WeightGradientTask) -> None:
        self.edges.append(edge)
        self.uses.append(use)

    def detached(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        detached = self.detached_parameters.get(name)
        if detached is None:
            detached = self.detached_parameters[name] = parameter.detach()
        return detached

    def arrived(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients at the edges after B; the edges would keep alive what is left of its graph."""
        self.edges, self.gradients = [], list(gradients)

    def weight_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight's gradient, once. The tape is used up.

        Of a weight that is used once a gradient leaves as soon as it is there, so that only one of them lives beside
        the sums. One that is used more often is summed over its uses first, from the last to the first: autograd runs
        its nodes in that order, and the sum of a micro-batch goes into the sum of the step as a whole.
        """
        uses, gradients = self.uses, self.gradients
        if not gradients:  # nothing came back to this stage
            uses.clear()
        left = Counter(name for use, g in zip(uses, gradients, strict=True) if g is not None for name in use.names)
        parts: dict[str, torch.Tensor] = {}
        while uses:
            use, gradient = uses.pop(), gradients.pop()
            if gradient is None:
                continue
            for name, new in zip(use.names, use.weight_gradients(gradient), strict=True):
                left[name] -= 1
                have = parts.pop(name, None)
                total = new if have is None else _sum_gradients(have, new)
                del have, new
                if left[name]:
                    parts[name] = total
                else:
                    yield name, total
                del total


def _sum_gradients(have: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new + have if have.is_sparse else have + new  # dense + sparse, the other way round torch has not
