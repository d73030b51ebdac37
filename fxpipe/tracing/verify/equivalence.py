"""Compares every graph with its model, on real values and at the sizes that will run.

Other sizes show what a recording can miss: a loop over the batch, a branch on a size, a value treated as a constant.
A graph with correct outputs can still be wrong: it may lack the backward of a custom function, and a second call reads
state that the first call left, in buffers or hidden in an object or a global. So, on a few samples,

    model   call ──▶ output, gradients, state ──▶ call on other samples ──▶ output, state
    graph   run  ──▶ output, gradients, state ──▶ run  on the same      ──▶ output, state

with the same random numbers, and a backward from one random direction of the outputs. A missing gradient differs from
a gradient of zero: an optimizer skips the first parameter and decays the second. Large gradients are reduced to sums.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import backward_id, suspend_hooks
from fxpipe._torch.functions import opname
from fxpipe._torch.module_internals import module_flags, own_buffers
from fxpipe._torch.saved_tensor_hooks import NoSavedTensors, is_hooks_error
from fxpipe.errors import DecisionError, TraceError
from fxpipe.tracing.dynamic_sizes import SizeCondition
from fxpipe.tracing.forward_rng import DrawFromStream, DrawStream, python_draws
from fxpipe.tracing.guards import expectations_of
from fxpipe.tracing.interpreter import copy_as_leaf, writable_copy
from fxpipe.tracing.model_state import (
    Snapshot,
    container_tensors,
    equal_tensors,
    is_fixed,
    preserve_state,
    slots_of,
    without_gradients,
)
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record import module_hooks as hooks
from fxpipe.tracing.record.patches import replaced
from fxpipe.tracing.record.record_model import changed_container_error, changed_input_item
from fxpipe.tracing.tensors import detached, slice_samples, storage_of
from fxpipe.tracing.traced import Traced, as_given, runs_python
from fxpipe.tracing.verify.autograd_graph import AutogradGraph, are_equal, autograd_graph
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
    samples is compared at the micro-batch sizes and only observed at the size of a larger part. Raises `TraceError`,
    with the name, the size and the remedy, if an output or a buffer differs, or a gradient at the smallest size.
    """
    batch = traced.batch_of(leaves)
    smaller = micro_batch_sizes(batch, chunks) - {batch} or {batch - 1} - {0}
    example = traced.recorded_samples or batch
    others = (*sorted(smaller, reverse=True), *((batch + 1, 2 * batch) if example == batch else ()))
    if traced.recorded_samples is not None and not traced.holds_at(batch):
        raise TraceError("forward does something else with all samples than with a part of them")
    parts = smaller if min(chunks, batch) > 1 else ()
    watched = {size: excuse_reads(traced, leaves, size) for size in parts}
    watched |= check_training_equivalence(traced, leaves, chunks)  # also at excused sizes
    refused, differing = set[int](), set[int]()
    is_loop = traced.is_for_one_size and any(map(_takes_a_sample, traced.nodes))
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
        note, want = _size_note(size, batch), None
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
        try:
            have = watched.get(size) or watch_seeded(traced, sample)
            _refuse_other_results(traced, want, have, note, size < batch or not traced.mini_batch_conditions)
        except TraceError:
            if size == example or not is_loop:
                raise
            differing.add(size)  # forward loops over the samples by their number
            continue
        seen.append(have.effects)
    equal = {size for size, *_, want in wanted if want is not None or watched.get(size)} - differing
    sizes = {batch, *equal, *refused, *((example, batch + 1) if example != batch else ())}
    if differing:
        is_batch = SizeCondition(sympy.Eq(traced.batch, batch), next(info(n).source for n in traced.nodes))
        return replace(traced, effects=effects_of(traced, seen), batch_conditions=(*traced.batch_conditions, is_batch))
    # If Python used the batch size unnoticed, other sizes may differ even if the compared ones agree:
    # `h[: len(x) // 2 * 2]` is `h[:8]` with 8 and 9 samples.
    where = traced.not_followed or next((info(n).source for n in traced.nodes if _cuts_samples(n)), "")
    conditions = traced.batch_conditions
    if where and not traced.recorded_sizes:
        is_compared = sympy.Or(*(sympy.Eq(traced.batch, size) for size in sorted(sizes)))
        conditions = (*conditions, SizeCondition(is_compared, where))
    return replace(traced, effects=effects_of(traced, seen), batch_conditions=conditions)


