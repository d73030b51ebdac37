"""Symbolic shapes: the batch dimension of each value, and every size as a formula in the batch size `b`.

The graph runs once on fake tensors whose batch dimensions are symbols, one for each input (`symbolic_run`). Operations
unify the symbols of inputs that meet; a symbol that meets a fixed size becomes that number: a mask of shape [T, T] has
no batch, even if T equals the batch size of the example. The remaining free symbol is the batch.

Sizes of dynamic dimensions are symbols, too. Shapes contain the recorded sizes instead; the symbols and their
conditions are in `Traced.dynamic`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.dynamic_sizes import FIXED_SIZES, DynamicSizes, FixedSizeError, InputDim, SizeCondition
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.node_info import TensorShape, constant_of, info, update_info
from fxpipe.tracing.record.recorded_sizes import PIECES, SIZE_FUNCTIONS, SizeRead, length
from fxpipe.tracing.shapes.input_dims import batch_sizes, candidate_dims
from fxpipe.tracing.shapes.output_dims import left_dims, uneven_outputs, with_out_dims
from fxpipe.tracing.shapes.size_reads import (
    SIZE_RELATIONS,
    add_size_read,
    batch_condition,
    constant_formula,
    depends_on_values,
    fix_squeezes,
    is_not_followed,
    recorded_sizes_condition,
    relation,
)
from fxpipe.tracing.shapes.symbolic_run import SymbolicRun, run_on_symbols
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import CALL_OPS, Traced, common_batch_size
from fxpipe.utils.batch_split import rows_per_sample


def add_shapes(
    traced: Traced,
    values: Sequence[Any],
    in_dims: Any = None,
    out_dims: Any = None,
    dynamic: Mapping[InputDim, str] = MappingProxyType({}),
    lengths: Collection[InputDim] = (),
) -> Traced:
    """Finds the batch in `traced`, recorded on `values`, and the shapes of its nodes (`NodeInfo`).

    Fixed sizes become constants of the graph.

    Args:
        dynamic: dimensions to keep dynamic if possible, with the names of their sizes.
        lengths: dimensions among them that another graph has shown to hold no samples (a mask of shape [T, T]).

    Raises:
        ArgumentError: there is no batch, inputs disagree on it, or an output needs `out_dims`.
        TraceError: forward computes with the batch size in plain Python.
    """
    asked, sure = candidate_dims(traced.leaves, in_dims), in_dims is not None
    sizes = batch_sizes(traced.leaves, asked)
    if 0 in sizes:
        raise ArgumentError("the inputs hold no samples (size 0 in the batch dimension); give at least one")
    traced, run = _run_with_dynamic_sizes(traced, values, asked, sure, dynamic, () if sure else lengths)
    full_formula = _formula_of(_own_symbols(traced, run, dynamic), run)
    example = {symbol: sympy.Integer(size) for symbol, size in traced.dynamic.example}

    def formula(value: Any) -> sympy.Expr:
        return full_formula(value).xreplace(example) if example else full_formula(value)

    # By id, since equal values are one object.
    shapes: dict[int, tuple[tuple[TensorShape, ...], tuple[TensorShape, ...] | None]] = {}
    for node, value in run.node_values.items():
        if id(value) not in shapes:
            full = _shapes_of(value, full_formula)
            is_dynamic = any(example.keys() & size.free_symbols for shape in full for size in shape.shape)
            shapes[id(value)] = (_shapes_of(value, formula), full) if is_dynamic else (full, None)
        known = info(node)
        number, is_data_dependent = known.number, known.is_data_dependent
        dynamic_number = None
        # A number read from a value is not a size: each step reads it again and compares.
        is_float = isinstance(value, (float, torch.SymFloat)) and node.target in SIZE_FUNCTIONS
        is_number = is_float or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool))
        if is_number and not known.is_compared_read:
            number, dynamic_number = formula(value), full_formula(value)
            dynamic_number = dynamic_number if example.keys() & dynamic_number.free_symbols else None
            sources = [source for source in node.all_input_nodes if info(source).is_data_dependent]
            is_data_dependent = bool(number.free_symbols - {traced.batch} or sources)
        elif not run.known.value_dependent_nodes.isdisjoint((node, container_of(node))):
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
    of_values = [read for read in traced.size_reads if depends_on_values(traced, read)]
    of_batch = [read for read in traced.size_reads if not depends_on_values(traced, read)]
    # A condition on dynamic sizes as well as on the batch size belongs to `traced.dynamic`.
    of_batch = [read for read in of_batch if example.keys().isdisjoint(_symbols_of(run, full_formula, read))]
    conditions = [read for r in of_batch if (read := batch_condition(traced, r)) is not None]
    if traced.is_for_one_size and (run.known.fixing or not traced.is_recorded):
        unknown = f"somewhere in {type(traced.model).__name__}.forward, as {traced.tracer!r} saw it"
        where = next((info(node).source for node in run.known.fixing), unknown)
        conditions.append(SizeCondition(sympy.Eq(traced.batch, traced.batch_of(values)), where))
    layouts = _layout_conditions(run, full_formula)
    conditions += [c for c in layouts if c.condition.free_symbols == {traced.batch}]
    for size_read in of_values:
        add_size_read(traced, size_read)
    if traced.recorded_sizes:
        conditions.append(recorded_sizes_condition(traced))
    traced = replace(
        traced,
        size_reads=(),
        layout_reads=(),
        batch_conditions=tuple(conditions),
        mini_batch_conditions=fix_squeezes(traced, traced.batch_of(values)),
        not_followed=next((read.where for read in of_batch if is_not_followed(read)), ""),
    )
    traced = with_out_dims(traced, out_dims)
    if not (sure or traced.is_whole or any(how is not None for how in traced.out_dims)):
        _refuse_fixed_batch(traced, asked, run)  # each micro-batch would compute the mini-batch
    traced = replace(traced, left_attribute_dims=left_dims(traced), uneven_outputs=uneven_outputs(traced))
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
    """Runs the graph on symbols; finds `in_dims` and the dimensions that can be dynamic.

    A dimension in `dynamic` that may hold the samples is first tried as batch, unless another has the same name.
    """
    reasons: dict[InputDim, str] = {}
    may_hold = {(place, dim) for place, dim in enumerate(candidates) if dim is not None}
    names_of_others = set[str]() if sure else {name for key, name in dynamic.items() if key not in may_hold}
    lengths = {*lengths, *(key for key, name in dynamic.items() if key in may_hold and name in names_of_others)}
    of_samples = may_hold & dynamic.keys() - lengths
    while True:
        wanted = {*dynamic} - reasons.keys() - of_samples
        asked = [None if (p, dim) in wanted.intersection(lengths) else dim for p, dim in enumerate(candidates)]
        sizes = batch_sizes(traced.leaves, asked)
        try:
            run = run_on_symbols(traced, values, asked, sure, sizes == {1}, wanted)
            if not run.is_free and 1 in sizes and sizes != {1} and not sure:
                # A dimension of size 1 is broadcast against larger ones, unless the larger ones are not a batch.
                with contextlib.suppress(TraceError):
                    second = run_on_symbols(traced, values, asked, sure, True, wanted)
                    run = second if second.is_free else run
            try:
                with_batch = replace(traced, in_dims=_find_batch(traced, asked, run, sure))
            except ArgumentError:
                if not traced.is_whole:
                    raise
                candidates, of_samples = [None] * len(candidates), set()
                continue
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
    """Returns the function from a size to its formula in the batch size and the dynamic sizes."""

    def formula(value: Any) -> sympy.Expr:
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return run.env.replace(value.node.expr).xreplace(names)
        return constant_formula(value)

    return formula


def _own_symbols(traced: Traced, run: SymbolicRun, asked: Mapping[InputDim, str]) -> dict[Any, sympy.Symbol]:
    """Maps torch's symbols to ours: the batch symbol, and symbols named as in `asked` for dynamic sizes."""
    names = dict.fromkeys(_batch_symbols(run), traced.batch)
    for dim, name in asked.items():
        size = run.env.replace(run.dynamic[dim]) if dim in run.dynamic else None
        if size is not None and size.is_Symbol and size not in names:
            names[size] = sympy.Symbol(name, integer=True, positive=True)
    return names


