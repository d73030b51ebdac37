"""Tracing: a model becomes a `torch.fx` graph of functions, whatever Python its forward runs.

    traced = fxpipe.trace(model, (x,))
    print(traced)           # every node: what it computes, its shape in the batch size b, module path, source line

The passes, in order: `record` runs the model once and writes down every torch function; `shapes` finds the dimension
that holds the batch; `check` compares graph and model at several sizes and `effects` watches what shares storage and
what is changed in place. The model, its buffers and all random states stay as they were.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import ArgumentTypeError
from fxpipe.progress import showing
from fxpipe.thread_state import ThreadState
from fxpipe.tracing.checking.check import check_against_model, watched
from fxpipe.tracing.checking.gathering import check_gathering
from fxpipe.tracing.checking.micro_batches import (
    OtherMicroBatchesError,
    compares_parts,
    excuse,
    graph_of_parts,
    holds_for_parts,
    sizes_of_parts,
)
from fxpipe.tracing.checking.two_calls import FirstCalls, check_two_calls
from fxpipe.tracing.guards import lifted, refuse_unanswerable
from fxpipe.tracing.other_ways.symbolic_tracing import symbolic_graph
from fxpipe.tracing.print_calls import lost_prints, printing_once
from fxpipe.tracing.recording.fake import faked, is_faked
from fxpipe.tracing.recording.hooks import made_from
from fxpipe.tracing.recording.lazy_state import make_lazy_state, new_attributes
from fxpipe.tracing.recording.own_dice import standing_still
from fxpipe.tracing.recording.record import input_leaves
from fxpipe.tracing.recording.refusals import CannotRecord, MakesState
from fxpipe.tracing.recording.untracked import read_untracked
from fxpipe.tracing.sizing.batch_mixing import refuse_mixing
from fxpipe.tracing.sizing.shapes import add_shapes
from fxpipe.tracing.snapshot import undone
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.ways import Tracer, asked_whole, check_tracer, find_graph, record_with
from fxpipe.tracing.written_inputs import refuse_differing, refuse_unwritable
from fxpipe.turns import one_at_a_time

__all__ = ["Traced", "outline", "trace"]


def trace(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    in_dims: Any = None,
    out_dims: Any = None,
    chunks: int = 1,
    tracer: Tracer = "auto",
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    check: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> Traced:
    """Traces `model` on example inputs.

    Args:
        model: any module. It runs on the inputs a few times and is left as it was. One without values (on the meta
            device, or made under a FakeTensorMode) is run on fake tensors, which takes no memory.
        args, kwargs: example inputs: tensors, None, numbers, nested in tuples, lists, dicts and dataclasses. Without
            any a model that needs some is traced symbolically, as far as that goes: a graph without shapes, to be
            printed.
        in_dims: which dimension of an input holds the batch (default 0): an int, a tuple with an entry for each input,
            or a dict by name; None for inputs without a batch.
        out_dims: how the outputs of micro-batches go together: a tree like the output, or one entry for all: a
            dimension, None (the same for all), "mean", "sum" or "stack"; "mean" or "sum" alone are for outputs without
            a dimension that holds the batch. Found by itself where it can be.
        chunks: number of micro-batches: graph and model are also compared at their sizes.
        tracer: "auto" takes the first way that leads to a right graph (`fxpipe.tracing.ways`). "record", "export" and
            "fx" (symbolic tracing) allow one way; a `torch.fx.Tracer`, or a function from the model to a
            `torch.fx.GraphModule`, is your own.
        leaf_modules: names or classes of modules to keep whole: their Python runs in every step, as one node.
        check: compare the graph with the model on real values, where it has some. Without it a graph that is not the
            model's goes unseen.
        seed: of the random numbers that forward draws and reads (layer drop).
        progress: show bars where it takes long and stderr is a terminal.

    Raises:
        TraceError: forward does what a graph cannot carry.
        ArgumentError: there is no batch dimension, or inputs or outputs disagree on it.
        Exception: what the model itself raises on these inputs, with a note.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if args is None and not kwargs and _needs_inputs(model):
        return symbolic_graph(model)
    args = () if args is None else args
    if not isinstance(args, tuple):
        raise ArgumentTypeError(f"args is a {type(args).__name__}; expected a tuple of inputs, as in (x,)")
    with (
        printing_once(),
        showing(progress),
        _ready_to_record(model),
        faked(model, (args, kwargs or {})) as (args, kwargs),
    ):
        leaves = input_leaves(model, args, kwargs)[2]
        if is_faked():  # no values to compare; and torch.export would make a graph of another kind
            check, tracer = False, "record" if isinstance(tracer, str) and tracer == "auto" else tracer

        def finish(traced: Traced, leaves: Sequence[Any] = leaves, chunks: int = chunks) -> Traced:
            refuse_unanswerable(traced)
            add_shapes(traced, leaves, in_dims, out_dims)
            read_untracked(traced)
            refuse_unanswerable(traced)
            traced.guards = lifted(traced)
            if check:
                calls = FirstCalls(traced, leaves)
                traced.effects = check_against_model(traced, leaves, chunks, calls)
                check_two_calls(traced, leaves, chunks, calls.begun)
                excuse(traced, leaves)
                refuse_mixing(traced)
                with undone(model):
                    is_told = check_gathering(traced, leaves)
            else:
                is_told = True
                traced.effects = watched(traced, leaves)
                refuse_mixing(traced)
            refuse_differing(traced)
            refuse_unwritable(traced, leaves)
            sizes = sizes_of_parts(traced.batch_of(leaves), chunks)
            traced.compares_parts = out_dims is None and (not is_told or compares_parts(traced))
            if not holds_for_parts(traced, leaves, sizes, out_dims is not None):
                raise OtherMicroBatchesError(traced, leaves, sizes)
            return traced

        def of_a_part(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
            leaves = input_leaves(model, args, kwargs)[2]
            alone = functools.partial(finish, leaves=leaves, chunks=1)
            return find_graph(model, args, kwargs, tracer, whole, seed, alone, in_dims, 1, check)

        def find() -> Traced:
            try:
                return find_graph(model, args, kwargs, tracer, whole, seed, finish, in_dims, chunks, check)
            except OtherMicroBatchesError as error:
                return graph_of_parts(error, leaves, of_a_part)

        tracer, whole = check_tracer(tracer), asked_whole(model, leaf_modules)
        traced = _with_lazy_state(find, model, args, kwargs, in_dims)
        traced.prints = lost_prints()
        return traced


def outline(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any, out_dims: Any) -> Traced:
    """Another graph of the model, of the mode that it is in now, as far as a recording on these inputs shows it.

    It is recorded as `traced` was, and compared with nothing. Where other functions run than in `traced`, it is found
    how outputs go together; where the same do, that is the same as there.

    Raises:
        Exception: there is no such graph, or none that is found without going by other ways.
    """
    assert traced.recorded_with is not None
    model = traced.model
    with printing_once(is_first_run=False), showing(False), _ready_to_record(model):
        found = record_with(traced.recorded_with, model, args, kwargs, traced.seed)
        refuse_unanswerable(found)
        if found.signature == traced.signature and found.out_spec == traced.out_spec and not traced.untold:
            return found
        add_shapes(found, input_leaves(model, args, kwargs)[2], in_dims, out_dims)
        refuse_unanswerable(found)
        return found


@contextlib.contextmanager
def _ready_to_record(model: nn.Module) -> Iterator[None]:
    """A block in which the model runs to be recorded."""
    # Tensors made in inference mode have no versions, and nothing else is lost without it (but `grad`, which it sets).
    grad = ThreadState.now().grad
    with (
        one_at_a_time,
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        _compiled_functions_run_plainly(),
        failures_unlogged(),
        standing_still(model),
    ):
        yield


def _with_lazy_state(
    find: Callable[[], Traced], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any
) -> Traced:
    """The graph of what the model does in every call, where the first one makes what it has later."""
    try:
        traced = find()
        if not new_attributes(traced) or is_faked():
            return traced
        error = None
    except MakesState as refusal:
        error = refusal
    made = make_lazy_state(model, args, kwargs, in_dims)
    if made is None and error is not None:
        raise error
    try:
        traced = find()
        if names := new_attributes(traced):
            raise CannotRecord(
                f"forward makes the attribute {names[0]!r}, and something else each time it is called; set it in "
                "__init__",
                final=True,
            )
    except Exception:
        if made is not None:
            made.take_back()
        raise
    traced.attributes_read += () if made is None else made.attributes
    return traced


def _needs_inputs(model: nn.Module) -> bool:
    parameters = inspect.signature(made_from(model).forward).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """A block in which torch does not log what fake tensors cannot do, each with a stack: it is raised as well."""
    here, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here or record.exc_info is None

    logger.addFilter(is_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_elsewhere)


def _compiled_functions_run_plainly() -> contextlib.AbstractContextManager[object]:
    """What `torch.compile` made runs as the Python it was made from, and is recorded as that."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
