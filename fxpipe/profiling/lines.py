"""Seconds as a line over the micro-batch size: at which sizes to measure, and what follows from what was found there.

seconds │            ╱● asked for         The line goes through what was found at the size that was asked for.
        │       ╱●                        Neither its fixed part nor that of a sample is negative: where noise, or a
  fixed ├──╱                              kernel that changes with the size, says so, the other one is all.
        └───────┴─────┴── samples
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxpipe.profiling.costs import Seconds
from fxpipe.tracing.checking.check import is_same_graph
from fxpipe.tracing.traced import Traced


def other_sizes(traced: Traced, micro_batch: int, wanted: int | None = None) -> Iterator[int]:
    """Sizes besides `micro_batch` at which to measure for a line. One is enough: first `wanted`, then the best.

    They are far enough from it that noise does not decide the slope, and smaller where they can be; but a single sample
    takes other kernels than several do, so larger ones come before it: no larger than they must be, for they take long.
    """
    smaller = [micro_batch // 4, micro_batch // 2] if micro_batch >= 4 else [micro_batch - 1]
    larger = micro_batch + max(1, micro_batch // 2)
    good = (*(s for s in smaller if s > 1), larger, 2 * micro_batch, 1)
    for size in dict.fromkeys(good if wanted is None else (wanted, *good)):
        if size != micro_batch and is_same_graph(traced, size):
            yield size


def line(found: Mapping[int, float], micro_batch: int, grows: bool = True) -> Seconds:
    """The line through the seconds found at `micro_batch`, and nearest to those found at other sizes.

    Where there are none, all is cost per sample, or fixed, as `grows` says: does the work grow with the batch at all?
    """
    here = found[micro_batch]
    runs = {size - micro_batch: seconds - here for size, seconds in found.items() if size != micro_batch}
    if runs:
        slope = sum(run * rise for run, rise in runs.items()) / sum(run * run for run in runs)
        slope = min(max(slope, 0.0), here / micro_batch)
    else:
        slope = here / micro_batch if grows else 0.0
    return Seconds(max(0.0, here - slope * micro_batch), slope)
