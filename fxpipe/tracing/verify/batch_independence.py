"""The check that the outputs of micro-batches, put together, are the output of the batch.

They are not where samples act on each other: a loss that is no mean over samples, logits of all against all, rows in
another order than the samples. Nor where an input was taken for batched that is not. So the graph is run on a batch and
on parts of it, with what is meant to differ left out: dropout drops nothing, batch norm takes its running statistics. A
graph with other random nodes, or that changes other buffers, cannot be compared so, and is not; nor are whole numbers.

A forward that sorts its samples may be given some that are in order already. So of three, a b c, the parts are c a and
b: sorted, the rows of c a are those of a c, unless all three are equal. What merely needs samples in an order (the
longest first) or two by two makes something else of c a, and is given the parts a b and c.

Values of one batch may hide what others show, behind a mask that leaves nothing, say. So where the graph knows that
samples meet, one of them is given another value there (`sample_perturbation`).

All of the graph, and with its own weights, as dear as that is. Less does not do: maps that make few features and repeat
them find attention over the samples to be attention to oneself; and of nodes that are alike the first may be given what
shows nothing, a state of zeros, equal queries for all samples, scores that are masked with -1e9.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.errors import ArgumentError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.batch_mixing import mixing_error, sources_that_meet
from fxpipe.tracing.shapes.output_dims import batch_dependent_nodes
from fxpipe.tracing.traced import CALL_OPS, Traced
from fxpipe.tracing.verify.deterministic_run import ComparedOutputs, can_run_deterministically, run_deterministically
from fxpipe.tracing.verify.effects import Effects
from fxpipe.tracing.verify.equivalence import is_close, take_samples
from fxpipe.tracing.verify.micro_batch_sizes import excuse_sizes
from fxpipe.tracing.verify.sample_perturbation import Change, OutputValues, node_that_mixes

# Samples that tell what many would: of two, rows that go round by two (`x.roll(2, 0)`) stay where they are. If they do
# not tell all are asked, and where forward takes some out of the batch of which so few have none (`x[8:]`): values then
# are not of the sizes that they have of many.
FEW_SAMPLES = 3


def check_batch_independence(traced: Traced, leaves: Sequence[Any]) -> bool:
    """Compares a batch with its parts put together.

    Returns whether it has told for all batches: not where only the parts of this one go together, as where samples
    belong together by two, or where it is too small to tell.

    Raises:
        ArgumentError: they differ; names the output and the remedies.
    """
    batch, asked = traced.batch_of(leaves), _outputs_to_compare(traced)
    if not asked or not can_run_deterministically(traced):
        return True  # nobody can tell
    # A mean may depend on samples that are unlike the first ones (shorter texts): all have a say.
    if (
        batch >= FEW_SAMPLES
        and _grows_evenly(traced)
        and all(isinstance(traced.results[place][1], int) for place in asked)
        and _few_samples_agree(traced, asked, leaves)
    ):
        _refuse_mixing_of_other_values(traced, asked, leaves, (0, FEW_SAMPLES))
        return True
    if batch > 1:
        _compare_all_samples(traced, asked, leaves, batch)
        _refuse_mixing_of_other_values(traced, asked, leaves, (0, batch))
    elif traced.holds_at(2):
        _refuse_mixing_of_other_values(traced, asked, leaves, (0, 1), (0, 1))
    return not any(isinstance(traced.results[place][1], int) for place in asked)


def _refuse_mixing_of_other_values(
    traced: Traced, asked: ComparedOutputs, leaves: Sequence[Any], *bounds: tuple[int, int]
) -> None:
    """Refuses outputs whose samples act on each other for values that these samples do not have."""
    waiting = [node for place, node in asked.items() if isinstance(traced.results[place][1], int)]
    before = set(waiting)  # and what goes into them
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in before]
        before.update(new)
        waiting += new
    sources = {source: node for source, node in sources_that_meet(traced).items() if node in before}
    mixing = node_that_mixes(
        traced, sources, lambda change: _run_samples(traced, asked, leaves, *bounds, change=change)
    )
    if mixing is not None:
        raise mixing_error(traced, *mixing)


def _grows_evenly(traced: Traced) -> bool:
    """Returns whether all sizes are polynomials in the batch size. Of `b // 4 * 4` few samples show nothing."""
    numbers = {number for node in traced.graph.nodes if (number := info(node).number) is not None}
    numbers |= {size for node in traced.graph.nodes for shape in info(node).shapes for size in shape.shape}
    return all(number.is_polynomial(traced.batch) for number in numbers if not number.is_number)


def _few_samples_agree(traced: Traced, asked: ComparedOutputs, leaves: Sequence[Any]) -> bool:
    """Returns whether the first three samples come out of parts as they come out together; a model may need more.

    Raises:
        ArgumentError: rows are in another order than the samples.
    """
    if not all(traced.holds_at(size) for size in (1, 2, FEW_SAMPLES)):
        return False
    run = functools.partial(_run_samples, traced, asked, leaves)
    whole = run((0, FEW_SAMPLES), expected=FEW_SAMPLES)
    if whole is None:
        return False
    parts = _complete_runs(run((2, 3), (0, 1)), run((0, 1)), run((1, 2)))
    if parts and _reordered_samples_agree(traced, whole, *parts):
        return True
    # Samples that belong together by two go together if cut behind the second: they are cut behind the first as well.
    for cut in (2, 1):
        parts = _complete_runs(run((0, cut)), run((cut, FEW_SAMPLES)))
        if not parts or _differing_outputs(traced, whole, parts, cut / FEW_SAMPLES):
            return False
    return True


def _reordered_samples_agree(
    traced: Traced, whole: OutputValues, ends: OutputValues, first_alone: OutputValues, middle: OutputValues
) -> bool:
    """Of the samples a, b, c: the ends are c and a. And a alone: ends that change places do so in both."""
    right = True
    for place, value in whole.items():
        dim = traced.results[place][1]
        assert isinstance(dim, int)
        last, first = ends[place].tensor_split(2, dim)
        if not _is_close_across_sizes(traced, value, torch.cat([first, middle[place], last], dim)):
            if _is_close_across_sizes(traced, value, torch.cat([last, middle[place], first], dim)):
                raise _dependence_error(traced, place)
            right = False
        right = right and _is_close_across_sizes(traced, first, first_alone[place])
    return right


def _compare_all_samples(traced: Traced, asked: ComparedOutputs, leaves: Sequence[Any], batch: int) -> None:
    """Compares all samples with two parts of them, and looks whether they come out in that order if the second part
    comes first."""
    cut = 1 << (batch - 1).bit_length() - 1  # samples that belong together by two or four stay together
    excuse_sizes(traced, leaves, {cut, batch - cut})
    if not all(traced.holds_at(size) for size in (batch, cut, batch - cut)):
        return
    run = functools.partial(_run_samples, traced, asked, leaves)
    runs = _complete_runs(run((0, batch)), run((0, cut)), run((cut, batch)))
    if not runs:
        return  # a part is of another graph, or the model takes none of its size
    whole, *parts = runs
    for place in _differing_outputs(traced, whole, parts, cut / batch):
        raise _dependence_error(traced, place)
    if not any(isinstance(traced.results[place][1], int) for place in asked):
        return
    turned = run((cut, batch), (0, cut))
    if turned is not None:
        for place in _differing_outputs(traced, turned, parts[::-1], 1 - cut / batch):
            if _is_close_across_sizes(
                traced, turned[place], whole[place]
            ):  # not where samples merely have to come in their order
                raise _dependence_error(traced, place)


def _run_samples(
    traced: Traced,
    asked: ComparedOutputs,
    leaves: Sequence[Any],
    *bounds: tuple[int, int],
    expected: int | None = None,
    change: Change | None = None,
) -> OutputValues | None:
    """Computes what is asked of these samples; None if forward does not take them."""
    pieces = [take_samples(traced, leaves, *bound) for bound in bounds]
    dims = traced.in_dims
    sample = [
        piece[0] if dim is None or len(piece) == 1 else torch.cat(piece, dim)
        for piece, dim in zip(zip(*pieces, strict=True), dims, strict=True)
    ]
    try:
        return run_deterministically(traced, asked, sample, expected, change)
    except Exception:
        return None


def _complete_runs(*runs: OutputValues | None) -> list[OutputValues]:
    """Returns the runs; nothing if one is missing."""
    complete = [run for run in runs if run is not None]
    return complete if len(complete) == len(runs) else []


def _differing_outputs(traced: Traced, whole: OutputValues, parts: Sequence[OutputValues], share: float) -> list[int]:
    """The outputs that are not their parts put together, of which the first has this share of the samples."""
    differing = []
    combinations = {one.output: one for one in traced.combinations}
    first, second = parts
    together: Any
    for place, value in whole.items():
        if len(traced.outputs) <= place < len(traced.outputs) + len(traced.pieces):
            continue  # it only says something with others
        if place in combinations:
            one = combinations[place]
            pieces = zip(one.pieces, one.reductions, strict=True)
            together = one([_join_two(first[piece], second[piece], how, share) for piece, how in pieces])
        else:
            together = _join_two(first[place], second[place], traced.results[place][1], share)
        if not _is_close_across_sizes(traced, value, together):
            differing.append(place)
    return differing


def _join_two(first: Any, second: Any, how: int | str | None, share: float) -> Any:
    if isinstance(how, int):
        return torch.cat([first, second], how)
    return {"mean": first * share + second * (1 - share), "sum": first + second, None: first}[how]


def _is_close_across_sizes(traced: Traced, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether values are equal to half of the digits, of float32 if that was made wider on the way."""
    eps = torch.finfo(left.dtype).eps
    if any(shape.dtype == torch.float32 for node in batch_dependent_nodes(traced) for shape in info(node).shapes):
        eps = max(eps, torch.finfo(torch.float32).eps)
    return is_close(left, right, eps**0.5)


