"""The ways to take a model apart, each run on one entry and judged against the plain model."""

import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers.devices import workers
from helpers.oracle import draw_seed
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import FxpipeError, InternalError, StateError
from fxpipe.pipe.verification import SeededDraws, opaque_methods
from fxpipe.tracing.forward_rng import DrawStream
from fxpipe.utils.accelerator import mix_seed
from zoo.entry import AT_SIZES, HANDED_OVER, IN_ONE, SEED, Call, Entry, Row
from zoo.reference import (
    CHUNKS,
    STEP_SEED,
    Comparison,
    Leaves,
    Step,
    back,
    compare,
    direct_step,
    flat,
    micro_batches,
    step_of,
    weighted,
)
from zoo.sizes import MANY_GRAPHS, with_sizes


def run(entry: Entry, way: str, mode: str, stages: int) -> Row:
    """One row; raises where the plain model does."""
    judges = {
        "fxpipe": _fxpipe,
        IN_ONE: functools.partial(_fxpipe, chunks=1),
        HANDED_OVER: _handed_over,
        AT_SIZES: _at_sizes,
        "symbolic_trace": _symbolic,
        "pipelining": _pipelining,
    }
    found = judges[way](entry, mode == "train", stages)
    return Row(entry.name, entry.family, way, mode, stages, **found)


# -- fxpipe ----------------------------------------------------------------------------------------------------------


def _fxpipe(entry: Entry, training: bool, stages: int, chunks: int = CHUNKS) -> dict[str, Any]:
    def judge(pipe: fxpipe.Pipeline) -> tuple[str, str]:
        verdict, message = _verified(pipe, entry.build()[1])
        if not training and verdict == "right":
            with torch.no_grad():
                verdict, message = _verified(pipe, entry.build()[1])
        return verdict, message

    return _judged(entry, training, stages, chunks, judge)


def _handed_over(entry: Entry, training: bool, stages: int) -> dict[str, Any]:
    """A step of two batches of the entry's, as micro-batches; right is what a loop that accumulates gradients has."""

    def judge(pipe: fxpipe.Pipeline) -> tuple[str, str]:
        batches = [entry.build(seed)[1] for seed in (SEED, SEED + 1)]
        torch.manual_seed(STEP_SEED)
        seed = draw_seed(True)
        plain = entry.build()[0].train(training)
        traced = pipe._fxpipe.first.traced
        for i, (args, kwargs) in enumerate(batches):
            draws = SeededDraws(mix_seed(seed, i), torch.device("cpu"), DrawStream(seed), traced)
            with draws, draws.as_one_node(plain, opaque_methods(traced)):
                (weighted(flat(plain(*args, **kwargs))) / len(batches)).backward()
        parts = [(args, kwargs, None) for args, kwargs in (entry.build(seed)[1] for seed in (SEED, SEED + 1))]
        torch.manual_seed(STEP_SEED)
        pipe.forward_backward(micro_batches=parts, loss_fn=lambda outputs: weighted(flat(outputs)))
        model: Any = pipe
        comparison = compare(step_of(model, [], ((), {})), step_of(plain, [], ((), {})))
        return comparison.verdict, comparison.message

    return _judged(entry, training, stages, 1, judge)


def _judged(
    entry: Entry, training: bool, stages: int, chunks: int, judge: Callable[[fxpipe.Pipeline], tuple[str, str]]
) -> dict[str, Any]:
    model, (args, kwargs) = entry.build()
    model.train(training)
    start = time.perf_counter()
    pipe = None
    found: dict[str, Any] = {}
    try:
        pipe = fxpipe.pipeline(
            model, workers(stages), chunks, example_args=args, example_kwargs=kwargs, **entry.options
        )
        found = _about(pipe) | {"plan_seconds": time.perf_counter() - start}
        verdict, message = judge(pipe)
    except Exception as error:
        is_refusal = isinstance(error, FxpipeError) and not isinstance(error, InternalError)
        verdict, message = "refused" if is_refusal else "fails", _text(error)
    finally:
        if pipe is not None:
            pipe.close()
    return found | {"verdict": verdict, "message": message}