def _takes_a_sample(node: fx.Node) -> bool:
    """Returns whether a node reads or writes one sample by its number: `x[i]`."""
    if opname(node.target).strip("_") not in ("getitem", "setitem") or not isinstance(node.args[0], fx.Node):
        return False
    shapes, index = info(node.args[0]).shapes, node.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    return type(first) is int and len(shapes) == 1 and any(size.free_symbols for size in shapes[0].shape[:1])


def _size_note(size: int, batch: int) -> str:
    return "" if size == batch else f" with {size} samples instead of the example's {batch}"


def _cuts_samples(node: fx.Node) -> bool:
    """Returns whether a node reads or writes a slice of samples with a plain number as a bound."""
    if opname(node.target).strip("_") not in ("getitem", "setitem") or not isinstance(node.args[0], fx.Node):
        return False
    shapes, index = info(node.args[0]).shapes, node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    plain = itertools.takewhile(lambda part: isinstance(part, (slice, int)), parts)
    cut = zip(plain, shapes[0].shape if len(shapes) == 1 else (), strict=False)
    slices = [part for part, size in cut if isinstance(part, slice) and size.free_symbols]
    return any(type(bound) is int and bound for part in slices for bound in (part.start, part.stop))


def excuse_reads(traced: Traced, leaves: Sequence[Any], size: int) -> GraphRun | None:
    """Excuses a size if graph and model agree although reads do not hold: `if len(x) != len(y): y = y.expand(len(x))`.

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
    """Returns the graph's run. Raises `TraceError` if it differs from the model's, and any error of the model."""
    want = run_model(traced, sample) if with_model else None
    have = watch_seeded(traced, sample)
    _refuse_other_results(traced, want, have)
    return have


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


_numbers = itertools.count(1009, 1009)


@contextlib.contextmanager
def restoring(traced: Traced) -> Iterator[Snapshot]:
    """A block that runs the model or its graph with the user's seed; the model and all random states are restored."""
    with preserve_state(traced.model) as snapshot, without_gradients(traced.model), preserve_objects(traced.in_spec):
        for name in traced.overwritten:  # whatever reads one before it is set raises, or gets another number each time
            path, _, key = name.rpartition(".")
            store = traced.model.get_submodule(path).__dict__
            is_counter = name in traced.recording_options.counters
            store[key] = store[key] + next(_numbers) if is_counter else NotKept(name)
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
    if not _has_python(traced):  # which may run backward inside
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


def _has_python(traced: Traced) -> bool:
    return any(map(runs_python, traced.nodes))


def _run_now(traced: Traced, sample: Sequence[Any], size_note: str) -> RunResult:
    with restoring(traced):
        return _result_of(traced, *call_model(traced, list(map(copy_as_leaf, sample)), size_note))


def _result_of(traced: Traced, leaves: Sequence[Any], copies: Sequence[Any]) -> RunResult:
    """`leaves`: of the model's output. `copies`: the inputs after the call."""
    names = {n.target for n in traced.graph.nodes if n.op == "get_attr"} | set(traced.assigned)
    slots, own = slots_of(traced.model), _own_storages(traced)
    slots = {s: t for s, t in slots.items() if not is_fixed(t) and s.name in names}
    return RunResult(
        [detached(x, own) for x in leaves],
        {s.name: t.detach().clone() for s, t in slots.items()},
        {p: detached(copies[p], own) for p in traced.placeholders if p < len(copies)},
    )


def _own_storages(traced: Traced) -> set[int]:
    return {storage_of(t) for t in (*slots_of(traced.model).values(), *container_tensors(traced.model).values())}


