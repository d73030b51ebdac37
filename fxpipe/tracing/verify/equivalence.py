"""Compares every graph with its model, on real values and at the sizes that will run.

Other sizes show what a recording can miss: a loop over the batch, a branch on a size, a value treated as a constant. If
only a part of the samples was recorded, disguised sizes have shown these (`record.untracked_sizes`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.functions import opname
from fxpipe._torch.saved_tensor_hooks import NoSavedTensors, is_hooks_error
from fxpipe.errors import DecisionError, TraceError
from fxpipe.tracing.dynamic_sizes import SizeCondition
from fxpipe.tracing.forward_rng import DrawFromStream, DrawStream, python_draws
from fxpipe.tracing.guards import expectations_of
from fxpipe.tracing.interpreter import copy_as_leaf, writable_copy
from fxpipe.tracing.model_state import (
    Snapshot,
    container_tensors,
    is_fixed,
    preserve_state,
    slots_of,
    without_gradients,
)
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record import module_hooks as hooks
from fxpipe.tracing.record.input_containers import changed_container_error, changed_input_item
from fxpipe.tracing.record.patches import replaced
from fxpipe.tracing.tensors import detached, slice_samples, storage_of
from fxpipe.tracing.traced import Traced, as_given, runs_python
from fxpipe.tracing.verify.effects import Effects, GraphRun, ObservedEffects, RunResult, effects_of, observe_run
from fxpipe.utils.batch_split import micro_batch_sizes
from fxpipe.utils.python_objects import NotKept
from fxpipe.utils.pytree import StructureError, leaves_by_structure, preserve_objects

# elements compared at the same time: allocating larger temporaries takes longer than filling them
COMPARED_AT_ONCE = 1 << 18


def take_samples(traced: Traced, leaves: Sequence[Any], start: int, stop: int) -> list[Any]:
    """Returns samples start..stop of flattened inputs; repeats from the first after the last."""
    return slice_samples(leaves, traced.in_dims, start, stop)


def check_against_model(traced: Traced, leaves: Sequence[Any], chunks: int = 1) -> Traced:
    """Compares graph and model on the inputs and at other sizes; returns the graph with observed `effects`.

    These are the micro-batch sizes (one sample fewer if a micro-batch is as large as the batch), and one sample more: a
    loop over four samples with slices works with three. Skips sizes that the model rejects. A graph recorded on some
    samples is compared at the micro-batch sizes and only observed at the size of a larger part.

    Raises:
        TraceError: an output or a buffer differs; names it, the size and the remedy.
    """
    batch = traced.batch_of(leaves)
    smaller = micro_batch_sizes(batch, chunks) - {batch} or {batch - 1} - {0}
    example = traced.recorded_samples or batch
    others = (*sorted(smaller, reverse=True), *((batch + 1, 2 * batch) if example == batch else ()))
    if traced.recorded_samples is not None and not traced.holds_at(batch):
        raise TraceError("forward does something else with all samples than with a part of them")
    parts = smaller if min(chunks, batch) > 1 else ()
    watched = {size: excuse_reads(traced, leaves, size) for size in parts}
    refused = set[int]()
    wanted: list[tuple[int, str, list[Any], RunResult | None]] = []
    for size in dict.fromkeys((example, *others) if example == batch else (*others, example)):
        if (size > batch + 1 and len(wanted) > 1) or not traced.holds_at(size):
            continue
        sample = sample_within_guards(traced, leaves, size)
        if sample is None and size == example:
            raise TraceError(
                "a value that forward reads is another one when it is asked again: "
                + "; ".join([*map(str, traced.guards.guards if traced.guards else ()), *expectations_of(traced)])
            )
        if sample is None:
            continue
        note, want = "" if size == batch else f" with {size} samples instead of the example's {batch}", None
        if not watched.get(size) and all(read.holds(size) for read in traced.mini_batch_conditions):
            try:
                want = run_model(traced, sample, note)
            except TraceError:
                raise
            except Exception:
                if size == example:
                    raise
                refused.add(size)
                continue  # the model raises again for such a batch
        wanted.append((size, note, sample, want))
    # After all runs of the model: it may replace tensors without the graph.
    seen: list[ObservedEffects] = []
    for size, note, sample, want in wanted:
        have = watched.get(size) or watch_seeded(traced, sample)
        seen.append(have.effects)
        if size < batch or not traced.mini_batch_conditions:
            _refuse_other_dimensions(traced, have, note)
        if want is not None:
            _refuse_other_results(traced, want, have, note)
    compared = {size for size, *_, want in wanted if want is not None or watched.get(size)}
    sizes = {batch, *compared, *refused, *((example, batch + 1) if example != batch else ())}
    # If Python used the batch size unnoticed, other sizes may differ even if the compared ones agree:
    # `h[: len(x) // 2 * 2]` is `h[:8]` with 8 and 9 samples.
    where = traced.not_followed or next((info(n).source for n in traced.nodes if _cuts_samples(n)), "")
    conditions = traced.batch_conditions
    if where and not traced.recorded_sizes:
        is_compared = sympy.Or(*(sympy.Eq(traced.batch, size) for size in sorted(sizes)))
        conditions = (*conditions, SizeCondition(is_compared, where))
    return replace(traced, effects=effects_of(traced, seen), batch_conditions=conditions)


def _cuts_samples(node: fx.Node) -> bool:
    """Returns whether a node reads or writes a slice of samples with a plain number as a bound."""
    if opname(node.target).strip("_") not in ("getitem", "setitem") or not isinstance(node.args[0], fx.Node):
        return False
    shapes, index = info(node.args[0]).shapes, node.args[1]
    if len(shapes) != 1:
        return False
    parts = index if isinstance(index, tuple) else (index,)
    plain = itertools.takewhile(lambda part: isinstance(part, (slice, int)), parts)
    return any(
        isinstance(part, slice)
        and bool(size.free_symbols)
        and any(type(bound) is int and bound for bound in (part.start, part.stop))
        for part, size in zip(plain, shapes[0].shape, strict=False)
    )


def excuse_reads(traced: Traced, leaves: Sequence[Any], size: int) -> GraphRun | None:
    """Excuses a micro-batch size at which graph and model agree although reads of the batch size do not hold.

    For example, `if batch_size != positions.shape[0]: positions = positions.expand(batch_size, -1)` with one sample.
    Returns the graph's run if it equals the model's.
    """
    sample = None if traced.holds_at(size) else sample_within_guards(traced, leaves, size)
    if sample is None:
        return None
    try:
        result = compare_runs(traced, sample)
    except Exception:
        return None
    traced.comparisons.excused.add(size)
    return result


def compare_runs(traced: Traced, sample: Sequence[Any], with_model: bool = True) -> GraphRun:
    """Runs model and graph, and compares them; returns the graph's run.

    Raises `TraceError` if they differ, and any error of the model.
    """
    want = run_model(traced, sample) if with_model else None
    have = watch_seeded(traced, sample)
    _refuse_other_dimensions(traced, have)
    if want is not None:
        _refuse_other_results(traced, want, have)
    return have


def agrees_at_size(traced: Traced, leaves: Sequence[Any], size: int) -> bool:
    """Returns whether model and graph agree on this number of samples. False if the model raises."""
    sample = sample_within_guards(traced, leaves, size)
    if sample is None:
        return True  # forward branches on the mini-batch, and fewer samples would change the branch
    try:
        is_model = all(read.holds(size) for read in traced.mini_batch_conditions)
        compare_runs(traced, sample, is_model)
    except Exception:
        return False
    return True


def effects_unverified(traced: Traced, leaves: Sequence[Any]) -> Effects:
    return effects_of(traced, [watch_seeded(traced, leaves).effects])


def sample_within_guards(traced: Traced, leaves: Sequence[Any], size: int) -> list[Any] | None:
    """Returns `size` samples for which the values that forward reads match the graph; None if there are none."""
    batch = traced.batch_of(leaves)
    for start in (0, batch - size) if size < batch else (0,):
        sample = take_samples(traced, leaves, start, start + size)
        if traced.guards_hold(sample, traced.seed):
            with contextlib.suppress(DecisionError):
                if expectations_of(traced):
                    watch_seeded(traced, sample)
                return sample
    return None


@contextlib.contextmanager
def restoring(traced: Traced) -> Iterator[Snapshot]:
    """A block that runs the model or its graph with the user's seed; the model and all random states are restored."""
    with preserve_state(traced.model) as snapshot, without_gradients(traced.model), preserve_objects(traced.in_spec):
        for name in traced.overwritten:  # whatever reads one before it is set raises
            path, _, key = name.rpartition(".")
            traced.model.get_submodule(path).__dict__[key] = NotKept(name)
        torch.manual_seed(torch.initial_seed() % 2**31)
        yield snapshot