def _verified(pipe: fxpipe.Pipeline, inputs: Call) -> tuple[str, str]:
    """The verdict of `fxpipe.verify`, and the largest difference."""
    torch.manual_seed(STEP_SEED)
    try:
        report = fxpipe.verify(pipe, *inputs[0], **inputs[1])
    except StateError:  # what can be compared over micro-batches alone needs gradients, in evaluation too
        with torch.enable_grad():
            report = fxpipe.verify(pipe, *inputs[0], **inputs[1])
    if report:
        return "right", ""
    worst = report.wrong[0]
    return (
        f"wrong {worst.kind}s",
        f"{worst.name}{worst.where}: differs by {worst.size:.1e}, {worst.allowed:.1e} allowed",
    )


def _at_sizes(entry: Entry, training: bool, stages: int) -> dict[str, Any]:
    """A batch of the entry's size, then one of each other size."""
    sized = with_sizes(entry, training)
    if sized is None:
        return {"verdict": "right", "message": "no size can vary"}
    found: dict[str, Any] = {"sizes": str(sized)}

    def judge(pipe: fxpipe.Pipeline) -> tuple[str, str]:
        for one in (entry, *map(sized.at, sized.sizes)):
            verdict, message = _verified(pipe, one.build()[1])
            if verdict != "right":
                return verdict, message
        found["graphs"] = len(pipe._fxpipe.graphs)
        return "right", _why_many(pipe) if found["graphs"] > MANY_GRAPHS else ""

    return found | _judged(entry, training, stages, CHUNKS, judge)


def _why_many(pipe: fxpipe.Pipeline) -> str:
    """Why there is more than one graph for all sizes: a size that is a plain number, or other answers of guards."""
    graphs = [graph.traced for graph in pipe._fxpipe.graphs]
    reasons = dict.fromkeys(reason for traced in graphs for reason in traced.reasons_of_fixed_sizes)
    answers = dict.fromkeys(str(g) for traced in graphs if traced.guards for g in traced.guards.guards)
    lines = dict.fromkeys(line for traced in graphs for line in pipe._fxpipe.graphs.size_conclusions(traced))
    if reasons or answers:
        return "; ".join(reasons or answers)
    return f"forward concludes something else from sizes at {'; '.join(lines)}"


def _about(pipe: fxpipe.Pipeline) -> dict[str, Any]:
    plan = pipe.plan
    return {
        "remarks": _remarks(pipe),
        "nodes": sum(len(stage.nodes) for stage in plan.stages),
        "largest_leaf": largest_leaf(pipe),
    }


def largest_leaf(pipe: fxpipe.Pipeline) -> float:
    """The share of the model's parameters that the largest module kept whole has."""
    first = pipe._fxpipe.first
    return max(first.traced.opaque_shares.values(), default=0.0) if first is not None else 0.0


def _remarks(pipe: fxpipe.Pipeline) -> str:
    """What is special about the way, in a few words."""
    first, plan = pipe._fxpipe.first, pipe.plan
    whole = len(first.traced.whole) if first is not None else 0
    found = {
        "general paths": any(why.startswith("by the general paths") for why in plan.why),
        f"{whole} whole": whole,
        f"{len(plan.guards)} guards": len(plan.guards),
    }
    return ", ".join(text for text, is_so in found.items() if is_so)


# -- torch.fx.symbolic_trace -----------------------------------------------------------------------------------------


def _symbolic(entry: Entry, training: bool, stages: int) -> dict[str, Any]:
    """Run on the mini-batch, and on a micro-batch alone. There are no stages."""

    def attempt() -> Comparison:
        for count in (1, CHUNKS):
            model = entry.build()[0].train(training)
            traced = fx.symbolic_trace(model)
            plain = entry.build()[0].train(training)
            want = direct_step(plain, plain, micro_batches(entry, entry.build()[1], count)[0])
            have = direct_step(model, traced, micro_batches(entry, entry.build()[1], count)[0])
            comparison = compare(have, want)
            if comparison.message:
                break
        return comparison

    return _attempted(attempt)


# -- torch.distributed.pipelining ------------------------------------------------------------------------------------