def _dynamic_symbols(run: SymbolicRun) -> dict[sympy.Symbol, InputDim]:
    """Returns the symbols of sizes that can vary, each with a dimension. Raises `FixedSizeError`."""
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
    """Returns the dynamic sizes of a graph, with all conditions on them. Raises `FixedSizeError`."""
    free = _dynamic_symbols(run)
    if not free:
        return replace(FIXED_SIZES, fixed=dict(reasons))
    formula = _formula_of(names, run)
    symbols: dict[sympy.Symbol, InputDim] = {}
    for symbol, key in free.items():
        symbols.setdefault(names[symbol], key)  # sizes with one name are equal
    conditions = [SizeCondition(s >= 2, "torch, for which 0 and 1 are sizes of their own") for s in symbols]
    for read in traced.size_reads:
        is_of_values = any(isinstance(o, fx.Node) and o in run.known.value_dependent_nodes for o in read.operands)
        met = _symbols_of(run, formula, read) & symbols.keys()
        if not met or is_of_values:
            continue
        if read.function not in SIZE_RELATIONS and read.function not in PIECES and read.function is not bool:
            dims = frozenset(symbols[s] for s in met)
            raise FixedSizeError(f"forward takes its size as a plain number at {read.where}", dims)
        conditions.append(SizeCondition(relation(read, [*map(formula, _operand_values(run, read))]), read.where))
    _refuse_other_layouts(run, formula, symbols)
    conditions += [c for c in _layout_conditions(run, formula) if c.condition.free_symbols & symbols.keys()]
    for guard in run.guards:
        expression = run.env.replace(guard.condition).xreplace(names)
        if expression.free_symbols & symbols.keys():
            conditions.append(replace(guard, condition=expression))
    formulas = {key: run.env.replace(symbol).xreplace(names) for key, symbol in run.dynamic.items()}
    example = tuple((s, values[place].shape[dim]) for s, (place, dim) in symbols.items())
    different = {condition.condition: condition for condition in reversed(conditions)}
    different.pop(sympy.true, None)
    is_observed = not run.observed_dims.isdisjoint(formulas)
    return DynamicSizes(formulas, symbols, example, tuple(reversed(different.values())), dict(reasons), is_observed)


