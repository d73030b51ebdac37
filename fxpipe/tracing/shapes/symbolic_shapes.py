"""Symbolic shapes: which dimension of which value holds the batch, and every size as a formula in the batch size `b`.

The graph is run once on fake tensors whose batch dimensions are symbols, one for each input (`symbolic_run`).
Operations unify the symbols of inputs that meet; a symbol that meets a fixed size becomes that number: a mask of shape
[T, T] turns out to have no batch, also where T happens to equal the batch size of the example. What remains free is the
batch.

Other dimensions are fixed, unless they are asked to be dynamic: then their sizes are symbols too. Shapes are written
with the sizes of the recording in place of these; what the symbols are, and what must hold of them, is in
`Traced.dynamic`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.operators import OpOverload
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.dynamic_sizes import FIXED_SIZES, DynamicSizes, FixedSizeError, InputDim, Lengths, SizeCondition
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.node_info import ValueRead, constant_of, info, number_of, set_info, update_info
from fxpipe.tracing.record.recorded_sizes import NOT_FOLLOWED, PIECES, SIZE_FUNCTIONS, SizeRead, length
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.shapes.batch_reductions import ReductionWalk, UnknownReductionError
from fxpipe.tracing.shapes.symbolic_run import SymbolicRun, run_on_symbols
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import CALL_OPS, InputLeaf, Traced, common_batch_size
from fxpipe.utils.batch_split import BatchDim, rows_per_sample
from fxpipe.utils.output_combination import OutputCombination, UndeterminedOutput
from fxpipe.utils.pytree import UNNAMED, StructureError, broadcast_prefix

# -- `squeeze` in micro-batches of a single sample: only what is 1 for every batch size goes -------------------------
#
# `x.squeeze()` takes out all dimensions of size 1. For a mini-batch of four samples the batch is none of them, but in a
# micro-batch of one it would be, and what the micro-batches make would no longer go together. So each squeeze is told
# which dimensions the mini-batch loses. A mini-batch that has one sample itself is another graph.

_ATEN = torch.ops.aten.squeeze
_SQUEEZES = ("squeeze", torch.squeeze, _ATEN.default, _ATEN.dim, _ATEN.dims)


def fix_squeezes(traced: Traced, batch: int) -> tuple[SizeCondition, ...]:
    """Names the dimensions in every squeeze that could meet the batch. `batch`: number of samples of the recording.

    Returns what mini-batches the graph holds for.
    """
    reads = []
    for node in traced.nodes:
        if node.target not in _SQUEEZES or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        sizes = info(node.args[0]).shapes[0].shape
        asked = _squeezed_dims(node, len(sizes))
        varying = [sizes[d] for d in asked if sizes[d].free_symbols == {traced.batch}]
        for size in varying:
            alone = sympy.Eq(size, 1)
            if alone == sympy.false:
                continue
            is_alone = bool(alone.subs(traced.batch, batch))
            reads.append(SizeCondition(alone if is_alone else sympy.Ne(size, 1), info(node).source))
            if not is_alone:
                _set_squeeze_dims(node, tuple(d for d in asked if sizes[d] == 1))
    return tuple(reads)


def _squeezed_dims(node: fx.Node, dims: int) -> list[int]:
    """Lists the dimensions that a squeeze takes out if they are of size 1."""
    named: tuple[Any, ...] = (*node.args[1:], *(value for key, value in node.kwargs.items() if key == "dim"))
    if not named:
        return list(range(dims))
    return [d % dims for d in (named[0] if isinstance(named[0], (tuple, list)) else named)]


# No model of the zoo: `x.squeeze()` over micro-batches of one sample needs it (behaviour/test_batch.py).
def _set_squeeze_dims(node: fx.Node, dims: tuple[int, ...]) -> None:
    node.args, node.kwargs = (node.args[0], dims), {}
    if isinstance(node.target, OpOverload):
        node.target = _ATEN.dims


OUT_DIM_REDUCTIONS = ("mean", "sum", "stack")
SIZE_RELATIONS = {
    operator.eq: sympy.Eq,
    operator.ne: sympy.Ne,
    operator.lt: sympy.Lt,
    operator.le: sympy.Le,
    operator.gt: sympy.Gt,
    operator.ge: sympy.Ge,
}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor that a node makes: sizes in the batch size `b`."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> sympy.Expr:
        return sympy.Mul(*self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@functools.lru_cache(maxsize=4096)
def bytes_formula(shapes: tuple[TensorShape, ...]) -> sympy.Expr:
    """Sums the bytes of all these tensors."""
    return sympy.Add(*(shape.bytes for shape in shapes))


@functools.lru_cache(maxsize=4096)
def bytes_at(formula: sympy.Expr, batch: sympy.Symbol, samples: int, lengths: Lengths = ()) -> int:
    """Computes the bytes for a micro-batch of so many samples. A size that depends on values (nonzero) counts as 0.

    `lengths`: the dynamic sizes, where the formula is in some.
    """
    number = formula.xreplace({batch: sympy.Integer(samples), **{s: sympy.Integer(size) for s, size in lengths}})
    return int(number.subs(dict.fromkeys(number.free_symbols, 0)))


def add_shapes(
    traced: Traced,
    values: Sequence[Any],
    in_dims: Any = None,
    out_dims: Any = None,
    dynamic: Mapping[InputDim, str] = MappingProxyType({}),
    lengths: Collection[InputDim] = (),
) -> Traced:
    """Finds the batch in `traced`, recorded on `values`, and the shapes of its nodes (`NodeInfo`).

    Sizes that turn out fixed become constants of the graph. Of the dimensions in `dynamic` those stay so that can, and
    their sizes have these names; `lengths` are those of them of which another graph has told that they hold no samples
    (a mask of shape [T, T]).

    Raises:
        ArgumentError: there is no batch, inputs disagree on it, or an output needs `out_dims`.
        TraceError: forward computes with the batch size in plain Python.
    """
    asked, sure = candidate_dims(traced.leaves, in_dims), in_dims is not None
    sizes = _batch_sizes(traced.leaves, asked)
    if 0 in sizes:
        raise ArgumentError("an example input holds no samples (size 0 in the batch dimension); give at least one")
    traced, run = _run_with_dynamic_sizes(traced, values, asked, sure, dynamic, () if sure else lengths)
    full_formula = _formula_of(_own_symbols(traced, run, dynamic), run)
    example = {symbol: sympy.Integer(size) for symbol, size in traced.dynamic.example}

    def formula(value: Any) -> sympy.Expr:
        return full_formula(value).xreplace(example) if example else full_formula(value)

    # By id, since alike values are one object.
    shapes: dict[int, tuple[tuple[TensorShape, ...], tuple[TensorShape, ...] | None]] = {}
    for node, value in run.node_values.items():
        if id(value) not in shapes:
            full = _shapes_of(value, full_formula)
            is_dynamic = any(example.keys() & size.free_symbols for shape in full for size in shape.shape)
            shapes[id(value)] = (_shapes_of(value, formula), full) if is_dynamic else (full, None)
        known = info(node)
        number, is_data_dependent = known.number, known.is_data_dependent
        dynamic_number = None
        # What was read of a value is no size: it may be another one in each step, and is compared there.
        is_float = isinstance(value, (float, torch.SymFloat)) and node.target in SIZE_FUNCTIONS
        is_number = is_float or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool))
        if is_number and not known.is_compared_read:
            number, dynamic_number = formula(value), full_formula(value)
            dynamic_number = dynamic_number if example.keys() & dynamic_number.free_symbols else None
            sources = [source for source in node.all_input_nodes if info(source).is_data_dependent]
            is_data_dependent = bool(number.free_symbols - {traced.batch} or sources)
        elif not run.value_dependent_nodes.isdisjoint((node, container_of(node))):
            is_data_dependent = True
        known_shapes, dynamic_shapes = shapes[id(value)]
        update_info(
            node,
            known_shapes=known_shapes,
            dynamic_shapes=dynamic_shapes,
            number=number,
            dynamic_number=dynamic_number,
            is_float_number=is_float,
            is_data_dependent=is_data_dependent,
        )
    of_values = [read for read in traced.size_reads if _depends_on_values(traced, read)]
    of_batch = [read for read in traced.size_reads if not _depends_on_values(traced, read)]
    # A condition on dynamic sizes as well as on the batch size is one of `traced.dynamic`.
    of_batch = [read for read in of_batch if not _is_dynamic(run, full_formula, read, example.keys())]
    conditions = [read for r in of_batch if (read := _batch_condition(traced, r)) is not None]
    conditions += _assumed_conditions(traced, traced.batch_of(values))
    layouts = _layout_conditions(run, full_formula)
    conditions += [c for c in layouts if c.condition.free_symbols == {traced.batch}]
    for size_read in of_values:
        add_size_read(traced, size_read)
    if traced.recorded_sizes:
        conditions.append(_recorded_sizes_condition(traced))
    traced = replace(
        traced,
        size_reads=(),
        layout_reads=(),
        batch_conditions=tuple(conditions),
        mini_batch_conditions=fix_squeezes(traced, traced.batch_of(values)),
        not_followed=next((read.where for read in of_batch if _is_not_followed(read)), ""),
    )
    traced = _with_out_dims(traced, out_dims)
    traced = replace(traced, left_attribute_dims=_left_dims(traced), uneven_outputs=_uneven_outputs(traced))
    _fold_fixed_sizes(traced)
    return traced


def _shapes_of(value: Any, formula: Callable[[Any], sympy.Expr]) -> tuple[TensorShape, ...]:
    return tuple(TensorShape(tuple(map(formula, t.shape)), t.dtype) for t in tensors_in(value))


# -- dynamic sizes ---------------------------------------------------------------------------------------------------


def _run_with_dynamic_sizes(
    traced: Traced,
    values: Sequence[Any],
    candidates: list[int | None],
    sure: bool,
    dynamic: Mapping[InputDim, str],
    lengths: Collection[InputDim],
) -> tuple[Traced, SymbolicRun]:
    """Runs the graph on symbols; finds `in_dims`, and which dimensions can be dynamic.

    What the user says is dynamic and may hold the samples is held to do so first, and dynamic then, unless a dimension
    that cannot has the same name.
    """
    reasons: dict[InputDim, str] = {}
    may_hold = {(place, dim) for place, dim in enumerate(candidates) if dim is not None}
    names_of_others = set[str]() if sure else {name for key, name in dynamic.items() if key not in may_hold}
    lengths = {*lengths, *(key for key, name in dynamic.items() if key in may_hold and name in names_of_others)}
    of_samples = may_hold & dynamic.keys() - lengths
    while True:
        wanted = {*dynamic} - reasons.keys() - of_samples
        asked = [None if (p, dim) in wanted.intersection(lengths) else dim for p, dim in enumerate(candidates)]
        sizes = _batch_sizes(traced.leaves, asked)
        try:
            run = run_on_symbols(traced, values, asked, sure, sizes == {1}, wanted)
            if not run.is_free and 1 in sizes and sizes != {1} and not sure:
                # A dimension of size 1 beside larger ones is broadcast; but here the larger ones are no batch.
                with contextlib.suppress(TraceError):
                    second = run_on_symbols(traced, values, asked, sure, True, wanted)
                    run = second if second.is_free else run
            with_batch = replace(traced, in_dims=_find_batch(traced, asked, run, sure))
            others = {(place, dim) for place, dim in of_samples if with_batch.in_dims[place] != dim}
            if others:
                of_samples -= others
                lengths |= others
                continue
            symbols = _own_symbols(traced, run, dynamic)
            return replace(with_batch, dynamic=_dynamic_sizes(with_batch, run, values, symbols, reasons)), run
        except FixedSizeError as error:
            reasons |= dict.fromkeys(error.dims or wanted, str(error))


def _batch_symbols(run: SymbolicRun) -> set[Any]:
    return {s for symbol in run.symbols.values() for s in run.env.replace(symbol).free_symbols}


def _formula_of(names: Mapping[Any, sympy.Symbol], run: SymbolicRun) -> Callable[[Any], sympy.Expr]:
    """Returns the function that tells what a size is, in the batch size and the dynamic sizes."""

    def formula(value: Any) -> sympy.Expr:
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return run.env.replace(value.node.expr).xreplace(names)
        return _constant_formula(value)

    return formula


def _constant_formula(value: Any) -> sympy.Expr:
    return sympy.Float(value) if isinstance(value, float) else sympy.Integer(int(value))


def _own_symbols(traced: Traced, run: SymbolicRun, asked: Mapping[InputDim, str]) -> dict[Any, sympy.Symbol]:
    """Names torch's symbols anew: that of the batch, and those of dynamic sizes as `asked`."""
    names = dict.fromkeys(_batch_symbols(run), traced.batch)
    for dim, name in asked.items():
        size = run.env.replace(run.dynamic[dim]) if dim in run.dynamic else None
        if size is not None and size.is_Symbol and size not in names:
            names[size] = sympy.Symbol(name, integer=True, positive=True)
    return names


