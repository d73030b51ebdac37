"""The weight of each element in the loss: a check of means that takes a few microseconds and runs in every step.

An element (a sample, a token, a pixel) must have the same weight in each micro-batch. If micro-batches have different
numbers of elements, such as tokens without padding, a mean over them gives too much weight to a short micro-batch. The
gradient is wrong, and no value shows it if the model itself computes the loss, or if padding occurs after the verified
step.

Autograd's graph of the loss shows it: the gradient that arrives at a mean over n elements is n times the weight of each
element. Only the head of the graph is read, from the loss through 0-dim values to the first sums and means. A loss
without any passes. A term independent of samples, a penalty on parameters, has its share in each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from fxpipe._torch.autograd import gradients_of, output_shape, saved_reduction, saved_total_weight
from fxpipe.rewriting.program import ReceivedValue
from fxpipe.runtime.bound_program import BoundProgram

TORCH_MEAN, TORCH_SUM = 1, 2  # `reduction` in the autograd nodes of torch's losses
VALUE = "none in some micro-batch, with loss 0 or NaN"  # the key of micro-batch losses among sums and means
MOST_HEAD_NODES = 64  # larger heads are not checked


class LossReduction(NamedTuple):
    """A sum or mean in the head of a graph."""

    edge: GradientEdge  # receives its gradient
    count: Any  # its divisor: number of elements, or a tensor if elements have weights


@dataclass(slots=True)
class LossWeightingCheck:
    """The weights of elements, by sum or mean and by micro-batch; filled by all workers."""

    is_on: bool
    reduced: frozenset[tuple[int, str]]  # outputs (maker, name) without the batch, reduced by the model
    # By place and micro-batch, flat since workers write at the same time: the gradient that has arrived, and the
    # divisor of the mean.
    gradients: dict[tuple[tuple[Any, ...], int], tuple[torch.Tensor, Any]] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)  # losses of micro-batches, if combined by a mean

    @classmethod
    def of(cls, bound: BoundProgram, is_on: bool) -> LossWeightingCheck:
        """Returns the check for a program, without outputs that the user has said how to combine."""
        reduced = {
            (output.source, output.name)
            for place, (output, how) in enumerate(zip(bound.program.outputs, bound.out_dims, strict=True))
            if how in ("mean", "sum") and isinstance(output, ReceivedValue) and place not in bound.told
            if bound.wiring.users[output.source, output.name] == (len(bound.devices),)
        }
        return cls(is_on, frozenset(reduced))

    def reductions_of(self, node: Any, number: int) -> list[LossReduction]:
        """Returns the sums and means in the head of a graph that ends in this output of `node`."""
        return reductions_under(node, number) if self.is_on else []

    def note(
        self, place: Any, i: int, reductions: Sequence[LossReduction], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Records the gradients that have arrived at `reductions` in micro-batch i; `place`: of the graph."""
        for ordinal, (reduction, gradient) in enumerate(zip(reductions, gradients, strict=True)):
            if gradient is not None:
                key = place, len(reductions), ordinal, reduction.edge.node.name()
                self.gradients[key, i] = (gradient, reduction.count)

    def note_roots(
        self,
        j: int,
        i: int,
        names: Sequence[str],
        roots: Sequence[GradientEdge],
        arrived: Sequence[torch.Tensor | None],
    ) -> None:
        """Records the gradients of outputs that stage j has reduced."""
        for name, root, gradient in zip(names, roots, arrived, strict=True) if self.is_on else ():
            if (
                (j, name) in self.reduced
                and gradient is not None
                and (reductions := self.reductions_of(root.node, root.output_nr))
            ):
                edges = [reduction.edge for reduction in reductions]
                gradients = gradients_of(edges, [root], [gradient], keep_graph=True)
                self.note((j, name), i, reductions, gradients)

    def difference(self, share: Callable[[int], Any], means_only: bool = False) -> str | None:
        """Describes how the weights of elements differ between micro-batches; None if they do not.

        Waits for the values, which a GPU may still be computing.

        Args:
            share: the weight of a micro-batch.
            means_only: ignore sums, since the model may divide them by its own numbers later.
        """
        by_place: dict[tuple[Any, ...], dict[int, tuple[torch.Tensor, Any]]] = {}
        for (key, i), noted in self.gradients.items():
            by_place.setdefault(key, {})[i] = noted
        for i, loss in self.values.items():  # 0, or 0 / 0: apparently no elements counted
            has_some = ((loss - loss == 0) & (loss != 0)).double()
            by_place.setdefault((VALUE,), {})[i] = has_some.new_tensor(float(share(i))), has_some
        for (*_, name), by_micro_batch in by_place.items():
            are_sums = all(isinstance(count, int) and count == 1 for _, count in by_micro_batch.values())
            if means_only and (are_sums or name == VALUE):
                continue
            gradients, counts = zip(*by_micro_batch.values(), strict=True)
            ones = map(_weight_of_one, _floats(gradients), _floats(counts))
            known = dict(zip(by_micro_batch, ones, strict=True))
            known = {i: known[i] for i in sorted(known) if not math.isnan(known[i])}
            exact = all(gradient.dtype in (torch.float32, torch.float64) for gradient in gradients)
            tolerance = 1e-5 if exact else 3e-2
            if _are_close([*known.values()], tolerance):
                continue
            shares = {i: float(share(i)) for i in known}
            if _are_close([value / shares[i] for i, value in known.items() if shares[i]], tolerance):
                continue
            least, most = min(known, key=lambda i: abs(known[i])), max(known, key=lambda i: abs(known[i]))
            times = abs(known[most] / known[least]) if known[least] else math.inf
            return (
                f"the loss takes a sum or mean over elements ({name.removesuffix('0').removesuffix('Backward')}) that "
                f"count {times:.3g} times as much in micro-batch {most} as in micro-batch {least}; in the whole "
                "mini-batch all count the same, and the gradients would be wrong. Is it a mean over tokens or pixels "
                "of which some do not count (ignore_index, a mask)?"
            )
        return None


