"""The inputs of a step by micro-batch: parts of one mini-batch, or micro-batches of the caller.

A mini-batch is split as by `tensor_split`. The plan decides how outputs are combined: concatenated along the batch
dimension, averaged by size, summed, stacked, or, if they are equal, the first. Micro-batches of the caller are
independent: each is a mini-batch to the model, may have its own sizes, and runs the program of its own graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import ArgumentError, StateError, UnequalOutputsError
from fxpipe.rewriting.program import clone
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors, different_programs
from fxpipe.utils.batch_split import BatchDim, rows_per_sample, samples_per_micro_batch
from fxpipe.utils.output_combination import needing_all


def scatter(leaves: Sequence[Any], dims: Sequence[int | None], count: int) -> list[list[Any]]:
    """Splits the leaves into a part for each micro-batch; each part has the leaves without the batch."""
    every: list[Sequence[Any]] = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is None:
            every.append([leaf] * count)
            continue
        rows = rows_per_sample(dim)
        parts = leaf.split([rows * size for size in samples_per_micro_batch(leaf.shape[dim] // rows, count)], dim)
        # Parts are as dense as the leaf, so that forward may `view` them.
        every.append([part.contiguous() for part in parts] if leaf.is_contiguous() else parts)
    return [list(part) for part in zip(*every, strict=True)] if every else [[] for _ in range(count)]


def target_dims(leaves: Sequence[Any], batch: int, rows: Collection[int] = (1,)) -> list[int | None]:
    """Returns the batch dimension of each leaf of the target: 0 for tensors. `rows`: possible numbers in a sample."""
    sizes = {batch * number: number for number in sorted(rows)}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] not in sizes):
            raise ArgumentError(
                f"target holds a tensor of shape {tuple(leaf.shape)}, but the inputs hold {batch} samples: its "
                f"dimension 0 must be {' or '.join(map(str, sizes))}; what is no part of the batch belongs into "
                "loss_fn (functools.partial)"
            )
    return [BatchDim(0, sizes[leaf.shape[0]]) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def _check_equal_sizes(parts: Sequence[Any], how: int | str, what: str) -> None:
    """Raises `UnequalOutputsError` if the parts of the output `what` cannot be combined."""
    shapes = [tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)]
    fixed = {shape[:how] + shape[how + 1 :] if isinstance(how, int) else shape for shape in shapes}
    if len(fixed) > 1:
        sizes = ", ".join(map(str, dict.fromkeys(shapes)))
        along = f"along dimension {how}" if isinstance(how, int) else f"as a {how}" if how != "stack" else "as a stack"
        raise UnequalOutputsError(
            f"{what} comes out of micro-batches with the shapes {sizes}, which cannot be put together {along}: a size "
            "that depends on values is that of each micro-batch. Let forward make the same size for all, of an input "
            "(pad_packed_sequence(..., total_length=x.shape[1])); or use chunks=1; or give micro-batches yourself "
            "(forward_backward(micro_batches=...)), whose outputs come as a list"
        )


def gather(parts: Sequence[Any], how: int | str | None, weights: Sequence[float], what: str = "an output") -> Any:
    """Combines the outputs of all micro-batches; tensors are detached. `what`: the output's name."""
    return combine([part.detach() if isinstance(part, torch.Tensor) else part for part in parts], how, weights, what)


def combine(parts: Sequence[Any], how: int | str | None, weights: Sequence[float], what: str) -> Any:
    """Combines the outputs of micro-batches as `gather` does, with gradients."""
    if how is None:
        return parts[0]
    _check_equal_sizes(parts, how, what)
    if how == "mean":
        return sum(part * weight for part, weight in zip(parts, weights, strict=True))
    if how == "sum":
        return sum(parts[1:], parts[0])
    if how == "stack":
        return torch.stack(list(parts))
    assert isinstance(how, int)
    return torch.cat(list(parts), how) if len(parts) > 1 else parts[0]  # a single part may lack the dimension


def scatter_gradient(
    gradient: torch.Tensor, shapes: Sequence[torch.Size], how: int | str | None, weights: Sequence[float]
) -> list[torch.Tensor | None]:
    """Splits the gradient of a result of `gather` into gradients of the parts, which have these shapes."""
    if how is None:
        return [gradient, *[None] * (len(shapes) - 1)]
    if how == "mean":
        return [gradient * weight for weight in weights]
    if how == "sum":
        return [gradient] * len(shapes)
    if how == "stack":
        return list(gradient.unbind())
    assert isinstance(how, int)
    return list(gradient.split([shape[how] for shape in shapes], how)) if len(shapes) > 1 else [gradient]


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """A mini-batch to be split into micro-batches, or micro-batches of the caller."""

    bounds: tuple[BoundProgram, ...]  # by micro-batch
    leaves: Sequence[Any]  # flattened inputs of the mini-batch; or by micro-batch
    samples: tuple[int, ...]  # by micro-batch
    targets: tuple[Any, ...] = ()  # () or (target,) of the mini-batch; or by micro-batch
    is_handed_over: bool = False
    replicas: int = 1  # number of replicas of the pipe, whose mini-batches are one

    @classmethod
    def of_mini_batch(
        cls, bound: BoundProgram, leaves: Sequence[Any], samples: Sequence[int], target: tuple[Any, ...] = ()
    ) -> GivenInputs:
        return cls((bound,) * len(samples), leaves, tuple(samples), target)

    @property
    def bound(self) -> BoundProgram:
        """The program of the mini-batch, or of the first micro-batch."""
        return self.bounds[0]

    def takes_all(self, reduction: str) -> bool:
        """Returns whether the backward of a step needs the outputs of all micro-batches."""
        is_split = len(self.samples) * self.replicas > 1 and not self.is_handed_over
        return is_split and self.is_joint(reduction)

    def is_joint(self, reduction: str) -> bool:
        """Returns whether the loss needs all samples together."""
        return reduction == "batch" or needing_all(self.bound.combinations) is not None

    @property
    def batch(self) -> int:
        return sum(self.samples)

    @property
    def shares(self) -> list[float]:
        return [size / self.batch for size in self.samples]