def call_model(traced: Traced, inputs: Sequence[Any], size_note: str = "") -> tuple[list[Any], list[Any]]:
    """Calls the model on flattened inputs. Returns the leaves of its output, and the inputs after the call.

    Raises `TraceError` if the output's structure differs from the recording's, or the model changes a container.
    """
    copies = as_given(traced.leaves, map(writable_copy, inputs))
    args, kwargs = pytree.tree_unflatten(copies, traced.in_spec)
    options = traced.recording_options
    draws = python_draws(traced.model, lambda: False, torch.Tensor.item) if options.draws_for_python else []
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


def _refuse_other_results(
    traced: Traced, want: RunResult | None, have: RunResult, size_note: str = "", is_cut: bool = True
) -> None:
    """Raises `TraceError` if results differ, or an output of a part has another number of dimensions than recorded."""
    remedy = (
        "; forward may depend on the batch size or on values in plain Python (range(len(x)), a branch), seed random "
        "numbers, or change what it reads later: keep these in tensor functions and buffers"
    )
    for place, (h, node, dim) in enumerate(zip(have.outputs, traced.outputs, traced.out_dims, strict=True)):
        is_held = is_cut and isinstance(dim, int) and isinstance(node, fx.Node)
        if is_held and h.dim() != len(info(node).shapes[0].shape):
            raise TraceError(
                f"output {place} ({node.name}, {info(node).shapes[0]}) has {h.dim()} "
                f"dimensions{size_note}, so the outputs of micro-batches cannot be put together; name "
                "the dimensions that forward takes out (x.squeeze(1))"
            )
    if want is None:
        return
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
    # Two cheap passes are enough for finite values that differ by less than what the largest one allows.
    largest = max((float(torch.linalg.vector_norm(w, torch.inf)) for w, _ in pieces if len(w)), default=0.0)
    gaps = (float(torch.linalg.vector_norm(w - h, torch.inf)) for w, h in pieces if len(w))
    if largest < torch.inf and all(gap <= tolerance * largest for gap in gaps):  # False for NaN, which `max` may drop
        return True
    scale = max((float(w.abs().nan_to_num(posinf=0, neginf=0).max()) for w, _ in pieces if len(w)), default=0.0)
    limit = tolerance * max(scale, 1e-30)
    return all(torch.allclose(w, h, rtol=tolerance, atol=limit, equal_nan=True) for w, h in pieces)


def is_roughly_close(want: Any, have: Any) -> bool:
    """Returns whether values are equal to half of their digits, since kernels differ between sizes."""
    is_rounded = isinstance(want, torch.Tensor) and (want.is_floating_point() or want.is_complex())
    return is_close(want, have, torch.finfo(want.dtype).eps ** 0.5 if is_rounded else None)


FEWEST_SAMPLES = 2  # samples; the shapes of a single sample are special
SMALL_GRADIENT = 1 << 16  # elements up to which a gradient is kept unreduced
GRADIENT_FACTOR = 4 / 3  # scales gradients to measure their rounding; a power of two would change no bit


@dataclass(frozen=True, slots=True)
class _GradientSummary:
    scale: float  # the largest magnitude; NaN if there is any
    sums: tuple[torch.Tensor, ...]  # along the first dimension, and along all others; a small gradient unreduced
    terms: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _GradientSummary:
        dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
        dtype = torch.promote_types(dense.dtype, torch.float32)
        if not dense.numel():
            scale = 0.0
        elif dense.is_complex():
            scale = float(torch.linalg.vector_norm(dense, torch.inf))
        else:
            scale = max(map(abs, map(float, torch.aminmax(dense))))  # a norm takes ten times as long
        if dense.numel() <= SMALL_GRADIENT or dense.dim() < 2:
            return cls(scale, (dense.to(dtype, copy=True),), 1)
        rows = dense.flatten(1)
        return cls(scale, (rows.sum(0, dtype=dtype), rows.sum(1, dtype=dtype)), max(rows.shape))

    def differs(self, other: _GradientSummary, eps: float) -> bool:
        """Returns whether they differ by far more than another summation order explains."""
        tolerance = eps**0.5
        limit = tolerance * self.terms**0.5 * (self.scale if math.isfinite(self.scale) else 0.0)
        return not all(
            torch.allclose(own, its, rtol=tolerance, atol=limit, equal_nan=True)
            for own, its in zip(self.sums, other.sums, strict=True)
        )

    def distance(self, other: _GradientSummary, factor: float = 1.0) -> float:
        pairs = zip(self.sums, other.sums, strict=True)
        return max((float((own - its / factor).abs().max()) for own, its in pairs if own.numel()), default=0.0)


