"""The ways to a graph, in order.

1. *Recording*: the model runs once, values that it reads become guards.
2. Recording with the general paths of libraries, where something stood in the way of the first.
3. Recording with some modules kept whole: the innermost ones around what stands in the way. Where that is the model
   itself, or most of it, recording goes as far as it can, and the rest of forward is one node (`graph_break`).
4. `torch.export`, where that fails, or keeps more than half of the parameters in one piece; the finer graph wins. Not
   where the user wants modules whole (`leaf_modules`): export keeps none.
5. Recording, with values that only the stages know compared there (`guards.expect`).

Each graph is finished by the same passes (shapes, guards, the comparison with the model): one that is not the model's
is an error of its way, and the next one is tried. What no graph could carry, and what the model itself raises, ends
the search at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing.guards import expectations_of, refuse_unguardable
from fxpipe.tracing.importers.symbolic_trace import trace_by_function, trace_by_tracer, trace_symbolically
from fxpipe.tracing.importers.torch_export import trace_by_export
from fxpipe.tracing.module_attributes import all_attribute_guards
from fxpipe.tracing.record.batch_numbers import record_with_batch_numbers
from fxpipe.tracing.record.cut_marker import refuse_missed_marks
from fxpipe.tracing.record.leaf_module import LEAF_MODULE_REASON
from fxpipe.tracing.record.patches import compile_mode
from fxpipe.tracing.record.record_model import record
from fxpipe.tracing.record.recorder import GraphBreak
from fxpipe.tracing.record.small_batch import record_small_batch
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.traced import RecordingOptions, Traced

TracerOption = str | fx.Tracer | type[fx.Tracer] | Callable[[nn.Module], fx.GraphModule]
TRACERS = ("auto", "record", "export", "fx")
LARGE_NODE_SHARE = 0.5  # share of the parameters in one piece from which on another way is tried


def find_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracer: TracerOption,
    whole: dict[str, str],
    seed: int,
    finish: Callable[[Traced], Traced],
    in_dims: Any = None,
    chunks: int = 1,
    in_parts: bool = False,
) -> Traced:
    """The first graph that is right, by the ways that `tracer` allows. `finish` runs the other passes on each.

    `in_parts`: it compares graph and model, so that it may be enough to record on a part of the samples.

    Raises:
        TraceError: no way has led to a graph; says why for each, and what can be done.
    """
    if whole and tracer not in ("auto", "record"):
        raise ArgumentError(
            f"leaf_modules={[*whole]} and tracer={tracer!r}: only recording keeps modules whole, other ways leave "
            "nothing of their Python; use tracer='record', or leave leaf_modules out"
        )
    if isinstance(tracer, fx.Tracer) or (isinstance(tracer, type) and issubclass(tracer, fx.Tracer)):
        return _guard_attributes(finish(_without_marks(trace_by_tracer, model, tracer, args, kwargs)))
    if not isinstance(tracer, str):
        return _guard_attributes(finish(_without_marks(trace_by_function, model, tracer, args, kwargs)))
    if tracer == "export":
        return _guard_attributes(finish(_without_marks(trace_by_export, model, args, kwargs, in_dims)))
    if tracer == "fx":
        return _guard_attributes(finish(_without_marks(trace_symbolically, model, args, kwargs)))

    def record_it(in_stages: bool = False) -> Traced:
        return _record_with_fallbacks(model, args, kwargs, whole, seed, finish, in_dims, chunks, in_parts, in_stages)

    try:
        recorded = record_it()
    except TraceError as error:
        if isinstance(error, CannotRecord) and error.is_final:
            raise
        ways: dict[str, Callable[[], Traced]] = {}
        if tracer == "auto" and not whole:  # it would keep none of the modules that the user asked for
            ways["torch.export"] = lambda: _guard_attributes(
                finish(_without_marks(trace_by_export, model, args, kwargs, in_dims))
            )
        if isinstance(error, CannotRecord) and error.in_stages:
            ways["comparing such values in the stages"] = lambda: record_it(in_stages=True)
        return _try_others(model, ways, error)
    if tracer == "auto" and not whole and recorded.whole and recorded.largest_opaque_share > LARGE_NODE_SHARE:
        with contextlib.suppress(Exception):
            exported = _guard_attributes(finish(_without_marks(trace_by_export, model, args, kwargs, in_dims)))
            if exported.largest_opaque_share < recorded.largest_opaque_share:
                exported.why = tuple(f"not recorded: {reason}" for reason in recorded.why)
                return exported
        recorded.why = (*recorded.why, *imbalance_warnings(recorded))
    return recorded


def imbalance_warnings(traced: Traced) -> tuple[str, ...]:
    """Returns a warning for each module that nobody asked to keep whole, yet holds most of the model in one node."""
    return tuple(
        f"module {path!r} is one node with {share:.0%} of the parameters: no cut divides it, so that one device does "
        f"most of the work. It is the innermost module around what has to be kept whole: {traced.whole[path]}. A small "
        "module or an @fxpipe.leaf function around that alone would be kept whole in its place; or leave it out (in "
        "models of transformers with SpecAugment: config.apply_spec_augment = False, and mask the inputs)"
        for path, share in traced.opaque_shares.items()
        if share > LARGE_NODE_SHARE and traced.whole[path] != LEAF_MODULE_REASON
    )


def _without_marks(way: Callable[..., Traced], *args: Any) -> Traced:
    """A graph made without recording."""
    with refuse_missed_marks():
        return way(*args)


def _guard_attributes(traced: Traced) -> Traced:
    """A graph made in another way holds for the attributes that the modules have: nobody saw which ones it depends
    on."""
    traced.attributes_read = all_attribute_guards(traced.model)
    return traced


def _try_others(model: nn.Module, ways: dict[str, Callable[[], Traced]], recording: TraceError) -> Traced:
    """The graph by the first of other ways that leads to one; what is final in one of them ends the search."""
    failures = {"recording": str(recording)}
    for name, way in ways.items():
        try:
            traced = way()
        except Exception as error:
            if isinstance(error, CannotRecord) and error.is_final:
                raise error from recording
            failures[name] = _first_line(error)
            continue
        traced.why = (f"not simply recorded: {recording}", *traced.why)
        return traced
    if len(failures) == 1:
        raise recording
    listed = "\n".join(f"- {name}: {failure}" for name, failure in failures.items())
    raise TraceError(
        f"{type(model).__name__} cannot be traced:\n{listed}\n"
        "Change what stands in the way; or keep the module around it whole (leaf_modules=[name or class]), make a "
        "function of it (@fxpipe.leaf), or give a tracer of your own (tracer=)"
    ) from recording


def _record_with_fallbacks(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: dict[str, str],
    seed: int,
    finish: Callable[[Traced], Traced],
    in_dims: Any,
    chunks: int,
    in_parts: bool,
    in_stages: bool,
) -> Traced:
    def record_on(args: tuple[Any, ...], kwargs: dict[str, Any], uncomputed: bool = False) -> Traced:
        def record_disguised(disguised: Mapping[Any, int]) -> Traced:
            options = RecordingOptions(whole, continued, in_compile_mode)
            return record_with_options(options, model, args, kwargs, seed, uncomputed=uncomputed, disguised=disguised)

        traced = record_disguised({})
        traced.again = record_disguised
        traced.checks_in_stages = in_stages
        refuse_unguardable(traced)
        return traced

    whole = dict(asked)
    continued: dict[str, GraphBreak] = {}
    first: TraceError | None = None
    in_compile_mode = False
    while True:
        try:
            part = record_small_batch(model, record_on, finish, args, kwargs, in_dims, chunks) if in_parts else None
            traced = part or record_with_batch_numbers(record_on, finish, args, kwargs, in_dims, chunks)
        except TraceError as error:
            if isinstance(error, CannotRecord) and error.is_final:
                raise
            problem = error
        except Exception:
            if first is None or not in_compile_mode:
                raise
            problem = first  # this is of a path that the model never takes
        else:
            break
        if first is None:
            first, in_compile_mode = problem, True
            continue
        if _is_same_failure(problem, first):
            in_compile_mode = False  # no help
        modules = problem.modules - whole.keys() if isinstance(problem, CannotRecord) else frozenset[str]()
        behind = _graph_breaks_for(model, problem, modules, continued)
        if behind:
            continued |= behind
            continue
        if not modules:
            if _is_same_failure(problem, first):
                raise first
            in_stages_too = any(isinstance(e, CannotRecord) and e.in_stages for e in (first, problem))
            raise CannotRecord(f"{first}; and further on: {problem}", in_stages=in_stages_too)
        continued = {path: where for path, where in continued.items() if path not in modules}
        whole |= dict.fromkeys(_modules_of_same_class(model, modules), str(problem))
    traced.recording_options = RecordingOptions(whole, continued, in_compile_mode)
    reasons = [f"{name} is kept whole: {reason}" for name, reason in traced.opaque_names.items()]
    if in_compile_mode:
        reasons.insert(0, f"by the general paths of libraries: {first}")
    if traced.recorded_sizes:
        sizes = ", ".join(map(str, traced.recorded_sizes))
        reasons.append(f"plain numbers that depend on the batch size are computed in the graph (holds for {sizes})")
    reasons += [f"compared in the stages: {text}" for text in expectations_of(traced)]
    traced.why = tuple(reasons)
    return traced


def _is_same_failure(left: TraceError, right: TraceError) -> bool:
    """Returns whether the same has stood in the way twice: the same thing, at the same line, with the same remedy."""
    return type(left) is type(right) and left.args == right.args


def record_with_options(
    options: RecordingOptions, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, **rest: Any
) -> Traced:
    """Records with what has stood in the way known."""
    with compile_mode() if options.in_compile_mode else contextlib.nullcontext():
        return record(model, args, kwargs, whole=options.whole, continued=options.graph_breaks, seed=seed, **rest)


def _graph_breaks_for(
    model: nn.Module, error: TraceError, modules: Collection[str], continued: Mapping[str, GraphBreak]
) -> dict[str, GraphBreak]:
    """Chooses what to record up to the line that stands in the way: the model, or a module that is most of it."""
    if not isinstance(error, CannotRecord) or len(modules) > 1:
        return {}
    path = next(iter(modules), "")
    if path in continued and continued[path].may_split and path not in error.calls:  # in one piece, then
        return {path: continued[path]._replace(may_split=False)} if continued[path].calls else {}
    if path not in error.calls or (path in continued and continued[path].calls <= error.calls[path]):
        return {}
    where = GraphBreak(error.calls[path], str(error), may_split=not path)
    if not path:
        return {path: where}  # it would be right to keep the model whole, and would leave nothing to cut
    own, all_of = (sum(p.numel() for p in m.parameters()) for m in (model.get_submodule(path), model))
    return {path: where} if where.calls and own > LARGE_NODE_SHARE * all_of else {}


def _modules_of_same_class(model: nn.Module, paths: frozenset[str]) -> list[str]:
    """Modules of the same classes will fail alike; those of torch itself need not, nor does one that holds others."""
    modules = dict(model.named_modules())
    kinds = {type(modules[path]) for path in paths if not type(modules[path]).__module__.startswith("torch.nn.")}
    same = {path for path, module in modules.items() if path in paths or (path and type(module) in kinds)}
    return [path for path in same if path in paths or not any(p.startswith(f"{path}.") for p in same)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def requested_leaf_modules(model: nn.Module, leaf_modules: Sequence[str | type[nn.Module]]) -> dict[str, str]:
    """Paths of the modules that the user wants to keep whole.

    Raises:
        ArgumentError: the model has no such module.
    """
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


def check_tracer(tracer: Any) -> TracerOption:
    """Raises where `tracer` is none."""
    if isinstance(tracer, str) and tracer not in TRACERS:
        raise ArgumentError(
            f"tracer={tracer!r} is unknown; accepted are {', '.join(map(repr, TRACERS))}, a torch.fx.Tracer, or a "
            "function from a module to a torch.fx.GraphModule"
        )
    if not isinstance(tracer, (str, fx.Tracer)) and not callable(tracer):
        raise ArgumentTypeError(
            f"tracer is a {type(tracer).__name__}; expected one of {', '.join(map(repr, TRACERS))}, a torch.fx.Tracer, "
            "or a function from a module to a torch.fx.GraphModule"
        )
    known: TracerOption = tracer
    return known
