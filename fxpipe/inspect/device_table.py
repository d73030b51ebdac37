"""The table of the devices of a step: their time and peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.inspect.table import Column, Table, bytes_column, number_column, seconds_column, share_column, text_column
from fxpipe.simulation.timeline import MEMORY_PARTS, MemoryParts, MemoryTimeline


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    index: int
    name: str
    busy: float  # seconds
    bubble: float  # share of the step
    parts: MemoryParts  # at the peak
    limit: float | None  # bytes


def _part_column(part: str) -> Column[DeviceFigures]:
    return bytes_column(part, lambda row: getattr(row.parts, part) or None)


DEVICE_COLUMNS: tuple[Column[DeviceFigures], ...] = (
    number_column("device", lambda row: row.index),
    text_column("", lambda row: row.name),
    seconds_column("busy", lambda row: row.busy),
    share_column("bubble", lambda row: row.bubble),
    bytes_column("peak memory", lambda row: row.parts.total, lambda row: row.limit),
    *map(_part_column, MEMORY_PARTS),
)


def device_table(
    names: Sequence[str],
    busy: Sequence[float],
    bubble: Sequence[float],
    memory: Sequence[MemoryTimeline],
    limits: Sequence[float | None],
    *without: str,
) -> Table[DeviceFigures]:
    """Makes a table of devices: time and, if known, peak memory by part. Omits the columns named in `without`."""
    parts = [one.at_peak for one in memory] or [MemoryParts()] * len(names)
    hidden = {*without} if memory else {*without, "peak memory", *MEMORY_PARTS}
    figures = (range(len(names)), names, busy, bubble, parts, limits or (None,) * len(names))
    rows = [DeviceFigures(*row) for row in zip(*figures, strict=True)]
    return Table([column for column in DEVICE_COLUMNS if column.name not in hidden], rows)
