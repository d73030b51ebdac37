"""The mechanisms that only some models need, and the functions by which it is seen that a model has taken one.

A place is the dotted name of a function below `fxpipe`, which ran; with a `?` behind it, it has returned something.
What a user asks for, by an argument or a call, is no matter of the model: `asked_by` says by what.
"""

import contextlib
import importlib
import inspect
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

NO_MODEL = "No model of the zoo"  # the comment above a function that says who needs it all the same


class Mechanism(NamedTuple):
    """A mechanism, and how it is seen that it was taken: one of the places is enough."""

    name: str
    places: tuple[str, ...]
    asked_by: str = ""

    def is_taken(self, called: Iterable[str]) -> bool:
        return not {f"fxpipe.{place}" for place in self.places}.isdisjoint(called)


def _group(title: str, *rows: tuple[str, ...]) -> tuple[Mechanism, ...]:
    """The rows of a group: a name, its places with spaces between, and what it is asked for by, if anything."""
    return tuple(Mechanism(f"{title}: {row[0]}", tuple(row[1].split()), *row[2:]) for row in rows)


MECHANISMS = (
    *_group(
        "strategies",
        ("recorded on a micro-batch", "tracing.record.other_sizes.record_small_batch?"),
        ("recorded as libraries run when they are compiled", "tracing.record.patches.compile_mode"),
        ("recorded at several sizes, with formulas", "tracing.record.other_sizes.record_with_batch_numbers?"),
        ("recorded again, with values disguised", "tracing.record.other_sizes._is_same_recording"),
        ("lazy state made before it is traced", "tracing.record.lazy_state.make_lazy_state?"),
        ("a function of the user's", "tracing.imported_graph.trace_by_function", "tracer="),
        ("checks of arguments in the stages", "tracing.guards.expect"),
        ("the graph of a micro-batch for the mini-batch", "tracing.strategies._graph_of_micro_batch?"),
        ("not verified", "tracing.verify.equivalence.effects_unverified", "check=False"),
    ),
    *_group(
        "Python that runs in every step",
        ("modules", "tracing.record.opaque_call.call_leaf_module"),
        ("functions", "tracing.record.opaque_call.leaf.call", "@fxpipe.leaf"),
        ("hooks of modules", "tracing.record.opaque_call.call_hook"),
        ("vmap", "tracing.record.patches.patch_for_recording.vmap"),
        ("autograd functions", "tracing.record.patches._add_application"),
        ("autograd functions that C calls", "tracing.record.patches._HiddenApplications.forward"),
        ("the rest of a forward (graph break)", "tracing.record.graph_break.call_with_graph_break"),
        ("checkpoints in it", "_torch.checkpoint._call_through"),
        ("watched for writes to its arguments", "rewriting.build_stages.with_checks.call"),
        ("watched for random numbers", "rewriting.rng.forbid_random_numbers.call"),
    ),
    *_group(
        "reads and guards",
        ("values of tensors", "tracing.guards.Guard.text"),
        ("sizes that depend on values", "tracing.shapes.symbolic_shapes.add_size_read"),
        ("sizes that depend on values, unseen", "tracing.record.other_sizes._add_read"),
        ("the length of a dimension", "tracing.record.recorded_sizes.SizeRecorder.read_length"),
        ("a size's bits or text", "tracing.record.recorded_sizes.plain_number"),
        ("a size as a key", "tracing.record.recorded_sizes.RecordedSize.__hash__"),
        ("conditions on the batch size", "tracing.shapes.symbolic_shapes.batch_condition?"),
        ("a read that any size answers alike", "tracing.verify.equivalence.excuse_reads?"),
        ("draws of a stream", "tracing.forward_rng.DrawStream.take"),
        ("attributes of modules", "tracing.record.python_reads.PythonReads.add_attribute"),
        ("a mode of some modules", "tracing.model_state.evaluating_modules?"),
        ("tensors of nobody, as constants", "tracing.record.recorder.Recorder._constant_name?"),
        ("tensors in containers of modules", "tracing.model_state.container_tensors?"),
    ),
    *_group(
        "sizes",
        ("seen in real runs", "tracing.shapes.observed_shapes.observe_shapes"),
        ("seen in real runs at other lengths", "tracing.shapes.observed_shapes.fit_lengths"),
        ("seen to depend on values", "tracing.shapes.observed_shapes._is_of_values"),
        ("functions of the user's distrusted", "tracing.shapes.symbolic_run._Knowledge.distrust"),
        ("a squeeze told its dimensions", "tracing.shapes.symbolic_shapes.fix_squeezes?"),
        ("micro-batches compared with the mini-batch in each step",
         "tracing.verify.compared_sizes.must_compare_micro_batches?"),
        ("samples that are apart again behind a block", "tracing.verify.sample_rows._SideBySide._changes_with"),
    ),
    *_group(
        "what a forward leaves",
        ("inputs written to", "tracing.verify.effects.Effects.written_inputs?"),
        ("attributes set", "tracing.traced.Traced.left?"),
        ("state, from micro-batch to micro-batch", "tracing.traced.Traced.carried_state?"),
        ("buffers changed", "runtime.stage_instance.StageTotals.final_buffers?"),
        ("prints", "tracing.print_calls._print_once"),
    ),
    *_group(
        "outputs without the batch",
        ("a mean or sum found", "tracing.shapes.batch_reductions.ReductionWalk._reduced?"),
        ("a function of pieces", "tracing.shapes.batch_reductions.ReductionWalk._sources_in_tail"),
        ("a total over a count", "tracing.shapes.batch_reductions.ReductionWalk._counted_piece"),
        ("means over elements chosen by values", "tracing.shapes.batch_reductions.ReductionWalk._elements_piece"),
        ("a tail from where samples have not met", "tracing.verify.sample_rows._with_longer_tail?"),
        ("pieces known from inputs", "tracing.shapes.output_dims.InputValues.__call__", "forward_backward()"),
        ("weights of elements checked", "runtime.loss_checks.LossWeightingCheck.note"),
        ("put together as the user says", "utils.pytree.broadcast_prefix?"),
    ),
    *_group(
        "stages",
        ("portals", "rewriting.build_stages.stash"),
        ("copies at entry", "rewriting.build_stages._StageBuilder._call"),
        ("views made again", "rewriting.cut_points.Aliases.nearest_root?"),
        ("no cut here", "rewriting.cut_points.forbidden_cuts?"),
        ("tied weights", "planning.describe_cut.tied_parameters?"),
        ("parts of the thread's state", "rewriting.build_stages.set_grad rewriting.build_stages.set_autocast"),
        ("recomputed", "runtime.step.Step.recompute", "checkpoint="),
        ("recomputed in a part", "planning.choose._cut_with_split_stages", "checkpoint='auto', memory_limit="),
        ("split backward", "rewriting.split_backward.split_stage_backward", "schedule='zero_bubble'"),
        ("compiled", "rewriting.stage_callables._dynamic_dims", "compile="),
        ("deferred batch norm", "rewriting.deferred_batch_norm.DeferredBatchNorm.of", "deferred_batch_norm="),
        ("cut where forward says", "tracing.record.opaque_call.cut", "fxpipe.cut()"),
        ("pinned", "partitioning.manual_cuts.placements_for_pins", "pin="),
        ("on the caller's thread", "runtime.executors.InlineExecutor.run", "one device"),
    ),
    *_group(
        "random numbers",
        ("a generator as an argument", "rewriting.rng.seeded_function.draw_given"),
        ("the process's generator, lent", "rewriting.rng.seeded_function.draw rewriting.rng._lend_generator"),
        ("Python's and numpy's", "rewriting.rng.seeded_python_rng"),
        ("dropout", "rewriting.rng.dropout"),
        ("recurrent layers", "rewriting.rng._recurrent.run"),
        ("in compiled stages", "rewriting.rng_compiled._dropout_noise", "compile="),
    ),
    *_group(
        "steps",
        ("inputs that require grad", "runtime.exchange.Exchange.input_gradients", "x.requires_grad_()"),
        ("backward that is differentiated", "runtime.commit._Undifferentiable.forward", "create_graph=True"),
        ("gradients rolled back", "runtime.commit.gradient_rollback", "a backward that fails"),
        ("the modes around a call", "runtime.caller_context._modes_suspended", "a mode around the call"),
        ("forward and backward interleaved", "runtime.engine.Engine.forward_backward", "forward_backward()"),
        ("the loss verified", "runtime.loss_checks.verify_loss", "forward_backward()"),
        ("copies between devices", "runtime.transport.Transport.open", "devices="),
        ("in a forked child", "runtime.engine.Engine._forget_others", "os.fork()"),
    ),
)  # fmt: skip


