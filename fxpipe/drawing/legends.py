"""What the colours of a picture mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.drawing.letters import text_width
from fxpipe.drawing.scene import Item, Line, Rect, Text

SIDE = 10.0  # of a square
SIZE = 10.0  # of the letters
NEAR, APART = 5.0, 18.0  # from a square to its text; to the next square


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    colour: str
    border: str = ""
    is_line: bool = False


def legend(entries: Sequence[Entry], x: float, y: float, width: float) -> list[Item]:
    """In one line, whose base is at `y`; what has no room in `width` is left out."""
    items: list[Item] = []
    at = x
    for entry in entries:
        end = at + SIDE + NEAR + text_width(entry.name, SIZE)
        if end > x + width:
            break
        if entry.is_line:
            items.append(Line(((at, y - 4), (at + SIDE, y - 4)), entry.colour, 2))
        else:
            items.append(Rect(at, y - SIDE + 1, SIDE, SIDE, entry.colour, entry.border))
        items.append(Text(at + SIDE + NEAR, y, entry.name, SIZE))
        at = end + APART
    return items