def _dependence_error(traced: Traced, place: int) -> ArgumentError:
    node = traced.results[place][0]
    first_left = len(traced.results) - len(traced.left)
    name = f"output {place}" if place < len(traced.outputs) else "what forward writes to an input"
    name = f"what forward sets {[*traced.left][place - first_left]!r} to" if place >= first_left else name
    return ArgumentError(
        f"{name} ({node.name}, {info(node).shapes[0]}, made at "
        f"{info(node).source or 'the input'}): the outputs of micro-batches, put together, are not the "
        "output of the batch. Do samples act on each other (a loss that is no mean over samples, normalisation "
        f"over the batch), are rows in another order than the samples (give the batch a dimension of its own), "
        f"or is an input not batched (in_dims={_assumed_in_dims(traced)} was taken)? Say with in_dims what is batched, "
        "or with out_dims how the outputs go together ('stack', 'mean', 'sum', a dimension), if that is meant. "
        "A loss that the model takes itself in a way that its graph does not tell (a module kept whole): let it "
        "take the loss by functions of torch, or return what it sums and what it divides by"
    )


def _outputs_to_compare(traced: Traced) -> ComparedOutputs:
    """Returns, by place of an output that is put together, what to compare for it: itself or what says the same."""
    compared = {}
    wanted = {piece for one in traced.combinations if one.output not in traced.told for piece in one.pieces}
    for place, (node, dim) in enumerate(traced.results):
        shapes: Sequence[Any] = info(node).shapes if isinstance(node, fx.Node) else ()
        is_told = place in traced.told if place < len(traced.outputs) else bool(traced.told)
        if place in wanted:
            compared[place] = node
        elif dim is None or len(shapes) != 1 or is_told or node in traced.pieces:
            continue
        elif shapes[0].dtype.is_floating_point or shapes[0].dtype.is_complex:
            assert isinstance(node, fx.Node)
            compared[place] = node.all_input_nodes[0] if _is_samplewise_linear(traced, node, dim) else node
    return compared


def _is_samplewise_linear(traced: Traced, node: fx.Node, dim: int | str) -> bool:
    """Returns whether an output is a linear map of its input, for each sample by itself, and says no more than that.

    To multiply with a vocabulary may take as long as all before it.
    """
    effects: Effects | None = traced.effects
    assert effects is not None
    if node.target is not F.linear or not node.args or not isinstance(dim, int):
        return False
    source, *weights = node.all_input_nodes
    return (
        source is node.args[0]
        and source.op in CALL_OPS
        and info(source).shapes[0].dtype == info(node).shapes[0].dtype
        and dim < len(info(node).shapes[0].shape) - 1
        and batch_dependent_nodes(traced).isdisjoint(weights)
        and effects.alias[source] not in set().union(*effects.written_classes)
        and node.users.keys() == {traced.graph.output_node()}
    )


def _assumed_in_dims(traced: Traced) -> dict[str, int | None]:
    return {leaf.head: dim for leaf, dim in zip(traced.leaves, traced.in_dims, strict=True) if leaf.is_tensor}
