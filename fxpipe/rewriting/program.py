"""The interface of compiler and runtime: stages as callables, and the values that they send to each other.

Nothing here is a graph node: values have names, and all graph rewriting is hidden in `Stage.callable`. In turn, a stage
sees of the runtime only `stage_context` and the `WeightGradientTape` that it is given.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

PIPE_INPUT = -1  # as a source: the inputs of the pipe


@dataclass(frozen=True, slots=True)
class ReceivedValue:
    """A value that a stage or the loss receives."""

    name: str
    source: int  # the last stage before the receiver that changed it in place, else its maker; or INPUT


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The module and the source line of a node."""

    module: str  # dotted path
    source: str  # the user's line: `path/unet.py:31`


# Statistics of one call of deferred batch norm: (name of the running mean, name of the running variance, number of
# values of a channel, their mean, their unbiased variance, momentum).
BatchStatistics = tuple[str, str, int, torch.Tensor, torch.Tensor, float]


@dataclass(frozen=True, slots=True)
class StageCallable:
    """The callable that runs a stage, compiled or plain."""

    call: Callable[..., tuple[Any, ...]]
    split_parameters: frozenset[str]  # W computes their gradients; if any, `call` takes a `WeightGradientTape` first
    failing_node: Callable[[BaseException], str]  # returns the node whose code raised an exception, or ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pure function of (parameters and buffers..., received values...).

    It returns the values of `sends`, the new values of `assigns`, and for each deferred batch norm a tuple of
    `BatchStatistics`. It writes to buffers in `changed_buffers` in place: pass copies, except of `changed_at_end`.
    """

    run: Callable[..., tuple[Any, ...]]  # the generated GraphModule, from which `callable` is made
    attributes: tuple[str, ...]
    receives: tuple[ReceivedValue, ...]
    sends: tuple[str, ...]
    assigns: tuple[str, ...]
    changed_buffers: tuple[str, ...]
    # Subset of `changed_buffers`: running statistics and other state that is updated at the end of the step.
    changed_at_end: tuple[str, ...]
    # Subset of `changed_buffers` and `assigns`: counters of mini-batches, not micro-batches.
    counters: tuple[str, ...]
    # The same: state that each micro-batch of a mini-batch changes alike, from its value before the step.
    repeated: frozenset[str]
    locations: dict[str, SourceLocation]  # by node name
    code: str
    make_callable: Callable[[Stage, bool], StageCallable]  # (stage, whether backward is split) -> callable
    _callables: dict[bool, StageCallable] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def changes(self) -> dict[str, None]:
        """The tensors of the model that F changes or sets, by name, in order."""
        return dict.fromkeys((*self.changed_buffers, *self.assigns))

    def uses(self, name: str) -> bool:
        """Returns whether the stage reads this tensor of the model, or sets it."""
        return name in self.attributes or name in self.assigns

    @property
    def changes_in_order(self) -> bool:
        """Returns True if F changes tensors of the model that F of the next micro-batch reads."""
        return bool(self.changes.keys() - {*self.changed_at_end, *self.counters})

    def callable(self, is_split: bool) -> StageCallable:
        """Returns the callable that runs the stage. `is_split`: compute the gradients of weights in W, not in B."""
        if is_split not in self._callables:
            self._callables[is_split] = self.make_callable(self, is_split)
        return self._callables[is_split]


@dataclass(frozen=True, slots=True)
class Skip:
    """A value that skips the next stage through a portal."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """An output of the model that is the same in every step."""

    value: Any


@dataclass(frozen=True, slots=True)
class Program:
    """The stages of a model. `outputs` are the leaves of its output in order."""

    stages: tuple[Stage, ...]
    inputs: tuple[str | None, ...]  # by input leaf: its name as a received value; None if it is not a tensor
    outputs: tuple[ReceivedValue | ConstantOutput, ...]
    skips: tuple[Skip, ...]
    is_random: bool
    # By place among the input leaves: the final value of an input that forward writes to.
    written_inputs: Mapping[int, ReceivedValue] = field(default_factory=dict)
    # By name: the value of an attribute that forward sets for each sample.
    left: Mapping[str, ReceivedValue] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, None]:
        """The tensors of the model that its stages change or set, by name."""
        return {name: None for stage in self.stages for name in stage.changes}

    def first_users(self, stages: Iterable[int] | None = None) -> dict[str, int]:
        """Returns, by tensor of the model, the first stage that reads it. `stages`: only these, in order."""
        users: dict[str, int] = {}
        for j in range(len(self.stages)) if stages is None else stages:
            for name in self.stages[j].attributes:
                users.setdefault(name, j)
        return users

    def __str__(self) -> str:
        return "\n\n".join(stage.code for stage in self.stages)


ValueKey = tuple[int, str]  # (stage that makes a value, or the input; its name)


def value_users(program: Program) -> dict[ValueKey, tuple[int, ...]]:
    """Returns the stages that receive each value; the loss, which receives the outputs, follows the last stage."""
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
    """Sums the bytes that stages send to each other for one micro-batch; a value sent to two stages counts twice."""
    return sum(sizes[value.name] for stage in program.stages for value in stage.receives if value.source != PIPE_INPUT)


class StageContext(threading.local):
    """Settings of the stage that runs in this thread; set by the runtime, read by stage code."""

    seed = 0  # seed of the step and micro-batch
    recomputes = False  # the step runs parts again, which must give the same results
    is_recomputing = False  # the stage runs again


stage_context = StageContext()


def is_recomputing() -> bool:
    """Returns whether this code runs again for a micro-batch, to recompute values for the backward.

        @fxpipe.leaf
        def count(tokens):
            if not fxpipe.is_recomputing():
                seen.update(tokens.tolist())    # once for each micro-batch, whatever `checkpoint` is
            return tokens

    True only in the thread that recomputes, and only in Python code that runs in every step: functions marked by
    `fxpipe.leaf`, opaque modules, hooks on modules inside, `torch.autograd.Function`s. Recorded code runs only while
    the graph is recorded, when the answer is False. The result must not depend on the answer.
    """
    return stage_context.is_recomputing


class WeightGradientTask(NamedTuple):
    """The weight-gradient task of a split node that has run."""

    names: tuple[str, ...]  # names of its parameters that require a gradient
    weight_gradients: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # gradient at the edge -> gradients of `names`


@dataclass(slots=True)
class WeightGradientTape:
    """The weight-gradient tasks of one micro-batch in a stage, in the order in which its split nodes ran."""

    uses: list[WeightGradientTask] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)  # for B, which drops them
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # at the edges, for W
    # Shared by all tapes of a stage.
    detached_parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, edge: GradientEdge, use: WeightGradientTask) -> None:
        self.edges.append(edge)
        self.uses.append(use)

    def detached(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        if name not in self.detached_parameters:
            self.detached_parameters[name] = parameter.detach()
        return self.detached_parameters[name]

    def arrived(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Stores the gradients at the edges after B; drops the edges, which would keep B's graph alive."""
        self.edges, self.gradients = [], list(gradients)

    def weight_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each weight's gradient once, and empties the tape.

        The gradient of a weight that is used once is yielded immediately, so only one exists at a time. Other gradients
        are first summed over the uses, last use first, as autograd does.
        """
        uses, gradients = self.uses, self.gradients
        if not gradients:  # no gradient arrived at this stage
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
                total = new if have is None else new + have if have.is_sparse else have + new  # no sparse + dense
                del have, new
                if left[name]:
                    parts[name] = total
                else:
                    yield name, total
                del total


def clone(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy that the stage may write to.

    Unlike `Tensor.clone` it preserves strides with gaps, so that `contiguous` copies in the same cases as before.
    Tensors with overlapping memory (stride 0) become dense; torch refuses to write to them anyway.
    """
    copy = value.clone()
    if copy.stride() == value.stride() or 0 in value.stride():
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