@contextlib.contextmanager
def restoring_after_graph(traced: Traced) -> Iterator[None]:
    """A block that runs the graph, as `restoring`. Its errors become `TraceError`, since the model has run."""
    try:
        with restoring(traced):  # a hook, or an opaque module, may write to tensors of other modules
            yield
    except (DecisionError, TraceError):
        raise
    except Exception as error:
        raise TraceError(
            f"the traced graph raises, and the model does not, when both are compared at several batch sizes: {error}; "
            "forward may compute with the batch size in plain Python (range(len(x)), int(x.shape[0]))"
        ) from error


def watch_seeded(traced: Traced, sample: Sequence[Any]) -> GraphRun:
    """Runs the graph with the seed of the model's run."""
    with restoring_after_graph(traced):
        return observe_run(traced, sample)


def run_model(traced: Traced, sample: Sequence[Any], size_note: str = "") -> RunResult:
    if not any(map(runs_python, traced.nodes)):  # Python may run backward inside
        block = NoSavedTensors()
        try:
            with block:
                result = _run_now(traced, sample, size_note)
            if not block.was_read:
                return result
        except Exception as error:
            if not (block.was_read or is_hooks_error(error)):
                raise
    return _run_now(traced, sample, size_note)


def _run_now(traced: Traced, sample: Sequence[Any], size_note: str) -> RunResult:
    names = {n.target for n in traced.graph.nodes if n.op == "get_attr"} | set(traced.assigned)
    with restoring(traced):
        leaves, copies = call_model(traced, list(map(copy_as_leaf, sample)), size_note)
        slots = slots_of(traced.model)
        own = {storage_of(t) for t in (*slots.values(), *container_tensors(traced.model).values())}
        outputs = [detached(x, own) for x in leaves]
        slots = {s: t for s, t in slots.items() if not is_fixed(t) and s.name in names}
        buffers = {s.name: t.detach().clone() for s, t in slots.items()}
        inputs = {p: detached(copies[p], own) for p in traced.placeholders if p < len(copies)}
    return RunResult(outputs, buffers, inputs)


