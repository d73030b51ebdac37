"""Profiling: the cost of each node of a traced model.

    costs = fxpipe.profile(traced, (x,), micro_batch=4)
    print(costs)            # every node: milliseconds forward and backward, bytes as formulas such as 100352*b

`memory` counts bytes and FLOPs for every batch size. `node_timing` measures the seconds of each node at two sizes of
micro-batches; `formulas` splits them into a fixed cost and a cost per sample. Without values (meta or fake tensors),
seconds are estimated for hardware known by name, from the operations of each node (`probe`, `flops`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import HARDWARE, Hardware, parse_hardware
from fxpipe.profiling import formulas
from fxpipe.profiling.flops import work_of
from fxpipe.profiling.loss_cost import LOSS_NAME, LossOf, MicroBatchLoss, parse_loss
from fxpipe.profiling.memory import GraphCounts, count_flops_and_bytes
from fxpipe.profiling.node_timing import NodeTiming, Timings, dependents_of, measure
from fxpipe.profiling.profile_data import ZERO_FORMULA, NodeCost, Profile, Seconds
from fxpipe.tracing.fake_tensors import (
    in_fake_mode,
    is_faked,
    mute_fake_tensor_logs,
    names_without_values,
    with_fake_tensors,
)
from fxpipe.tracing.model_state import preserve_state
from fxpipe.tracing.parameter_offload import parameters_at_home
from fxpipe.tracing.traced import Traced, attribute_tensor
from fxpipe.utils import accelerator
from fxpipe.utils.locks import DISPATCH_MODE_LOCK
from fxpipe.utils.output_combination import needing_all
from fxpipe.utils.polynomial import SizePoint, fit_counts, polynomial_sum
from fxpipe.utils.progress import phase, show_progress
from fxpipe.utils.pytree import flatten
from fxpipe.utils.units import parse_count, parse_number, with_article

__all__ = ["NodeCost", "Profile", "Seconds", "profile"]


@mute_fake_tensor_logs()  # costs that need values are counted on values
def profile(
    traced: Traced,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    micro_batch: int | None = None,
    second: int | None = None,
    budget: float = 10.0,
    repeats: int = 5,
    threads: int | None = None,
    hardware: str | Hardware | None = None,
    device: torch.device | str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    progress: bool = True,
) -> Profile:
    """Measures every node of `traced` on inputs like the trace's, or estimates it if there are no values.

    The model and the inputs are not changed.

    Args:
        args, kwargs: inputs of the model; the number of samples may differ from the trace's.
        micro_batch: number of samples of one micro-batch, to be run. Default: all.
        second: another number of samples, to separate fixed costs from costs per sample; if the model does not accept
            it, others are tried. Default: a number near `micro_batch`.
        budget: time limit in seconds. If it is too short, nodes run fewer times, but at least once after warm-up.
        repeats: minimum number of runs of a node for the median; more if the times disagree.
        threads: number of torch's threads while measuring; a pipeline worker has a share of the cores only. Default:
            unchanged.
        hardware: estimate the seconds for this hardware instead of measuring: a name in `fxpipe.hardware.HARDWARE` or
            a `Hardware`. Default for a model or inputs without values: "a100-80gb".
        device: device to measure on. The model stays on its device; tensors are copied one by one, so the model need
            not fit. Default: the device of the model.
        loss_fn, target: the loss of the model's output, as for `Pipeline.forward_backward`; its cost is `Profile.loss`.
            The target has as many samples as the inputs.
        progress: show a bar if it takes long and stderr is a terminal.

    Raises:
        ArgumentError: the inputs do not match the trace, there are fewer samples than `micro_batch`, or the target has
            another number of samples.
        LossError: `loss_fn` does not return a loss.
        Exception: raised by a node or `loss_fn` on these inputs, with a note.
    """
    numbers = {"micro_batch": micro_batch, "second": second, "threads": threads, "repeats": repeats}
    for name, number in numbers.items():
        if number is not None:
            parse_count(name, number)
    budget = parse_number("budget", budget, "seconds")
    effects = traced.effects
    if effects is None:
        raise ArgumentError("the graph has not been run yet; give the Traced that fxpipe.trace(model, args) returns")
    chosen = None if hardware is None else parse_hardware(hardware)
    inputs = _leaves(traced, args, {} if kwargs is None else kwargs)
    micro_batch = _micro_batch(traced, inputs, micro_batch)
    lengths = formulas.planned_lengths(traced, inputs)
    here = formulas.size_point(micro_batch, lengths)
    others = formulas.sizes_to_measure(traced, micro_batch, second)
    other_lengths = formulas.lengths_together(traced, micro_batch, lengths)
    planned = parse_loss(loss_fn, target)
    # `preserve_state`: hooks and opaque modules run unchanged.
    with (
        DISPATCH_MODE_LOCK,
        show_progress(progress),
        preserve_state(traced.model),
        preserve_state(loss_fn) if isinstance(loss_fn, nn.Module) else contextlib.nullcontext(),
        with_fake_tensors(traced.model, inputs) as leaves,
    ):
        loss = None
        if planned is not None or needing_all(traced.combinations) is not None:
            loss = partial(MicroBatchLoss.if_it_runs, traced, planned, traced.batch_of(leaves))
        place = _device_of_model(traced, leaves) if device is None else accelerator.parse_device("device", device)
        phase("counting operations")
        if is_faked() and chosen is None:
            chosen = HARDWARE["a100-80gb"]
        if chosen is not None:
            points = [here, *(here._replace(b=size) for size in itertools.islice(others, 1))]

            def estimate(leaves: Sequence[Any]) -> tuple[GraphCounts, Timings]:
                counts = count_flops_and_bytes(traced, effects, leaves, micro_batch, loss is not None)
                return counts, _estimates(counts, points, chosen, loss)

            estimated = None
            if not is_faked():  # on fake tensors, unless the model needs values
                with contextlib.suppress(Exception), with_fake_tensors(traced.model, leaves, always=True) as fakes:
                    estimated = estimate(fakes)
            counts, timings = estimated or estimate(leaves)
        else:
            counts = count_flops_and_bytes(traced, effects, leaves, micro_batch)
            phase("profiling")
            with contextlib.ExitStack() as stack:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads or torch.get_num_threads())
                stack.enter_context(parameters_at_home())
                timings = measure(
                    traced,
                    effects,
                    leaves,
                    counts.nodes,
                    place,
                    micro_batch,
                    others,
                    lengths=other_lengths,
                    repeats=repeats,
                    budget=budget,
                    loss=loss,
                )
    end = traced.graph.output_node()
    growing = {end} | dependents_of(traced, traced.batch_placeholders)

    def seconds(of: Callable[[NodeTiming], float], node: fx.Node, work: sympy.Expr) -> Seconds:
        by_point = {point: of(nodes[node]) for point, nodes in timings.items() if node in nodes}
        by_batch = {point.b: number for point, number in by_point.items() if point.others == here.others}
        line = formulas.fit_seconds(by_batch, micro_batch, node in growing)
        if not lengths:
            return line
        formula = formulas.size_polynomial(work, traced.batch, micro_batch, lengths)
        return replace(line, growing=formulas.fit_growth(by_point, here, formula))

    costs = []
    for node in traced.nodes:
        counted = counts.nodes[node]
        # The seconds grow with the FLOPs or, without any, with the bytes that the node reads and writes.
        moved = formulas.bytes_of_values((*(n for n in node.all_input_nodes if n.op != "get_attr"), node))
        work, backward_work = counted.flops or moved, counted.backward_flops or counted.flops or moved
        weight = seconds(lambda m: m.weight_seconds, node, backward_work)
        backward = seconds(lambda m: m.backward_seconds - m.weight_seconds, node, backward_work) + weight
        forward = seconds(lambda m: m.forward_seconds, node, work)
        if lengths and chosen is not None and counted.work is not None:  # grow with the estimates of its operations
            runs = (counted.work.forward, counted.work.backward, counted.work.to_inputs)
            ahead, back, to_inputs = (polynomial_sum(one.growing(chosen, here.values) for one in run) for run in runs)
            forward, backward = replace(forward, growing=ahead), replace(backward, growing=back)
            weight = replace(weight, growing=back + to_inputs * -1)
        costs.append(replace(counted, forward=forward, backward=backward, weight=weight))
    of_loss = None
    if end in timings[here]:
        held = tuple((point.b, of[end].bytes) for point, of in timings.items() if end in of)
        outputs_size = formulas.bytes_of_values(end.all_input_nodes)  # the cost of the loss grows with it
        of_loss = NodeCost(
            LOSS_NAME,
            seconds(lambda m: m.forward_seconds, end, outputs_size),
            seconds(lambda m: m.backward_seconds, end, outputs_size),
            ZERO_FORMULA,
            ZERO_FORMULA,
            working_bytes=formulas.grown_with_sizes(fit_counts(held, micro_batch), here).formula,
            work=work_of(tuple((point, of[end].ran) for point, of in timings.items() if end in of), here),
        )
    name = "" if chosen is None else chosen.name
    fingerprint = traced.fingerprint()
    return Profile(
        tuple(costs), micro_batch, traced.batch, str(place), name, counts.saved, fingerprint, of_loss, here.others
    )


def _estimates(counts: GraphCounts, points: Sequence[SizePoint], hardware: Hardware, loss: LossOf | None) -> Timings:
    """Estimates the seconds of nodes at `points`, and of the loss at each run with their dynamic sizes."""
    here, *_ = points
    works = {node: cost.work for node, cost in counts.nodes.items() if cost.work is not None}
    timings = {
        point: {node: NodeTiming.estimated(work, hardware, point) for node, work in works.items()} for point in points
    }
    if loss is not None:
        end = next(iter(counts.nodes)).graph.output_node()
        with in_fake_mode(), torch.inference_mode(False):
            runs = {point: run for point, run in counts.runs.items() if point.others == here.others}
            losses = {point: loss(run.outputs, point.b) for point, run in runs.items()}
            probed = {point: one.probe() for point, one in losses.items() if one is not None}
        if here not in probed:
            return timings
        work = work_of(tuple((point, ran) for point, (_, ran) in probed.items()), here)
        for point, (size, ran) in probed.items():
            timings.setdefault(point, {})[end] = NodeTiming.estimated(work, hardware, point, size, ran)
    return timings


def _leaves(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise ArgumentTypeError(
            f"args is {with_article(args)} and kwargs {with_article(kwargs)}; expected a tuple and a dict, as in "
            "profile(traced, (x,))"
        )
    leaves = flatten((args, kwargs))[0]
    if len(leaves) != len(traced.leaves):
        expected = ", ".join(leaf.path for leaf in traced.leaves)
        raise ArgumentError(
            f"{len(leaves)} inputs for a graph that was traced on {len(traced.leaves)} ({expected}); give the inputs "
            "that fxpipe.trace was given"
        )
    for leaf, value in zip(traced.leaves, leaves, strict=True):
        if leaf.is_tensor != isinstance(value, torch.Tensor):
            expected = "a tensor" if leaf.is_tensor else repr(leaf.constant)
            raise ArgumentError(f"input {leaf.path} is {with_article(value)}; the graph was traced on {expected}")
    return leaves


def _micro_batch(traced: Traced, leaves: Sequence[Any], wanted: int | None) -> int:
    samples = traced.batch_of(leaves)
    size = samples if wanted is None else wanted
    if size > samples:
        raise ArgumentError(f"micro_batch={size}, but the inputs hold {samples} samples; give at least {size}")
    # Without values graph and model cannot be compared: such a read may be harmless, and is checked later.
    runs = (
        traced.holds_at(size)
        or any(size in sizes for _, sizes, _ in traced.comparisons.accepted_splits)
        or names_without_values(traced.model)
    )
    for read in () if runs else traced.batch_conditions:
        if not read.holds(size):
            raise ArgumentError(
                f"the graph does not hold for {size} samples: at {read.where} forward went on as if {read.condition} "
                "held; trace the model on that many samples"
            )
    return size


def _device_of_model(traced: Traced, leaves: Sequence[Any]) -> torch.device:
    own = (attribute_tensor(traced, n) for n in traced.graph.nodes if n.op == "get_attr")
    inputs = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    for tensor in (*own, *inputs):
        return tensor.device
    raise ArgumentError("neither the model nor the inputs hold a tensor, so there is nothing to measure")
