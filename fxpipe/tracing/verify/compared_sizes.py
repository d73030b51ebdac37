"""Checks that a graph holds for the micro-batches that run, as well as for the mini-batch, and at dynamic sizes.

Forward may depend on the number of samples (`max(*x.shape)`, `if len(x) > 4`). Conditions on the mini-batch's size must
hold for each size that runs, or make no difference. The checks, in this order:

1. All conditions hold at the micro-batch sizes: nothing runs.
2. Model and graph agree on that number of samples: the size is *excused*.
3. The joined outputs of the mini-batch's graph on micro-batches equal its outputs on the mini-batch. This check also
   runs if the batch size is, or may be, a number in the graph's computation.
4. The joined outputs of a graph recorded for a micro-batch do, and need nothing that all samples share: it runs.

Checks 3 and 4 require outputs that can be joined, no random numbers, and are valid for this mini-batch only. Graphs
with dynamic sizes are compared with their model at other sizes: the recording's inputs are cut or repeated.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from sympy.core.relational import Relational
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpipe._torch.functions import VALUE_READS, opname
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.errors import TraceError
from fxpipe.tracing.dynamic_sizes import FixedSizeError, InputDim, Lengths, SizeCondition
from fxpipe.tracing.fake_tensors import is_faked, with_fake_tensors
from fxpipe.tracing.forward_rng import preserve_own_generators
from fxpipe.tracing.interpreter import NodeValues, run_nodes
from fxpipe.tracing.model_state import preserve_state
from fxpipe.tracing.node_info import info, named_arguments, parameter_names, state_of
from fxpipe.tracing.print_calls import mute_repeated_prints
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.shapes.observed_shapes import observe_graph, observed_tensors, resized
from fxpipe.tracing.traced import Traced, attribute_tensor, call_node
from fxpipe.tracing.verify import equivalence
from fxpipe.tracing.verify.effects import Effects, running_statistics
from fxpipe.utils.batch_split import micro_batch_sizes
from fxpipe.utils.locks import DISPATCH_MODE_LOCK
from fxpipe.utils.pytree import flatten

FEW_SIZES = (1, 2, 3)
_DIFFERENT = "values of micro-batches that differ"  # equal to no output

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_WITH_DROPOUT: Mapping[Any, str] = {
    F.scaled_dot_product_attention: "dropout_p",
    F.multi_head_attention_forward: "dropout_p",
}
_BATCH_NORMS = (F.batch_norm, torch.batch_norm)
MADE_DETERMINISTIC = frozenset((*_DROPOUTS, *_WITH_DROPOUT, *_BATCH_NORMS))


class OtherMicroBatchesError(CannotRecord):
    def __init__(self, traced: Traced, sizes: Sequence[int], message: str = ""):
        super().__init__(message or _failure_message(traced, sum(sizes), {*sizes}), is_final=True)
        self.traced, self.sizes = traced, sizes


def holds_for_micro_batches(traced: Traced, leaves: Sequence[Any], sizes: Sequence[int], is_told: bool = False) -> bool:
    """Returns whether the graph holds for these micro-batches. `is_told`: the outputs need not be compared."""
    batch, lengths = traced.batch_of(leaves), traced.dynamic.lengths_of(leaves)
    if lengths is None:
        return False
    key = batch, frozenset(sizes), lengths
    if traced.holds_for(batch, sizes, lengths):
        return True
    if is_faked() and not traced.is_whole:  # no values yet: the check is repeated with values
        return True
    if traced.is_whole or key in traced.comparisons.tried_splits or not traced.holds_for(batch, (), lengths):
        return False
    traced.comparisons.tried_splits.add(key)
    excuse_sizes(traced, leaves, sizes)
    holds = all(traced.holds_at(size, lengths) for size in sizes)
    same = None if holds and is_told else _give_same_outputs(traced, traced, leaves, sizes)
    if same or (holds and same is None):
        traced.comparisons.accepted_splits.add(key)
    return traced.holds_for(batch, sizes, lengths)


def must_compare_micro_batches(traced: Traced) -> bool:
    """Returns whether plain numbers of the graph may belong to a size, or conditions fail for a few samples."""
    return bool(traced.recorded_sizes) or not all(map(traced.holds_at, FEW_SIZES))


def excuse_sizes(traced: Traced, leaves: Sequence[Any], sizes: Collection[int] = FEW_SIZES) -> None:
    """Compares graph and model at sizes at which reads do not hold: most branches for one sample make no difference."""
    for size in sizes:
        if size <= traced.batch_of(leaves) and not traced.holds_at(size):
            equivalence.excuse_reads(traced, leaves, size)


def may_replace(whole: Traced, parts: Traced, leaves: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Returns whether `parts`, the graph of micro-batches of these sizes, may run instead of the mini-batch's."""
    excuse_sizes(parts, leaves, {*sizes})
    used = [{id(attribute_tensor(one, n)) for n in one.graph.nodes if n.op == "get_attr"} for one in (whole, parts)]
    parameters = {id(p) for p in whole.model.parameters()}  # one for each place in the batch is used by some parts only
    if used[0] & parameters != used[1] & parameters:
        return False
    return all(map(parts.holds_at, sizes)) and bool(_give_same_outputs(whole, parts, leaves, sizes))