def call_model(traced: Traced, inputs: Sequence[Any], size_note: str = "") -> tuple[list[Any], list[Any]]:
    """Calls the model on flattened inputs. Returns the leaves of its output, and the inputs after the call.

    Raises `TraceError` if the output's structure differs from the recording's, or the model changes a container.
    """
    copies = as_given(traced.leaves, map(writable_copy, inputs))
    args, kwargs = pytree.tree_unflatten(copies, traced.in_spec)
    options = traced.recording_options
    draws = python_draws(lambda: False, torch.Tensor.item) if options and options.draws_for_python else []
    with DrawFromStream(DrawStream(traced.seed), traced.draws_from_stream), replaced(draws):
        result = hooks.run_model(traced.model, args, kwargs)
    if changed := changed_input_item(traced.model, (args, kwargs), traced.leaves, copies, traced.in_spec):
        raise changed_container_error(changed)
    try:
        return leaves_by_structure(result, traced.out_spec), copies
    except StructureError as error:
        raise TraceError(
            f"the model's output has another structure{size_note} than when it was recorded: {error}; return the same "
            "structure for every batch size and in every call"
        ) from error


def _refuse_other_results(traced: Traced, want: RunResult, have: RunResult, size_note: str = "") -> None:
    remedy = (
        "; forward may depend on the batch size or on values in plain Python (range(len(x)), a branch), seed random "
        "numbers, or change what it reads later: keep these in tensor functions and buffers"
    )
    for place, (w, h, node) in enumerate(zip(want.outputs, have.outputs, traced.outputs, strict=True)):
        name = node.name if isinstance(node, fx.Node) else repr(node)
        if not is_close(w, h):
            raise TraceError(f"output {place} ({name}) of the traced graph differs from the model's{size_note}{remedy}")
        if isinstance(w, torch.Tensor) and w.requires_grad != h.requires_grad:
            raise TraceError(
                f"output {place} ({name}) requires grad in {'the model' if w.requires_grad else 'the traced graph'} "
                "only; forward may switch gradients on or off in a way that was not seen"
            )
    for name, value in have.buffers.items():
        if name in want.buffers and not is_close(want.buffers[name], value):
            raise TraceError(f"buffer {name!r} after the traced graph differs from the model's{size_note}{remedy}")
    for place, value in have.inputs.items():
        if traced.leaves[place].same_as is None and not is_close(want.inputs[place], value):
            raise TraceError(
                f"input {traced.leaves[place].path} after the traced graph differs from what the model leaves in it"
                f"{size_note}{remedy}"
            )


