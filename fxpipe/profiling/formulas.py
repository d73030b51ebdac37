"""Bytes of parameters and outputs as formulas in the batch size: one trace answers for every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.sizing.shapes import bytes_of
from fxpipe.tracing.traced import Traced


def parameter_bytes(traced: Traced) -> dict[fx.Node, sympy.Expr]:
    """For each working node the parameters, buffers and constants that no node before it uses.

    The recorder gives every tensor of the model one `get_attr` node, whatever its names, so a tied weight counts once.
    """
    counted: set[fx.Node] = set()
    found = {}
    for node in traced.nodes:
        new = [n for n in node.all_input_nodes if n.op == "get_attr" and n not in counted]
        counted.update(new)
        found[node] = sympy.Add(*map(_bytes, new))
    return found


def output_bytes(
    traced: Traced, effects: Effects, seen: Mapping[fx.Node, int], samples: int
) -> dict[fx.Node, sympy.Expr]:
    """For each working node the new memory that its value takes; 0 where it shares the memory of something older.

    A size that hangs on values (`x[mask]`) has no formula: it is taken to grow with the batch from the bytes that were
    `seen` with so many `samples`.
    """
    found = {}
    for node in traced.nodes:
        made = sympy.Integer(0) if shares_memory(effects, node) else _bytes(node)
        found[node] = -(-seen[node] // samples) * traced.batch if made.free_symbols - {traced.batch} else made
    return found


def shares_memory(effects: Effects, node: fx.Node) -> bool:
    """Is what the node returns in memory that was there before: a view, an argument, a part of a tuple?"""
    alias = effects.alias[node]
    return node in effects.same or (alias is not None and alias in {effects.alias[n] for n in node.all_input_nodes})


def _bytes(node: fx.Node) -> sympy.Expr:
    return bytes_of(node.meta["shapes"])
