"""Cuts a sequence of costs into blocks: the least bottleneck first, then blocks as even as can be guaranteed.

Given n items with costs >= 0, cut them into k nonempty blocks. In order of priority:

1. the *bottleneck*, the largest block sum, is minimal: it bounds the throughput of a pipeline;
2. any two block sums differ by at most the largest item, the best guarantee that holds for every sequence;
3. if costs leave a choice (zeros, ties), the numbers of items are even.

    costs     4  1  1  3  0  2  1  2      3 blocks, largest item 4
    blocks   [4  1][1  3  0][2  1  2]     sums 5, 4, 5: least bottleneck 5, differences at most 1

(2) is the theorem of I. Bárány and V. S. Grinberg, "Block partitions of sequences", Israel Journal of Mathematics 206
(2015), https://arxiv.org/abs/1308.2452: from any start, move one item at a time towards a smallest block until (2)
holds. A step never makes a block as large as the largest block, so a start with the least bottleneck keeps it. The
start here is exact, by bisection on the bottleneck, with cuts as near to even as the bottleneck allows.

Arithmetic is exact: a finite float is an integer times a power of two, so all costs are scaled to integers. Then each
cost becomes cost * (n + 1) + 1: all n extra units together are less than any difference between two sums. So the
number of items orders equal sums, which is (3), and no block ends up empty: a block that loses its only item is the
only block with sum 0, so it receives next, and the gap moves to the fixed largest block, which has at least two items.

The steps end, as in the paper. While the largest block stays fixed, each step moves an item one block away from it, and
there are only n items and k blocks. When it loses an item, either the largest sum decreases, or fewer blocks have it;
there are finitely many sums and blocks.

Limitations: the number of steps is bounded only by O(k * n**3), though in practice few sequences need any; transfers
cost nothing here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from fxpipe.errors import PartitionError


def block_partition(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Returns the lengths of `blocks` consecutive blocks of `costs`, each at least 1.

    The largest block sum is minimal, and any two block sums differ by at most the largest cost, without rounding.

        >>> block_partition([4, 1, 1, 3, 0, 2, 1, 2], 3)
        (2, 3, 3)

    `costs`: finite numbers >= 0 in any common unit. `blocks`: at least 1. Raises `PartitionError` for fewer costs.
    """
    if len(costs) < blocks:
        raise PartitionError(f"blocks={blocks}, but there are only {len(costs)} costs to cut")
    return partition_integers(exact_integers(costs), blocks)


def exact_integers(costs: Sequence[float]) -> list[int]:
    """Scales the costs to the largest unit in which all of them are integers."""
    ratios = [(cost if isinstance(cost, int) else float(cost)).as_integer_ratio() for cost in costs]
    denominator = max((d for _, d in ratios), default=1)  # all are powers of two
    return [numerator * (denominator // d) for numerator, d in ratios]


def partition_integers(costs: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Computes `block_partition` of integers >= 0, with 1 <= blocks <= len(costs), neither checked."""
    units = [cost * (len(costs) + 1) + 1 for cost in costs]  # see the module's docstring
    sums = list(accumulate(units, initial=0))
    largest = max(units)
    low, high = max(largest, -(-sums[-1] // blocks)), sums[-1]
    cuts = _even_cuts(sums, blocks, least_integer(low, high, lambda bottleneck: _fits(sums, blocks, bottleneck)))
    _improve(sums, largest, cuts)
    return tuple(stop - start for start, stop in pairwise(cuts))


# Below, `sums[p]` is the sum of the first p items, and block i has the items cuts[i] to cuts[i + 1] - 1.


def least_integer(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Finds the least integer from `low` on for which `holds` is True, by bisection; it is True for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sums: Sequence[int], blocks: int, bottleneck: int) -> bool:
    """Returns True if the items fit into `blocks` blocks of at most `bottleneck`; fills each block greedily."""
    stop = 0
    for _ in range(blocks):
        stop = _furthest_stop(sums, stop, bottleneck)
        if stop == len(sums) - 1:
            return True
    return False


def _furthest_stop(sums: Sequence[int], start: int, bottleneck: int) -> int:
    return bisect_right(sums, sums[start] + bottleneck, lo=start) - 1


def _even_cuts(sums: Sequence[int], blocks: int, bottleneck: int) -> list[int]:
    """Cuts into nonempty blocks of at most `bottleneck`, each cut as near to its even share as possible."""
    items, total = len(sums) - 1, sums[-1]
    starts = [items]  # from the last block on: the first start such that this block and all later ones hold the rest
    for _ in range(blocks):
        starts.append(bisect_left(sums, sums[starts[-1]] - bottleneck))
    first, cuts = starts[::-1], [0]
    for i in range(1, blocks):
        low = max(first[i], cuts[-1] + 1)  # this block is not empty
        high = min(_furthest_stop(sums, cuts[-1], bottleneck), items - (blocks - i))  # later blocks are not empty
        place = bisect_left(sums, i * total, key=lambda s: s * blocks)  # the first cut at or after the even share
        if i * total - sums[place - 1] * blocks <= sums[place] * blocks - i * total:
            place -= 1
        cuts.append(min(max(place, low), high))
    return [*cuts, items]


def _improve(sums: Sequence[int], largest: int, cuts: list[int]) -> None:
    """Runs the steps of Bárány and Grinberg in place; `largest` is the largest item, which is 1 in the paper."""
    size = [sums[stop] - sums[start] for start, stop in pairwise(cuts)]
    while True:
        # (1) Fix a p with M(P) = b_p: B_p is a maximal block.
        p = size.index(max(size))
        h = -1
        while h != p:
            # (2) If M(P) <= m(P) + 1, stop.
            minimum = min(size)
            if size[p] <= minimum + largest:
                return
            # (3) Else let B_q be the minimal block closest to B_p (of two, the left), B_h its neighbour towards B_p.
            q = min((i for i, b in enumerate(size) if b == minimum), key=lambda i: abs(i - p))
            # Move the item of B_h that is next to B_q to B_q: the last one if p < q, the first one if q < p.
            if p < q:
                h, cut, item = q - 1, q, cuts[q] - 1
                cuts[cut] -= 1
            else:
                h, cut, item = q + 1, q + 1, cuts[q + 1]
                cuts[cut] += 1
            moved = sums[item + 1] - sums[item]
            size[h] -= moved
            size[q] += moved
            # If p = h go to (1), else to (2): B_p is still maximal.