def _layout_conditions(run: SymbolicRun, formula: Callable[[Any], sympy.Expr]) -> Iterator[SizeCondition]:
    """Yields conditions on sizes from the layout of tensors that forward read as numbers (`x.storage_offset()`)."""
    for read, answer in run.layouts:
        for told, number in zip(pytree.tree_leaves(answer), pytree.tree_leaves(read.answer), strict=False):
            if type(number) is int:
                yield SizeCondition(sympy.Eq(formula(told), number), read.where)


def _refuse_other_layouts(
    run: SymbolicRun, formula: Callable[[Any], sympy.Expr], symbols: Mapping[sympy.Symbol, InputDim]
) -> None:
    """Raises if forward read the layout of a tensor that differs for dynamic sizes."""
    for read, answer in run.layouts:
        fake = run.node_values[read.tensor]
        sizes = map(formula, (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else ())
        met = {s for size in sizes for s in size.free_symbols} & symbols.keys()
        is_same = type(answer) is not bool or answer == read.answer
        if met and not (is_same and answer is not None):
            raise FixedSizeError(
                f"forward goes by the layout of a tensor at {read.where}", frozenset(symbols[s] for s in met)
            )


def _symbols_of(run: SymbolicRun, formula: Callable[[Any], sympy.Expr], read: SizeRead) -> set[sympy.Symbol]:
    return {symbol for size in map(formula, _operand_values(run, read)) for symbol in size.free_symbols}


def _operand_values(run: SymbolicRun, read: SizeRead) -> list[Any]:
    if read.function is length or read.function in PIECES:
        tensor, dim, *rest = read.operands
        sizes = [run.node_values[o] if isinstance(o, fx.Node) else o for o in rest]
        return [run.node_values[tensor].shape[dim], *sizes]  # type: ignore[index]
    return [run.node_values[o] if isinstance(o, fx.Node) else o for o in read.operands]


def _find_batch(traced: Traced, asked: Sequence[int | None], run: SymbolicRun, sure: bool) -> tuple[int | None, ...]:
    """Returns the batch dimension of each input, or None. Raises `ArgumentError` if there is no batch."""
    if traced.is_whole and not run.symbols:
        return (None,) * len(traced.leaves)
    free = {place for place, s in run.symbols.items() if run.env.replace(s).free_symbols}
    if not free or (sure and len(free) < len(run.symbols)):
        _refuse_fixed_batch(traced, asked, run)
    common_batch_size(
        [(traced.leaves[p].path, traced.leaves[p].shape[asked[p]] // rows_per_sample(asked[p])) for p in free]  # type: ignore[index]
    )
    return tuple(asked[place] if place in free else None for place in range(len(traced.leaves)))


def _refuse_fixed_batch(traced: Traced, asked: Sequence[int | None], run: SymbolicRun) -> None:
    """Raises `ArgumentError` if a node fixed a size that may be the number of samples."""
    lines = [
        f"{traced.leaves[place].path} (size {traced.leaves[place].shape[asked[place]]}, fixed by "  # type: ignore[index]
        f"{run.fixed_by[s].name} at {info(run.fixed_by[s]).source})"
        for place, s in run.symbols.items()
        if s in run.fixed_by
    ]
    if lines:
        raise ArgumentError(
            "the batch size cannot vary: " + "; ".join(lines) + "; let forward take the size from its input "
            "(x.shape[0]), or name another batch dimension with in_dims"
        )


def _fold_fixed_sizes(traced: Traced) -> None:
    """Replaces numbers that do not depend on the batch size with constants, and erases their nodes."""
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
