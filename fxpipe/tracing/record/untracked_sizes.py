"""Finds sizes that are used outside torch without being tracked, by recording again with other sizes.

A size that depends on values, or one that may vary, may be used without a method call (`range(size)`, an index of a
list). So such sizes are *disguised*: Python sees other numbers, and torch functions the real ones. If the recording
changes, a size that depends on values becomes a read like others (`guards`), and one that may vary is refused: a
dynamic size, and the number of samples if only a part of them was recorded (`small_batch`). Texts of tensors are
disguised as well: a forward that depends on one runs as Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import sympy
from torch import fx

from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.batch_numbers import is_same_recording
from fxpipe.tracing.record.record_model import erase_unused_nodes
from fxpipe.tracing.record.recorded_sizes import SizeRead, length
from fxpipe.tracing.record.size_recorder import GUISES, TEXTS, Disguise
from fxpipe.tracing.record.unrecordable import CannotRecord, calls_before_effects
from fxpipe.tracing.shapes.symbolic_shapes import add_size_read
from fxpipe.tracing.traced import Traced


def read_untracked_sizes(traced: Traced) -> Traced:
    """Adds a read for each size that depends on values and that forward uses untracked.

    Raises `FixedSizeError` if forward uses a size that may vary untracked, `CannotRecord` if it depends on a tensor's
    text.
    """
    again = traced.again
    sizes = {
        (node.args[0].name, node.args[1]): node
        for node in traced.graph.nodes
        if node.target == "size" and info(node).is_data_dependent
    }
    example = dict(traced.dynamic.example)
    others = [(size + more, (2 * more + 2) * size + more) for more, size in enumerate(example.values(), 1)]
    if traced.recorded_samples is not None:
        if traced.not_followed:
            raise FixedSizeError(f"forward takes the number of samples as a plain number at {traced.not_followed}")
        example[traced.batch] = traced.recorded_samples
        batch = traced.batch_of(traced.leaves)
        others.append((batch, batch + 1))
    if again is not None and (sizes or example or traced.first_text):
        plain = again({})
        if traced.first_text and not all(_is_same_recording(plain, again, {TEXTS: guise}) for guise in GUISES):
            module, line, calls = traced.first_text
            raise CannotRecord(
                f"the model{f' in module {module!r}' if module else ''} depends on the text of a tensor at {line}; "
                "read the number itself (int, float, item), or keep the decision in tensors (torch.where, masks)",
                frozenset({module}) if module else frozenset(),
                calls={module: calls_before_effects(traced.graph, module, calls)},
            )
        if example:
            _refuse_untracked(traced, example, others, plain, again)
        if not _is_same_recording(plain, again, dict.fromkeys(sizes, 1)):
            met = [node for key, node in sizes.items() if not _is_same_recording(plain, again, {key: 1})]
            for node in met or sizes.values():
                _add_read(traced, node)
    erase_unused_nodes(traced)
    return replace(traced, again=None)


def _refuse_untracked(
    traced: Traced,
    example: Mapping[sympy.Symbol, int],
    others: Sequence[tuple[int, int]],
    plain: Traced,
    again: Callable[[Disguise], Traced],
) -> None:
    """Refuses a size if its disguise changes the recording. `others`: two sizes that Python sees for each of `example`.

    A size that is larger by one shows a dependence on each size (`range(size)`), one several times larger a dependence
    in steps (`math.isqrt(size)`). Different factors show a dependence on the ratio of sizes.
    """
    sizes = {
        (node.name, dim): formula
        for node in traced.graph.nodes
        for shape in info(node).full_shapes[:1]
        for dim, formula in enumerate(shape.shape)
        if formula.free_symbols & example.keys() and formula.free_symbols <= {*example, traced.batch}
    }
    recorded = {traced.batch: traced.batch_of(traced.leaves), **example}

    def is_same(symbols: Collection[sympy.Symbol]) -> bool:
        for seen in zip(*others, strict=True):
            values = {**recorded, **{s: size for s, size in zip(example, seen, strict=True) if s in symbols}}
            more = {formula: int(formula.subs(values)) - int(formula.subs(recorded)) for formula in {*sizes.values()}}
            if not _is_same_recording(plain, again, {key: more[formula] for key, formula in sizes.items()}):
                return False
        return True

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


# No model of the zoo: Python that depends on a size of values needs it (behaviour/test_continuation.py).
def _add_read(traced: Traced, size: fx.Node) -> None:
    known = info(size)
    calls = known.recorded_at.calls
    add_size_read(traced, SizeRead(length, size.args, known.recorded_size, known.source, known.module, calls))  # type: ignore[arg-type]
