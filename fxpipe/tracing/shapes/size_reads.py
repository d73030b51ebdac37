"""Reads of sizes in plain Python, as conditions on the batch size.

A comparison with its result, or a number of pieces, is a condition on the batch size: the graph is valid if it holds. A
size that depends on the values of tensors is a value, which each step reads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch.operators import OpOverload
from fxpipe.errors import TraceError
from fxpipe.tracing.dynamic_sizes import SizeCondition
from fxpipe.tracing.node_info import ValueRead, info, number_of, set_info
from fxpipe.tracing.record.recorded_sizes import NOT_FOLLOWED, PIECES, SizeRead, length
from fxpipe.tracing.traced import CALL_OPS, Traced

SIZE_RELATIONS = {
    operator.eq: sympy.Eq,
    operator.ne: sympy.Ne,
    operator.lt: sympy.Lt,
    operator.le: sympy.Le,
    operator.gt: sympy.Gt,
    operator.ge: sympy.Ge,
}


def relation(read: SizeRead, operands: Sequence[sympy.Expr]) -> sympy.Basic:
    """Returns the condition on the operands from a comparison with its result, or from a number of pieces."""
    if read.function in PIECES:
        return sympy.Eq(PIECES[read.function](*operands), read.result)
    is_relation = read.function in SIZE_RELATIONS
    holds = SIZE_RELATIONS[read.function](*operands) if is_relation else sympy.Ne(operands[0], 0)
    return holds if read.result else sympy.Not(holds)


def _operand_sizes(read: SizeRead) -> list[sympy.Expr]:
    if read.function is length or read.function in PIECES:
        tensor, dim, *rest = read.operands
        sizes = [number_of(o) if isinstance(o, fx.Node) else constant_formula(o) for o in rest]
        return [info(tensor).shapes[0].shape[dim], *sizes]  # type: ignore[arg-type,index]
    return [number_of(o) if isinstance(o, fx.Node) else constant_formula(o) for o in read.operands]


def depends_on_values(traced: Traced, read: SizeRead) -> bool:
    is_of_node = any(isinstance(o, fx.Node) and info(o).is_data_dependent for o in read.operands)
    return is_of_node or any(number.free_symbols - {traced.batch} for number in _operand_sizes(read))


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
        read=ValueRead(read.result, read.function.__name__, is_size=True),
        known_shapes=(),
    )
    set_info(node, known)


def is_not_followed(read: SizeRead) -> bool:
    return read.function in NOT_FOLLOWED and any(o.free_symbols for o in _operand_sizes(read))


def batch_condition(traced: Traced, read: SizeRead) -> SizeCondition | None:
    """Returns the condition of a read on the batch size, if any. Raises `TraceError` if forward computed with it."""
    operands = _operand_sizes(read)
    if not any(o.free_symbols for o in operands):
        return None
    if read.function in NOT_FOLLOWED:
        return None  # comparisons at other sizes show the effect
    if read.function in SIZE_RELATIONS or read.function is bool:
        condition = relation(read, operands)
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


def recorded_sizes_condition(traced: Traced) -> SizeCondition:
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


def constant_formula(value: Any) -> sympy.Expr:
    return sympy.Float(value) if isinstance(value, float) else sympy.Integer(int(value))


# -- `squeeze` in micro-batches of one sample: keeps the batch dimension ----------------------------------------------
#
# In a micro-batch of one sample, `x.squeeze()` would remove the batch, and the outputs of micro-batches could not be
# combined. So each squeeze gets the dimensions that it removes from the mini-batch. A mini-batch of one sample needs
# another graph.

_ATEN = torch.ops.aten.squeeze
_SQUEEZES = ("squeeze", torch.squeeze, _ATEN.default, _ATEN.dim, _ATEN.dims)


def fix_squeezes(traced: Traced, batch: int) -> tuple[SizeCondition, ...]:
    """Sets dims of squeezes that could remove the batch; returns conditions. `batch`: samples in the recording."""
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
    """Returns the dimensions that a squeeze removes if their size is 1."""
    named: tuple[Any, ...] = (*node.args[1:], *(value for key, value in node.kwargs.items() if key == "dim"))
    if not named:
        return list(range(dims))
    return [d % dims for d in (named[0] if isinstance(named[0], (tuple, list)) else named)]


# No model of the zoo: `x.squeeze()` over micro-batches of one sample needs it (behaviour/test_batch.py).
def _set_squeeze_dims(node: fx.Node, dims: tuple[int, ...]) -> None:
    node.args, node.kwargs = (node.args[0], dims), {}
    if isinstance(node.target, OpOverload):
        node.target = _ATEN.dims
