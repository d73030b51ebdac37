"""Round numbers along an axis, and their names: of time, and of bytes."""

from __future__ import annotations

import math

from fxpipe.units import human_bytes

TIMES = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
MINUTES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 18000, 36000, 86400)  # steps, in seconds


def time_ticks(seconds: float, most: int) -> tuple[tuple[float, str], ...]:
    """At most `most` + 1 places from 0 to `seconds`, and what to write there: `20 ms`, `1:30 min`."""
    if seconds <= 0:
        return ((0.0, "0"),)
    least = seconds / max(1, most)
    step = next((s for s in MINUTES if s >= least), _round_up(least)) if seconds >= 120 else _round_up(least)
    count = int(seconds / step * (1 + 1e-9))
    return tuple((k * step, _time(k * step, step, seconds)) for k in range(count + 1))


def byte_ticks(size: float, most: int) -> tuple[tuple[float, str], ...]:
    """At most `most` + 1 places from 0 to `size`."""
    if size <= 0:
        return ((0.0, "0"),)
    unit = 1024.0 ** max(0, min(4, math.floor(math.log(size, 1024))))
    step = _round_up(size / unit / max(1, most)) * unit
    if unit > 1 and step < unit:
        step = 2 ** math.ceil(math.log2(size / unit / max(1, most))) * unit
    return tuple((k * step, human_bytes(k * step) if k else "0") for k in range(int(size / step * (1 + 1e-9)) + 1))


def _round_up(least: float) -> float:
    """The least of 1, 2, 5, 10, 20, 50 … that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))


def _time(at: float, step: float, seconds: float) -> str:
    if not at:
        return "0"
    if seconds >= 120:
        minutes, rest = divmod(round(at), 60)
        return f"{minutes // 60}:{minutes % 60:02} h" if seconds >= 7200 else f"{minutes}:{rest:02} min"
    size, unit = next((one for one in reversed(TIMES) if one[0] <= seconds * (1 + 1e-9)), TIMES[0])
    return f"{_plain(at / size, step / size)} {unit}"


def _plain(value: float, step: float) -> str:
    """As many places as the steps need."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{places}f}"
