"""A picture as data: what stands where, in points, y downwards. `svg` and `raster` draw it.

Every layout (a timeline, a graph) is a pure function to a `Scene`, so that one layout serves all formats, and tests ask
the data whether anything overlaps or is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""  # none
    radius: float = 0.0  # of the corners
    title: str = ""  # shown where the pointer rests on it


@dataclass(frozen=True, slots=True)
class Line:
    """Straight from point to point."""

    points: tuple[Point, ...]
    stroke: str
    width: float = 1.0
    dashes: tuple[float, ...] = ()  # lengths of strokes and gaps, in turn
    title: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A cubic Bézier curve."""

    start: Point
    control: tuple[Point, Point]
    end: Point
    stroke: str
    width: float = 1.0
    has_arrow: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Area:
    """A polygon."""

    points: tuple[Point, ...]
    fill: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  # of the base line
    text: str
    size: float = 11.0  # of the letters
    fill: str = "#222222"
    anchor: Literal["start", "middle", "end"] = "start"
    is_bold: bool = False
    angle: float = 0.0  # degrees, clockwise, about (x, y)


Item: TypeAlias = Rect | Line | Curve | Area | Text


@dataclass(frozen=True, slots=True)
class Scene:
    """Items are drawn in their order."""

    width: float
    height: float
    items: tuple[Item, ...]
    title: str = ""  # for those who cannot see it
    background: str = "#ffffff"
