"""Compares graph and model over two training calls: outputs, gradients and state.

A graph with correct outputs can still be wrong: symbolic tracing loses the backward of an `autograd.Function`, and the
second call reads state of the first, in buffers or hidden in an object or a global. So, on a few samples,

    model   call ──▶ output, gradients, state ──▶ call on other samples ──▶ output, state
    graph   run  ──▶ output, gradients, state ──▶ run  on the same      ──▶ output, state

with the same random numbers, and a backward from one random direction of the outputs. A missing gradient differs from
a gradient of zero: an optimizer skips the first parameter and decays the second. To save memory, gradients are
compared and freed one at a time; large gradients are reduced to sums.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe._torch.autograd import backward_id, suspend_hooks
from fxpipe._torch.module_internals import module_flags
from fxpipe.errors import DecisionError, TraceError
from fxpipe.tracing.interpreter import copy_as_leaf
from fxpipe.tracing.model_state import (
    container_tensors,
    equal_tensors,
    is_fixed,
    python_rng_state,
    set_python_rng_state,
    set_tensor,
    slots_of,
)
from fxpipe.tracing.tensors import detached, storage_of
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import GraphRun, observe_run
from fxpipe.tracing.verify.equivalence import (
    call_model,
    is_roughly_close,
    restoring,
    restoring_after_graph,
    sample_within_guards,
    take_samples,
)
from fxpipe.utils.batch_split import micro_batch_sizes

FEWEST_SAMPLES = 2  # samples; the shapes of a single sample are special
SMALL_GRADIENT = 1 << 16  # elements up to which a gradient is kept unreduced
PERIOD = 65537  # elements after which a direction repeats; a prime, so that the rows of a matrix differ
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


def check_training_equivalence(traced: Traced, leaves: Sequence[Any], chunks: int = 1) -> None:
    """Compares gradients and state on the fewest samples for which the graph holds and the model runs.

    Raises `TraceError`, with a name, if something differs.
    """
    batch = traced.batch_of(leaves)
    sizes = {min(FEWEST_SAMPLES, batch), *micro_batch_sizes(batch, chunks)} | (
        {batch} if traced.recorded_samples is None else set()
    )
    for size in sorted(sizes, key=lambda size: (size < FEWEST_SAMPLES, size)):
        if not traced.holds_at(size) or not all(r.holds(size) for r in traced.mini_batch_conditions):
            continue
        sample = sample_within_guards(traced, leaves, size)
        if sample is None:
            continue
        start = size if size < batch else min(1, batch - 1)
        others = take_samples(traced, leaves, start, start + size), sample
        try:
            want, again = _calls_of_model(traced, sample, others)
        except TraceError:
            raise
        except Exception:
            continue  # the model raises again for such a batch
        have = _calls_of_graph(traced, sample, again, want[0].gradients is not None)
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
                    leave = "" if traced.is_recorded else ", or leave it to recording (tracer='record')"
                    raise TraceError(
                        f"forward changes {name!r}, and {_graph_text(traced)} does not do the same{when}; keep what "
                        f"forward changes in a buffer (register_buffer){leave}"
                    )
        return


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
            again = again or _scaled_gradients(traced, sample)
            same = again[name]
            if same is not None and gradient.distance(other) <= 100 * gradient.distance(same, GRADIENT_FACTOR):
                continue
        raise TraceError(
            f"the gradient of {name!r} by {_graph_text(traced)} is not the model's{_gradient_remedy(traced)}"
        )


def _graph_text(traced: Traced) -> str:
    return "the traced graph" if traced.is_recorded else f"the graph that {traced.tracer!r} made"


def _gradient_remedy(traced: Traced) -> str:
    if traced.is_recorded:
        return (
            ": forward does to gradients what no function of torch shows; keep the module around it whole "
            "(leaf_modules=[name or class])"
        )
    return (
        ": forward may use an autograd.Function with a backward of its own, hooks on tensors, or switch gradients off, "
        "which such a graph loses; leave it to recording (tracer='record')"
    )


# -- the model -------------------------------------------------------------------------------------------------------


def _gradients_of_model(
    traced: Traced, outputs: Sequence[Any], inputs: Sequence[Any], sample: Sequence[Any], factor: float = 1.0
) -> _GradientSummaries | None:
    try:
        return _summarize_gradients(outputs, _gradient_leaves(traced, inputs, sample), factor)
    except Exception as error:
        if traced.is_recorded:
            return None
        raise TraceError(
            f"the gradients of the graph that {traced.tracer!r} made cannot be compared with the model's, since "
            f"backward raises {type(error).__name__}: {error}; trace it in a block of torch.no_grad() if it is not to "
            "be trained, or leave it to recording (tracer='record')"
        ) from error


def _calls_of_model(
    traced: Traced, sample: Sequence[Any], others: Sequence[Sequence[Any]]
) -> tuple[list[_CallResult], Sequence[Any] | None]:
    """Calls the model, and again on other samples if the first call changes it. Also returns these samples."""
    held = container_tensors(traced.model)
    before = _model_state(traced, held)
    inputs, again = list(map(copy_as_leaf, sample)), None
    with restoring(traced) as snapshot:
        outputs, _ = call_model(traced, inputs)
        gradients = _gradients_of_model(traced, outputs, inputs, sample) if traced.state.grad else None
        calls = [_CallResult([], _model_state(traced, held), gradients)]
        del outputs
        after = calls[0].state
        is_same = before.keys() == after.keys() and all(equal_tensors(before[name], after[name]) for name in before)
        # The graph must hold for the model in its present state.
        if not is_same and module_flags(traced.model) == traced.flags and traced.holds_for_model():
            again = next((s for s in others if traced.guards_hold(s, traced.seed)), None)
        if again is not None:
            try:
                with _seeded():
                    outputs, _ = call_model(traced, list(map(copy_as_leaf, again)))
                own = {storage_of(t) for t in (*slots_of(traced.model).values(), *held.values())}
                calls.append(_CallResult([detached(x, own) for x in outputs], _model_state(traced, held)))
            except TraceError:
                raise
            except Exception:
                again = None  # the model raises again when it is called with them
    snapshot.refuse_changes(traced.overwritten)
    return calls, again


def _scaled_gradients(traced: Traced, sample: Sequence[Any]) -> _GradientSummaries:
    inputs = list(map(copy_as_leaf, sample))
    with restoring(traced):
        outputs, _ = call_model(traced, inputs)
        gradients = _gradients_of_model(traced, outputs, inputs, sample, GRADIENT_FACTOR)
    assert gradients is not None
    return gradients


def _model_state(traced: Traced, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies `held` (tensors in containers) and the named tensors of the model except parameters.

    Excludes tensors that require grad and that the graph does not read: forward recomputes them, as in weight_norm.
    """
    read = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    kept = {
        slot.name: tensor
        for slot, tensor in slots_of(traced.model).items()
        if not is_fixed(tensor) and not (tensor.requires_grad and slot.name not in read)
    }
    return {name: tensor.detach().clone() for name, tensor in (kept | dict(held)).items()}


