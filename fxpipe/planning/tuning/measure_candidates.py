"""Runs the best few candidates on the devices.

They train the model alternately: a round is a step of each, so that disturbances affect all of them equally, and the
median over the rounds counts. They run the profiled graphs. On GPUs the parameters move before a candidate's step,
which is not timed. Afterwards parameters, gradients, buffers, devices and random numbers are restored.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.tensor_data import replace_data
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning.candidates import CandidateResult, ModelPlans
from fxpipe.tracing.model_state import preserve_rng, preserve_state, slots_of, without_gradients
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils import accelerator
from fxpipe.utils.progress import progress
from fxpipe.utils.pytree import flatten, map_tensor_leaves

MEASURING_ROUNDS = 5  # after one warm-up round: fewer than the steps after which a loss is verified again


def default_loss(output: Any) -> torch.Tensor:
    """Returns the default loss: the output if it is a scalar, otherwise the sum of the mean squares of all outputs."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if len(leaves) == 1 and leaves[0].dim() == 0:
        return leaves[0]
    means = [leaf.abs().float().square().mean() for leaf in leaves]
    return torch.stack([mean.to(means[-1].device) for mean in means]).sum()


def measure_steps(
    rows: Sequence[CandidateResult],
    contestants: Sequence[CandidateResult],
    plans: ModelPlans,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    loss_fn: Callable[..., Any] | None,
    target: Any,
    reduction: str,
) -> tuple[CandidateResult, ...]:
    """Returns the rows, with the median seconds of measured steps for the contestants."""
    traced, batch = plans.profiled.traced, plans.profiled.batch
    leaves, spec = flatten(inputs)
    args, kwargs = inputs
    if traced.batch_of(leaves) != batch:  # repeats samples if there are too few
        args, kwargs = pytree.tree_unflatten(take_samples(traced, leaves, 0, batch), spec)

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.shape[0]
        return tensor if count == batch else tensor[torch.arange(batch, device=tensor.device) % count]

    arguments: dict[str, Any] = {"loss_fn": default_loss}
    if loss_fn is not None or target is not None:
        target_of_batch = map_tensor_leaves(repeated, target)
        arguments = {"loss_fn": loss_fn, "target": target_of_batch, "reduction": reduction}
    # A loss module may have parameters and buffers, which must be restored.
    loss_modules = (loss_fn,) if isinstance(loss_fn, nn.Module) else ()
    seconds: dict[int, list[float]] = {k: [] for k in range(len(contestants))}
    model = traced.model
    with (
        _restore_all((model, *loss_modules), (inputs, target)),
        contextlib.ExitStack() as stack,
        progress("measuring", MEASURING_ROUNDS + 1, "rounds") as step,
    ):
        turns = [_step_timer(model, row.plan, plans, stack) for row in contestants if row.plan is not None]
        for _ in range(MEASURING_ROUNDS + 1):
            for k, turn in enumerate(turns):
                seconds[k].append(turn(args, kwargs, arguments))
            step()
    medians = {id(row): statistics.median(seconds[k][1:]) for k, row in enumerate(contestants)}
    return tuple(replace(row, measured_seconds=medians.get(id(row))) for row in rows)


def _step_timer(
    model: nn.Module, plan: Plan, plans: ModelPlans, stack: contextlib.ExitStack
) -> Callable[[Any, Any, dict[str, Any]], float]:
    prepared = plans.prepared(plan)
    pipe = stack.enter_context(Pipeline(model, prepared.settings))
    pipe._fxpipe.keep(pipe._fxpipe.take_plan_of(prepared))
    devices = [torch.device(name) for name in plan.workers]

    def run(args: Any, kwargs: Any, arguments: dict[str, Any]) -> float:
        pipe._fxpipe.settle()
        model.zero_grad(set_to_none=True)
        accelerator.synchronize(*devices)
        begin = time.perf_counter()
        pipe.forward_backward(*args, **arguments, **kwargs)
        accelerator.synchronize(*devices)
        return time.perf_counter() - begin

    return run


@contextlib.contextmanager
def _restore_all(modules: Sequence[nn.Module], inputs: Any) -> Iterator[None]:
    """Restores modules, gradients of inputs and targets, and random numbers at the end of the block."""
    leaves = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None  # otherwise backward would add to it
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserve_rng())
            for module in modules:
                stack.enter_context(without_gradients(module))
                stack.enter_context(preserve_state(module))
                slots = [tensor for tensor in slots_of(module).values() if not tensor.is_inference()]
                for tensor in slots:  # back onto its device
                    stack.callback(replace_data, tensor, tensor.data)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
