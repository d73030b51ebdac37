"""Recordings at other sizes find numbers that depend on a size without being tracked.

A recording cannot follow `int(x.shape[0])` or `[0] * x.shape[0]` (`recorded_sizes`): its graph has a plain number. If a
graph is wrong at another batch size, the model is recorded again with other numbers of samples:

    4 samples   view(lin, 4, 2, 3)   div(view, 4.0)
    5 samples   view(lin, 5, 2, 3)   div(view, 5.0)

If the recordings differ only in numbers, nodes that compute them replace these numbers: the simplest formula that fits
all recordings. The graph holds only for the recorded sizes (see `min(int(x.shape[0]), 512)`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch import fx
from torch.fx.node import map_aggregate

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import hook_stores
from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.model_state import container_tensors, equal_tensors
from fxpipe.tracing.node_info import info, set_info, value_read_of
from fxpipe.tracing.record.module_hooks import is_computation_hook
from fxpipe.tracing.record.record_model import erase_unused_nodes, input_leaves
from fxpipe.tracing.record.recorded_sizes import GUISES, TEXTS, Disguise, SizeRead, length
from fxpipe.tracing.record.unrecordable import CannotRecord, calls_before_effects
from fxpipe.tracing.shapes.observed_shapes import Number, SizePoint, simplest_formula
from fxpipe.tracing.shapes.symbolic_shapes import SIZE_RELATIONS, add_size_read
from fxpipe.tracing.tensors import slice_samples
from fxpipe.tracing.traced import CALL_OPS, Traced, TraceRequest, candidate_dims, runs_python
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils.batch_split import largest_micro_batch, micro_batch_sizes, rows_per_sample, samples_along
from fxpipe.utils.python_objects import equal_values
from fxpipe.utils.pytree import flatten, redefined_class

MAX_SIZES = 3  # number of recorded sizes, not counting micro-batch sizes
MAX_FAILURES = 3  # sizes at which the model fails or runs other functions, after which recording stops

RecordFunction = Callable[..., Traced]  # (args, kwargs) -> a recording; see `record`


def record_with_batch_numbers(request: TraceRequest, record_on: RecordFunction) -> Traced | None:
    """Records with formulas for plain numbers that depend on the batch size; None if there are no such numbers.

    Raises `CannotRecord` if the model runs other functions at other batch sizes, or a number has no formula.
    """
    base = record_on(request.args, request.kwargs)
    leaves = flatten((request.args, request.kwargs))[0]
    error: CannotRecord | None = None
    for dims in _batch_candidates(base, request.in_dims):
        place = next(p for p, dim in enumerate(dims) if dim is not None and rows_per_sample(dim) == 1)
        batch = base.leaves[place].shape[dims[place]]  # type: ignore[index]
        needed = {batch, *micro_batch_sizes(batch, request.chunks)}
        batched = dataclasses.replace(base, in_dims=tuple(dims))
        try:
            recordings, problem = _record_at_sizes(batched, leaves, batch, needed, record_on)
        except CannotRecord as failure:
            error = error or failure
            continue
        numbers = [_numbers_in(traced) for traced in recordings.values()]
        if not all(map(equal_values, numbers, numbers[1:])):
            halves = {(batch + 1) // 2, batch // 2}  # to compare outputs
            columns = zip(*numbers, strict=True)
            points = [list(zip(recordings, column, strict=True)) for column in columns]
            return _insert_formulas(base, points, needed | halves, place, dims[place])
        if problem is None and len(recordings) > 1:
            break
        error = error or problem
    if error is not None:
        raise error
    return None


def _batch_candidates(traced: Traced, in_dims: Any) -> Iterator[list[int | None]]:
    """Yields sets of inputs that may hold the batch, the most likely first, as `in_dims` for each leaf."""
    asked = candidate_dims(traced.leaves, in_dims)
    places = [p for p, dim in enumerate(asked) if dim is not None and traced.leaves[p].shape[dim]]
    if in_dims is not None:
        if places:
            yield asked
        return
    sizes = {place: traced.leaves[place].shape[asked[place]] for place in places}  # type: ignore[index]
    for size in sorted(dict.fromkeys(sizes.values()), key=lambda s: s == 1):
        group = [place for place in places if sizes[place] == size]
        for left_out in (None, *reversed(group)) if len(group) > 1 else (None,):
            yield [dim if p in group and p != left_out else None for p, dim in enumerate(asked)]


def _record_at_sizes(
    base: Traced, leaves: Sequence[Any], batch: int, needed: set[int], record_on: RecordFunction
) -> tuple[dict[int, Traced], CannotRecord | None]:
    """Returns recordings of the same functions, by size, and an error if a size has others; raises it if needed."""
    recordings = {batch: base}
    problem: CannotRecord | None = None
    failures = 0  # sizes at which the model fails or needs another graph
    least = min(needed)
    # Sizes of micro-batches, of halves (to compare outputs), then small ones.
    sizes = [*sorted(needed), (batch + 1) // 2, batch // 2, least + 1, least + 2, least + 3, batch + 1, batch + 2]
    for size in dict.fromkeys((*sizes, 2 * batch, 3 * batch)):
        if failures == MAX_FAILURES or len(recordings) >= len(needed) + MAX_SIZES:
            break
        if size in (0, batch):
            continue
        other = _record_samples(base, leaves, batch, size, record_on)
        if other is None:
            failures += 1
        elif _same_size_reads(base, other):
            difference = _first_difference(base, other)
            if difference is None:
                recordings[size] = other
                continue
            failures += 1
            problem = problem or _other_functions_error(base, other, (batch, size), difference)
            if size in needed and same_value_reads(base, other):
                raise problem
    return recordings, problem


def is_same_recording(left: Traced, right: Traced) -> bool:
    is_same = _first_difference(left, right) is None and same_value_reads(left, right)
    return is_same and equal_values(_numbers_in(left), _numbers_in(right))


def _record_samples(
    batched: Traced, leaves: Sequence[Any], batch: int, size: int, record_on: RecordFunction
) -> Traced | None:
    """Records the model on `size` samples for which forward reads the same values, or not as many; None if none are."""
    for start in (0, batch - size) if size < batch else (0,):
        try:
            other = record_on(
                *pytree.tree_unflatten(take_samples(batched, leaves, start, start + size), batched.in_spec)
            )
        except Exception:
            return None
        if same_value_reads(batched, other, if_counts_differ=True):
            return other
    return None


def same_value_reads(base: Traced, other: Traced, if_counts_differ: bool = False) -> bool:
    reads, others = ([value_read_of(n).value for n in t.graph.nodes if info(n).is_guarded_read] for t in (base, other))
    return all(map(equal_values, reads, others)) if len(reads) == len(others) else if_counts_differ


def _same_size_reads(base: Traced, other: Traced) -> bool:
    reads, others = (
        [(r.function, r.result, r.where) for r in t.size_reads if r.function in SIZE_RELATIONS or r.function is bool]
        for t in (base, other)
    )
    return all(map(operator.eq, reads, others))


def _first_difference(base: Traced, other: Traced) -> tuple[fx.Node, fx.Node] | None:
    """Returns the first nodes in which two recordings differ in more than numbers; None if there are none."""
    order = {node: number for traced in (base, other) for number, node in enumerate(traced.graph.nodes)}
    for node, another in zip(base.graph.nodes, other.graph.nodes, strict=False):
        if _node_without_numbers(node, order) != _node_without_numbers(another, order):
            return node, another
    if len(base.graph.nodes) != len(other.graph.nodes) or base.out_spec != other.out_spec:
        return base.graph.output_node(), other.graph.output_node()
    for name, tensor in base.constants.items():
        if not equal_tensors(tensor, other.constants[name]):  # NumPy may have computed it from the batch size
            node = next(n for n in base.graph.nodes if n.target == name)
            return next(iter(node.users), node), node
    return None


def _other_functions_error(
    base: Traced, other: Traced, sizes: tuple[int, int], different: tuple[fx.Node, fx.Node]
) -> CannotRecord:
    """Returns the error, which names the module that loops over samples, so that it can be kept opaque."""
    anew = redefined_class(base.out_spec, other.out_spec)
    if anew is not None:
        return CannotRecord(
            f"the model returns a {anew}, a class that forward defines anew in each call, so that no two outputs are "
            "of one kind; define it outside forward",
            is_final=True,
        )
    longer = max(zip((base, other), different, strict=True), key=lambda one: len(one[0].graph.nodes))[1]
    # The additional node and the node before it both belong to the loop.
    pairs = zip(info(longer).module.split("."), info(longer.prev).module.split("."), strict=False)
    path = ".".join(part for part, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    while path and path in base.whole:  # the model itself has no module around it
        path = path.rpartition(".")[0]
    at = next((n for n in (longer, *different, longer.prev) if info(n).source), None)
    where = f" in module {path!r}" if path else ""
    where += f" at {info(at).source}" if at is not None else ""
    return CannotRecord(
        f"the model runs other functions with {sizes[1]} samples than with the example's {sizes[0]}{where}: it goes "
        "over the samples in plain Python (range(len(x)), for row in x), or branches on their number; use a tensor "
        "function over the batch, or keep the Python whole (leaf_modules=[name or class], or @fxpipe.leaf on a "
        "function), or use chunks=1 or micro-batches of your own (forward_backward(micro_batches=...))",
        frozenset({path}) if path else frozenset(),
        source=info(at).source if at is not None else "",
    )


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _numbers_in(traced: Traced) -> list[Number]:
    leaves: list[Any] = []
    for node in traced.graph.nodes:
        map_aggregate((node.args, node.kwargs), leaves.append)
    return list(filter(_is_number, leaves))


def _node_without_numbers(node: fx.Node, order: dict[fx.Node, int]) -> Any:
    """Returns a key that is equal for nodes that differ only in numbers."""

    def bone(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", order[value]
        if _is_number(value):
            return "number", type(value)
        if node.op == "output" and not isinstance(value, (bool, str, type(None))):
            return "object", type(value)  # new in each forward; the comparison with the model checks it
        return value

    target = node.target
    if callable(target):  # an autograd.Function is a new object in each recording
        name = getattr(target, "__module__", ""), getattr(target, "__qualname__", type(target))
    else:
        name = "", target
    return node.op, node.name, name, info(node).source, map_aggregate((node.args, node.kwargs), bone)


def _insert_formulas(
    base: Traced, numbers: Sequence[Sequence[SizePoint]], needed: set[int], place: int, dim: int | None
) -> Traced:
    """Returns `base` with nodes for the numbers that differ; it holds for the sizes at which all formulas fit.

    `numbers`: for each number among the arguments, in order, its values at the recorded sizes. Formulas have to fit at
    `needed` sizes, if recorded.
    """
    remaining = iter(numbers)
    holding = {size for size, _ in numbers[0]}
    graph = base.graph
    first = next(node for node in graph.nodes if node.op in CALL_OPS)
    nodes: dict[Any, fx.Node] = {}  # by formula, and by a part of one

    def node_for(key: Any, op: str, target: Any, *args: Any) -> fx.Node:
        if key not in nodes:
            name = "batch" if op == "call_method" else f"batch_{target.__name__}"
            with graph.inserting_before(first):
                nodes[key] = graph.create_node(op, target, args, name=name)
            set_info(nodes[key], info(first).beside(recorded_at=info(first).recorded_at))
        return nodes[key]

    def put(at: fx.Node, value: Any) -> Any:
        if not _is_number(value):
            return value
        points = next(remaining)
        if all(equal_values(number, value) for _, number in points):
            return value
        formula = simplest_formula(points) or simplest_formula([point for point in points if point[0] in needed])
        if formula is None:
            known, shown = info(at), ", ".join(f"{number} with {size} samples" for size, number in points[:3])
            raise CannotRecord(
                f"the model{f' in module {known.module!r}' if known.module else ''} makes a plain number of the number "
                f"of samples at {known.source} ({shown}), by no formula of a line; keep the size a size (x.shape[0], "
                "len(x)), or use a tensor function (x.mean(), torch.log)",
                frozenset({known.module}) if known.module else frozenset(),
            )
        holding.intersection_update(size for size, number in points if formula.fits([(size, number)]))
        if not formula.slope:
            return value
        node = node_for("b", "call_method", "size", base.placeholders[place], dim)
        if formula.slope != 1:
            node = node_for(formula.slope, "call_function", operator.mul, node, formula.slope)
        if formula.start:
            node = node_for(formula[:2], "call_function", operator.add, node, formula.start)
        if formula.divisor != 1 or formula.is_float:
            function = operator.truediv if formula.is_float else operator.floordiv
            node = node_for(formula, "call_function", function, node, formula.divisor)
        return node

    for node in list(graph.nodes):
        arguments: Any = map_aggregate((node.args, node.kwargs), functools.partial(put, node))
        node.args, node.kwargs = arguments
    return dataclasses.replace(base, recorded_sizes=tuple(sorted(holding)))


# Running a model on a large mini-batch several times may take minutes. So the model is recorded on the samples of one
# micro-batch. Then sizes with the batch are disguised (see below): if the recording stays the same, forward does not
# depend on the number of samples. The graph is compared with the model at the micro-batch sizes. All other cases, such
# as user hooks, tables outside modules, and values that are others when all samples are read, are recorded on all.

LONG_RECORDING = 0.25  # seconds; after shorter recordings, all samples are recorded
SLOW_DEVICE = 1e10  # operations per second


def record_small_batch(request: TraceRequest, record_on: RecordFunction) -> Traced | None:
    """Records on the number of samples of a micro-batch; returns None, or raises any error, if all are needed."""
    model = request.model
    stores = [store for module in model.modules() if module is not model for store in hook_stores(module)]
    if is_faked() or not all(is_computation_hook(hook) for store in stores for hook in store.values()):
        return None
    leaves, spec, values = input_leaves(model, request.args, request.kwargs)
    dims = candidate_dims(leaves, request.in_dims)
    sizes = {samples_along(value, dim) for value, dim in zip(values, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        return None
    (batch,) = sizes
    samples = max(2, largest_micro_batch(batch, request.chunks))  # the shapes of a single sample are special
    if samples >= batch:
        return None

    # Each parameter is used about once for each element of an input; models that use them more often are measured.
    elements = max(value.numel() for value, dim in zip(values, dims, strict=True) if dim is not None)
    if 2 * elements * sum(p.numel() for p in model.parameters()) < LONG_RECORDING * SLOW_DEVICE:
        return None
    sample = pytree.tree_unflatten(slice_samples(values, dims, 0, samples), spec)
    start = time.perf_counter()
    traced = record_on(*sample)
    if time.perf_counter() - start < LONG_RECORDING:
        return None  # further recordings would take longer than all samples
    if any(map(runs_python, traced.nodes)):
        return None
    if traced.constants.keys() - container_tensors(model).keys():  # tables outside modules, perhaps one for each size
        return None
    record_again = traced.again
    assert record_again is not None
    plain = _record_again(traced, record_again, {})
    if not is_same_recording(traced, plain):  # a model that remembers its inputs
        return None

    def again(disguised: Disguise) -> Traced:
        return _record_again(plain, record_again, disguised) if disguised else plain

    return dataclasses.replace(traced, leaves=leaves, recorded_samples=samples, again=again)


def _record_again(plain: Traced, again: RecordFunction, disguised: Disguise) -> Traced:
    """Records a slow model again, without its products if nothing depends on them."""
    with contextlib.suppress(Exception):
        recording = again(disguised, without_products=True)
        if is_same_recording(plain, recording):
            return recording
    return again(disguised)


# Python may use a size that depends on values, or one that may vary, without a method call (`range(size)`, the index of
# a list). So such sizes are *disguised*: Python sees other numbers, and torch functions the real ones. If that changes
# the recording, a size that depends on values becomes a read like others (`guards`), and one that may vary is refused:
# a dynamic size, and the number of samples if only a part of them was recorded. Texts of tensors are disguised as well:
# a forward that depends on one runs as Python.


def read_untracked_sizes(traced: Traced) -> Traced:
    """Adds a read for each size that depends on values and that forward uses untracked.

    Raises `FixedSizeError` if forward uses a size that may vary, `CannotRecord` if it depends on a tensor's text.
    """
    again = traced.again
    sizes = {
        (node.args[0].name, node.args[1]): node
        for node in traced.graph.nodes
        if node.target == "size" and info(node).is_data_dependent
    }
    example = dict(traced.dynamic.example)
    others = [(size + more, (2 * more + 2) * size + more) for more, size in enumerate(example.values(), 1)]
    if traced.recorded_samples is not None:
        if traced.not_followed:
            raise FixedSizeError(f"forward takes the number of samples as a plain number at {traced.not_followed}")
        example[traced.batch] = traced.recorded_samples
        batch = traced.batch_of(traced.leaves)
        others.append((batch, batch + 1))
    if again is not None and (sizes or example or traced.first_text):
        is_same = functools.partial(_is_same_recording, again({}), again)
        if traced.first_text and not all(is_same({TEXTS: guise}) for guise in GUISES):
            module, line, calls = traced.first_text
            raise CannotRecord(
                f"the model{f' in module {module!r}' if module else ''} depends on the text of a tensor at {line}; "
                "read the number itself (int, float, item), or keep the decision in tensors (torch.where, masks)",
                frozenset({module}) if module else frozenset(),
                calls={module: calls_before_effects(traced.graph, module, calls)},
            )
        if example:
            _refuse_untracked(traced, example, others, is_same)
        if not is_same(dict.fromkeys(sizes, 1)):
            met = [node for key, node in sizes.items() if not is_same({key: 1})]
            for node in met or sizes.values():
                _add_read(traced, node)
    erase_unused_nodes(traced)
    return dataclasses.replace(traced, again=None)


def _refuse_untracked(
    traced: Traced,
    example: Mapping[sympy.Symbol, int],
    others: Sequence[tuple[int, int]],
    has_same_recording: Callable[[Disguise], bool],
) -> None:
    """Refuses a size if its disguise changes the recording. `others`: two sizes that Python sees for each of `example`.

    A size that is larger by one shows a dependence on each size (`range(size)`), one several times larger a dependence
    in steps (`math.isqrt(size)`). Different factors show a dependence on the ratio of sizes.
    """
    sizes = {
        (node.name, dim): formula
        for node in traced.graph.nodes
        for shape in info(node).full_shapes[:1]
        for dim, formula in enumerate(shape.shape)
        if formula.free_symbols & example.keys() and formula.free_symbols <= {*example, traced.batch}
    }
    recorded = {traced.batch: traced.batch_of(traced.leaves), **example}

    def is_same(symbols: Collection[sympy.Symbol]) -> bool:
        for seen in zip(*others, strict=True):
            values = {**recorded, **{s: size for s, size in zip(example, seen, strict=True) if s in symbols}}
            more = {formula: int(formula.subs(values)) - int(formula.subs(recorded)) for formula in {*sizes.values()}}
            if not has_same_recording({key: more[formula] for key, formula in sizes.items()}):
                return False
        return True

    if is_same(example):
        return
    met = {symbol for symbol in example if len(example) == 1 or not is_same([symbol])} or {*example}
    dims = frozenset(key for key, formula in traced.dynamic.formulas.items() if met & formula.free_symbols)
    raise FixedSizeError("forward takes its size as a plain number (range(size), an index of a list)", dims)


def _is_same_recording(plain: Traced, again: Callable[[Disguise], Traced], disguised: Disguise) -> bool:
    try:
        return not disguised or is_same_recording(plain, again(disguised))
    except Exception:  # an index out of range, a text that does not parse
        return False


# No model of the zoo: Python that depends on a size of values needs it (behaviour/test_continuation.py).
def _add_read(traced: Traced, size: fx.Node) -> None:
    known = info(size)
    calls = known.recorded_at.calls
    add_size_read(traced, SizeRead(length, size.args, known.recorded_size, known.source, known.module, calls))  # type: ignore[arg-type]