_GradientSummaries = dict[str, _GradientSummary | None]


@dataclass(frozen=True, slots=True)
class _CallResult:
    outputs: list[Any]
    state: dict[str, torch.Tensor]  # by name: tensors of the model except parameters
    gradients: _GradientSummaries | None = None  # None: not computed, or the model's own backward raises
    backward: AutogradGraph | None = None  # gradients need not be computed if it is the same


def check_training_equivalence(traced: Traced, leaves: Sequence[Any], chunks: int = 1) -> dict[int, GraphRun]:
    """Raises `TraceError` if gradients or state differ on the fewest samples for which graph and model run.

    Returns the run of the graph by its number of samples; nothing if there is none.
    """
    batch = traced.batch_of(leaves)
    whole = {batch} if traced.recorded_samples is None else set()
    others = {min(FEWEST_SAMPLES, batch), *micro_batch_sizes(batch, chunks)}
    sizes = whole if whole and traced.is_for_one_size else others | whole
    for size in sorted(sizes, key=lambda size: (size < FEWEST_SAMPLES, size)):
        if not traced.holds_at(size) or not all(r.holds(size) for r in traced.mini_batch_conditions):
            continue
        sample = sample_within_guards(traced, leaves, size)
        if sample is None:
            continue
        start = size if size < batch else min(1, batch - 1)
        followers = take_samples(traced, leaves, start, start + size), sample
        try:
            result, want, again = _calls_of_model(traced, sample, followers, by_graph=not _has_python(traced))
        except TraceError:
            raise
        except Exception:
            continue  # the model raises again for such a batch
        run, have = _calls_of_graph(traced, sample, again, want[0])
        if not are_equal(want[0].backward, have[0].backward):  # other functions may have the same gradients
            del want, have  # with all values that autograd has saved
            result, want, again = _calls_of_model(traced, sample, followers, by_graph=False)
            run, have = _calls_of_graph(traced, sample, again, want[0])
        is_cut = size < batch or not traced.mini_batch_conditions
        _refuse_other_results(traced, result, run, _size_note(size, batch), is_cut)
        _refuse_other_gradients(traced, want[0], have[0], sample)
        for when, of_model, of_graph in zip(("", " in the second of two calls in a row"), want, have, strict=False):
            for place, (w, h) in enumerate(zip(of_model.outputs, of_graph.outputs, strict=True)):
                if not is_roughly_close(w, h):
                    raise TraceError(
                        f"output {place} of the second of two calls in a row is not the model's in the traced graph; "
                        "keep what forward remembers from call to call in buffers (register_buffer)"
                    )
            for name, tensor in of_model.state.items():
                if name not in of_graph.state or not is_roughly_close(tensor, of_graph.state[name]):
                    raise TraceError(
                        f"forward changes {name!r}, and the traced graph does not do the same{when}; keep what "
                        "forward changes in a buffer (register_buffer)"
                    )
        return {size: run}
    return {}


