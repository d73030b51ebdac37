"""Other sizes than the profile's, at which the graph runs to see how counts depend on sizes.

They keep the remainder of the original, so that rounding (`height // 2`) is the same, and counts are on a polynomial.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import sympy

from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.dynamic_sizes_check import resize
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils.polynomial import SizePoint

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
    sample = take_samples(traced, resize(traced, leaves, lengths), 0, samples)
    return [*sample, *traced.head(sample, samples).values()] if traced.head is not None else sample


def other_lengths(traced: Traced, symbol: sympy.Symbol, samples: int, lengths: Lengths) -> Iterator[Lengths]:
    """Yields dynamic sizes that differ from these in one, for which the graph holds; smaller ones first."""
    size, step = dict(lengths)[symbol], _step(traced, symbol)
    wanted = (size // 2, size // 4, 3 * size // 4, size - step, size + step, size + 2 * step, 2 * size, 3 * size)
    sizes = (size + step * round((one - size) / step) for one in wanted)
    for other in dict.fromkeys(one for one in sizes if one >= 2 and one != size):
        changed = tuple((s, other if s == symbol else own) for s, own in lengths)
        if traced.holds_at(samples, changed):
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