def reductions_under(node: Any, number: int) -> list[LossReduction]:
    """Returns the first sums and means on the paths from a 0-dim value through 0-dim values, in graph order."""
    reductions: list[LossReduction] = []
    todo: list[tuple[Any, int]] = [(node, number)]
    seen: set[tuple[Any, int]] = set()
    while todo:
        node, number = todo.pop()
        if node is None or (node, number) in seen or not _is_scalar(node, number):
            continue
        seen.add((node, number))
        if len(seen) > MOST_HEAD_NODES:
            return []
        if (count := _count_of(node)) is not None:
            reductions.append(LossReduction(GradientEdge(node, number), count))
        else:
            todo.extend(reversed(node.next_functions))
    return reductions


def _is_scalar(node: Any, number: int) -> bool:
    """Returns whether this output of the function with backward `node` is 0-dim. Leaves are not functions."""
    shape = output_shape(node, number)
    return shape is not None and len(shape) == 0 and bool(node.next_functions)


def _count_of(node: Any) -> Any:
    """Returns the divisor of a sum or mean; None for other functions. Of saved values it reads at most a scalar."""
    name, reduction = node.name(), saved_reduction(node)
    if reduction == TORCH_MEAN and name.startswith("NllLoss"):
        return saved_total_weight(node).detach()
    if reduction == TORCH_SUM or name.startswith(("SumBackward", "NansumBackward")):
        return 1
    if reduction != TORCH_MEAN and not name.startswith("MeanBackward"):
        return None
    below, number = node.next_functions[0]
    if below is None:
        return None
    if (variable := getattr(below, "variable", None)) is not None:
        return variable.numel()
    shape = output_shape(below, number)
    return None if shape is None else math.prod(shape)


def _floats(values: Sequence[Any]) -> list[float]:
    """Returns numbers as floats; 0-dim tensors on one device together, since each read waits for the GPU."""
    if all(isinstance(value, torch.Tensor) for value in values) and len({value.device for value in values}) == 1:
        return list(torch.stack(tuple(values)).tolist())
    return [float(value) for value in values]


def _weight_of_one(gradient: float, count: float) -> float:
    """Returns the weight of one of `count` elements; NaN if unknown: none count, or the gradient overflows."""
    if not math.isfinite(gradient) or (count == 0 and gradient == 0):
        return math.nan
    return gradient / count if count else math.inf


def _are_close(values: Sequence[float], tolerance: float) -> bool:
    if math.inf in values:
        return False
    return not values or max(values) - min(values) <= tolerance * max(map(abs, values))
