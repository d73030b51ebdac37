"""Splits mini-batches into micro-batches, and gathers their outputs.

Splits as `tensor_split`: sizes differ by at most one. The plan decides how outputs are combined: concatenated along the
batch dimension, averaged by size, summed, stacked, or, if they are equal, the first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from fxpipe.errors import ArgumentError, UnequalOutputsError
from fxpipe.utils.batch_split import BatchDim, rows_per_sample, samples_per_micro_batch


def scatter(leaves: Sequence[Any], dims: Sequence[int | None], count: int) -> list[list[Any]]:
    """Splits the leaves into a part for each micro-batch; leaves without the batch are the same for all."""
    parts = [
        _split_leaf(leaf, dim, count) if dim is not None else [leaf] * count
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return [list(part) for part in zip(*parts, strict=True)] if parts else [[] for _ in range(count)]


def _split_leaf(leaf: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    """Splits a leaf into parts that are as dense as the leaf, so that forward may `view` them."""
    rows = rows_per_sample(dim)
    parts = leaf.split([rows * size for size in samples_per_micro_batch(leaf.shape[dim] // rows, count)], dim)
    return [part.contiguous() for part in parts] if leaf.is_contiguous() else list(parts)


def target_dims(leaves: Sequence[Any], batch: int, rows: Collection[int] = (1,)) -> list[int | None]:
    """Returns the batch dimension of each leaf of the target: 0 for tensors.

    Args:
        rows: possible numbers of rows of a sample.

    Raises:
        ArgumentError: a tensor has another size there.
    """
    sizes = {batch * number: number for number in sorted(rows)}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] not in sizes):
            raise ArgumentError(
                f"target holds a tensor of shape {tuple(leaf.shape)}, but the inputs hold {batch} samples: its "
                f"dimension 0 must be {' or '.join(map(str, sizes))}; what is no part of the batch belongs into "
                "loss_fn (functools.partial)"
            )
    return [BatchDim(0, sizes[leaf.shape[0]]) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def check_equal_sizes(parts: Sequence[Any], how: int | str | None, what: str) -> None:
    """Checks that the parts of an output can be combined. `what`: the output's name.

    Raises:
        UnequalOutputsError: their sizes differ in other dimensions than the batch.
    """
    if how is None or not all(isinstance(part, torch.Tensor) for part in parts):
        return
    shapes = [tuple(part.shape) for part in parts]
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
    """Combines the outputs of all micro-batches; tensors are detached. `what`: the output's name.

    Raises:
        UnequalOutputsError: they cannot be combined.
    """
    return combine([part.detach() if isinstance(part, torch.Tensor) else part for part in parts], how, weights, what)


def combine(parts: Sequence[Any], how: int | str | None, weights: Sequence[float], what: str) -> Any:
    """Combines the outputs of micro-batches as `gather` does, with gradients."""
    check_equal_sizes(parts, how, what)
    if how is None:
        return parts[0]
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
    if len(shapes) == 1:
        return [gradient]
    return list(gradient.split([shape[how] for shape in shapes], how))
