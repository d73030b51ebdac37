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
from torch import fx

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
                "functions with fixed sizes (torch.where, masks), or keep sizes sizes (x.shape[0], not len(x))"
            )
    first = next(node for node in traced.graph.nodes if node.op in CALL_OPS)
    return SizeCondition(sympy.Or(*(sympy.Eq(traced.batch, s) for s in traced.recorded_sizes)), info(first).source)


def constant_formula(value: Any) -> sympy.Expr:
    return sympy.Float(value) if isinstance(value, float) else sympy.Integer(int(value))
