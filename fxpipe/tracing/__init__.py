"""Tracing: converts a model to a `torch.fx` graph of functions, whatever Python its forward runs.

    traced = fxpipe.trace(model, (x,))
    print(traced)           # every node: what it computes, its shape in the batch size b, module path, source line

A `TraceRequest` holds the arguments. `strategies` tries the ways to record: most often `record` runs the model once and
records every torch function. `run_passes` completes a recording: `shapes` finds the dimension that holds the batch;
`guards` keeps the values that the graph depends on; `verify` compares graph and model at several sizes and observes
shared storage and in-place changes. The model, its buffers and all random states are restored.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import original_module
from fxpipe._torch.thread_state import ThreadState
from fxpipe._torch.tools import is_compiler_loaded
from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing.dynamic_sizes import NO_DYNAMIC_DIMS, DynamicDims, FixedSizeError, InputDim, parse_dynamic_shapes
from fxpipe.tracing.fake_tensors import active_fake_mode, is_faked, mute_fake_tensor_logs, with_fake_tensors
from fxpipe.tracing.forward_rng import preserve_own_generators
from fxpipe.tracing.guards import refuse_unguardable
from fxpipe.tracing.print_calls import mute_repeated_prints
from fxpipe.tracing.record import record_model
from fxpipe.tracing.record.lazy_state import make_lazy_state, new_attributes
from fxpipe.tracing.record.opaque_call import LEAF_MODULE_REASON
from fxpipe.tracing.record.record_model import input_leaves, refuse_side_effects
from fxpipe.tracing.record.unrecordable import CannotRecord, MakesState
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes
from fxpipe.tracing.strategies import find_graph
from fxpipe.tracing.traced import Traced, TraceRequest, candidate_dims
from fxpipe.tracing.verify.effects import check_invariants
from fxpipe.utils.locks import DISPATCH_MODE_LOCK
from fxpipe.utils.progress import show_progress
from fxpipe.utils.units import with_article

__all__ = ["Traced", "trace", "trace_unverified"]


def trace(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    in_dims: Any = None,
    out_dims: Any = None,
    chunks: int = 1,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    check: bool = True,
    seed: int = 0,
    progress: bool = True,
    dynamic_shapes: Any = None,
    dynamic: DynamicDims = NO_DYNAMIC_DIMS,
    is_whole: bool = False,
) -> Traced:
    """Traces `model` on example inputs.

    Args:
        model: any module. It runs on the inputs a few times and is restored. A model without values (on the meta
            device, or created under a FakeTensorMode) runs on fake tensors, without memory.
        args, kwargs: example inputs: tensors, None, numbers, nested in tuples, lists, dicts and dataclasses.
        in_dims: the dimension of each input that holds the batch (default 0): an int, a tuple with an entry for each
            input, or a dict by name; None for inputs without a batch.
        out_dims: how to combine the outputs of micro-batches: a tree like the output, or one entry for all: a
            dimension, None (equal for all), "mean", "sum" or "stack". A single "mean" or "sum" applies to outputs
            without a batch dimension only. By default it is found automatically if possible.
        chunks: number of micro-batches: graph and model are also compared at their sizes.
        leaf_modules: names or classes of modules to keep whole: their Python runs in every step, as one node.
        check: compare the graph with the model on real values, if it has values. Without the check, a wrong graph goes
            unnoticed.
        seed: of the random numbers that forward draws and reads (layer drop).
        progress: show bars for long operations if stderr is a terminal.
        dynamic_shapes: dimensions whose size may differ from the example's: a dict from inputs to a dict from
            dimensions to names or `torch.export.Dim`, as for `fxpipe.pipeline`.
        dynamic: dimensions that may vary as well, if forward allows it; `Traced.dynamic` contains the result and the
            reasons.
        is_whole: the mini-batch is the only micro-batch: samples may interact, and no batch dimension is required.

    Raises:
        TraceError: a graph cannot represent what forward does.
        ArgumentError: there are no inputs or no batch dimension, or inputs or outputs disagree on it.
        Exception: any error of the model on these inputs, with a note.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is {with_article(model)}; expected a torch.nn.Module")
    parameters = inspect.signature(original_module(model).forward).parameters
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needs_inputs = any(p.default is p.empty and p.kind in kinds for p in parameters.values())
    if args is None and not kwargs and needs_inputs:
        raise ArgumentError(
            f"forward of {type(model).__name__} takes inputs, and there are none; give examples, as in "
            "fxpipe.trace(model, (x,))"
        )
    args = () if args is None else args
    if not isinstance(args, tuple):
        raise ArgumentTypeError(f"args is {with_article(args)}; expected a tuple of inputs, as in (x,)")
    with (
        mute_repeated_prints() as prints,
        show_progress(progress),
        _ready_to_record(model),
        with_fake_tensors(model, (args, kwargs or {})) as (args, kwargs),
    ):
        whole = requested_leaf_modules(model, leaf_modules)
        inputs, _, leaves = input_leaves(model, args, kwargs)
        candidate_dims(inputs, in_dims)  # before the model fails with an error about sizes
        dynamic = dynamic.with_asked(parse_dynamic_shapes(dynamic_shapes, inputs, parameters))
        compares = check and not is_faked()  # there are values
        request = TraceRequest(
            model, args, kwargs, leaves, whole, in_dims, out_dims, chunks, compares, seed, dynamic, is_whole
        )
        traced = replace(_find_graph_with_dynamic_sizes(request), print_lines=tuple(prints))
        if (mode := active_fake_mode()) is not None:
            traced.constants.update({name: mode.original(tensor) for name, tensor in traced.constants.items()})
        check_invariants(traced)
        refuse_side_effects(traced, args, kwargs or {}, has_run=compares)
    if mode is not None:
        traced.python_state.take()  # with the model's own tensors in lists and dicts
    return traced