# -- the graph -------------------------------------------------------------------------------------------------------


def _calls_of_graph(
    traced: Traced, sample: Sequence[Any], again: Sequence[Any] | None, has_gradients: bool
) -> list[_CallResult]:
    held = container_tensors(traced.model)
    with restoring_after_graph(traced):
        run = observe_run(traced, sample, saves=True)
        gradients = _gradients_of_graph(traced, run, sample) if has_gradients else None
        _leave(traced, run)
        del run
        calls = [_CallResult([], _model_state(traced, held), gradients)]
        if again is not None:
            with _seeded(), contextlib.suppress(DecisionError):  # a micro-batch raises it, too
                run = observe_run(traced, again)
                _leave(traced, run)
                calls.append(_CallResult(list(map(detached, run.outputs)), _model_state(traced, held)))
    return calls


def _gradients_of_graph(traced: Traced, run: GraphRun, sample: Sequence[Any]) -> _GradientSummaries:
    inputs = [run.leaves.get(place) for place in range(len(sample))]
    stand_ins = {id(tensor): copy for tensor, copy in run.tensors}
    leaves = {name: stand_ins.get(id(leaf), leaf) for name, leaf in _gradient_leaves(traced, inputs, sample).items()}
    try:
        return _summarize_gradients(run.outputs, leaves)
    except Exception as error:
        raise TraceError(
            f"backward through {_graph_text(traced)} raises, and through the model it does not: "
            f"{type(error).__name__}: {error}{_gradient_remedy(traced)}"
        ) from error


def _leave(traced: Traced, run: GraphRun) -> None:
    with torch.no_grad():
        for tensor, copy in run.tensors:
            if not tensor.requires_grad and not equal_tensors(tensor, copy):
                tensor.copy_(copy)
        for name, tensor in run.assigned.items():
            set_tensor(traced.model, name, tensor)


# -- gradients -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    before = python_rng_state()
    torch.manual_seed(torch.initial_seed())
    try:
        yield
    finally:
        set_python_rng_state(before)


def _gradient_leaves(traced: Traced, inputs: Sequence[Any], sample: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model and the inputs at which gradients end, by name.

    `sample`: the inputs before forward, which may write a computed value to an input.
    """
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
    """Returns random numbers for an output, the same in each call. Large outputs repeat them to save time."""
    generator = torch.Generator().manual_seed(number)
    noise = factor * torch.randn(min(output.numel(), PERIOD), generator=generator, dtype=torch.float64)
    noise = noise.to(output.device, output.dtype)
    if output.numel() > PERIOD:
        noise = noise.repeat(-(-output.numel() // PERIOD))[: output.numel()]
    return noise.view(output.shape)


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
