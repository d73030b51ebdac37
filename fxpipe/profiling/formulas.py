"""Formulas in the batch size and the dynamic sizes, so that one profile serves every micro-batch.

Bytes of parameters and outputs follow from the shapes of the trace. Other counts are made at a few sizes and fitted
(`fxpipe.utils.polynomial.fit_counts`). These sizes keep the remainder of the original, so that rounding (`height // 2`)
is the same, and counts are on a polynomial.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import sympy
from torch import fx

from fxpipe.errors import ArgumentError
from fxpipe.profiling.profile_data import Seconds
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.node_info import bytes_at, bytes_formula, info
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.compared_sizes import resize
from fxpipe.tracing.verify.effects import Effects
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils.polynomial import ZERO, Polynomial, SizePoint, fit_counts
from fxpipe.utils.polynomial_bound import polynomial_bound


def parameter_bytes(traced: Traced) -> dict[fx.Node, sympy.Expr]:
    """Computes for each working node the bytes of parameters, buffers and constants that no earlier node uses."""
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
    """Computes for each working node the new memory of its value; 0 for a view, an argument, a part of a tuple.

    If a size depends on values (`x[mask]`), the bytes `seen` with `samples` samples are assumed to grow with the batch.
    """
    bytes_of = {}
    sizes = {traced.batch, *traced.dynamic.symbols}
    for node in traced.nodes:
        alias = effects.alias[node]
        is_view = alias is not None and alias in {effects.alias[n] for n in node.all_input_nodes}
        size = sympy.Integer(0) if is_view or node in effects.same else _node_bytes(node)
        bytes_of[node] = -(-seen[node] // samples) * traced.batch if size.free_symbols - sizes else size
    return bytes_of


def bytes_of_values(nodes: Iterable[fx.Node]) -> sympy.Expr:
    return sympy.Add(*map(_node_bytes, nodes))


def _node_bytes(node: fx.Node) -> sympy.Expr:
    return bytes_formula(info(node).full_shapes)


@functools.lru_cache(maxsize=4096)
def size_polynomial(formula: sympy.Expr, batch: sympy.Symbol, samples: int, lengths: Lengths = ()) -> Polynomial:
    """Returns a formula as a polynomial, exact for these sizes. A size that depends on values (nonzero) counts as 0."""
    symbols = (batch, *(symbol for symbol, _ in lengths))
    formula = formula.xreplace(dict.fromkeys(formula.free_symbols - {*symbols}, sympy.Integer(0)))
    here, point = bytes_at(formula, batch, samples, lengths), size_point(samples, lengths)
    with contextlib.suppress(ArgumentError):
        polynomial = polynomial_bound(formula, *symbols)
        if polynomial.value(point.values) == here:
            return polynomial
    return fit_counts(((point, here),), point)


def grown_with_sizes(counted: Polynomial, here: SizePoint) -> Polynomial:
    """Makes the growing terms of counts at several numbers of samples grow with all dynamic sizes, too."""
    once = math.prod(size for _, size in here.others)
    others = tuple((name, 1) for name, _ in here.others)
    return Polynomial.of(
        {(*powers, *others) if powers else (): c * Fraction(1, once) if powers else c for powers, c in counted.terms}
    )


# Seconds are a line over the micro-batch size, through the seconds at the requested size. Neither part is negative: if
# noise would make one negative, it is 0.


def sizes_to_measure(traced: Traced, micro_batch: int, wanted: int | None = None) -> Iterator[int]:
    """Yields other sizes than `micro_batch` to measure for a line; one is enough. First `wanted`, then the best.

    They are far enough away that noise does not decide the slope, and smaller if possible. A single sample runs other
    kernels than several do, so it comes last, after larger sizes, which are as small as possible, since they take long.
    """
    smaller = [micro_batch // 4, micro_batch // 2] if micro_batch >= 4 else [micro_batch - 1]
    larger = micro_batch + max(1, micro_batch // 2)
    good = (*(s for s in smaller if s > 1), larger, 2 * micro_batch, 1)
    for size in dict.fromkeys(good if wanted is None else (wanted, *good)):
        if size != micro_batch and traced.holds_at(size):
            yield size


def fit_seconds(by_size: Mapping[int, float], micro_batch: int, grows: bool = True) -> Seconds:
    """Fits the line through the seconds at `micro_batch` that is nearest to the seconds at other sizes.

    Without other sizes all cost is per sample if `grows` (the work grows with the batch), else fixed.
    """
    here = by_size[micro_batch]
    runs = {size - micro_batch: seconds - here for size, seconds in by_size.items() if size != micro_batch}
    slope = here / micro_batch if grows else 0.0
    if runs:
        slope = sum(run * rise for run, rise in runs.items()) / sum(run * run for run in runs)
        slope = min(max(slope, 0.0), here / micro_batch)
    return Seconds(max(0.0, here - slope * micro_batch), slope)


def fit_growth(by_point: Mapping[SizePoint, float], here: SizePoint, work: Polynomial) -> Polynomial:
    """Returns the part of the seconds that grows with `work`, by a line over it as in `fit_seconds`.

    With other dynamic sizes seconds are a line over the work of a node, not over samples.
    """
    now, once = by_point[here], float(work.value(here.values))
    if not (now and once > 0):
        return ZERO
    runs = [(float(work.value(p.values)) / once - 1, s - now) for p, s in by_point.items() if p != here]
    spread = sum(more * more for more, _ in runs)
    growing = sum(more * rise for more, rise in runs) / spread if spread else now
    return work * Fraction(min(max(growing, 0.0), now) / once)


MAX_STEP = 64  # limit of the step between sizes; with more rounding, sizes with other remainders are used

_DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod")


def size_point(samples: int, lengths: Lengths) -> SizePoint:
    return SizePoint(samples, tuple((symbol.name, size) for symbol, size in lengths))


def planned_lengths(traced: Traced, leaves: Sequence[Any]) -> Lengths:
    """Returns the dynamic sizes of flattened inputs, or of the recording if the inputs have none."""
    lengths = traced.dynamic.lengths_of(leaves)
    return traced.dynamic.example if lengths is None else lengths


def resize_inputs(traced: Traced, leaves: Sequence[Any], samples: int, lengths: Lengths) -> list[Any]:
    """Returns the inputs of a micro-batch with this number of samples and these dynamic sizes, cut or repeated."""
    return [*traced.with_head(take_samples(traced, resize(traced, leaves, lengths), 0, samples), samples)]


def other_lengths(traced: Traced, symbol: sympy.Symbol, samples: int, lengths: Lengths) -> Iterator[Lengths]:
    """Yields dynamic sizes that differ from these in one, for which the graph holds; smaller ones first."""
    size, step = dict(lengths)[symbol], _step(traced, symbol)
    wanted = (size // 2, size // 4, 3 * size // 4, size - step, size + step, size + 2 * step, 2 * size, 3 * size)
    for other in dict.fromkeys(size + step * round((one - size) / step) for one in wanted):
        changed = tuple((s, other if s == symbol else own) for s, own in lengths)
        if other >= 2 and other != size and traced.holds_at(samples, changed):
            yield changed


def lengths_together(traced: Traced, samples: int, lengths: Lengths) -> Iterator[Lengths]:
    """Yields dynamic sizes that all differ from these, for which the graph holds: half of each, and so on."""
    steps = {symbol: _step(traced, symbol) for symbol, _ in lengths}
    for above, below in ((1, 2), (1, 4), (3, 4), (2, 1)) if lengths else ():
        changed = tuple((s, size + steps[s] * round(size * (above / below - 1) / steps[s])) for s, size in lengths)
        if all(size >= 2 for _, size in changed) and changed != lengths and traced.holds_at(samples, changed):
            yield changed


def _step(traced: Traced, symbol: sympy.Symbol) -> int:
    """Returns the step whose multiples can be added to a size without a change of rounding."""
    formulas = {
        size
        for node in traced.graph.nodes
        for shape in info(node).dynamic_shapes or ()
        for size in shape.shape
        if symbol in size.free_symbols
    }
    step = math.lcm(*map(_divisor, formulas))
    return step if step <= MAX_STEP else 1


@functools.lru_cache(maxsize=4096)
def _divisor(formula: sympy.Basic) -> int:
    """Returns the product of the divisors that cause rounding in a formula."""
    own = 1
    if type(formula).__name__ in _DIVISIONS and formula.args[1].is_Integer:
        own = abs(int(formula.args[1])) or 1
    elif isinstance(formula, sympy.floor | sympy.ceiling):
        own = int(sympy.fraction(sympy.together(formula.args[0]))[1])
    return own * math.lcm(*map(_divisor, formula.args))