def resolve(place: str) -> Any:
    """The function of a place; for one within a function its code.

    Raises:
        LookupError: there is none.
    """
    names = f"fxpipe.{place.removesuffix('?')}".split(".")
    for end in range(len(names), 0, -1):
        try:
            holder: Any = importlib.import_module(".".join(names[:end]))
        except ModuleNotFoundError:
            continue
        for name in names[end:]:
            holder = _member(holder, name)
        return holder
    raise LookupError(place)


def _member(holder: Any, name: str) -> Any:
    with contextlib.suppress(AttributeError):
        return inspect.getattr_static(holder, name)
    function = inspect.unwrap(getattr(holder, "__func__", holder))
    for constant in getattr(getattr(function, "__code__", function), "co_consts", ()):
        if inspect.iscode(constant) and constant.co_name == name:
            return constant
    raise LookupError(f"{holder} has no {name}")


def is_justified(mechanism: Mechanism) -> bool:
    """Whether a comment above one of its functions says who needs it, though no model of the zoo does."""
    functions = [getattr(function, "__func__", function) for function in map(resolve, mechanism.places)]
    return any(NO_MODEL in (inspect.getcomments(inspect.unwrap(function)) or "") for function in functions)


def missed(called: Iterable[Collection[str]]) -> list[tuple[str, str]]:
    """The mechanisms that no model took although nobody has to ask for them, or the other way round: and what to do.

    Args:
        called: for each model the functions that ran.
    """
    models = list(called)
    missed = []
    for mechanism in MECHANISMS:
        is_taken = any(mechanism.is_taken(functions) for functions in models)
        if not (is_taken or mechanism.asked_by or is_justified(mechanism)):
            missed.append((mechanism.name, f"say above it who needs it (# {NO_MODEL} ...), or take it out"))
        elif is_taken and is_justified(mechanism):
            missed.append((mechanism.name, f"a model takes it: {NO_MODEL!r} is no longer so"))
    return missed
