"""Formulas in the batch size: one trace answers for every micro-batch.

Bytes of parameters and outputs follow from the shapes of the trace. What no shape tells is counted at a few sizes and
fitted (`fxpipe.utils.polynomial.fit_counts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy
from torch import fx

from fxpipe.profiling.profile_data import Seconds
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.symbolic_shapes import bytes_formula
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import Effects


def parameter_bytes(traced: Traced) -> dict[fx.Node, sympy.Expr]:
    """Computes for each working node the bytes of parameters, buffers and constants that no node before it uses.

    The recorder gives every tensor of the model one `get_attr` node, whatever its names, so a tied weight counts once.
    """
    counted: set[fx.Node] = set()
    bytes_of = {}
    for node in traced.nodes:
        new = [n for n in node.all_input_nodes if n.op == "get_attr" and n not in counted]
        counted.update(new)
        bytes_of[node] = sympy.Add(*map(_node_bytes, new))
    return bytes_of


def output_bytes(
    traced: Traced, effects: Effects, seen: Mapping[fx.Node, int], samples: int
) -> dict[fx.Node, sympy.Expr]:
    """Computes for each working node the new memory of its value; 0 where it shares the memory of something older.

    A size that depends on values (`x[mask]`) has no formula: it is taken to grow with the batch from the bytes that
    were `seen` with so many `samples`.
    """
    bytes_of = {}
    for node in traced.nodes:
        size = sympy.Integer(0) if shares_memory(effects, node) else _node_bytes(node)
        bytes_of[node] = -(-seen[node] // samples) * traced.batch if size.free_symbols - {traced.batch} else size
    return bytes_of


def shares_memory(effects: Effects, node: fx.Node) -> bool:
    """Returns whether a node's value is in memory that was there before: a view, an argument, a part of a tuple."""
    alias = effects.alias[node]
    return node in effects.same or (alias is not None and alias in {effects.alias[n] for n in node.all_input_nodes})


def _node_bytes(node: fx.Node) -> sympy.Expr:
    return bytes_formula(info(node).shapes)


# Seconds as a line over the micro-batch size: at which sizes to measure, and what follows from what was found there.
#
# seconds │            ╱● asked for         The line goes through what was found at the size that was asked for.
#         │       ╱●                        Neither its fixed part nor that of a sample is negative: where noise, or a
#   fixed ├──╱                              kernel that changes with the size, says so, the other one is all.
#         └───────┴─────┴── samples


def sizes_to_measure(traced: Traced, micro_batch: int, wanted: int | None = None) -> Iterator[int]:
    """Sizes besides `micro_batch` at which to measure for a line. One is enough: first `wanted`, then the best.

    They are far enough from it that noise does not decide the slope, and smaller where they can be; but a single sample
    takes other kernels than several do, so larger ones come before it: no larger than they must be, for they take long.
    """
    smaller = [micro_batch // 4, micro_batch // 2] if micro_batch >= 4 else [micro_batch - 1]
    larger = micro_batch + max(1, micro_batch // 2)
    good = (*(s for s in smaller if s > 1), larger, 2 * micro_batch, 1)
    for size in dict.fromkeys(good if wanted is None else (wanted, *good)):
        if size != micro_batch and traced.holds_at(size):
            yield size


def fit_seconds(by_size: Mapping[int, float], micro_batch: int, grows: bool = True) -> Seconds:
    """The line through the seconds found at `micro_batch`, and nearest to those found at other sizes.

    Where there are none, all is cost per sample, or fixed, as `grows` says: does the work grow with the batch at all?
    """
    here = by_size[micro_batch]
    runs = {size - micro_batch: seconds - here for size, seconds in by_size.items() if size != micro_batch}
    if runs:
        slope = sum(run * rise for run, rise in runs.items()) / sum(run * run for run in runs)
        slope = min(max(slope, 0.0), here / micro_batch)
    else:
        slope = here / micro_batch if grows else 0.0
    return Seconds(max(0.0, here - slope * micro_batch), slope)
