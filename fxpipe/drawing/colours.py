"""The colours of pictures, which also those tell apart who see no red, no green or no blue, and who print in grey.

The colours of kinds of actions go from Okabe and Ito ("Color Universal Design", 2008), moved apart in lightness: that
is the difference that every eye sees. `CATEGORIES` are theirs as they are, without the yellow, which no line can have.
"""

from __future__ import annotations

from fxpipe.scheduling.actions import Kind

INK = "#222222"  # of text
FAINT = "#6b6b6b"  # of text that matters less; still legible on white
GRID = "#e3e3e3"
PAPER = "#ffffff"
LIMIT = "#b3261e"  # of a line that must not be passed

KINDS = {
    Kind.FORWARD: "#6fbdf0",
    Kind.RECOMPUTE: "#f0e050",
    Kind.BACKWARD: "#0a5c99",
    Kind.WEIGHT: "#d9701c",
    Kind.UPDATE: "#2b2b2b",
}
RECEIVING = "#c9c9c9"

MEMORY = {  # what stays throughout a step, in greys; what comes and goes
    "parameters": "#3f4a5a",
    "gradients": "#7d8a9c",
    "optimizer": "#b9c2cd",
    "activations": "#009e73",
    "portals": "#8fdcc2",
    "working": "#a23f8c",
}

CATEGORIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#555555")
RAMP = ("#a6d3ef", "#6fbdf0", "#0a5c99", "#0b2239")  # from the first of many to the last


def letters_on(fill: str) -> str:
    """The colour of text that is read best on `fill`, which is `#rrggbb`."""
    return INK if contrast(INK, fill) >= contrast(PAPER, fill) else PAPER


def contrast(one: str, other: str) -> float:
    """1 for the same colour to 21 for black on white; text needs 4.5, or 3 where it is large (WCAG 2.1, 1.4.3)."""
    lower, higher = sorted((_luminance(one), _luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def mixed(one: str, other: str, share: float) -> str:
    """From `one` (share 0) to `other` (share 1)."""
    parts = zip(_parts(one), _parts(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)


def on_ramp(share: float) -> str:
    """The colour at `share`, 0 to 1, of `RAMP`."""
    place = min(1.0, max(0.0, share)) * (len(RAMP) - 1)
    step = min(int(place), len(RAMP) - 2)
    return mixed(RAMP[step], RAMP[step + 1], place - step)


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear(part / 255) for part in _parts(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)
