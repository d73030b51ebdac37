"""Says what is the least that would do, where no candidate fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.tuning.rows import Row
from fxpipe.tuning.search import Limits
from fxpipe.units import human_bytes


def least_that_would(rows: Sequence[Row], limits: Limits) -> str:
    """The candidate that lacks least, and what it would fit into."""
    tried = [row for row in rows if row.plan is not None]
    nearest = min(tried, key=lambda row: (row.lacks, row.step_seconds))
    over = [
        f"device {k} {human_bytes(peak)} of {human_bytes(limit)}"
        for k, (peak, limit) in enumerate(zip(nearest.memory, limits, strict=True))
        if limit is not None and peak > limit
    ]
    return (
        f"none of the {len(tried)} ways to train that were tried fits into memory. The one that lacks least is "
        f"{nearest}, which needs on {', '.join(over)}: a memory_limit of {_enough(nearest, limits)} would do, or more "
        "devices, smaller mini-batches (batch_size), an optimizer that keeps less (optimizer_state)"
    )


def _enough(row: Row, limits: Limits) -> str:
    """A limit for all devices alike, or one for each, as they were given."""
    needed = [None if limit is None else max(limit, peak) for peak, limit in zip(row.memory, limits, strict=True)]
    if len({*limits}) == 1:
        return _in_bytes(max(row.memory))
    return "[" + ", ".join("None" if need is None else _in_bytes(need) for need in needed) + "]"


def _in_bytes(need: float) -> str:
    """Rounded up, so that it does fit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if need >= size:
            return f"'{-(-int(need * 100) // size) / 100 + 0.01:.2f}{unit}'"
    return f"{int(need) + 1}"
