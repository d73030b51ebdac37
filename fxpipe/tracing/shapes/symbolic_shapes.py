"""Symbolic shapes: the batch dimension of each value, and every size as a formula in the batch size `b`.

The graph runs once on fake tensors whose batch dimensions are symbols, one for each input (`symbolic_run`). Operations
unify the symbols of inputs that meet; a symbol that meets a fixed size becomes that number: a mask of shape [T, T] has
no batch, even if T equals the batch size of the example. The remaining free symbol is the batch. Sizes of dynamic
dimensions are symbols, too; shapes contain the recorded sizes instead (`Traced.dynamic`).

A read of a size in plain Python is a condition: a comparison with its result, or a number of pieces. A size that
depends on the values of tensors is a value, which each step reads.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.fake_tensor_mode import first_expression
from fxpipe._torch.operators import OpOverload
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.dynamic_sizes import FIXED_SIZES, DynamicSizes, FixedSizeError, InputDim, SizeCondition
from fxpipe.tracing.node_info import TensorShape, ValueRead, constant_of, container_of, info, set_info, update_info
from fxpipe.tracing.record.joined_pieces import has_rows
from fxpipe.tracing.record.recorded_sizes import NOT_FOLLOWED, PIECES, SIZE_FUNCTIONS, SizeRead, length
from fxpipe.tracing.shapes.output_dims import left_dims, uneven_outputs, with_out_dims
from fxpipe.tracing.shapes.symbolic_run import SymbolicRun, run_on_symbols, unbacked_sizes
from fxpipe.tracing.source_lines import is_line_of_check
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import CALL_OPS, Traced, batch_sizes, candidate_dims, common_batch_size
from fxpipe.utils.batch_split import rows_per_sample

SIZE_RELATIONS = {
    operator.eq: sympy.Eq,
    operator.ne: sympy.Ne,
    operator.lt: sympy.Lt,
    operator.le: sympy.Le,
    operator.gt: sympy.Gt,
    operator.ge: sympy.Ge,
}
_ATEN = torch.ops.aten.squeeze
_SQUEEZES = ("squeeze", torch.squeeze, _ATEN.default, _ATEN.dim, _ATEN.dims)


def add_shapes(
    traced: Traced,
    values: Sequence[Any],
    in_dims: Any = None,
    out_dims: Any = None,
    dynamic: Mapping[InputDim, str] = MappingProxyType({}),
    lengths: Collection[InputDim] = (),
) -> Traced:
    """Finds the batch in `traced`, recorded on `values`, and the shapes of its nodes (`NodeInfo`).

    Fixed sizes become constants of the graph. Raises `ArgumentError` if there is no batch, inputs disagree on it, or an
    output needs `out_dims`; `TraceError` if forward computes with the batch size in plain Python.

    Args:
        dynamic: dimensions to keep dynamic if possible, with the names of their sizes.
        lengths: dimensions among them that another graph has shown to hold no samples (a mask of shape [T, T]).
    """
    asked, sure = candidate_dims(traced.leaves, in_dims), in_dims is not None
    sizes = batch_sizes(traced.leaves, asked)
    if 0 in sizes:
        raise ArgumentError("the inputs hold no samples (size 0 in the batch dimension); give at least one")
    traced, run, formula = _run_with_dynamic_sizes(traced, values, asked, sure, dynamic, () if sure else lengths)
    example = {symbol: sympy.Integer(size) for symbol, size in traced.dynamic.example}
    # With recorded sizes, and with symbols if these differ. By id, since equal values are one object.
    shapes: dict[int, tuple[tuple[TensorShape, ...], tuple[TensorShape, ...] | None]] = {}
    cut = set[fx.Node]()  # a value that forward read has set their sizes: numbers here, others for other values
    for node, value in run.node_values.items():
        if id(value) not in shapes:
            full = tuple(TensorShape(tuple(map(formula, t.shape)), t.dtype) for t in tensors_in(value))
            fixed = tuple(TensorShape(tuple(s.xreplace(example) for s in one.shape), one.dtype) for one in full)
            shapes[id(value)] = fixed, full if full != fixed else None
        is_float = isinstance(value, (float, torch.SymFloat)) and node.target in SIZE_FUNCTIONS
        is_number = is_float or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool))
        known_shapes, dynamic_shapes = shapes[id(value)]
        update_info(node, known_shapes=known_shapes, dynamic_shapes=dynamic_shapes, is_float_number=is_float)
        sources = cut.intersection(node.all_input_nodes)
        # A number read from a value is not a size: each step reads it again and compares.
        if is_number and not info(node).is_compared_read:
            full_number = formula(value)
            number = full_number.xreplace(example)
            if (sources and not number.free_symbols) or any(info(source).number is not None for source in sources):
                cut.add(node)
            is_data_dependent = node in cut or bool(number.free_symbols - {traced.batch})
            # An index may have told torch that such a size is the largest that it can be: in this recording.
            is_data_dependent |= isinstance(value, torch.SymInt) and bool(unbacked_sizes(first_expression(value)))
            dynamic_number = None if number == full_number else full_number
            update_info(node, number=number, dynamic_number=dynamic_number, is_data_dependent=is_data_dependent)
        elif sources or not run.known.value_dependent_nodes.isdisjoint((node, container_of(node))):
            cut.add(node)
            update_info(node, is_data_dependent=True)
    _count_first_rows(traced)
    of_values: list[SizeRead] = []
    conditions: list[SizeCondition] = []
    not_followed = ""
    for read in traced.size_reads:
        full_operands = _operands(run, formula, read)
        operands = [size.xreplace(example) for size in full_operands]
        is_of_node = any(isinstance(o, fx.Node) and info(o).is_data_dependent for o in read.operands)
        if is_of_node or any(number.free_symbols - {traced.batch} for number in operands):
            of_values += [] if read.function is str else [read]  # `other_sizes` finds what a text decides
        # A condition on dynamic sizes as well as on the batch size belongs to `traced.dynamic`.
        elif operands == full_operands and _symbols_in(operands):
            if condition := batch_condition(traced, read, operands):
                conditions.append(condition)
            not_followed = not_followed or (read.where if read.function in NOT_FOLLOWED else "")
    if traced.is_for_one_size and run.known.fixing:
        where = next(info(node).source for node in run.known.fixing)
        conditions.append(SizeCondition(sympy.Eq(traced.batch, traced.batch_of(values)), where))
    conditions += [c for c in _layout_conditions(run, formula) if c.condition.free_symbols == {traced.batch}]
    for read in of_values:
        add_size_read(traced, read)
    if traced.recorded_sizes:
        conditions.append(_recorded_sizes_condition(traced))
    traced = replace(
        traced,
        size_reads=(),
        layout_reads=(),
        batch_conditions=tuple(conditions),
        mini_batch_conditions=fix_squeezes(traced, traced.batch_of(values)),
        not_followed=not_followed,
    )
    traced = with_out_dims(traced, out_dims)
    if not (sure or traced.is_whole or any(how is not None for how in traced.out_dims)):
        _refuse_fixed_batch(traced, asked, run)  # each micro-batch would compute the mini-batch
    traced = replace(traced, left_attribute_dims=left_dims(traced), uneven_outputs=uneven_outputs(traced))
    _fold_fixed_sizes(traced)
    return traced


def _count_first_rows(traced: Traced) -> None:
    """Lets a guard on a number of selected rows count them where they are selected, before parameters see them."""
    containers = {*map(container_of, traced.graph.nodes)}
    for read in [n for n in traced.graph.nodes if n.target is has_rows]:
        size: Any = read.args[0]
        factor, symbol = sympy.sympify(info(size).dynamic_number or info(size).number).as_coeff_Mul()
        firsts = [n for n in traced.graph.nodes if n not in containers for s in info(n).shapes if symbol in s.shape]
        if info(size).is_data_dependent and symbol.is_Symbol and firsts:
            size.args = (first := firsts[0]), info(first).shapes[0].shape.index(symbol)
            read.args = size, int(read.args[1] // factor)
            first.append(size)
            masks = [n for n in first.all_input_nodes[1:] for s in info(n).shapes if s.dtype == torch.bool]
            if first.target == "__getitem__" and masks:
                size.target, size.args = "count_nonzero", (masks[0],)


def _run_with_dynamic_sizes(
    traced: Traced,
    values: Sequence[Any],
    candidates: list[int | None],
    sure: bool,
    dynamic: Mapping[InputDim, str],
    lengths: Collection[InputDim],
) -> tuple[Traced, SymbolicRun, Callable[[Any], sympy.Expr]]:
    """Runs the graph on symbols; finds `in_dims`, the dimensions that can be dynamic, and the formula of any size.

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
            if not run.batch_symbols and 1 in sizes and sizes != {1} and not sure:
                # A dimension of size 1 is broadcast against larger ones, unless the larger ones are not a batch.
                with contextlib.suppress(TraceError):
                    second = run_on_symbols(traced, values, asked, sure, True, wanted)
                    run = second if second.batch_symbols else run
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
            formula = _formula_of(traced, run, dynamic)
            sizes_found = _dynamic_sizes(with_batch, run, values, formula, reasons)
            return replace(with_batch, dynamic=sizes_found), run, formula
        except FixedSizeError as error:
            reasons |= dict.fromkeys(error.dims or wanted, str(error))


