"""The sizes of the micro-batches that a mini-batch is split into: they differ by at most one."""

from __future__ import annotations


def samples_per_micro_batch(batch: int, count: int) -> list[int]:
    """Returns the samples of each of so many micro-batches, as `tensor_split` cuts them: the larger ones first.

    >>> samples_per_micro_batch(7, 3)
    [3, 2, 2]
    """
    least, larger = divmod(batch, count)
    return [least + 1] * larger + [least] * (count - larger)


def micro_batch_sizes(batch: int, chunks: int) -> frozenset[int]:
    """Returns the sizes of micro-batches, one or two, where there are no more of them than samples.

    >>> sorted(micro_batch_sizes(7, 3)), sorted(micro_batch_sizes(2, 8)), sorted(micro_batch_sizes(0, 8))
    ([2, 3], [1], [0])
    """
    parts = max(1, min(chunks, batch))
    return frozenset((batch // parts, -(-batch // parts)))


def largest_micro_batch(batch: int, chunks: int) -> int:
    """Returns the samples of the largest micro-batch."""
    return max(micro_batch_sizes(batch, chunks))
