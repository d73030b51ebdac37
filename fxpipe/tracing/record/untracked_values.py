"""Finds values that are used outside torch without being tracked, by recording again with other values.

A size that depends on values may be used without a method call (`range(len)`, an index of a list), and a tensor may be
converted to text. So sizes and texts are *disguised*: Python sees other values, and torch functions the real ones. If
the recording changes, a size becomes a read like others (`guards`), and a dynamic size is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.batch_numbers import is_same_recording
from fxpipe.tracing.record.record_model import erase_unused_nodes
from fxpipe.tracing.record.recorded_sizes import SizeRead, SourcePlace, length
from fxpipe.tracing.record.recorder import GUISES
from fxpipe.tracing.record.unrecordable import CannotRecord, calls_before_effects
from fxpipe.tracing.shapes.size_reads import add_size_read
from fxpipe.tracing.traced import Traced


def read_untracked_values(traced: Traced) -> Traced:
    """Adds a read for each size that depends on values and that forward uses untracked.

    Raises `FixedSizeError` if forward uses a dynamic size untracked, `CannotRecord` if it depends on a tensor's text.
    """
    again = traced.again
    sizes: dict[Hashable, fx.Node] = {
        (node.args[0].name, node.args[1]): node
        for node in traced.graph.nodes
        if node.target == "size" and info(node).is_data_dependent
    }
    texts = range(len(traced.texts))
    if again is not None and (sizes or texts or traced.dynamic.symbols):
        plain = again({})
        _refuse_untracked_dynamic_sizes(traced, plain, again)
        if (sizes or texts) and not _is_same_recording(plain, again, (*sizes, *texts)):
            places = {key: SourcePlace.of(node) for key, node in sizes.items()}
            places |= {number: traced.texts[number] for number in texts}
            for place in dict.fromkeys(places.values()):
                keys = [key for key in places if places[key] == place]
                if not _is_same_recording(plain, again, keys):
                    _add_reads(traced, [sizes[key] for key in keys if key in sizes], place)
    erase_unused_nodes(traced)
    return replace(traced, again=None)


def _refuse_untracked_dynamic_sizes(
    traced: Traced, plain: Traced, again: Callable[[Mapping[Any, int]], Traced]
) -> None:
    """Refuses a dynamic size if a larger disguise changes the recording.

    Sizes are increased by one, which shows a dependence on each size (`range(size)`), then several times over, which
    shows a dependence in steps (`math.isqrt(size)`). Different factors show a dependence on the ratio of sizes.
    """
    sizes_of: dict[sympy.Symbol, set[Hashable]] = {symbol: set() for symbol in traced.dynamic.symbols}
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
        return all(_is_same_recording_in(plain, again, disguised) for disguised in (nearly, larger))

    if is_same(example):
        return
    met = {symbol for symbol in example if len(example) == 1 or not is_same([symbol])} or {*example}
    dims = frozenset(key for key, formula in traced.dynamic.formulas.items() if met & formula.free_symbols)
    raise FixedSizeError("forward takes its size as a plain number (range(size), an index of a list)", dims)


def _is_same_recording(plain: Traced, again: Callable[[Mapping[Any, int]], Traced], keys: Collection[Hashable]) -> bool:
    """Returns whether the recording stays the same if these sizes and texts are disguised.

    One guise is enough for a size, since comparisons are recorded. A text may be parsed to a number and compared.
    """
    guises = GUISES if any(isinstance(key, int) for key in keys) else (1,)
    return all(_is_same_recording_in(plain, again, dict.fromkeys(keys, guise)) for guise in guises)


def _is_same_recording_in(
    plain: Traced, again: Callable[[Mapping[Any, int]], Traced], disguised: Mapping[Any, int]
) -> bool:
    try:
        return is_same_recording(plain, again(disguised))
    except Exception:  # an index out of range, a text that does not parse
        return False


# No model of the zoo: Python that goes by a size of values needs it (behaviour/test_continuation.py).
def _add_reads(traced: Traced, sizes: Collection[fx.Node], place: SourcePlace) -> None:
    module, line, calls = place
    if not sizes:
        raise CannotRecord(
            f"the model{f' in module {module!r}' if module else ''} goes by the text of a tensor at {line}; read the "
            "number itself (int, float, item), or keep the decision in tensors (torch.where, masks)",
            frozenset({module}) if module else frozenset(),
            calls={module: calls_before_effects(traced.graph, module, calls)},
        )
    for size in sizes:
        add_size_read(traced, SizeRead(length, size.args, info(size).recorded_size, line, module, calls))  # type: ignore[arg-type]