@dataclass(frozen=True, slots=True)
class TrainedInput:
    """An input that requires grad, of the mini-batch or of one micro-batch of the caller."""

    tensor: torch.Tensor
    place: int  # index in the flattened inputs
    micro_batches: range  # users
    dim: int | None  # along which it is split; None: each micro-batch has all of it


@dataclass(frozen=True, slots=True)
class StepInputs:
    bounds: tuple[BoundProgram, ...]  # by micro-batch
    parts: tuple[Sequence[Any], ...]  # by micro-batch: flattened inputs
    weights: tuple[float, ...]  # by micro-batch: share of all samples
    values: tuple[Any, ...]  # all values of the caller, flattened
    trained: tuple[TrainedInput, ...]
    is_handed_over: bool = False

    @classmethod
    def of(cls, given_inputs: GivenInputs) -> StepInputs:
        bounds, bound, m = given_inputs.bounds, given_inputs.bound, len(given_inputs.samples)
        dims: Sequence[int | None]
        if given_inputs.is_handed_over:
            every = [*map(_with_head, bounds, given_inputs.leaves, given_inputs.samples)]
            users, dims = [range(i, i + 1) for i in range(m)], [None] * max(map(len, every))
        else:
            every = [_with_head(bound, given_inputs.leaves, given_inputs.batch)]
            users, dims = [range(m)], (*bound.in_dims, *[None] * (len(every[0]) - len(bound.in_dims)))
        trained = tuple(
            TrainedInput(leaf, place, used_by, dim)
            for leaves, used_by in zip(every, users, strict=True)
            for place, (leaf, dim) in enumerate(zip(leaves, dims, strict=False))
            if tensor_requires_grad(leaf)
        )
        parts: list[list[Any]] = []
        with torch.no_grad():  # parts begin separate graphs
            for one, leaves in zip(bounds, every, strict=False):
                written = one.program.written_inputs  # copied, since R reads their values of before
                parts.append([clone(leaf) if place in written else leaf for place, leaf in enumerate(leaves)])
            if not given_inputs.is_handed_over:
                parts = scatter(parts[0], dims, m)
        values = tuple(leaf for leaves in every for leaf in leaves)
        return cls(bounds, tuple(parts), tuple(given_inputs.shares), values, trained, given_inputs.is_handed_over)

    @property
    def programs(self) -> list[BoundProgram]:
        return different_programs(self.bounds)


def _with_head(bound: BoundProgram, leaves: Sequence[Any], samples: int) -> Sequence[Any]:
    """Returns the inputs of the program: the model's inputs, and the values that `bound.head` computes from them."""
    if bound.head is None or len(leaves) == len(bound.program.inputs):  # `leaves` may already have them
        return leaves
    return [*leaves, *bound.head(leaves, samples).values()]


def tensor_requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def check_programs_fit(bounds: Sequence[BoundProgram], tensors: Sequence[ModelTensors]) -> None:
    """Raises `StateError` if micro-batches of different programs cannot follow each other in one step."""
    # If a program changes a tensor of the model, the next one must use it in the same stage and by the same name.
    changed = {name for bound in bounds for name in bound.program.changes}
    places: dict[str, set[int]] = {}
    objects: dict[str, set[int]] = {}
    for bound, own in zip(bounds, tensors, strict=True):
        for j, stage in enumerate(bound.program.stages):
            for name in {*stage.attributes, *stage.assigns}:
                places.setdefault(name, set()).add(j)
                if name in stage.attributes and (name in changed or own.get(name).requires_grad):
                    objects.setdefault(name, set()).add(id(own.get(name)))
    for name in sorted(changed):
        if len(places[name]) > 1:
            numbers = " and ".join(map(str, sorted(places[name])))
            raise StateError(
                f"these micro-batches take {len(bounds)} graphs, as forward concludes different things from them, and "
                f"{name!r}, which forward changes, is in stages {numbers} of these: the next micro-batch would not "
                "find what one has left; give those for which forward does the same in a step of their own"
            )
    for name, different in objects.items():
        if len(different) > 1:
            raise StateError(
                f"these micro-batches take {len(bounds)} graphs, in which {name!r} is not the same tensor; keep it as "
                "a parameter or buffer of a module (register_parameter, register_buffer)"
            )