def _give_same_outputs(whole: Traced, parts: Traced, leaves: Sequence[Any], sizes: Sequence[int]) -> bool | None:
    """Returns whether the joined outputs of `parts` on micro-batches equal the outputs of `whole`; None if unknown."""
    batch = whole.batch_of(leaves)
    have = (parts.in_dims, parts.out_dims, parts.out_spec)
    if (whole.in_dims, whole.out_dims, whole.out_spec) != have:
        return False
    if "stack" in whole.out_dims or not (can_run_deterministically(whole) and can_run_deterministically(parts)):
        return None
    weights = [size / batch for size in sizes]
    for is_opened in (False, True):
        try:
            with preserve_state(whole.model):
                want = run_deterministically(whole, leaves, is_opened)
                cuts = parts.micro_batches(leaves, sizes)
                of_parts = [run_deterministically(parts, part, is_opened) for part in cuts]
        except Exception:
            return None
        joined: list[Any] = []
        for how, *values in zip(parts.handed_out_dims, *of_parts, strict=True):
            if isinstance(how, int):
                joined.append(torch.cat(values, how))
            elif how is None:
                is_same = all(equivalence.is_roughly_close(values[0], value) for value in values)
                joined.append(values[0] if is_same else _DIFFERENT)
            else:
                weighted = [v * w for v, w in zip(values, weights, strict=True)] if how == "mean" else values
                joined.append(sum(weighted[1:], weighted[0]))
        if not all(map(equivalence.is_roughly_close, _outputs(whole, want), _outputs(parts, joined))):
            return False
    return True


def _outputs(traced: Traced, handed_out: Sequence[Any]) -> list[Any]:
    """Returns the outputs, combined from pieces if needed."""
    combined = {one.output: one.of(handed_out) for one in traced.combinations}
    return [combined.get(place, handed_out[place]) for place in range(len(traced.outputs))]


def values_differ_message(parts: Traced) -> str:
    reads = "; ".join(map(str, parts.guards.guards if parts.guards is not None else ()))
    return (
        f"forward reads values that differ between micro-batches ({reads}, in the first), and each needs a graph; "
        "pass the micro-batches (forward_backward(micro_batches=...)), use chunks=1, or read them before the model"
    )


def _failure_message(traced: Traced, batch: int, sizes: Collection[int]) -> str:
    failing = [(s, r) for s in sizes for r in traced.batch_conditions if not r.holds(s)]
    failing += [(s, r) for s in sizes for r in traced.failing_conditions(s)]
    if not failing:
        why = "some samples belong together (x[: len(x) // 2 * 2]), or act on each other"
        if traced.recorded_sizes:
            line = next((read.where for read in traced.batch_conditions), "len(x), range(len(x))")
            why = f"what forward computes with the batch size (as in {line}) is another number there"
        return (
            f"micro-batches of {' and '.join(map(str, sorted(sizes)))} do not make, put together, what the model makes "
            f"of the mini-batch of {batch}: {why}; choose the batch size and chunks so that it is the same (chunks=1)"
        )
    size, read = failing[0]
    condition = read.condition.xreplace({symbol: sympy.Integer(n) for symbol, n in traced.dynamic.example})
    condition = condition.canonical if isinstance(condition, Relational) else condition  # `b >= 12`, not `12 <= b`
    others = [chunks for chunks in range(1, batch + 1) if all(map(traced.holds_at, micro_batch_sizes(batch, chunks)))]
    remedy = f"use chunks={' or '.join(map(str, others[-3:]))}, " if others else "use "
    even = " (a number of samples that chunks divides)" if len(sizes) > 1 else ""
    return (
        f"forward goes by the batch size at {read.where}: {condition} (b samples) is so for the mini-batch of "
        f"{batch}, not for micro-batches of {size}, and these do not make what the model makes of the mini-batch; "
        f"{remedy}batches for which it is the same{even}, micro-batches of your own "
        "(forward_backward(micro_batches=...)), or take the size out of what forward computes"
    )


