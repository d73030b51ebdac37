"""Compares a graph with dynamic sizes with its model at other sizes: some observed before, and a new one.

The recording's inputs are cut or repeated from their beginning, so that the model accepts their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy

from fxpipe.errors import TraceError
from fxpipe.tracing.dynamic_sizes import FixedSizeError, InputDim, Lengths
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.observed_shapes import observe_graph, observed_tensors, resized
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.equivalence import FEWEST_SAMPLES, check_training_equivalence, compare_runs, take_samples
from fxpipe.tracing.verify.micro_batch_sizes import checking_mode

_STEP = 3  # a new size is larger than the largest recorded size by this, if the graph holds for it
_FARTHEST_STEP = 17  # else it differs from the recorded size by less than this
_CANDIDATES = 4  # tried new sizes, since the model may reject some


def check_dynamic_sizes(traced: Traced, leaves: Sequence[Any], seen: Sequence[Mapping[InputDim, int]]) -> None:
    """Compares outputs, gradients and state of graph and model at other sizes than the recording's.

    Raises `FixedSizeError` if they differ, or if no other size can be compared.

    Args:
        leaves: the inputs of the recording, flattened.
        seen: earlier sizes of the inputs, by dimension.
    """
    if traced.uneven_outputs:
        raise FixedSizeError("rows of an output do not simply grow with the number of samples")
    keys = traced.dynamic.symbols
    known = [tuple((s, sizes[key]) for s, key in keys.items()) for sizes in seen if sizes.keys() >= {*keys.values()}]
    before = [lengths for lengths in known if lengths != traced.dynamic.example]
    others = [lengths for lengths in dict.fromkeys(before) if _compare(traced, leaves, lengths)]
    candidates = [*itertools.islice(_unseen(traced, leaves, before), _CANDIDATES)]
    unseen = next((lengths for lengths in candidates if _compare(traced, leaves, lengths)), None)
    if not others and unseen is None:
        why = "the model runs at no other size" if candidates else "forward concludes something else at any other size"
        raise FixedSizeError(f"{why}, as far as was tried", is_of_this_size=not candidates)
    small = tuple((symbol, max(2, size // 2)) for symbol, size in _bounds(traced, before, min).items())
    if any(condition.is_of_torch for condition in traced.dynamic.conditions) and _compare(traced, leaves, small):
        others.append(small)
    traced.comparisons.lengths.update((traced.dynamic.example, *others, *([] if unseen is None else [unseen])))


def recheck_lengths(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether graph and model agree on samples with new sizes; else restricts the graph to compared sizes."""
    with checking_mode(traced, args, kwargs) as leaves:
        if is_faked():
            return False  # a model without values cannot be compared: it is recorded at these sizes
        lengths = traced.dynamic.lengths_of(leaves)
        assert lengths is not None
        try:
            if _compare(traced, leaves, lengths):
                traced.comparisons.lengths.add(lengths)
        except FixedSizeError:
            traced.comparisons.hold_between_compared()
            return False
        return True


def _unseen(traced: Traced, leaves: Sequence[Any], before: Sequence[Lengths]) -> Iterator[Lengths]:
    """Yields new sizes for which the graph holds, larger ones first, since models reject them less often."""
    largest, least = _bounds(traced, before, max), _bounds(traced, before, min)
    example = dict(traced.dynamic.example)
    known = {traced.dynamic.example, *before}
    steps = [step for more in range(1, _FARTHEST_STEP) for step in (more, -more)]
    for lengths in (
        {symbol: size + _STEP for symbol, size in largest.items()},
        {symbol: size - 1 for symbol, size in least.items()},
        {symbol: size // 2 for symbol, size in least.items()},
        *({symbol: size + step for symbol, size in example.items()} for step in steps),
    ):
        wanted = tuple((symbol, max(2, size)) for symbol, size in lengths.items())
        if wanted not in known and _sample_of(traced, leaves, wanted) is not None:
            known.add(wanted)
            yield wanted


def _bounds(
    traced: Traced, before: Sequence[Lengths], bound: Callable[[Iterable[int]], int]
) -> dict[sympy.Symbol, int]:
    known = [dict(lengths) for lengths in (traced.dynamic.example, *before)]
    return {symbol: bound(lengths[symbol] for lengths in known) for symbol in traced.dynamic.symbols}


def _compare(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> bool:
    """Compares graph and model on a few samples of these sizes. Returns whether the graph holds and the model runs.

    Raises `FixedSizeError` if they differ.
    """
    sample = _sample_of(traced, leaves, lengths)
    if sample is None:
        return False
    batch = traced.batch_of(sample)
    failing = traced.failing_conditions(batch, lengths)
    try:
        compare_runs(traced, sample)
        check_training_equivalence(traced, sample)
    except TraceError as error:
        if failing:
            return False
        shown = ", ".join(str(size) for _, size in lengths)
        raise FixedSizeError(f"at another size ({shown}): {error}") from error
    except Exception:
        return False  # the model raises again for such inputs
    if failing or traced.dynamic.is_observed:
        sizes = {traced.batch: batch, **dict(lengths)}
        are_expected = all(  # all values have the sizes that the formulas give
            tensor.shape == tuple(formula.subs(sizes) for formula in shape.shape)
            for node, value in observe_graph(traced, sample, traced.nodes[-1]).items()
            for tensor, shape in zip(observed_tensors(value), info(node).full_shapes, strict=False)
        )
        if not are_expected and not failing:
            raise FixedSizeError("functions that can only be seen make other sizes than those seen before")
        if not are_expected:
            return False
    traced.comparisons.harmless.update(failing)
    return True


def _sample_of(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> list[Any] | None:
    """Returns samples of these sizes, as few as possible, for which the graph may hold; None if there are none.

    All of forward's conditions on sizes must hold; conditions of torch need not.
    """
    reads = (*traced.batch_conditions, *traced.mini_batch_conditions)
    for batch in dict.fromkeys((min(FEWEST_SAMPLES, traced.batch_of(leaves)), traced.batch_of(leaves))):
        failing = traced.failing_conditions(batch, lengths)
        if not all(one.is_of_torch for one in failing) or not all(read.holds(batch) for read in reads):
            continue
        sample = resize(traced, take_samples(traced, leaves, 0, batch), lengths)
        if traced.guards_hold(sample, traced.seed):
            return sample
    return None


def resize(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> list[Any]:
    """Returns the flattened inputs with these dynamic sizes: cut, or repeated from their beginning."""
    values = dict(lengths)
    return resized(leaves, {key: int(formula.subs(values)) for key, formula in traced.dynamic.formulas.items()})