def _dynamic_symbols(run: SymbolicRun) -> dict[sympy.Symbol, InputDim]:
    """The symbols of sizes that can vary, and of which dimension each is the size.

    Raises:
        FixedSizeError: a size of a dynamic dimension is a number, or goes with the batch size.
    """
    symbols: dict[sympy.Symbol, InputDim] = {}
    sizes = {key: run.env.replace(symbol) for key, symbol in run.dynamic.items()}
    for key, size in sizes.items():
        if size.is_number:
            node = run.fixed_by.get(run.dynamic[key])
            where = f"{node.name} at {info(node).source}" if node is not None else "a function of torch"
            raise FixedSizeError(
                f"its size is fixed by {where}, where it meets a plain number (of a loop over positions, of a table)",
                frozenset({key}),
            )
        if size.free_symbols & _batch_symbols(run):
            raise FixedSizeError(f"its size goes with the batch size ({size})", frozenset({key}))
        if size.is_Symbol:
            symbols.setdefault(size, key)
    for key, size in sizes.items():
        if not size.free_symbols <= symbols.keys():
            raise FixedSizeError(f"its size goes with others ({size})", frozenset({key}))
    return symbols


def _dynamic_sizes(
    traced: Traced,
    run: SymbolicRun,
    values: Sequence[Any],
    names: Mapping[Any, sympy.Symbol],
    reasons: Mapping[InputDim, str],
) -> DynamicSizes:
    """The dynamic sizes of a graph, with all that was concluded from them.

    Raises:
        FixedSizeError: a size cannot be dynamic, or forward made a plain number of it.
    """
    free = _dynamic_symbols(run)
    if not free:
        return replace(FIXED_SIZES, fixed=dict(reasons))
    formula = _formula_of(names, run)
    symbols: dict[sympy.Symbol, InputDim] = {}
    for symbol, key in free.items():
        symbols.setdefault(names[symbol], key)  # those of one name are equal
    conditions = [SizeCondition(s >= 2, "torch, for which 0 and 1 are sizes of their own") for s in symbols]
    for read in traced.size_reads:
        is_of_values = any(isinstance(o, fx.Node) and o in run.value_dependent_nodes for o in read.operands)
        operands = list(map(formula, _operand_values(run, read)))
        met = {s for operand in operands for s in operand.free_symbols} & symbols.keys()
        if not met or is_of_values:
            continue
        if read.function not in SIZE_RELATIONS and read.function not in PIECES and read.function is not bool:
            dims = frozenset(symbols[s] for s in met)
            raise FixedSizeError(f"forward takes its size as a plain number at {read.where}", dims)
        conditions.append(SizeCondition(_relation(read, operands), read.where))
    _refuse_other_layouts(run, formula, symbols)
    conditions += [c for c in _layout_conditions(run, formula) if c.condition.free_symbols & symbols.keys()]
    for guard in run.guards:
        expression = run.env.replace(guard.condition).xreplace(names)
        if expression.free_symbols & symbols.keys():
            conditions.append(SizeCondition(expression, guard.where, is_of_torch=not guard.is_asked))
    formulas = {key: run.env.replace(symbol).xreplace(names) for key, symbol in run.dynamic.items()}
    example = tuple((s, values[place].shape[dim]) for s, (place, dim) in symbols.items())
    different = {condition.condition: condition for condition in reversed(conditions)}
    different.pop(sympy.true, None)
    is_observed = not run.observed_dims.isdisjoint(formulas)
    return DynamicSizes(formulas, symbols, example, tuple(reversed(different.values())), dict(reasons), is_observed)