def can_run_deterministically(traced: Traced) -> bool:
    """Returns whether all functions that would make parts of a batch differ can run deterministically."""
    effects: Effects | None = traced.effects
    assert effects is not None
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"}
    for node, classes in zip(effects.nodes, effects.written_classes, strict=True):
        is_norm = node.target in _BATCH_NORMS and bool(running_statistics(node))
        is_counter = str(getattr(node.args[0], "target", "")).endswith("num_batches_tracked") if node.args else False
        if classes & states and not (is_norm or is_counter):
            return False
        if node.target in _BATCH_NORMS and not is_norm and named_arguments(node).get("training"):
            return False
        if info(node).is_scalar_draw and not node.users:
            continue
        if info(node).is_random and node.target not in (*_DROPOUTS, *_WITH_DROPOUT):
            return False
    return traced.carried_state.keys().isdisjoint(str(n.target) for n in traced.graph.nodes if n.op == "get_attr")


def run_deterministically(
    traced: Traced, sample: Sequence[Any], is_opened: bool = False, results: Sequence[Any] | None = None
) -> list[Any]:
    """Returns the values of `results`, by default what a micro-batch returns. `is_opened`: with `opened` parameters."""
    results = traced.handed_out if results is None else results
    # Only opaque Python may compute gradients inside.
    grad = any(info(node).opaque is not None for node in traced.nodes)

    def placeholder(node: fx.Node) -> Any:
        return sample[traced.place_of(node)].detach().clone()

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = attribute_tensor(traced, node)
        held = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        held = _varied(opened(held)) if is_opened and isinstance(tensor, torch.nn.Parameter) else held
        return held.requires_grad_(grad and tensor.requires_grad)

    def work(node: fx.Node, values: NodeValues) -> Any:
        with set_thread_state(state_of(node)), torch.set_grad_enabled(grad and state_of(node).grad):
            return run_deterministic_node(node, values.__getitem__)

    values: NodeValues = {}
    keep = [node for node in results if isinstance(node, fx.Node)]
    for _ in run_nodes([*traced.graph.nodes], values, placeholder, attribute, work, keep):
        pass
    return [values[one] if isinstance(one, fx.Node) else one for one in results]


def opened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a parameter with its zeros replaced, or all elements if they are tiny (a layer scale)."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.numel() == 0:
        return tensor
    is_tiny = not max(map(abs, torch.aminmax(tensor))) > 1e-2
    if not is_tiny and tensor.numel() - int(tensor.count_nonzero()) <= 1e-5 * tensor.numel():
        return tensor
    closed = torch.ones_like(tensor, dtype=torch.bool) if is_tiny else tensor == 0
    other = 0.3 + torch.arange(int(closed.sum()), device=tensor.device).remainder(7) / 10
    return tensor.masked_scatter(closed, other.to(tensor.dtype))


