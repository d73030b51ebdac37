"""How much room a line of text takes, and what is left of it where there is less: a picture is laid out before any
font is known, and so by widths that no usual sans-serif exceeds by much.
"""

from __future__ import annotations

_NARROW, _WIDE = frozenset("iljtfrI.,:;|!()[]' -–·_"), frozenset("mwMW@%→←…")


def text_width(text: str, size: float) -> float:
    """Points, rather too many than too few."""
    return size * sum(0.40 if c in _NARROW else 0.92 if c in _WIDE else 0.66 if c.isupper() else 0.58 for c in text)


def fitted(name: str, width: float, size: float) -> str:
    """As much of a dotted name as fits: all, or its last parts, or nothing. `transformer.h.0.attn` -> `…0.attn`."""
    if text_width(name, size) <= width:
        return name
    head, _, last = name.rpartition(" – ")  # of several modules: the last parts of both
    if head:
        for depth in range(name.count("."), -1, -1):
            short = f"{_tail(head, depth)} – {_tail(last, depth)}"
            if text_width(short, size) <= width:
                return short
        return ""
    for at in (k for k, letter in enumerate(name) if letter in "._"):
        short = "…" + name[at + 1 :]
        if text_width(short, size) <= width:
            return short
    return ""


def clipped(text: str, width: float, size: float) -> str:
    """As much of its beginning and end as fits."""
    if text_width(text, size) <= width:
        return text
    keep = len(text)
    while keep > 2:
        keep -= 1
        short = text[: keep - keep // 2] + "…" + text[len(text) - keep // 2 :]
        if text_width(short, size) <= width:
            return short
    return ""


def _tail(name: str, depth: int) -> str:
    return ".".join(name.split(".")[-depth - 1 :])
