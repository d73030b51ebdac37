"""The deterministic clock cycle: in which order the forwards of all micro-batches on all stages are taken up.

A micro-batch i reaches stage j at the earliest i + j forwards after micro-batch 0 entered stage 0. Taking up the pairs
by that distance keeps every device busy as soon as it can be; for 4 micro-batches and 3 stages:

    clock k    0   1   2   3   4   5
    stage 0    0   1   2   3
    stage 1        0   1   2   3
    stage 2            0   1   2   3      (the micro-batch i)

Source: Kim et al. 2020, torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models, arXiv 2004.09910,
section 3.2 ("deterministic clock-cycle"); counted from 0 here.
"""

from __future__ import annotations

from collections.abc import Iterator


def clock_cycles(m: int, n: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """For each clock k = 0 ... m + n - 2 the pairs (micro-batch i, stage j) with i + j = k, j ascending.

    >>> for cycle in clock_cycles(m=3, n=2): print(*cycle)
    (0, 0)
    (1, 0) (0, 1)
    (2, 0) (1, 1)
    (2, 1)
    """
    for k in range(m + n - 1):
        yield tuple((k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n)))
