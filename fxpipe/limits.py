"""Limits of memory as users write them: `"70GiB"`, a number of bytes, or one of these for each device."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fxpipe.errors import ArgumentError, ArgumentTypeError

# Both families are meant literally: a card of "80GB" is sold with 80e9 bytes or with 80 GiB, and one must say which.
_UNITS = {"B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_ACCEPTED = "'70GiB', '80GB', a number of bytes, None for no limit, or a list with one of these for each device"


def parse_memory_limit(given: Any, devices: int) -> tuple[int | None, ...] | None:
    """Bytes for each device, None where there is no limit; None for all if nothing was said.

    >>> parse_memory_limit("1.5GiB", devices=2)
    (1610612736, 1610612736)
    >>> parse_memory_limit([10**9, None], devices=2)
    (1000000000, None)
    """
    if given is None:
        return None
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != devices:
            raise ArgumentError(
                f"memory_limit={list(given)!r} has {len(given)} entries for {devices} devices: give one for each, or "
                "one for all"
            )
        return tuple(None if limit is None else _bytes(limit) for limit in given)
    return (_bytes(given),) * devices


def _bytes(given: Any) -> int:
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", given.upper())
        if match is None:
            raise ArgumentError(f"memory_limit={given!r} is no number of bytes; expected {_ACCEPTED}")
        number, unit = float(match[1]), _UNITS[match[2] or "B"]
    elif isinstance(given, Real) and not isinstance(given, bool):
        number, unit = float(given), 1
    else:
        raise ArgumentTypeError(f"memory_limit={given!r} is a {type(given).__name__}; expected {_ACCEPTED}")
    if not math.isfinite(number) or number <= 0:
        raise ArgumentError(f"memory_limit={given!r}: expected more than 0 bytes: {_ACCEPTED}")
    return int(number * unit)