def _refuse_other_gradients(traced: Traced, want: _CallResult, have: _CallResult, sample: Sequence[Any]) -> None:
    if want.gradients is None or have.gradients is None:
        return
    eps = {name: torch.finfo(leaf.dtype).eps for name, leaf in _gradient_leaves(traced, sample, sample).items()}
    again: _GradientSummaries | None = None
    for name, gradient in want.gradients.items():
        other = have.gradients[name]
        if gradient is None or other is None:
            if gradient is other:
                continue
        elif not gradient.differs(other, eps[name]):
            continue
        else:
            # A gradient that cancels out is only rounding, which differs between kernels of torch. To measure it,
            # the model runs again with the outputs' gradients a third larger.
            if again is None:
                inputs = list(map(copy_as_leaf, sample))
                with restoring(traced):
                    outputs, _ = call_model(traced, inputs)
                    again = _gradients_of_model(traced, outputs, inputs, sample, GRADIENT_FACTOR)
                assert again is not None
            same = again[name]
            if same is not None and gradient.distance(other) <= 100 * gradient.distance(same, GRADIENT_FACTOR):
                continue
        raise TraceError(f"the gradient of {name!r} by the traced graph is not the model's{GRADIENT_REMEDY}")


GRADIENT_REMEDY = (
    ": forward does to gradients what no function of torch shows; keep the module around it whole "
    "(leaf_modules=[name or class])"
)


def _gradients_of_model(
    traced: Traced, outputs: Sequence[Any], inputs: Sequence[Any], sample: Sequence[Any], factor: float = 1.0
) -> _GradientSummaries | None:
    with contextlib.suppress(Exception):
        return _summarize_gradients(outputs, _gradient_leaves(traced, inputs, sample), factor)
    return None


def _calls_of_model(
    traced: Traced, sample: Sequence[Any], others: Sequence[Sequence[Any]], by_graph: bool
) -> tuple[RunResult, list[_CallResult], Sequence[Any] | None]:
    """Calls the model, and again on other samples if the first call changes it.

    Returns what the first call leaves, what is compared of both calls, and the samples of the second. `by_graph`:
    compare autograd's graphs, if they show everything, instead of gradients.
    """
    held = container_tensors(traced.model)
    before = _model_state(traced, held)
    inputs, again = list(map(copy_as_leaf, sample)), None
    with restoring(traced) as snapshot:
        outputs, copies = call_model(traced, inputs)
        result, backward, gradients = _result_of(traced, outputs, copies), None, None
        if traced.state.grad and by_graph:
            written = _own_storages(traced) - set(map(storage_of, traced.model.parameters()))
            backward = autograd_graph(outputs, _gradient_leaves(traced, inputs, sample), written)
        if traced.state.grad and backward is None:
            gradients = _gradients_of_model(traced, outputs, inputs, sample)
        calls = [_CallResult([], _model_state(traced, held), gradients, backward)]
        del outputs
        after = calls[0].state
        is_same = before.keys() == after.keys() and all(equal_tensors(before[name], after[name]) for name in before)
        # The graph must hold for the model in its present state.
        if not is_same and module_flags(traced.model) == traced.flags and traced.holds_for_model():
            again = next((s for s in others if traced.guards_hold(s, traced.seed)), None)
        if again is not None:
            try:
                torch.manual_seed(torch.initial_seed())
                outputs, _ = call_model(traced, list(map(copy_as_leaf, again)))
                own = _own_storages(traced)
                calls.append(_CallResult([detached(x, own) for x in outputs], _model_state(traced, held)))
            except TraceError:
                raise
            except Exception:
                again = None  # the model raises again when it is called with them
    snapshot.refuse_changes({*traced.overwritten, *traced.recording_options.caches})
    return result, calls, again