def _varied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns other elements for equal ones: which of them a sample uses would make no difference."""
    if (
        not tensor.is_floating_point()
        or tensor.layout != torch.strided
        or tensor.numel() < 2
        or tensor.min() < tensor.max()
    ):
        return tensor
    factors = 1 + torch.arange(tensor.numel(), device=tensor.device).remainder(7) / 10
    return tensor * factors.view(tensor.shape).to(tensor.dtype)


def run_deterministic_node(node: fx.Node, value_of: Callable[[fx.Node], Any], reads: list[Any] | None = None) -> Any:
    """Runs a node with dropout disabled and without batch statistics, also inside opaque modules.

    `reads`: to it are added the values that Python reads in an opaque module or a leaf function.
    """
    is_changed = info(node).opaque is not None or node.target in MADE_DETERMINISTIC
    is_changed |= reads is not None and isinstance(node.target, FunctionType)
    with _Deterministic(reads) if is_changed else contextlib.nullcontext():
        return call_node(node, value_of)


class _Deterministic(TorchFunctionMode):
    def __init__(self, reads: list[Any] | None = None) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in MADE_DETERMINISTIC:
            result = func(*args, **(kwargs or {}))
            if self.reads is not None and opname(func) in VALUE_READS:
                self.reads.append(result.tolist() if hasattr(result, "tolist") else result)
            return result
        bound = dict(zip(parameter_names(func), args, strict=False)) | (kwargs or {})
        if func in _DROPOUTS:
            return bound["input"].clone()
        if func in _WITH_DROPOUT:
            return func(**bound | {_WITH_DROPOUT[func]: 0.0})
        if bound.get("training") and bound.get("running_mean") is not None:
            bound["training"] = False
        elif bound.get("training") and bound.get("weight") is not None:  # without one it may be a loss over samples
            zeros = torch.zeros_like(bound["weight"])
            bound |= {"training": False, "running_mean": zeros, "running_var": zeros + 1}
        return func(**bound) if func is F.batch_norm else func(*map(bound.get, parameter_names(func)))


_STEP = 3  # a new size is larger than the largest recorded size by this, if the graph holds for it
_FARTHEST_STEP = 17  # else it differs from the recorded size by less than this
_CANDIDATES = 4  # tried new sizes, since the model may reject some


def check_dynamic_sizes(traced: Traced, leaves: Sequence[Any], seen: Sequence[Mapping[InputDim, int]]) -> None:
    """Compares graph and model at other sizes, also those `seen`. `FixedSizeError`: they differ, or none can run."""
    if traced.uneven_outputs:
        raise FixedSizeError("rows of an output do not simply grow with the number of samples")
    example, symbols = traced.dynamic.example, traced.dynamic.symbols
    runs = [tuple((s, one[key]) for s, key in symbols.items()) for one in seen if one.keys() >= {*symbols.values()}]
    before = [lengths for lengths in runs if lengths != example]
    others = [lengths for lengths in dict.fromkeys(before) if _compare(traced, leaves, lengths)]
    # New sizes for which the graph holds, larger ones first, since models reject them less often.
    known = [dict(lengths) for lengths in (example, *before)]
    largest, least = ({s: bound(one[s] for one in known) for s in symbols} for bound in (max, min))
    steps = [step for more in range(1, _FARTHEST_STEP) for step in (more, -more)]
    new = (
        {s: size + _STEP for s, size in largest.items()},
        {s: size - 1 for s, size in least.items()},
        {s: size // 2 for s, size in least.items()},
        *({s: size + step for s, size in example} for step in steps),
    )
    wanted = dict.fromkeys(tuple((s, max(2, size)) for s, size in lengths.items()) for lengths in new)
    fitting = (one for one in wanted if one not in (example, *before) and _sample_of(traced, leaves, one) is not None)
    candidates = [*itertools.islice(fitting, _CANDIDATES)]
    unseen = next((lengths for lengths in candidates if _compare(traced, leaves, lengths)), None)
    if not others and unseen is None:
        why = "the model runs at no other size" if candidates else "forward concludes something else at any other size"
        raise FixedSizeError(f"{why}, as far as was tried", is_of_this_size=not candidates)
    small = tuple((s, max(2, size // 2)) for s, size in least.items())
    if any(condition.is_of_torch for condition in traced.dynamic.conditions) and _compare(traced, leaves, small):
        others.append(small)
    traced.comparisons.lengths.update((example, *others, *([] if unseen is None else [unseen])))


def recheck_lengths(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether graph and model agree on samples with new sizes; else restricts the graph to compared sizes."""
    with checking_mode(traced, args, kwargs) as leaves:
        if is_faked():
            return False  # a model without values cannot be compared: it is recorded at these sizes
        lengths = traced.dynamic.lengths_of(leaves)
        assert lengths is not None
        try:
            if _compare(traced, leaves, lengths):
                traced.comparisons.lengths.add(lengths)
        except FixedSizeError:
            known = [dict(one) for one in traced.comparisons.lengths]
            limits = [(s, [one[s] for one in known]) for s in known[0]]
            between = sympy.And(*(sympy.And(s >= min(sizes), s <= max(sizes)) for s, sizes in limits))
            where = "where graph and model were compared, and found to differ beyond"
            traced.comparisons.bounds = SizeCondition(between, where)
            return False
        return True


