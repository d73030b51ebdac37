"""The ways to obtain a graph, in order.

1. *Recording*: the model runs once, values that it reads become guards.
2. Recording with the general code paths of libraries, if 1 failed.
3. Recording with some modules kept whole: the innermost modules around the failure. If this is the model, or most of
   it, methods that use no modules inside are kept whole first; then the rest of forward is one node (`graph_break`).

If a graph fails one of the passes (`run_passes`), the next way is tried. Errors that no graph can avoid, and errors of
the model itself, end the search immediately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.fake_tensors import WithoutProducts, is_faked
from fxpipe.tracing.guards import expectations_of, extract_guards, reads_are_of_all_samples, refuse_unguardable
from fxpipe.tracing.node_info import info, opaque_call_of
from fxpipe.tracing.record.opaque_call import LEAF_MODULE_REASON, methods_to_keep
from fxpipe.tracing.record.other_sizes import read_untracked_sizes, record_small_batch, record_with_batch_numbers
from fxpipe.tracing.record.record_model import input_leaves, record
from fxpipe.tracing.record.recorded_sizes import Disguise, length
from fxpipe.tracing.record.unrecordable import CannotRecord, MakesState
from fxpipe.tracing.shapes.output_dims import graph_of_stages, of_any_sizes, read_by_python_only
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes
from fxpipe.tracing.traced import (
    GraphBreak,
    InputLeaf,
    RecordingOptions,
    Traced,
    TraceRequest,
    candidate_dims,
    cut_elements,
    lists_of,
    opaque_name,
    other_in_dims,
)
from fxpipe.tracing.verify.compared_sizes import (
    OtherMicroBatchesError,
    check_dynamic_sizes,
    holds_for_micro_batches,
    may_replace,
    must_compare_micro_batches,
    values_differ_message,
)
from fxpipe.tracing.verify.effects import (
    effects_of_changed,
    refuse_differing_writes,
    refuse_remembered_samples,
    refuse_unwritable_inputs,
)
from fxpipe.tracing.verify.equivalence import check_against_model, effects_unverified, take_samples
from fxpipe.tracing.verify.owners import samples_meet
from fxpipe.tracing.verify.sample_rows import join_sample_rows
from fxpipe.utils.batch_split import rows_per_sample, samples_per_micro_batch
from fxpipe.utils.progress import phase

LARGE_NODE_SHARE = 0.5  # share of the parameters above which one node is too large


def find_graph(request: TraceRequest) -> Traced:
    """Finds the first correct graph, of the mini-batch or else of its micro-batches.

    If the inputs disagree on the batch, or all outputs need all samples, it is tried which inputs hold the batch; if
    forward loops over the samples, whether a graph for one size of micro-batches is right. If the mini-batch stays
    whole, a graph that can be split is still better: it is valid for other numbers of samples. Raises `TraceError` with
    the reason and the remedy, if no graph was found.
    """
    first, failure, as_asked = None, None, list[Any]()
    try:
        first = _graph_of_parts(request)
        is_split = any(how not in (None, "combined") for how in first.out_dims)
        if is_split or first.is_whole or request.in_dims is not None or request.chunks == 1:
            return first
    except (ArgumentError, TraceError) as error:
        failure, is_final = error, isinstance(error, CannotRecord) and error.is_final
        if is_final or request.is_whole or not request.is_compared:
            raise
        may_loop = isinstance(error, TraceError) or _may_loop_over_samples(request)
        as_asked = [request.in_dims or 0] if request.in_dims is not None or may_loop else []
    leaves = input_leaves(request.model, request.args, request.kwargs)[0]
    others = other_in_dims(leaves) if request.in_dims is None else []
    tries = [(in_dims, True) for in_dims in (*others, *as_asked) if request.chunks > 1]
    for in_dims, is_for_one in (*tries, *((in_dims, False) for in_dims in others)):
        try:
            cuts = cut_elements(leaves, candidate_dims(leaves, in_dims))
            if first is None or cuts > cut_elements(leaves, first.in_dims):  # a part of the boxes is no batch
                return _graph_of_parts(replace(request, in_dims=in_dims, is_for_one_size=is_for_one))
        except (ArgumentError, TraceError) as other:
            failure = other if isinstance(other, OtherMicroBatchesError) else failure
    if first is None:
        assert failure is not None
        raise _with_remedy_for_lists(failure, leaves, request) from failure.__cause__
    return first


def _may_loop_over_samples(request: TraceRequest) -> bool:
    with contextlib.suppress(Exception):
        return any(read.function is length for read in record(request.model, request.args, request.kwargs).size_reads)
    return False


def _with_remedy_for_lists(failure: Exception, leaves: Sequence[InputLeaf], request: TraceRequest) -> Exception:
    """Returns a failure to cut inputs as an error that says what to do with lists among them, if there are any."""
    values = pytree.tree_leaves((request.args, request.kwargs), is_leaf=lambda value: type(value) is list)
    has_list = any(type(value) is list and len(value) > 1 for value in values)
    if request.in_dims is not None or not has_list or not isinstance(failure, ArgumentError):
        return failure
    heads = lists_of(leaves)
    return ArgumentError(
        f"a list in {' or '.join(heads)} is not cut, as a graph has as many inputs as a list has entries. If each "
        "entry belongs to one sample, pass micro-batches with shorter lists, forward_backward(micro_batches=[(args, "
        f"kwargs, target), ...]), args as in ({', '.join(heads)},); or use chunks=1. If its tensors have a dimension "
        f"of samples, name it (in_dims={{{heads[0]!r}: 0}}); None: without samples. Without this: {failure}"
    )


def _graph_of_parts(request: TraceRequest) -> Traced:
    try:
        return _graph_of_all_samples(replace(request, is_whole=False, changes_once=not request.is_whole))
    except OtherMicroBatchesError as error:
        if not request.is_whole:
            return _graph_of_micro_batch(request, error)
    except (ArgumentError, TraceError):
        if not request.is_whole:
            raise
    return _graph_of_all_samples(replace(request, is_for_one_size=True))  # other sizes have another graph


def _graph_of_all_samples(request: TraceRequest) -> Traced:
    """Returns the graph of a recording, adding options after each failure."""
    leaf_modules = dict(request.leaf_modules)
    options = RecordingOptions(leaf_modules, may_overwrite=request.may_overwrite, caches=request.caches)
    first: TraceError | None = None
    while True:
        try:
            traced = _record_without_caches(request, options)
            return replace(traced, why=(*traced.why, *_reasons(traced, first), *imbalance_warnings(traced)))
        except TraceError as error:
            if isinstance(error, CannotRecord) and error.is_final:
                raise
            problem = error
        except Exception:
            if first is None or not options.in_compile_mode:
                raise
            problem = first  # raised on a path that the model never takes
        if first is None:
            first, options = problem, replace(options, in_compile_mode=True)
        else:
            options = _options_after(problem, first, options, request.model)


def imbalance_warnings(traced: Traced) -> tuple[str, ...]:
    """Returns a warning for each module, kept whole by fxpipe, that has most of the parameters in one node."""
    return tuple(
        f"module {path!r} is one node with {share:.0%} of the parameters: no cut divides it, so that one device does "
        f"most of the work. It is the innermost module around what has to be kept whole: {traced.whole[path]}. A small "
        "module, an @fxpipe.leaf function, or a method that uses no module inside, around that alone would be kept "
        "whole in its place"
        for path, share in traced.opaque_shares.items()
        if share > LARGE_NODE_SHARE and traced.whole[path] != LEAF_MODULE_REASON
    )


def _record_without_caches(request: TraceRequest, options: RecordingOptions) -> Traced:
    """Records and runs all passes; without caches, if a cache with sizes as keys prevents dynamic sizes."""
    recordings: list[Traced] = []
    traced, error = None, None
    try:
        traced = _record_by_size(request, options, recordings)
        are_keys = bool(request.dynamic.dims) and traced.has_keys_of_sizes
        if request.dynamic.dims <= traced.dynamic.formulas.keys() and not are_keys:
            return traced
    except FixedSizeError as problem:
        error = problem
    if not options.in_compile_mode and any(recording.has_keys_of_sizes for recording in recordings):
        with contextlib.suppress(Exception):
            other = _record_by_size(request, replace(options, in_compile_mode=True), [])
            if traced is None:
                return other
            dims, fewer = other.dynamic.formulas.keys(), traced.dynamic.formulas.keys()
            if dims > fewer or (dims == fewer and traced.has_keys_of_sizes and not other.has_keys_of_sizes):
                return other
    if traced is None:
        assert error is not None
        raise error
    return traced


def _record_by_size(request: TraceRequest, options: RecordingOptions, recordings: list[Traced]) -> Traced:
    """Records and runs all passes: on few samples, on all samples, or with formulas for numbers of samples.

    Appends to `recordings`. Raises `CannotRecord` if the model runs other functions at other batch sizes, or the error
    of a pass for the recording on all samples.
    """

    def record_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        nonlocal options

        def again(disguised: Disguise, without_products: bool = False) -> Traced:
            with WithoutProducts() if without_products else contextlib.nullcontext():
                return record(request.model, args, kwargs, options, request.seed, disguised)

        traced = replace(again({}), again=again)
        refuse_unguardable(traced)
        options = traced.recording_options  # later recordings need the same options
        recordings.append(traced)
        return traced

    if request.is_compared and not request.is_whole:
        with contextlib.suppress(Exception):  # if it matters, it will be raised again, on all samples
            part = record_small_batch(request, record_on)
            if part is not None:
                return run_passes(part, request)
    recording = record_on(request.args, request.kwargs)
    try:
        return run_passes(recording, request)
    except (TraceError, ArgumentError) as error:
        if isinstance(error, CannotRecord) or request.is_whole:
            raise  # the batch size is not the cause
        recording_of_sizes = record_with_batch_numbers(request, record_on)
        if recording_of_sizes is None:
            raise
    return run_passes(recording_of_sizes, request)


def _options_after(
    problem: TraceError, first: TraceError, options: RecordingOptions, model: nn.Module
) -> RecordingOptions:
    """Returns the options for the recording after a failure with `problem`. Raises if no option remains."""
    is_same = type(problem) is type(first) and problem.args == first.args
    if is_same:
        options = replace(options, in_compile_mode=False)  # no help
    has_rnn = options.records_packing and any(isinstance(m, nn.RNNBase) for m in model.modules())
    if has_rnn and isinstance(problem, CannotRecord) and problem.reads_size and not options.reads_lengths:
        return replace(options, reads_lengths=True)  # forward reads a size of padded outputs
    whole, graph_breaks = options.whole, options.graph_breaks
    modules = problem.modules - whole.keys() if isinstance(problem, CannotRecord) else frozenset[str]()
    large = [path for path in modules if _share_of(model, path) > LARGE_NODE_SHARE]
    methods = [name for path in large for name in methods_to_keep(model.get_submodule(path), path)]
    if isinstance(problem, CannotRecord) and not problem.modules and problem.source:
        methods += methods_to_keep(model, "", problem.source)
    if not whole.keys() >= {*methods}:
        return replace(options, whole={**whole, **dict.fromkeys(methods, str(problem))})
    behind = _graph_breaks_for(model, problem, modules, graph_breaks)
    if behind:
        return replace(options, graph_breaks={**graph_breaks, **behind})
    if not modules and has_rnn:
        return replace(options, records_packing=False)  # Python may loop over the samples of padded outputs
    if not modules and whole and not options.reads_sequences:
        return replace(options, reads_sequences=True)
    if not modules:
        if is_same:
            raise first
        raise CannotRecord(f"{first}; and further on: {problem}")
    others = {path: where for path, where in graph_breaks.items() if path not in modules}
    # Modules of the same classes will fail as well, except torch's own and modules that contain others.
    every = dict(model.named_modules())
    kinds = {type(every[path]) for path in modules if not type(every[path]).__module__.startswith("torch.nn.")}
    same = {path for path, module in every.items() if path in modules or (path and type(module) in kinds)}
    added = [path for path in same if path in modules or not any(p.startswith(f"{path}.") for p in same)]
    return replace(options, graph_breaks=others, whole={**whole, **dict.fromkeys(added, str(problem))})


def _reasons(traced: Traced, first: TraceError | None) -> tuple[str, ...]:
    opaque = {opaque_call_of(n).path: n for n in reversed(traced.nodes) if info(n).opaque_module is not None}
    nodes = reversed(opaque.values())  # the first of each module
    reasons = [f"{opaque_name(n)} is kept whole: {opaque_call_of(n).why}" for n in nodes]
    if traced.recording_options.in_compile_mode:
        reasons.insert(0, f"by the general paths of libraries: {first or 'the others look up values by sizes'}")
    if traced.recorded_sizes:
        sizes = ", ".join(map(str, traced.recorded_sizes))
        reasons.append(f"plain numbers that depend on the batch size are computed in the graph (holds for {sizes})")
    if is_faked():  # a step with values traces again
        reasons.append("whether samples act on each other: not yet checked, without values")
    return (*reasons, *(f"compared in the stages: {text}" for text in expectations_of(traced)))


def _graph_breaks_for(
    model: nn.Module, error: TraceError, modules: Collection[str], continued: Mapping[str, GraphBreak]
) -> dict[str, GraphBreak]:
    """Returns where to break the graph: in the model, or in a module that is most of it."""
    if not isinstance(error, CannotRecord) or len(modules) > 1:
        return {}
    path = next(iter(modules), "")
    if path in continued and continued[path].may_split and path not in error.calls:  # continue in one piece
        return {path: continued[path]._replace(may_split=False)} if continued[path].calls else {}
    if path not in error.calls or (path in continued and continued[path].calls <= error.calls[path]):
        return {}
    where = GraphBreak(error.calls[path], str(error), may_split=not path)
    if not path:
        return {path: where}  # keeping the model whole would leave nothing to cut
    return {path: where} if where.calls and _share_of(model, path) > LARGE_NODE_SHARE else {}


def _share_of(model: nn.Module, path: str) -> float:
    own, all_of = (sum(p.numel() for p in m.parameters()) for m in (model.get_submodule(path), model))
    return own / max(all_of, 1)


# No model of the zoo: forward that loops over its samples (Qwen2.5-VL) needs it (behaviour/test_rows_per_sample.py).
def _graph_of_micro_batch(request: TraceRequest, error: OtherMicroBatchesError) -> Traced:
    """Returns the graph of a micro-batch, if it can replace the graph of the mini-batch; otherwise raises."""
    whole, leaves = error.traced, request.leaves
    try:
        args, kwargs = pytree.tree_unflatten(take_samples(whole, leaves, 0, max(error.sizes)), whole.in_spec)
        inputs = input_leaves(request.model, args, kwargs)[2]
        part = replace(request, args=args, kwargs=kwargs, leaves=inputs, chunks=1)
        parts = replace(_graph_of_all_samples(part), of_mini_batch=whole)
        is_read = parts.guards_hold(leaves, parts.seed, error.sizes)
        error = error if is_read else OtherMicroBatchesError(whole, error.sizes, values_differ_message(parts))
        is_right = is_read and may_replace(whole, parts, leaves, error.sizes)
        is_right = is_right and not samples_meet(whole, leaves, error.sizes)
    except MakesState:  # with `may_overwrite`, it may be no state
        raise
    except Exception as failure:
        is_right, error.__cause__ = False, failure
    if not is_right:
        whole.refuse_uneven_outputs(whole.batch_of(leaves), error.sizes)
        raise error
    parts.comparisons.accepted_splits.add((whole.batch_of(leaves), frozenset(error.sizes), parts.dynamic.example))
    return parts


def run_passes(traced: Traced, request: TraceRequest) -> Traced:
    """Runs all passes on a recording, in order.

    Raises `FixedSizeError` if a dimension cannot be dynamic, `TraceError` if the graph differs from the model or cannot
    be cut, `ArgumentError` if there is no batch dimension, or inputs or outputs disagree on it.
    """
    leaves = request.leaves
    traced = replace(traced, is_whole=request.is_whole, is_for_one_size=request.is_for_one_size)
    traced = replace(traced, changes_once=request.changes_once)
    refuse_unguardable(traced)
    why_fixed = ""  # why no dimension can be dynamic, whatever forward does
    if not request.is_compared and not is_faked():  # fake graphs are for planning only
        why_fixed = "the graph is not compared with the model"
    elif traced.recorded_sizes:
        number = "forward makes plain numbers of the number of samples"
        why_fixed = f"{number}, and what becomes of other sizes is not followed"
    dynamic = {} if why_fixed else request.dynamic.names(traced.leaves)
    lengths = dynamic.keys() - request.dynamic.asked.keys()
    unasked = read_by_python_only(traced)
    traced = add_shapes(traced, leaves, request.in_dims, request.out_dims, dynamic, lengths)
    reasons = {} if is_faked() else dict.fromkeys(request.dynamic.dims - dynamic.keys(), why_fixed)
    fixed = {**traced.dynamic.fixed, **reasons}
    dynamic_sizes = replace(traced.dynamic.with_asked(request.dynamic), fixed=fixed)
    traced = replace(traced, dynamic=dynamic_sizes, batch_bounds=_batch_bounds(traced, request))
    traced = read_untracked_sizes(traced)
    refuse_unguardable(traced)
    if traced.recorded_samples is not None and not reads_are_of_all_samples(traced, leaves):
        raise TraceError("forward reads other values of all samples than of a part of them")
    traced = replace(traced, guards=extract_guards(traced))
    if request.is_compared:
        phase("comparing the graph with the model")
        traced = check_against_model(traced, leaves, request.chunks)
    else:
        traced = replace(traced, effects=effects_unverified(traced, leaves))
    is_told = is_faked() or traced.is_whole
    if not is_told:
        traced, is_told = join_sample_rows(traced, leaves, request.chunks, request.out_dims)
    traced = replace(traced, any_sizes=of_any_sizes(traced, unasked))
    traced = graph_of_stages(traced)
    assert traced.effects is not None
    traced = replace(traced, effects=effects_of_changed(traced, traced.effects))
    refuse_differing_writes(traced)
    if request.out_dims is None:
        refuse_remembered_samples(traced)
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