def trace_unverified(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any, out_dims: Any
) -> Traced:
    """Records another graph of the model in its present mode, with the options of `traced` and without comparison.

    The combination of outputs is determined again if other functions run than in `traced`. Raises any error if there is
    no such graph, or only with other options.
    """
    model = traced.model
    with mute_repeated_prints(is_first_run=False), show_progress(False), _ready_to_record(model):
        recording = record_model.record(model, args, kwargs, traced.recording_options, traced.seed)
        refuse_unguardable(recording)
        if recording.signature == traced.signature and recording.out_spec == traced.out_spec:
            return recording
        recording = add_shapes(recording, input_leaves(model, args, kwargs)[2], in_dims, out_dims)
        refuse_unguardable(recording)
        return recording


@contextlib.contextmanager
def _ready_to_record(model: nn.Module) -> Iterator[None]:
    # Tensors created in inference mode have no versions. Leaving it changes only `grad`, which is restored.
    grad = ThreadState.now().grad
    with (
        DISPATCH_MODE_LOCK,
        contextlib.ExitStack() as stack,
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        # Compiled functions and modules run, and are recorded, as the original Python.
        torch.compiler.set_stance("force_eager") if is_compiler_loaded() else contextlib.nullcontext(),
        mute_fake_tensor_logs(),
        preserve_own_generators(model),
    ):
        limit = sys.getrecursionlimit()
        stack.callback(sys.setrecursionlimit, limit)
        sys.setrecursionlimit(4 * limit)  # each call of forward adds up to three frames of fxpipe
        yield


def _find_graph_with_dynamic_sizes(request: TraceRequest) -> Traced:
    asked, fixed = request.dynamic, dict(request.dynamic.fixed)
    fixed_here: dict[InputDim, str] = {}
    while True:
        try:
            wanted = replace(asked, dims=asked.dims - {*fixed, *fixed_here})
            traced = _find_graph_with_lazy_state(replace(request, dynamic=wanted))
            break
        except FixedSizeError as error:
            reasons = dict.fromkeys(error.dims or wanted.dims, str(error))
            (fixed_here if error.is_of_this_size else fixed).update(reasons)
    traced = replace(traced, dynamic=replace(traced.dynamic, fixed={**traced.dynamic.fixed, **fixed}))
    traced = replace(traced, why=(*traced.why, *traced.reasons_of_fixed_sizes))
    reasons = {**traced.dynamic.fixed, **fixed_here}
    for place, dim in asked.asked.keys() - traced.dynamic.formulas.keys():
        leaf, is_of_samples = traced.leaves[place], traced.in_dims[place] == dim  # their number always varies
        if leaf.shape[dim] > 1 and not is_of_samples:  # size 1 is always fixed, as in `torch.export`
            reason = reasons[place, dim]
            raise ArgumentError(
                f"dynamic_shapes names dimension {dim} of {leaf.path}, which cannot vary: {reason}; leave it out (each "
                "size is another graph then), or let forward keep the size a size"
            )
    return traced


def _find_graph_with_lazy_state(request: TraceRequest) -> Traced:
    """Finds the graph of every call, even if the first call creates state that later calls use."""
    try:
        traced = find_graph(request)
        if not new_attributes(traced) or is_faked():
            return traced
        error: Exception | None = None
    except (MakesState, ArgumentError) as refusal:  # samples may interact in the state that the first call creates
        error = refusal
    lazy_state = make_lazy_state(request.model, request.args, request.kwargs, request.in_dims)
    if lazy_state is not None or error is None:
        try:
            traced = find_graph(request)
            if not (names := new_attributes(traced)):
                return traced
            error = CannotRecord(
                f"forward makes the attribute {names[0]!r}, and something else each time it is called; set it in "
                "__init__",
                is_final=True,
            )
        except Exception as failure:
            error = failure
        is_refilled = lazy_state is not None and lazy_state.restore_if_refilled(request)
    if isinstance(error, MakesState):
        with contextlib.suppress(MakesState):
            return find_graph(replace(request, may_overwrite=True))
    if lazy_state is not None and is_refilled:  # a cache by the number of samples
        with contextlib.suppress(TraceError, ArgumentError):
            return find_graph(replace(request, caches=lazy_state.names))
    raise error


def requested_leaf_modules(model: nn.Module, leaf_modules: Sequence[str | type[nn.Module]]) -> dict[str, str]:
    """Returns the paths of the modules to keep whole, with the reason. Raises `ArgumentError` for unknown modules."""
    modules = {path: module for path, module in model.named_modules() if path}
    whole: dict[str, str] = {}
    for asked in leaf_modules:
        matching = [
            path for path, m in modules.items() if (isinstance(m, asked) if isinstance(asked, type) else path == asked)
        ]
        if not matching:
            known = ", ".join([*modules][:8]) + (", ..." if len(modules) > 8 else "")
            raise ArgumentError(
                f"leaf_modules: {type(model).__name__} has no module {asked!r}; expected names ({known}) or classes "
                "of its modules"
            )
        whole |= dict.fromkeys(matching, LEAF_MODULE_REASON)
    return {path: why for path, why in whole.items() if not any(path.startswith(f"{p}.") for p in whole)}
