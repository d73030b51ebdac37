"""The passes that turn a recording into a graph that can be cut: sizes, guards, the comparison with the model."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import ArgumentError
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.guards import extract_guards, refuse_unguardable
from fxpipe.tracing.record.other_sizes import read_untracked_sizes
from fxpipe.tracing.shapes.input_values import with_head
from fxpipe.tracing.shapes.output_dims import of_any_sizes, read_by_python_only, without_tail
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes
from fxpipe.tracing.trace_request import TraceRequest
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.dynamic_sizes_check import check_dynamic_sizes
from fxpipe.tracing.verify.effects import effects_of_changed, refuse_differing_writes, refuse_unwritable_inputs
from fxpipe.tracing.verify.equivalence import check_against_model, check_training_equivalence, effects_unverified
from fxpipe.tracing.verify.micro_batch_sizes import (
    OtherMicroBatchesError,
    holds_for_micro_batches,
    must_compare_micro_batches,
)
from fxpipe.tracing.verify.sample_rows import join_sample_rows
from fxpipe.utils.batch_split import rows_per_sample, samples_per_micro_batch
from fxpipe.utils.progress import phase


def run_passes(traced: Traced, request: TraceRequest) -> Traced:
    """Runs all passes on a recording, in order.

    Raises:
        FixedSizeError: a dimension cannot be dynamic.
        TraceError: the graph differs from the model, or cannot be cut.
        ArgumentError: there is no batch dimension, or inputs or outputs disagree on it.
    """
    leaves = request.leaves
    is_for_one = traced.is_for_one_size or request.is_for_one_size
    traced = replace(traced, is_whole=request.is_whole, is_for_one_size=is_for_one)
    refuse_unguardable(traced)
    why_fixed = _why_sizes_are_fixed(traced, request)
    dynamic = {} if why_fixed else request.dynamic.names(traced.leaves)
    lengths = dynamic.keys() - request.dynamic.asked.keys()
    unasked = read_by_python_only(traced)
    traced = add_shapes(traced, leaves, request.in_dims, request.out_dims, dynamic, lengths)
    reasons = {} if is_faked() else dict.fromkeys(request.dynamic.dims - dynamic.keys(), why_fixed)
    fixed = {**traced.dynamic.fixed, **reasons}
    traced = replace(traced, dynamic=replace(traced.dynamic.with_asked(request.dynamic), fixed=fixed))
    traced = replace(traced, batch_bounds=_batch_bounds(traced, request))
    traced = read_untracked_sizes(traced)
    refuse_unguardable(traced)
    traced = replace(traced, guards=extract_guards(traced))
    if request.is_compared:
        phase("comparing the graph with the model")
        traced = check_against_model(traced, leaves, request.chunks)
        check_training_equivalence(traced, leaves, request.chunks)
    else:
        traced = replace(traced, effects=effects_unverified(traced, leaves))
    is_told = is_faked() or traced.is_whole
    if not is_told:
        traced, is_told = join_sample_rows(traced, leaves, request.chunks, request.out_dims)
    traced = replace(traced, any_sizes=of_any_sizes(traced, unasked))
    traced = with_head(without_tail(traced))
    assert traced.effects is not None
    traced = replace(traced, effects=effects_of_changed(traced, traced.effects))
    refuse_differing_writes(traced)
    refuse_unwritable_inputs(traced, leaves)
    sizes = samples_per_micro_batch(batch := traced.batch_of(leaves), max(1, min(request.chunks, batch)))
    has_out_dims = request.out_dims is not None
    must_compare = not has_out_dims and (not is_told or must_compare_micro_batches(traced))
    traced = replace(traced, compares_micro_batches=must_compare)
    if not holds_for_micro_batches(traced, leaves, sizes, has_out_dims):
        raise OtherMicroBatchesError(traced, sizes)
    if traced.dynamic.symbols and request.is_compared:
        check_dynamic_sizes(traced, leaves, request.dynamic.seen)
    return traced


def _batch_bounds(traced: Traced, request: TraceRequest) -> tuple[int, int | None]:
    """Returns the user's bounds for the samples of a mini-batch (`dynamic_shapes`)."""
    asked = request.dynamic.asked
    of_samples = [(place, dim) for place, dim in asked if traced.in_dims[place] == dim]
    names = {asked[key].name: key for key in of_samples if asked[key].name}
    for (place, dim), one in asked.items():
        if one.name in names and (place, dim) not in of_samples:
            raise ArgumentError(
                f"dynamic_shapes gives dimension {dim} of {traced.leaves[place].path} the name {one.name!r}, which is "
                f"that of the samples in {traced.leaves[names[one.name][0]].path}: their number is another one in each "
                "micro-batch; give it a name of its own"
            )
    bounds = [(asked[key], rows_per_sample(traced.in_dims[key[0]])) for key in of_samples]
    least = max((-(-one.least // rows) for one, rows in bounds), default=0)
    return least, min((one.largest // rows for one, rows in bounds if one.largest is not None), default=None)


def _why_sizes_are_fixed(traced: Traced, request: TraceRequest) -> str:
    """Returns why no dimension can be dynamic, whatever forward does; "" if some may."""
    if not request.is_compared and not is_faked():  # fake graphs are for planning only
        return "the graph is not compared with the model"
    if traced.again is None:
        return f"by {traced.tracer!r} nobody follows sizes"
    if traced.recorded_sizes:
        return "forward makes plain numbers of the number of samples, and what becomes of other sizes is not followed"
    return ""
