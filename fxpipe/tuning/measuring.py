"""Runs the best few candidates for real.

All of them train the one model, in turns: a round is a step of each, so that what disturbs the machine disturbs them
alike, and the median over the rounds counts. Their graphs are those that were studied; nothing is traced again. Where
stages are on GPUs, the parameters move to those of a candidate before its turn, which is not timed. Afterwards the
model is what it was: its parameters, gradients, buffers and devices, and the random numbers to come.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.pipes import Pipeline
from fxpipe.plans import Plan
from fxpipe.progress import progress
from fxpipe.tracing.checking.check import take
from fxpipe.tracing.snapshot import forked_random, gradients_aside, slots_of, undone
from fxpipe.trees import flatten, mapped
from fxpipe.tuning.plans import OfModel
from fxpipe.tuning.rows import Row

CONTESTANTS = 4
ROUNDS = 5  # beside a first one, to warm up: fewer than the steps after which a loss is verified again


@dataclass(frozen=True, slots=True)
class Loss:
    """What `forward_backward` is told beside the inputs."""

    loss_fn: Callable[..., Any] | None
    target: Any
    reduction: str

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """It may have parameters, which get gradients, and buffers, which change."""
        return (self.loss_fn,) if isinstance(self.loss_fn, nn.Module) else ()

    def arguments(self, batch: int) -> dict[str, Any]:
        """For mini-batches of so many samples."""
        if self.loss_fn is None and self.target is None:
            return {"loss_fn": squares}
        return {"loss_fn": self.loss_fn, "target": _of_size(self.target, batch), "reduction": self.reduction}


def squares(output: Any) -> torch.Tensor:
    """A loss for whom none was given: the output if it is a scalar, else the mean of the squares of all there is."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if len(leaves) == 1 and leaves[0].dim() == 0:
        return leaves[0]
    means = [leaf.abs().float().square().mean() for leaf in leaves]
    return torch.stack([mean.to(means[-1].device) for mean in means]).sum()


def measured(
    rows: Sequence[Row],
    contestants: Sequence[Row],
    plans: OfModel,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    loss: Loss,
) -> tuple[Row, ...]:
    """The rows, those of the contestants with the median seconds of their steps."""
    studied = plans.studied
    args, kwargs = _inputs_of_size(plans, inputs)
    arguments = loss.arguments(studied.batch)
    seconds: dict[int, list[float]] = {k: [] for k in range(len(contestants))}
    model = studied.traced.model
    with (
        _as_it_was((model, *loss.modules), (inputs, loss.target)),
        contextlib.ExitStack() as stack,
        progress("measuring", ROUNDS + 1, "rounds") as step,
    ):
        turns = [_turn(model, row.plan, plans, stack) for row in contestants if row.plan is not None]
        for _ in range(ROUNDS + 1):
            for k, turn in enumerate(turns):
                seconds[k].append(turn(args, kwargs, arguments))
            step()
    medians = {id(row): statistics.median(seconds[k][1:]) for k, row in enumerate(contestants)}
    return tuple(replace(row, measured_seconds=medians.get(id(row))) for row in rows)


def _turn(
    model: nn.Module, plan: Plan, plans: OfModel, stack: contextlib.ExitStack
) -> Callable[[Any, Any, dict[str, Any]], float]:
    prepared = plans.prepared(plan)
    pipe = stack.enter_context(Pipeline(model, prepared.settings))
    pipe._fxpipe.adopt(prepared)
    devices = [torch.device(name) for name in plan.workers]

    def run(args: Any, kwargs: Any, arguments: dict[str, Any]) -> float:
        pipe._fxpipe.settle()
        model.zero_grad(set_to_none=True)
        _synchronise(devices)
        begin = time.perf_counter()
        pipe.forward_backward(*args, **arguments, **kwargs)
        _synchronise(devices)
        return time.perf_counter() - begin

    return run


@contextlib.contextmanager
def _as_it_was(modules: Sequence[nn.Module], given: Any) -> Iterator[None]:
    """A block after which modules, gradients of what was given, and random numbers are as before."""
    leaves = [leaf for leaf in flatten(given)[0] if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None  # else it would be added to
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(forked_random())
            for module in modules:
                stack.enter_context(gradients_aside(module))
                stack.enter_context(undone(module))
                stack.enter_context(_where_it_was(module))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


@contextlib.contextmanager
def _where_it_was(module: nn.Module) -> Iterator[None]:
    """A block after which the tensors of a module are on the devices where they were."""
    before = [(tensor, tensor.data) for tensor in slots_of(module).values() if not tensor.is_inference()]
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _synchronise(devices: Sequence[torch.device]) -> None:
    for device in {*devices}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _inputs_of_size(
    plans: OfModel, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as a mini-batch of the studied size; what is missing is repeated."""
    traced, batch = plans.studied.traced, plans.studied.batch
    leaves, spec = flatten(inputs)
    if traced.batch_of(leaves) == batch:
        return inputs
    args, kwargs = pytree.tree_unflatten(take(traced, leaves, 0, batch), spec)
    return args, kwargs


def _of_size(target: Any, batch: int) -> Any:
    """With so many samples in dimension 0."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] == batch:
            return tensor
        return tensor[torch.arange(batch, device=tensor.device) % tensor.shape[0]]

    return mapped(part, target)