def _pipelining(entry: Entry, training: bool, stages: int) -> dict[str, Any]:
    """Exported, cut into stages with equal shares of the parameters, and run stage by stage on a micro-batch."""
    from torch.distributed.pipelining import pipeline

    def attempt() -> Comparison:
        def part() -> Call:
            return micro_batches(entry, entry.build()[1])[0]

        plain = entry.build()[0].train(training)
        want = direct_step(plain, plain, part())
        args, kwargs = part()
        model = entry.build()[0].train(training)
        pipe = pipeline(model, args, kwargs, split_policy=lambda traced: _split_by_size(traced, stages))
        args, kwargs = part()
        torch.manual_seed(STEP_SEED)
        outputs = _Stages(pipe.split_gm, args, kwargs).run(*_arguments(pipe.split_gm.graph, args, kwargs))
        tensors = _numbered(outputs)  # the tree of the outputs is the last stage's affair
        back(tensors)
        modules = [module for _, module in pipe.split_gm.named_children()]
        have = Step(tensors, *_state_of_stages(plain, modules, want))
        return compare(have, Step(_numbered([leaf for _, leaf in want.outputs]), want.gradients, want.buffers))

    return _attempted(attempt)


def _split_by_size(traced: fx.GraphModule, stages: int) -> fx.GraphModule:
    """Marks where a stage has its share of the parameters (each node counts as one more, for models without any)."""
    working = [n for n in traced.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    sizes, seen = [], set()
    for node in working:
        new = {str(a.target) for a in node.all_input_nodes if a.op == "get_attr"} - seen
        seen |= new
        attributes = [operator.attrgetter(name)(traced) for name in new]
        sizes.append(1 + sum(a.numel() for a in attributes if isinstance(a, Tensor)))
    total, passed, marks = sum(sizes), 0, 1
    for node, size in zip(working, sizes, strict=True):
        if marks < stages and passed >= total * marks / stages:
            with traced.graph.inserting_before(node):
                traced.graph.call_function(torch.ops.pippy._pipe_split.default, ())
            marks += 1
        passed += size
    traced.recompile()
    return traced


class _Stages(fx.Interpreter):
    """Stage after stage. The first takes what the user gives, where it has kept the signature of forward."""

    def __init__(self, stages: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__(stages)
        self.given = args, kwargs

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self.fetch_attr(target)
        if hasattr(stage.graph._codegen, "pytree_info"):
            args, kwargs = self.given
        return stage(*args, **kwargs)


def _arguments(graph: fx.Graph, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs in the order of the graph: one for each leaf, of keyword arguments by name where these are names."""
    names = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    flat_args, flat_kwargs = pytree.tree_leaves(args), dict(kwargs)
    rest = names[len(flat_args) :]
    if set(rest) <= set(flat_kwargs):
        return [*flat_args, *(flat_kwargs[name] for name in rest)]
    return [*flat_args, *pytree.tree_leaves(kwargs)]


def _numbered(tree: Any) -> Leaves:
    tensors = [leaf for _, leaf in flat(tree) if isinstance(leaf, Tensor)]
    return [(str(number), tensor) for number, tensor in enumerate(tensors)]


def _state_of_stages(
    plain: nn.Module, modules: Sequence[nn.Module], want: Step
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Gradients and buffers by the plain model's names. A weight that several stages have is right if each one is."""
    names: dict[int, set[str]] = {}
    for name, tensor in (*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), set()).add(name)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in plain.named_parameters():
        found = [p.grad for m in modules for n, p in m.named_parameters() if n in names[id(parameter)]]
        wanted = want.gradients[name]
        wrong = [g for g in found if compare(Step([], {name: g}, {}), Step([], {name: wanted}, {})).gradients]
        gradients[name] = (wrong or found or [None])[0]
    buffers = {}
    for name, buffer in plain.named_buffers():
        found = [b for m in modules for n, b in m.named_buffers() if n in names[id(buffer)]]
        buffers[name] = found[0] if found else want.buffers[name]  # one that no stage has cannot have changed wrongly
    return gradients, buffers


# -- a failure is a finding ------------------------------------------------------------------------------------------


def _attempted(attempt: Callable[[], Comparison]) -> dict[str, Any]:
    try:
        comparison = attempt()
        return {"verdict": comparison.verdict, "message": comparison.message}
    except Exception as error:
        return {"verdict": "fails", "message": _text(error)}


def _text(error: BaseException) -> str:
    cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
    notes = "".join(f" | {note}" for note in getattr(cause, "__notes__", ()))
    return f"{type(cause).__name__}: {cause}{notes}"[:1500]