def _formula_of(traced: Traced, run: SymbolicRun, asked: Mapping[InputDim, str]) -> Callable[[Any], sympy.Expr]:
    """Returns the function from a size to its formula in the batch size and in dynamic sizes, named as in `asked`."""
    names = dict.fromkeys(run.batch_symbols, traced.batch)  # torch's symbols -> ours
    for dim, name in asked.items():
        size = run.env.replace(run.dynamic[dim]) if dim in run.dynamic else None
        if size is not None and size.is_Symbol and size not in names:
            names[size] = sympy.Symbol(name, integer=True, positive=True)

    def formula(value: Any) -> sympy.Expr:
        value = value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
        if isinstance(value, sympy.Basic):
            return run.env.replace(value).xreplace(names)
        return sympy.Float(value) if isinstance(value, float) else sympy.Integer(int(value))

    return formula


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
        if size.free_symbols & run.batch_symbols:
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
    formula: Callable[[Any], sympy.Expr],
    reasons: Mapping[InputDim, str],
) -> DynamicSizes:
    """Returns the dynamic sizes of a graph, with all conditions on them. Raises `FixedSizeError`."""
    free = _dynamic_symbols(run)
    if not free:
        return replace(FIXED_SIZES, fixed=dict(reasons))
    symbols: dict[sympy.Symbol, InputDim] = {}
    for symbol, key in free.items():
        symbols.setdefault(formula(symbol), key)  # sizes with one name are equal
    conditions = [SizeCondition(s >= 2, "torch, for which 0 and 1 are sizes of their own") for s in symbols]
    for read in traced.size_reads:
        is_of_values = any(isinstance(o, fx.Node) and o in run.known.value_dependent_nodes for o in read.operands)
        operands = _operands(run, formula, read)
        met = _symbols_in(operands) & symbols.keys()
        if not met or is_of_values:
            continue
        if read.function not in SIZE_RELATIONS and read.function not in PIECES and read.function is not bool:
            dims = frozenset(symbols[s] for s in met)
            raise FixedSizeError(f"forward takes its size as a plain number at {read.where}", dims)
        conditions.append(SizeCondition(_relation(read, operands), read.where))
    _refuse_other_layouts(run, formula, symbols)
    conditions += [c for c in _layout_conditions(run, formula) if c.condition.free_symbols & symbols.keys()]
    for guard in run.guards:
        expression = formula(guard.condition)
        if expression.free_symbols & symbols.keys():
            conditions.append(replace(guard, condition=expression))
    formulas = {key: formula(symbol) for key, symbol in run.dynamic.items()}
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
        sizes = (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else ()
        met = _symbols_in(map(formula, sizes)) & symbols.keys()
        is_same = type(answer) is not bool or answer == read.answer
        if met and not (is_same and answer is not None):
            raise FixedSizeError(
                f"forward goes by the layout of a tensor at {read.where}", frozenset(symbols[s] for s in met)
            )


def _operands(run: SymbolicRun, formula: Callable[[Any], sympy.Expr], read: SizeRead) -> list[sympy.Expr]:
    values: list[Any] = [run.node_values[o] if isinstance(o, fx.Node) else o for o in read.operands]
    if read.function is length or read.function in PIECES:
        tensor, dim, *rest = values
        values = [tensor.shape[dim], *rest]
    return [*map(formula, values)]


def _symbols_in(sizes: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
    return {symbol for size in sizes for symbol in size.free_symbols}


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
    constants: dict[fx.Node, int | float] = {}
    for node in reversed(list(traced.graph.nodes)):
        known = info(node)
        if node.op not in CALL_OPS or known.number is None or known.number.free_symbols:
            continue
        if known.is_data_dependent or known.dynamic_number is not None:
            continue
        constants[node] = constant_of(node, known.number)
        for user in list(node.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: constants.get(n, n))
        traced.graph.erase_node(node)


def _relation(read: SizeRead, operands: Sequence[sympy.Expr]) -> sympy.Basic:
    """Returns the condition on the operands from a comparison with its result, or from a number of pieces."""
    if read.function in PIECES:
        return sympy.Eq(PIECES[read.function](*operands), read.result)
    is_relation = read.function in SIZE_RELATIONS
    holds = SIZE_RELATIONS[read.function](*operands) if is_relation else sympy.Ne(operands[0], 0)
    return holds if read.result else sympy.Not(holds)


def add_size_read(traced: Traced, read: SizeRead) -> None:
    """Adds a node that reads a size that depends on the values of tensors, as a value (`guards`)."""
    nodes = {o for o in read.operands if isinstance(o, fx.Node)}
    last = next(node for node in reversed(traced.graph.nodes) if node in nodes)
    name = f"{last.name}_{read.function.__name__}"
    with traced.graph.inserting_after(last):
        node = traced.graph.create_node("call_function", read.function, read.operands, name=name)
    known = info(last).beside(
        source=read.where,
        module=read.module,
        recorded_at=replace(info(last).recorded_at, calls=read.calls),
        read=ValueRead(
            read.result,
            read.function.__name__,
            is_size=True,
            is_check=isinstance(read.result, bool) and is_line_of_check(read.where),
        ),
        known_shapes=(),
    )
    set_info(node, known)


def batch_condition(traced: Traced, read: SizeRead, operands: Sequence[sympy.Expr]) -> SizeCondition | None:
    """Returns the condition of a read on the batch size, if any. Raises `TraceError` if forward computed with it."""
    if read.function in NOT_FOLLOWED:
        return None  # comparisons at other sizes show the effect
    if read.function in SIZE_RELATIONS or read.function is bool:
        condition = _relation(read, operands)
        if not (condition.is_Relational and condition.lhs == traced.batch and condition.rhs.is_number):
            condition = sympy.simplify(condition)  # slow, above all the first time
        return None if condition == sympy.true else SizeCondition(condition, read.where)
    if traced.recorded_sizes:
        return None  # the graph contains the computation
    raise TraceError(
        f"the model computes with the batch size in plain Python at {read.where} ({read.function.__name__}); in a "
        "micro-batch the result would be another one: keep the size a size (x / x.shape[0]), or use a tensor function "
        "(x.mean())"
    )


def _recorded_sizes_condition(traced: Traced) -> SizeCondition:
    """Returns the condition that the batch size is a recorded one. Raises `TraceError` if a size depends on values."""
    for node in traced.graph.nodes:
        sizes = [size for shape in info(node).shapes for size in shape.shape]
        if any(size.free_symbols - {traced.batch} for size in sizes):
            raise TraceError(
                f"the model computes with sizes in plain Python, and {node.name}, made at {info(node).source}, has a "
                "size that depends on the values of tensors: which numbers come from which cannot be told; use "
                "functions with fixed sizes (torch.where, masks), or keep sizes sizes (x.shape[0], not int(x.shape[0]))"
            )
    first = next(node for node in traced.graph.nodes if node.op in CALL_OPS)
    return SizeCondition(sympy.Or(*(sympy.Eq(traced.batch, s) for s in traced.recorded_sizes)), info(first).source)


# -- `squeeze` in micro-batches of one sample: keeps the batch dimension ----------------------------------------------
#
# In a micro-batch of one sample, `x.squeeze()` would remove the batch, and the outputs of micro-batches could not be
# combined. So each squeeze gets the dimensions that it removes from the mini-batch. A mini-batch of one sample needs
# another graph.


# No model of the zoo: `x.squeeze()` over micro-batches of one sample needs it (behaviour/test_batch.py).
def fix_squeezes(traced: Traced, batch: int) -> tuple[SizeCondition, ...]:
    """Sets dims of squeezes that could remove the batch; returns conditions. `batch`: samples in the recording."""
    reads = []
    for node in traced.nodes:
        if node.target not in _SQUEEZES or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        sizes = info(node.args[0]).shapes[0].shape
        named: tuple[Any, ...] = (*node.args[1:], *(value for key, value in node.kwargs.items() if key == "dim"))
        dims = named[0] if named else range(len(sizes))
        asked = [d % len(sizes) for d in (dims if isinstance(dims, (tuple, list, range)) else [dims])]
        varying = [sizes[d] for d in asked if sizes[d].free_symbols == {traced.batch}]
        for size in varying:
            alone = sympy.Eq(size, 1)
            if alone == sympy.false:
                continue
            is_alone = bool(alone.subs(traced.batch, batch))
            reads.append(SizeCondition(alone if is_alone else sympy.Ne(size, 1), info(node).source))
            if not is_alone:
                node.args, node.kwargs = (node.args[0], tuple(d for d in asked if sizes[d] == 1)), {}
                node.target = _ATEN.dims if isinstance(node.target, OpOverload) else node.target
    return tuple(reads)
