"""Formulas in the batch size: one trace answers for every micro-batch.

Bytes of parameters and outputs follow from the shapes of the trace. What no shape tells is counted at a few sizes and
fitted (`fitted`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction

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


# -- what was counted at some sizes ------------------------------------------------------------------------------------

DEGREE = 2  # of the formulas: nothing that is usual grows faster (the batch against itself, in contrastive losses)


@functools.lru_cache(maxsize=4096)
def fitted(counted: tuple[tuple[int, int], ...], samples: int, batch: sympy.Symbol) -> sympy.Expr:
    """The polynomial of least degree through what was counted, as pairs of (number of samples, count).

    One point more than it needs must lie on it, but for a line through two. Where there is none up to degree 2 (another
    kernel for another size, memory that is allotted in pages), the count for `samples` samples is taken to grow with
    the batch: right there, a guess elsewhere.
    """
    coefficients = polynomial(counted)
    if coefficients is None:
        coefficients = (Fraction(0), Fraction(dict(counted)[samples], samples))
    return sympy.Add(*(sympy.Rational(c.numerator, c.denominator) * batch**k for k, c in enumerate(coefficients)))


def polynomial(counted: Sequence[tuple[int, int]]) -> tuple[Fraction, ...] | None:
    """Coefficients, that of degree 0 first; None where there is none that one may trust."""
    if len(counted) == 1:
        return (Fraction(0),) if counted[0][1] == 0 else None
    for degree in range(DEGREE + 1):
        if len(counted) < degree + 2 and not (degree == 1 and len(counted) == 2):
            return None
        found = _through(counted[: degree + 1])
        if all(sum(c * size**k for k, c in enumerate(found)) == count for size, count in counted):
            return found
    return None


def _through(points: Sequence[tuple[int, int]]) -> tuple[Fraction, ...]:
    """Coefficients of the polynomial through so many points: Newton's divided differences, multiplied out."""
    sizes = [size for size, _ in points]
    divided = [Fraction(count) for _, count in points]
    for order in range(1, len(points)):
        for k in range(len(points) - 1, order - 1, -1):
            divided[k] = (divided[k] - divided[k - 1]) / (sizes[k] - sizes[k - order])
    found = [Fraction(0)]
    for k in range(len(points) - 1, -1, -1):  # found = found * (b - sizes[k]) + divided[k]
        shifted = [Fraction(0), *found]
        found = [a - sizes[k] * b for a, b in zip(shifted, [*found, Fraction(0)], strict=True)]
        found[0] += divided[k]
    return tuple(found[: len(points)])