def _compare(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> bool:
    """Returns whether graph and model run on a few samples of these sizes. Raises `FixedSizeError` if they differ."""
    sample = _sample_of(traced, leaves, lengths)
    if sample is None:
        return False
    batch = traced.batch_of(sample)
    failing = traced.failing_conditions(batch, lengths)
    try:
        if batch not in equivalence.check_training_equivalence(traced, sample):
            equivalence.compare_runs(traced, sample)
    except TraceError as error:
        if failing:
            return False
        shown = ", ".join(str(size) for _, size in lengths)
        raise FixedSizeError(f"at another size ({shown}): {error}") from error
    except Exception:
        return False  # the model raises again for such inputs
    if failing or traced.dynamic.is_observed:
        sizes = {traced.batch: batch, **dict(lengths)}
        are_expected = all(  # all values have the sizes that the formulas give
            tensor.shape == tuple(formula.subs(sizes) for formula in shape.shape)
            for node, value in observe_graph(traced, sample, traced.nodes[-1]).items()
            for tensor, shape in zip(observed_tensors(value), info(node).full_shapes, strict=False)
        )
        if not are_expected and not failing:
            raise FixedSizeError("functions that can only be seen make other sizes than those seen before")
        if not are_expected:
            return False
    traced.comparisons.harmless.update(failing)
    return True


def _sample_of(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> list[Any] | None:
    """Returns the fewest samples of these sizes for which all of forward's conditions, not torch's, hold; or None."""
    reads = (*traced.batch_conditions, *traced.mini_batch_conditions)
    for batch in dict.fromkeys((min(equivalence.FEWEST_SAMPLES, traced.batch_of(leaves)), traced.batch_of(leaves))):
        failing = traced.failing_conditions(batch, lengths)
        if not all(one.is_of_torch for one in failing) or not all(read.holds(batch) for read in reads):
            continue
        sample = resize(traced, equivalence.take_samples(traced, leaves, 0, batch), lengths)
        if traced.guards_hold(sample, traced.seed):
            return sample
    return None


def resize(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> list[Any]:
    """Returns the flattened inputs with these dynamic sizes: cut, or repeated from their beginning."""
    values = dict(lengths)
    return resized(leaves, {key: int(formula.subs(values)) for key, formula in traced.dynamic.formulas.items()})


def agrees_with_model(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int]) -> bool:
    """Returns whether the graph holds for micro-batches of these sizes, as far as the current values show."""
    if traced.is_whole or not all(traced.holds_at(size) for size in sizes):
        return False
    with checking_mode(traced, args, kwargs) as leaves:
        for size in () if is_faked() else sizes:
            sample = equivalence.sample_within_guards(traced, leaves, size)
            if sample is None:
                continue  # forward branches on the mini-batch, and fewer samples would change the branch
            try:
                equivalence.compare_runs(traced, sample, all(read.holds(size) for read in traced.mini_batch_conditions))
            except Exception:  # the model may raise as well
                return False
    return True


def recheck_micro_batches(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], is_told: bool
) -> bool:
    """See `holds_for_micro_batches`. Raises `ArgumentError` if the outputs have other rows than the mini-batch's."""
    with checking_mode(traced, args, kwargs) as leaves:
        if traced.holds_for(traced.batch_of(leaves), (), traced.dynamic.lengths_of(leaves)):
            traced.refuse_uneven_outputs(traced.batch_of(leaves), sizes)
        return holds_for_micro_batches(traced, leaves, sizes, is_told)


@contextlib.contextmanager
def checking_mode(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[list[Any]]:
    """A block in which graph and model can be compared. Yields the flattened inputs."""
    with (
        DISPATCH_MODE_LOCK,
        mute_repeated_prints(is_first_run=False),
        torch.inference_mode(False),
        torch.set_grad_enabled(traced.state.grad),
        preserve_own_generators(traced.model),
        with_fake_tensors(traced.model, (args, kwargs)) as (args, kwargs),
    ):
        yield flatten((args, kwargs))[0]