def _refuse_other_dimensions(traced: Traced, have: RunResult, size_note: str = "") -> None:
    """Raises TraceError if an output of the graph has another number of dimensions than recorded."""
    for place, (value, node, dim) in enumerate(zip(have.outputs, traced.outputs, traced.out_dims, strict=True)):
        if isinstance(dim, int) and isinstance(node, fx.Node) and value.dim() != len(info(node).shapes[0].shape):
            raise TraceError(
                f"output {place} ({node.name}, {info(node).shapes[0]}) has {value.dim()} "
                f"dimensions{size_note}, so the outputs of micro-batches cannot be put together; name "
                "the dimensions that forward takes out (x.squeeze(1))"
            )


def is_close(want: Any, have: Any, tolerance: float | None = None) -> bool:
    """Returns whether values are equal up to a tolerance (default: 100 eps), relative to each and the largest one."""
    if not isinstance(want, torch.Tensor):  # objects without `__eq__` are new in each forward
        is_new = type(want) is type(have) and getattr(type(want), "__eq__", None) is object.__eq__
        return is_new or bool(want is have or want == have)
    if not isinstance(have, torch.Tensor) or want.shape != have.shape or want.dtype != have.dtype:
        return False
    if want.layout != torch.strided:
        return want.layout == have.layout and is_close(want.to_dense(), have.to_dense())
    if not want.is_floating_point() and not want.is_complex():
        return bool(torch.equal(want, have))
    if tolerance is None:
        tolerance = 100 * torch.finfo(want.dtype).eps
    want, have = want.detach(), have.detach()
    if torch.equal(want, have):
        return True
    pieces = [*zip(want.flatten().split(COMPARED_AT_ONCE), have.flatten().split(COMPARED_AT_ONCE), strict=True)]
    scale = max((float(w.abs().nan_to_num(posinf=0, neginf=0).max()) for w, _ in pieces if len(w)), default=0.0)
    limit = tolerance * max(scale, 1e-30)
    return all(torch.allclose(w, h, rtol=tolerance, atol=limit, equal_nan=True) for w, h in pieces)


def is_roughly_close(want: Any, have: Any) -> bool:
    """Returns whether values are equal to half of their digits, since kernels differ between sizes."""
    is_rounded = isinstance(want, torch.Tensor) and (want.is_floating_point() or want.is_complex())
    return is_close(want, have, torch.finfo(want.dtype).eps ** 0.5 if is_rounded else None)
