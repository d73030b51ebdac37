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
from fxpipe.tracing.verify.equivalence import compare_runs, take_samples
from fxpipe.tracing.verify.micro_batch_sizes import checking_mode
from fxpipe.tracing.verify.training_equivalence import FEWEST_SAMPLES, check_training_equivalence

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
    before = [lengths for sizes in seen if (lengths := _lengths_seen(traced, sizes)) is not None]
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


def _lengths_seen(traced: Traced, sizes: Mapping[InputDim, int]) -> Lengths | None:
    if not all(key in sizes for key in traced.dynamic.symbols.values()):
        return None
    lengths = tuple((symbol, sizes[key]) for symbol, key in traced.dynamic.symbols.items())
    return lengths if lengths != traced.dynamic.example else None


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
    if (failing or traced.dynamic.is_observed) and not _have_expected_shapes(traced, sample, batch, lengths):
        if not failing:
            raise FixedSizeError("functions that can only be seen make other sizes than those seen before")
        return False
    traced.comparisons.harmless.update(failing)
    return True


def _sample_of(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> list[Any] | None:
    """Returns samples of these sizes, as few as possible, for which the graph may hold; None if there are none."""
    for batch in dict.fromkeys((min(FEWEST_SAMPLES, traced.batch_of(leaves)), traced.batch_of(leaves))):
        if not _may_hold(traced, batch, lengths):
            continue
        sample = resize(traced, take_samples(traced, leaves, 0, batch), lengths)
        if traced.guards_hold(sample, traced.seed):
            return sample
    return None


def _may_hold(traced: Traced, batch: int, lengths: Lengths) -> bool:
    """Returns whether all of forward's conditions on sizes hold; conditions of torch need not."""
    failing = traced.failing_conditions(batch, lengths)
    reads = (*traced.batch_conditions, *traced.mini_batch_conditions)
    return all(condition.is_of_torch for condition in failing) and all(read.holds(batch) for read in reads)


def _have_expected_shapes(traced: Traced, sample: Sequence[Any], batch: int, lengths: Lengths) -> bool:
    """Runs the graph and returns whether all values have the sizes that the formulas give."""
    sizes = {traced.batch: batch, **dict(lengths)}
    seen = observe_graph(traced, sample, traced.nodes[-1])
    return all(
        tensor.shape == tuple(formula.subs(sizes) for formula in shape.shape)
        for node, value in seen.items()
        for tensor, shape in zip(observed_tensors(value), info(node).full_shapes, strict=False)
    )


def resize(traced: Traced, leaves: Sequence[Any], lengths: Lengths) -> list[Any]:
    """Returns the flattened inputs with these dynamic sizes: cut, or repeated from their beginning."""
    values = dict(lengths)
    return resized(leaves, {key: int(formula.subs(values)) for key, formula in traced.dynamic.formulas.items()})
