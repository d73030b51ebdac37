"""Finds plain numbers that depend on the batch size by comparing recordings at several sizes.

A recording cannot follow `len(x)`, `int(x.shape[0])` or `1 / len(x)` (`recorded_sizes`): its graph has a plain number.
If a graph is wrong at another size, the model is recorded again with other numbers of samples:

    4 samples   view(lin, 4, 2, 3)   div(view, 4.0)
    5 samples   view(lin, 5, 2, 3)   div(view, 5.0)

If the recordings differ only in numbers, nodes that compute them replace these numbers: the simplest formula that fits
all recordings, or a polynomial. The graph holds only for the recorded sizes (see `min(len(x), 512)`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe.tracing.model_state import equal_tensors
from fxpipe.tracing.node_info import info, set_info, value_read_of
from fxpipe.tracing.record.fit_formula import Number, SizeFormula, formula_fits, polynomial_through, simplest_formula
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.shapes.input_dims import candidate_dims
from fxpipe.tracing.shapes.size_reads import SIZE_RELATIONS
from fxpipe.tracing.trace_request import TraceRequest
from fxpipe.tracing.traced import CALL_OPS, Traced
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils.batch_split import micro_batch_sizes, rows_per_sample
from fxpipe.utils.equality import equal_values
from fxpipe.utils.pytree import flatten, redefined_class

MAX_SIZES = 3  # number of recorded sizes, not counting micro-batch sizes
_SIZE_TARGETS = ("size", operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
MAX_FAILURES = 3  # sizes at which the model fails or runs other functions, after which recording stops

RecordFunction = Callable[..., Traced]  # (args, kwargs) -> a recording; see `record`


def record_with_batch_numbers(request: TraceRequest, record_on: RecordFunction) -> Traced | None:
    """Records with formulas for plain numbers that depend on the batch size; None if there are no such numbers.

    Raises `CannotRecord` if the model runs other functions at other batch sizes.
    """
    args, kwargs, in_dims, chunks = request.args, request.kwargs, request.in_dims, request.chunks
    base = record_on(args, kwargs)
    leaves = flatten((args, kwargs))[0]
    error: CannotRecord | None = None
    for dims in _batch_candidates(base, in_dims):
        compared = _compare_recordings(base, dims, leaves, record_on, chunks)
        if isinstance(compared, CannotRecord):
            error = error or compared
        elif compared is not None and compared.differs:
            place = next(p for p, dim in enumerate(dims) if dim is not None and rows_per_sample(dim) == 1)
            return _insert_formulas(base, compared, place, dims[place])
        elif compared is not None:
            break
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


# -- recordings at several sizes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _ComparedRecordings:
    sizes: tuple[int, ...]
    numbers: tuple[tuple[Number, ...], ...]  # by size: all numbers among the arguments, in order
    needed: frozenset[int]  # sizes of the batch, of micro-batches and of half batches
    differs: bool  # whether a number depends on the batch size


def _compare_recordings(
    base: Traced, dims: Sequence[int | None], leaves: Sequence[Any], record_on: RecordFunction, chunks: int
) -> _ComparedRecordings | CannotRecord | None:
    place = next(p for p, dim in enumerate(dims) if dim is not None and rows_per_sample(dim) == 1)
    batch = base.leaves[place].shape[dims[place]]  # type: ignore[index]
    needed = _needed_sizes(batch, chunks)
    has_size = _rewrite_factories(base)
    batched = dataclasses.replace(base, in_dims=tuple(dims))
    recordings = {batch: base}
    different: CannotRecord | None = None
    failures = 0  # sizes at which the model fails or needs another graph
    for size in _sizes_to_record(batch, needed):
        if failures == MAX_FAILURES or len(recordings) >= len(needed) + MAX_SIZES:
            break
        other = _record_samples(batched, leaves, batch, size, record_on)
        if other is None:
            failures += 1
            continue
        _rewrite_factories(other)
        _align_factories(base, other)
        if not same_size_reads(base, other):
            continue
        difference = first_difference(base, other)
        if difference is None:
            recordings[size] = other
        else:
            failures += 1
            different = different or _other_functions_error(base, other, (batch, size), difference)
            if size in needed:
                return different
    if len(recordings) == 1:
        return different
    numbers = [tuple(numbers_in(traced)) for traced in recordings.values()]
    differs = has_size or not all(map(same_numbers, numbers, numbers[1:]))
    if different is not None and not differs:
        return different
    halves = {(batch + 1) // 2, batch // 2}
    return _ComparedRecordings(
        tuple(recordings), tuple(numbers), frozenset((needed | halves) & recordings.keys()), differs
    )


def is_same_recording(left: Traced, right: Traced) -> bool:
    """Returns whether both recordings have the same functions, numbers and read values."""
    numbers, others = tuple(numbers_in(left)), tuple(numbers_in(right))
    is_same = first_difference(left, right) is None and same_value_reads(left, right)
    return is_same and len(numbers) == len(others) and same_numbers(numbers, others)


def same_numbers(left: Sequence[Number], right: Sequence[Number]) -> bool:
    return all(map(equal_values, left, right))


def _needed_sizes(batch: int, chunks: int) -> set[int]:
    return {batch, *micro_batch_sizes(batch, chunks)}


def _sizes_to_record(batch: int, needed: set[int]) -> list[int]:
    """Returns the sizes to record, in order: of micro-batches, of halves (to compare outputs), then small ones."""
    least = min(needed)
    wanted = [*sorted(needed), (batch + 1) // 2, batch // 2, least + 1, least + 2, least + 3, batch + 1, batch + 2]
    return [size for size in dict.fromkeys((*wanted, 2 * batch, 3 * batch)) if size not in (0, batch)]


def _record_samples(
    batched: Traced, leaves: Sequence[Any], batch: int, size: int, record_on: RecordFunction
) -> Traced | None:
    """Records the model on `size` samples for which forward reads the same values; None if there are none."""
    for start in (0, batch - size) if size < batch else (0,):
        try:
            other = record_on(
                *pytree.tree_unflatten(take_samples(batched, leaves, start, start + size), batched.in_spec)
            )
        except Exception:
            return None
        if same_value_reads(batched, other):
            return other
    return None


def same_value_reads(base: Traced, other: Traced) -> bool:
    reads, others = ([value_read_of(n).value for n in t.graph.nodes if info(n).is_guarded_read] for t in (base, other))
    return len(reads) == len(others) and all(map(equal_values, reads, others))


def same_size_reads(base: Traced, other: Traced) -> bool:
    """Returns whether all comparisons of recorded sizes had the same results."""
    reads, others = (
        [(r.function, r.result, r.where) for r in t.size_reads if r.function in SIZE_RELATIONS or r.function is bool]
        for t in (base, other)
    )
    return all(map(operator.eq, reads, others))


def first_difference(base: Traced, other: Traced) -> tuple[fx.Node, fx.Node] | None:
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
    path = _common_path(info(longer).module, info(longer.prev).module)
    while path and path in base.whole:  # the model itself has no module around it
        path = path.rpartition(".")[0]
    at = next((n for n in (longer, *different, longer.prev) if info(n).source), None)
    where = f" in module {path!r}" if path else ""
    where += f" at {info(at).source}" if at is not None else ""
    return CannotRecord(
        f"the model runs other functions with {sizes[1]} samples than with the example's {sizes[0]}{where}: it goes "
        "over the samples in plain Python (range(len(x)), for row in x), or branches on their number; use a tensor "
        "function over the batch, or keep the Python whole (leaf_modules=[name or class], or @fxpipe.leaf on a "
        "function)",
        frozenset({path}) if path else frozenset(),
    )


def _common_path(left: str, right: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left.split("."), right.split("."), strict=False))
    return ".".join(part for part, _ in same)


# -- the arguments of a graph, without its numbers -------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def numbers_in(traced: Traced) -> Iterator[Number]:
    numbers: list[Number] = []

    def look(value: Any) -> Any:
        if _is_number(value):
            numbers.append(value)
        return value

    for node in traced.graph.nodes:
        _map_arguments(node, look)
    yield from numbers


def _map_arguments(node: fx.Node, change: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of a node with `change` applied, in order, to everything that is not a container."""

    def mapped(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(mapped, value))
        if isinstance(value, tuple):
            items = map(mapped, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            return {key: mapped(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(mapped(value.start), mapped(value.stop), mapped(value.step))
        return change(value)

    return tuple(map(mapped, node.args)), {key: mapped(value) for key, value in node.kwargs.items()}


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
    return node.op, node.name, name, info(node).source, _map_arguments(node, bone)


# -- numbers replaced by formulas ------------------------------------------------------------------------------------


def _rewrite_factories(traced: Traced) -> bool:
    """Replaces `torch.tensor(n)`, which takes no symbolic number, by `torch.full((), n)`; likewise `[value] * n` and
    `range(n)`. Returns whether there is a symbolic number."""
    has_size = False
    for node in traced.graph.nodes:
        if node.target not in (torch.tensor, torch.as_tensor) or len(node.args) != 1:
            continue
        data = node.args[0]
        if isinstance(data, fx.Node) and data.target in _SIZE_TARGETS:
            has_size = True
            node.target, node.args = torch.full, ((), data)
        elif _is_number(data):
            node.target, node.args = torch.full, ((), data)
        elif isinstance(data, (list, tuple)) and data and all(map(_is_number, data)) and data != [0]:
            if all(type(x) is type(data[0]) and equal_values(x, data[0]) for x in data):
                node.target, node.args = torch.full, ((len(data),), data[0])
            elif list(data) == list(range(len(data))) and type(data[1]) is int:
                node.target, node.args = torch.arange, (len(data),)
    return has_size


def _align_factories(left: Traced, right: Traced) -> None:
    """Rewrites `[0]` as `[0] * 1` or `range(1)`, whichever the recording at the other size has."""
    for node, other in zip(left.graph.nodes, right.graph.nodes, strict=False):
        for single, like in ((node, other), (other, node)):
            if single.target is torch.tensor and single.args == ([0],) and like.target in (torch.full, torch.arange):
                single.target, single.args = like.target, ((1,), 0) if like.target is torch.full else (1,)


def _insert_formulas(base: Traced, compared: _ComparedRecordings, place: int, dim: int | None) -> Traced:
    """Returns `base` with nodes for the numbers that differ; it holds for the compared sizes."""
    sizes, formulas = _fit_formulas(compared)
    graph = base.graph
    first = next(node for node in graph.nodes if node.op in CALL_OPS)
    formula_nodes: dict[Any, fx.Node] = {}
    remaining = iter(formulas)
    for node in list(graph.nodes):
        at = node if node.op in CALL_OPS else first

        def put(value: Any, at: fx.Node = at) -> Any:
            if not _is_number(value):
                return value
            formula = next(remaining)
            return value if isinstance(formula, (int, float)) else emit(formula, at)

        def emit(formula: SizeFormula, at: fx.Node) -> Any:
            if isinstance(formula, (int, float)):
                return formula
            key = repr(formula)
            if key not in formula_nodes:
                if isinstance(formula, str):
                    call: Any = ("call_method", "size", (base.placeholders[place], dim), {}, "batch")
                else:
                    operands = tuple(emit(part, at) for part in formula[1:])
                    call = ("call_function", formula[0], operands, {}, f"batch_{formula[0].__name__}")
                with graph.inserting_before(first):
                    formula_nodes[key] = graph.create_node(*call)
                set_info(formula_nodes[key], info(at).beside(recorded_at=info(first).recorded_at))
            return formula_nodes[key]

        node.args, node.kwargs = _map_arguments(node, put)
    return dataclasses.replace(base, recorded_sizes=sizes)


def _fit_formulas(compared: _ComparedRecordings) -> tuple[tuple[int, ...], list[SizeFormula]]:
    """Returns the sizes at which all formulas hold (the needed sizes at least), and a formula for each number."""
    columns = [list(zip(compared.sizes, column, strict=True)) for column in zip(*compared.numbers, strict=True)]
    formulas: list[SizeFormula] = []
    holding = set(compared.sizes)
    for points in columns:
        needed = [point for point in points if point[0] in compared.needed]
        formula = next(
            f for f in (simplest_formula(points), simplest_formula(needed), polynomial_through(needed)) if f is not None
        )
        formulas.append(formula)
        holding = {size for size, number in points if size in holding and formula_fits(formula, [(size, number)])}
    return tuple(sorted(holding)), formulas
