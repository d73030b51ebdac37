"""Finds sizes that are used outside torch without being tracked, by recording again with other sizes.

A size that depends on values, or a dynamic size, may be used without a method call (`range(size)`, an index of a list).
So such sizes are *disguised*: Python sees other numbers, and torch functions the real ones. If the recording changes, a
size that depends on values becomes a read like others (`guards`), and a dynamic size is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import sympy
from torch import fx

from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.batch_numbers import is_same_recording
from fxpipe.tracing.record.record_model import erase_unused_nodes
from fxpipe.tracing.record.recorded_sizes import SizeRead, length
from fxpipe.tracing.shapes.size_reads import add_size_read
from fxpipe.tracing.traced import Traced

Disguise = Mapping[tuple[str, int], int]  # name of a node and dimension -> how much larger Python sees the size


def read_untracked_sizes(traced: Traced) -> Traced:
    """Adds a read for each size that depends on values and that forward uses untracked.

    Raises `FixedSizeError` if forward uses a dynamic size untracked.
    """
    again = traced.again
    sizes = {
        (node.args[0].name, node.args[1]): node
        for node in traced.graph.nodes
        if node.target == "size" and info(node).is_data_dependent
    }
    if again is not None and (sizes or traced.dynamic.symbols):
        plain = again({})
        _refuse_untracked_dynamic_sizes(traced, plain, again)
        if not _is_same_recording(plain, again, dict.fromkeys(sizes, 1)):
            met = [node for key, node in sizes.items() if not _is_same_recording(plain, again, {key: 1})]
            for node in met or sizes.values():
                _add_read(traced, node)
    erase_unused_nodes(traced)
    return replace(traced, again=None)


def _refuse_untracked_dynamic_sizes(traced: Traced, plain: Traced, again: Callable[[Disguise], Traced]) -> None:
    """Refuses a dynamic size if a larger disguise changes the recording.

    Sizes are increased by one, which shows a dependence on each size (`range(size)`), then several times over, which
    shows a dependence in steps (`math.isqrt(size)`). Different factors show a dependence on the ratio of sizes.
    """
    sizes_of: dict[sympy.Symbol, set[tuple[str, int]]] = {symbol: set() for symbol in traced.dynamic.symbols}
    for node in traced.graph.nodes:
        for shape in (info(node).dynamic_shapes or ())[:1]:
            for dim, formula in enumerate(shape.shape):
                for symbol in formula.free_symbols & sizes_of.keys():
                    sizes_of[symbol].add((node.name, dim))
    example = dict(traced.dynamic.example)

    def is_same(symbols: Collection[sympy.Symbol]) -> bool:
        steps = [*enumerate(symbols, 1)]
        nearly = {key: more for more, symbol in steps for key in sizes_of[symbol]}
        larger = {key: (2 * more + 1) * example[symbol] + more for more, symbol in steps for key in sizes_of[symbol]}
        return all(_is_same_recording(plain, again, disguised) for disguised in (nearly, larger))

    if is_same(example):
        return
    met = {symbol for symbol in example if len(example) == 1 or not is_same([symbol])} or {*example}
    dims = frozenset(key for key, formula in traced.dynamic.formulas.items() if met & formula.free_symbols)
    raise FixedSizeError("forward takes its size as a plain number (range(size), an index of a list)", dims)


def _is_same_recording(plain: Traced, again: Callable[[Disguise], Traced], disguised: Disguise) -> bool:
    try:
        return not disguised or is_same_recording(plain, again(disguised))
    except Exception:  # an index out of range, a text that does not parse
        return False


# No model of the zoo: Python that goes by a size of values needs it (behaviour/test_continuation.py).
def _add_read(traced: Traced, size: fx.Node) -> None:
    known = info(size)
    calls = known.recorded_at.calls
    add_size_read(traced, SizeRead(length, size.args, known.recorded_size, known.source, known.module, calls))  # type: ignore[arg-type]
