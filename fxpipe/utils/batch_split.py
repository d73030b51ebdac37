"""Sizes of the micro-batches of a mini-batch, which differ by at most one.

An input holds the batch in one dimension, usually with one row for each sample. With several rows per sample (tiles of
an image, boxes), the rows of a sample are consecutive and stay in one micro-batch (`BatchDim`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class BatchDim(int):
    """The dimension of a tensor that holds the batch, with `rows` rows for each sample."""

    rows: int

    def __new__(cls, dim: int, rows: int = 1) -> BatchDim:
        self = super().__new__(cls, dim)
        self.rows = rows
        return self

    def __reduce__(self) -> tuple[type[BatchDim], tuple[int, int]]:
        return BatchDim, (int(self), self.rows)


def rows_per_sample(dim: int | None) -> int:
    """Returns the rows per sample along a dimension that holds the batch.

    >>> rows_per_sample(0), rows_per_sample(BatchDim(0, rows=4))
    (1, 4)
    """
    return dim.rows if isinstance(dim, BatchDim) else 1


def rows_of_inputs(dims: Iterable[int | None]) -> frozenset[int]:
    """Returns the numbers of rows per sample of inputs that hold the batch in these dimensions, and 1."""
    return frozenset({1, *map(rows_per_sample, dims)})


def samples_along(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] // rows_per_sample(dim)


def samples_per_micro_batch(batch: int, count: int) -> list[int]:
    """Returns the samples of each of `count` micro-batches, larger ones first, as in `tensor_split`.

    >>> samples_per_micro_batch(7, 3)
    [3, 2, 2]
    """
    least, larger = divmod(batch, count)
    return [least + 1] * larger + [least] * (count - larger)


def micro_batch_sizes(batch: int, chunks: int) -> frozenset[int]:
    """Returns the one or two sizes of at most `chunks` micro-batches, at most one per sample.

    >>> sorted(micro_batch_sizes(7, 3)), sorted(micro_batch_sizes(2, 8)), sorted(micro_batch_sizes(0, 8))
    ([2, 3], [1], [0])
    """
    parts = max(1, min(chunks, batch))
    return frozenset((batch // parts, -(-batch // parts)))


def largest_micro_batch(batch: int, chunks: int) -> int:
    return max(micro_batch_sizes(batch, chunks))