def _model_state(traced: Traced, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies `held`, in containers, and tensors of the model, without parameters and what forward recomputes."""
    read = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    kept = {
        slot.name: tensor
        for slot, tensor in slots_of(traced.model).items()
        if not is_fixed(tensor) and not (tensor.requires_grad and slot.name not in read)
    }
    return {name: tensor.detach().clone() for name, tensor in (kept | dict(held)).items()}


def _calls_of_graph(
    traced: Traced, sample: Sequence[Any], again: Sequence[Any] | None, of_model: _CallResult
) -> tuple[GraphRun, list[_CallResult]]:
    """Runs the graph as the model was called. Returns the first run, and what is compared of both."""
    held = container_tensors(traced.model)
    with restoring_after_graph(traced):
        run = observe_run(traced, sample, saves=True)
        leaves = _leaves_of_graph(traced, run, sample)
        buffers = {name: tensor.detach().clone() for name, tensor in run.buffers.items()}  # backward may write to them
        backward = None if of_model.backward is None else autograd_graph(run.outputs, leaves)
        gradients = None if of_model.gradients is None else _gradients_of_graph(run, leaves)
        run = replace(run, outputs=list(map(detached, run.outputs)), buffers=buffers)
        _leave(traced, run)
        calls = [_CallResult([], _model_state(traced, held), gradients, backward)]
        if again is not None:
            torch.manual_seed(torch.initial_seed())
            with contextlib.suppress(DecisionError):  # a micro-batch raises it, too
                second = observe_run(traced, again)
                _leave(traced, second)
                calls.append(_CallResult(list(map(detached, second.outputs)), _model_state(traced, held)))
    return run, calls


def _leaves_of_graph(traced: Traced, run: GraphRun, sample: Sequence[Any]) -> dict[str, torch.Tensor]:
    inputs = [run.leaves.get(place) for place in range(len(sample))]
    stand_ins = {id(tensor): copy for tensor, copy in run.tensors}
    return {name: stand_ins.get(id(leaf), leaf) for name, leaf in _gradient_leaves(traced, inputs, sample).items()}


def _gradients_of_graph(run: GraphRun, leaves: Mapping[str, torch.Tensor]) -> _GradientSummaries:
    try:
        return _summarize_gradients(run.outputs, leaves)
    except Exception as error:
        raise TraceError(
            f"backward through the traced graph raises, and through the model it does not: "
            f"{type(error).__name__}: {error}{GRADIENT_REMEDY}"
        ) from error


def _leave(traced: Traced, run: GraphRun) -> None:
    with torch.no_grad():
        for tensor, copy in run.tensors:
            if not tensor.requires_grad and not equal_tensors(tensor, copy):
                tensor.copy_(copy)
        for name, tensor in run.assigned.items():
            path, _, key = name.rpartition(".")
            module = traced.model.get_submodule(path)
            buffers = own_buffers(module)
            (buffers if key in buffers else module.__dict__)[key] = tensor


def _gradient_leaves(traced: Traced, inputs: Sequence[Any], sample: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors at which gradients end, by name. `sample`: inputs before forward, which may write to them."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for slot, tensor in slots_of(traced.model).items():
        if tensor.requires_grad and tensor.is_leaf:
            first.setdefault(id(tensor), (slot.name, tensor))
    leaves = dict(first.values())
    for leaf, value, before in zip(traced.leaves, inputs, sample, strict=True):
        if isinstance(before, torch.Tensor) and before.requires_grad:
            leaves[f"input {leaf.path}"] = value
    return leaves


def _direction(output: torch.Tensor, number: int, factor: float) -> torch.Tensor:
    """Returns random numbers for an output, the same in each call."""
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float32)
    return noise.to(output.device, output.dtype).mul_(factor)


def _summarize_gradients(
    outputs: Sequence[Any], leaves: Mapping[str, torch.Tensor], factor: float = 1.0
) -> _GradientSummaries:
    """Summarizes gradients by name, for one direction of the outputs scaled by `factor`."""
    summaries: _GradientSummaries = dict.fromkeys(leaves)
    ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not ends or not leaves:
        return summaries
    directions = [_direction(end, number, factor) for number, end in enumerate(ends)]

    outer: list[int] = []  # a backward inside an autograd.Function does not give gradients of the outputs

    def begin(_: torch.Tensor) -> None:
        if not outer:
            outer.append(backward_id())

    def hook(name: str) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def note(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None or backward_id() not in outer:
                return None
            summaries[name] = _GradientSummary.of(gradient)
            return gradient.new_zeros(()).expand(gradient.shape) if gradient.layout == torch.strided else None

        return note

    with suspend_hooks([*leaves.values(), *(end for end in ends if end.is_leaf)]):
        for end in ends:
            end.register_hook(begin)
        for name, leaf in leaves.items():
            leaf.register_hook(hook(name))
        torch.autograd.grad(ends, list(leaves.values()), directions, allow_unused=True)
    return summaries