def _layout_conditions(run: SymbolicRun, formula: Callable[[Any], sympy.Expr]) -> Iterator[SizeCondition]:
    """Yields what numbers say of sizes that forward was told about the layout of tensors (`x.storage_offset()`)."""
    for read, answer in run.layouts:
        for told, number in zip(pytree.tree_leaves(answer), pytree.tree_leaves(read.answer), strict=False):
            if type(number) is int:
                yield SizeCondition(sympy.Eq(formula(told), number), read.where)


def _refuse_other_layouts(
    run: SymbolicRun, formula: Callable[[Any], sympy.Expr], symbols: Mapping[sympy.Symbol, InputDim]
) -> None:
    """Raises where a fake tensor of dynamic sizes has another layout than forward has met."""
    for read, answer in run.layouts:
        fake = run.node_values[read.tensor]
        sizes = map(formula, (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else ())
        met = {s for size in sizes for s in size.free_symbols} & symbols.keys()
        is_same = type(answer) is not bool or answer == read.answer
        if met and not (is_same and answer is not None):
            raise FixedSizeError(
                f"forward goes by the layout of a tensor at {read.where}", frozenset(symbols[s] for s in met)
            )


def _is_dynamic(
    run: SymbolicRun, formula: Callable[[Any], sympy.Expr], read: SizeRead, symbols: Collection[sympy.Symbol]
) -> bool:
    """Returns whether a read is of a dynamic size."""
    operands = map(formula, _operand_values(run, read)) if symbols else ()
    return any(not operand.free_symbols.isdisjoint(symbols) for operand in operands)


def _operand_values(run: SymbolicRun, read: SizeRead) -> list[Any]:
    if read.function is length or read.function in PIECES:
        tensor, dim, *rest = read.operands
        sizes = [run.node_values[o] if isinstance(o, fx.Node) else o for o in rest]
        return [run.node_values[tensor].shape[dim], *sizes]  # type: ignore[index]
    return [run.node_values[o] if isinstance(o, fx.Node) else o for o in read.operands]


def _relation(read: SizeRead, operands: Sequence[sympy.Expr]) -> sympy.Basic:
    """Returns the condition that a comparison and its result, or how many pieces there are, put on the operands."""
    if read.function in PIECES:
        return sympy.Eq(PIECES[read.function](*operands), read.result)
    is_relation = read.function in SIZE_RELATIONS
    holds = SIZE_RELATIONS[read.function](*operands) if is_relation else sympy.Ne(operands[0], 0)
    return holds if read.result else sympy.Not(holds)


# -- inputs ----------------------------------------------------------------------------------------------------------


def candidate_dims(leaves: Sequence[InputLeaf], in_dims: Any) -> list[int | None]:
    """For each input leaf the dimension that may hold the batch: what `in_dims` says, else 0.

    What the user says holds the batch may have several rows for each sample (`BatchDim`).
    """
    heads = list(dict.fromkeys(leaf.head for leaf in leaves))
    if in_dims is None or isinstance(in_dims, int):
        by_head = {} if in_dims is None else dict.fromkeys(heads, in_dims)
    elif isinstance(in_dims, tuple) and len(in_dims) == len(heads):
        by_head = dict(zip(heads, in_dims, strict=True))
    elif isinstance(in_dims, dict) and set(in_dims) <= set(heads):
        by_head = in_dims
    else:
        raise ArgumentError(
            f"in_dims={in_dims!r} does not fit the inputs {heads}; give an int for all, a tuple with an entry (int "
            "or None) for each input, or a dict from input name to int or None"
        )
    dims: list[BatchDim | None] = []
    for leaf in leaves:
        dim = by_head.get(leaf.head, 0 if leaf.shape else None) if leaf.is_tensor else None
        if dim is not None and not -len(leaf.shape) <= dim < len(leaf.shape):
            raise ArgumentError(
                f"in_dims gives dimension {dim} for input {leaf.path}, which has shape {leaf.shape}; use None for it"
            )
        dims.append(dim if dim is None else BatchDim(dim % len(leaf.shape)))
    return [*dims] if in_dims is None else _with_rows(leaves, dims)


def _batch_sizes(leaves: Sequence[InputLeaf], dims: Sequence[int | None]) -> set[int]:
    """The numbers of samples of inputs, which hold them in these dimensions."""
    return {leaf.shape[dim] // rows_per_sample(dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}


def _with_rows(leaves: Sequence[InputLeaf], dims: Sequence[BatchDim | None]) -> list[int | None]:
    """Finds how many rows each sample has in inputs that the user says hold the batch: the smallest one has one.

    Raises:
        ArgumentError: their number is not whole.
    """
    sizes = {leaf.path: leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    batch = min(sizes.values(), default=0)
    if batch == 0:
        return [*dims]
    smallest = next(path for path, size in sizes.items() if size == batch)
    for path, size in sizes.items():
        if size % batch:
            raise ArgumentError(
                f"in_dims says that {path} holds the batch, but its {size} rows are no whole number for each of the "
                f"{batch} samples of {smallest}; give each sample as many rows, or None in in_dims for an input "
                "without a batch"
            )
    return [
        None if dim is None else BatchDim(dim, leaf.shape[dim] // batch) for leaf, dim in zip(leaves, dims, strict=True)
    ]


def _find_batch(traced: Traced, asked: Sequence[int | None], run: SymbolicRun, sure: bool) -> tuple[int | None, ...]:
    """Finds which inputs hold the batch: of each the dimension, or None.

    Raises:
        ArgumentError: none does, or they disagree on its size.
    """
    symbols, fixed_by, env = run.symbols, run.fixed_by, run.env
    free = {place: size for place, s in symbols.items() if (size := env.replace(s)).free_symbols}
    if not free or (sure and len(free) < len(symbols)):
        lines = [
            f"{traced.leaves[place].path} (size {traced.leaves[place].shape[asked[place]]}, fixed by "  # type: ignore[index]
            f"{fixed_by[s].name} at {info(fixed_by[s]).source})"
            for place, s in symbols.items()
            if s in fixed_by
        ]
        if lines:
            raise ArgumentError(
                "the batch size cannot vary: " + "; ".join(lines) + "; let forward take the size from its input "
                "(x.shape[0]), or name another batch dimension with in_dims"
            )
    common_batch_size(
        [(traced.leaves[p].path, traced.leaves[p].shape[asked[p]] // rows_per_sample(asked[p])) for p in free]  # type: ignore[index]
    )
    return tuple(asked[place] if place in free else None for place in range(len(traced.leaves)))


def _operand_sizes(read: SizeRead) -> list[sympy.Expr]:
    if read.function is length or read.function in PIECES:
        tensor, dim, *rest = read.operands
        sizes = [number_of(o) if isinstance(o, fx.Node) else _constant_formula(o) for o in rest]
        return [info(tensor).shapes[0].shape[dim], *sizes]  # type: ignore[arg-type,index]
    return [number_of(o) if isinstance(o, fx.Node) else _constant_formula(o) for o in read.operands]


def _depends_on_values(traced: Traced, read: SizeRead) -> bool:
    is_of_node = any(isinstance(o, fx.Node) and info(o).is_data_dependent for o in read.operands)
    return is_of_node or any(number.free_symbols - {traced.batch} for number in _operand_sizes(read))


def add_size_read(traced: Traced, read: SizeRead) -> None:
    """Adds a node that reads a size that depends on the values of tensors: it is a value like any other (`guards`)."""
    nodes = {o for o in read.operands if isinstance(o, fx.Node)}
    last = next(node for node in reversed(traced.graph.nodes) if node in nodes)
    name = f"{last.name}_{read.function.__name__}"
    with traced.graph.inserting_after(last):
        node = traced.graph.create_node("call_function", read.function, read.operands, name=name)
    known = info(last).beside(
        source=read.where,
        module=read.module,
        recorded_at=replace(info(last).recorded_at, calls=read.calls),
        read=ValueRead(read.result, read.function.__name__, is_size=True),
        known_shapes=(),
    )
    set_info(node, known)


def _is_not_followed(read: SizeRead) -> bool:
    return read.function in NOT_FOLLOWED and any(o.free_symbols for o in _operand_sizes(read))


def _batch_condition(traced: Traced, read: SizeRead) -> SizeCondition | None:
    """Returns the condition that a read of a size puts on the batch size, where it depends on the batch.

    Raises:
        TraceError: it went on computing with it.
    """
    operands = _operand_sizes(read)
    if not any(o.free_symbols for o in operands):
        return None
    if read.function in NOT_FOLLOWED:
        return None  # what became of it shows at other sizes
    if read.function in SIZE_RELATIONS or read.function is bool:
        condition = _relation(read, operands)
        if not (condition.is_Relational and condition.lhs == traced.batch and condition.rhs.is_number):
            condition = sympy.simplify(condition)  # which takes long, the first time most of all
        return None if condition == sympy.true else SizeCondition(condition, read.where)
    if traced.recorded_sizes:
        return None  # what it computed is in the graph
    raise TraceError(
        f"the model computes with the batch size in plain Python at {read.where} ({read.function.__name__}); in a "
        "micro-batch the result would be another one: keep the size a size (x / x.shape[0]), or use a tensor function "
        "(x.mean())"
    )


def _assumed_conditions(traced: Traced, batch: int) -> Iterator[SizeCondition]:
    """Yields the conditions that were assumed of sizes, where they turn out to be that of the batch."""

    def size(place: int) -> Any:
        leaf, dim = traced.leaves[place], traced.in_dims[place]
        return traced.batch * rows_per_sample(dim) if dim is not None else leaf.shape[asked[place] or 0]

    asked = candidate_dims(traced.leaves, None)
    for condition, places in traced.size_assumptions:
        if all(traced.in_dims[place] is None for place in places.values()):
            continue
        assumed = condition.subs({symbol: size(place) for symbol, place in places.items()})
        if assumed != sympy.true:
            read = SizeCondition(
                assumed, f"somewhere in {type(traced.model).__name__}.forward, as {traced.tracer!r} saw it"
            )
            # Of a single sample export has seen two.
            yield read if read.holds(batch) else replace(read, condition=sympy.Eq(traced.batch, batch))


def _recorded_sizes_condition(traced: Traced) -> SizeCondition:
    """A graph with numbers computed from the batch size holds where it was recorded.

    Raises:
        TraceError: some size depends on values; so may have what was taken for a number in the batch size.
    """
    for node in traced.graph.nodes:
        sizes = [size for shape in info(node).shapes for size in shape.shape]
        if any(size.free_symbols - {traced.batch} for size in sizes):
            raise TraceError(
                f"the model computes with sizes in plain Python, and {node.name}, made at {info(node).source}, has a "
                "size that depends on the values of tensors: which numbers come from which cannot be told; use "
                "functions with fixed sizes (torch.where, masks), or keep sizes sizes (x.shape[0], not len(x))"
            )
    first = next(node for node in traced.graph.nodes if node.op in CALL_OPS)
    return SizeCondition(sympy.Or(*(sympy.Eq(traced.batch, s) for s in traced.recorded_sizes)), info(first).source)


# -- outputs ---------------------------------------------------------------------------------------------------------


def batch_dependent_nodes(traced: Traced) -> set[fx.Node]:
    """Nodes whose values depend on a batched input by more than fixed sizes, also where it was written to them."""
    dependent = {node for place, node in traced.placeholders.items() if traced.in_dims[place] is not None}
    written = set[Any]()  # storages
    for node in traced.graph.nodes:
        if node.op not in CALL_OPS:
            continue
        sources = node.all_input_nodes
        if any(n in dependent or not written.isdisjoint(info(n).storages) for n in sources):
            number = info(node).number
            if number is None or number.free_symbols:
                dependent.add(node)
                written |= info(node).written_storages
    return dependent


def _with_out_dims(traced: Traced, out_dims: Any) -> Traced:
    """Finds how the outputs of micro-batches go together."""
    asked: Any = None
    is_for_rest = isinstance(out_dims, str) and out_dims in ("mean", "sum")  # of outputs that hold samples nobody asks
    if out_dims is not None:
        try:
            asked = broadcast_prefix(out_dims, traced.out_spec)
        except StructureError as error:
            raise ArgumentError(
                f"out_dims={out_dims!r} does not fit the output, which has {len(traced.outputs)} leaves: {error}"
            ) from error
    walk = ReductionWalk(traced, batch_dependent_nodes(traced))
    dependent = walk.batch_dependent
    hows: list[int | str | None] = []
    combinations: list[OutputCombination] = []
    untold: list[UndeterminedOutput] = []
    for place, output in enumerate(traced.outputs):
        if not isinstance(output, fx.Node):
            hows.append(None)
            continue
        is_given = asked is not None and asked[place] is not UNNAMED
        if is_given and not (is_for_rest and (output not in dependent or _batch_dim(traced, output) is not None)):
            hows.append(_checked_out_dim(output, asked[place]))
        elif output not in dependent:
            hows.append(None)
        else:
            how = _out_dim(traced, output, place, walk)
            if isinstance(how, OutputCombination):
                combinations.append(how)
                how = "combined"
            elif isinstance(how, UndeterminedOutput):
                untold.append(how)
                how = "mean"
            hows.append(how)
    return replace(
        traced,
        out_dims=tuple(hows),
        combinations=tuple(combinations),
        piece_dims=walk.finish(),
        told=frozenset(place for place, dim in enumerate(asked or ()) if dim is not UNNAMED),
        untold=tuple(untold),
    )


def _left_dims(traced: Traced) -> dict[str, int | str]:
    """Finds, of attributes that forward sets and does not read, the dimension that holds samples.

    What requires grad is part of the caller's graph afterwards; so it must go together as outputs do.

    Raises:
        CannotRecord: it does not.
    """
    read = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    dependent = batch_dependent_nodes(traced)
    dims: dict[str, int | str] = {}
    for name, node in traced.assigned.items():
        if name in read or not isinstance(node, fx.Node) or node.op == "get_attr":
            continue
        dim = _batch_dim(traced, node) if node in dependent else None
        if dim is not None:
            dims[name] = dim
        elif name in traced.tied and not _sizes_of(node):
            dims[name] = "mean"
        elif name in traced.tied:
            raise CannotRecord(
                f"forward sets {name!r} to a tensor that requires grad and has no dimension for the samples, at "
                f"{info(node).source}; detach it, or let forward return it",
                is_final=True,
            )
    return dims


def _sizes_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """The sizes of a tensor; none for anything else."""
    shapes = info(node).shapes
    return shapes[0].shape if len(shapes) == 1 else ()


def _batch_dim(traced: Traced, node: fx.Node) -> int | None:
    """The one dimension that holds the batch, and nothing else of unknown size."""
    sizes = _sizes_of(node)
    holding = [d for d, size in enumerate(sizes) if traced.batch in size.free_symbols]
    return holding[0] if len(holding) == 1 and sizes[holding[0]].free_symbols == {traced.batch} else None


def _checked_out_dim(output: fx.Node, dim: Any) -> int | str | None:
    shape = info(output).shapes[0].shape if info(output).shapes else ()
    if dim is None or dim in OUT_DIM_REDUCTIONS or (type(dim) is int and -len(shape) <= dim < len(shape)):
        return dim % len(shape) if type(dim) is int else dim
    raise ArgumentError(
        f"out_dims gives {dim!r} for the output {output.name} of shape {list(shape)}; accepted are a dimension, None, "
        f"{', '.join(map(repr, OUT_DIM_REDUCTIONS))}"
    )


def _uneven_outputs(traced: Traced) -> tuple[tuple[str, sympy.Expr], ...]:
    """Outputs of which so many samples more are not as many rows more each time."""
    uneven = []
    for place, (output, dim) in enumerate(zip(traced.outputs, traced.out_dims, strict=True)):
        if isinstance(output, fx.Node) and isinstance(dim, int) and place not in traced.told:
            rows = info(output).shapes[0].shape[dim]
            if sympy.cancel(rows / traced.batch).free_symbols:
                uneven.append((output.name, rows))
    return tuple(uneven)


def _out_dim(
    traced: Traced, output: fx.Node, place: int, walk: ReductionWalk
) -> int | str | OutputCombination | UndeterminedOutput:
    if (dim := _batch_dim(traced, output)) is not None:
        return dim
    shapes = info(output).shapes
    number = info(output).number
    if number is not None and not sympy.cancel(number / traced.batch).free_symbols:
        return "sum"  # as many times the samples: each micro-batch has its share
    try:
        return walk.combination(output, place)
    except UnknownReductionError as unknown:
        told = str(unknown)
    if len(shapes) == 1 and not shapes[0].shape and shapes[0].dtype.is_floating_point:
        return UndeterminedOutput(place, f"output {place} ({output.name}) is made of {told}")
    what = str(shapes[0]) if shapes else "a number"
    if any(size.free_symbols - {traced.batch} for size in _sizes_of(output)):
        why = "has a size that depends on values"
    elif any(size.free_symbols for size in _sizes_of(output)):
        why = "holds the batch in several dimensions"
    else:
        why = "depends on the batch but has no dimension for it"
        example = _batch_sizes(traced.leaves, traced.in_dims)
        if example & {int(s) for shape in shapes for s in shape.shape if s != 1}:
            why += " (forward may have taken its size in plain Python: range(len(x)), int(x.shape[0]))"
    raise ArgumentError(
        f"output {place} ({output.name}, {what}, made at {info(output).source or 'the input'}) {why}, so the "
        "outputs of micro-batches cannot be put together; say how with out_dims: a dimension, None (the same for "
        "all), 'mean', 'sum' or 'stack'"
    )


def _fold_fixed_sizes(traced: Traced) -> None:
    """Numbers that are the same for every batch size become constants, and their nodes go."""
    for node in reversed(list(traced.graph.nodes)):
        number = info(node).number
        if node.op not in CALL_OPS or number is None or number.free_symbols or info(node).is_data_dependent:
            continue
        if info(node).dynamic_number is not None:
            continue
        for user in list(node.users):
            user.args, user.kwargs = _with_constant((user.args, user.kwargs), node, constant_of(node, number))
        traced.graph.erase_node(node)


def _with_constant(arguments: Any, node: fx.Node, value: int | float) -> Any:
    return fx.map_arg(arguments, lambda n: value if n is node else n)
