"""A picture as data: items with positions in points, y downwards. `svg` draws it.

Every layout (a timeline, a graph) is a pure function that returns a `Scene`, so tests can check the data for items that
overlap or are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Literal, TypeAlias

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    radius: float = 0.0
    title: str = ""  # hover text


@dataclass(frozen=True, slots=True)
class Bars:
    """Rectangles of one colour in one row, compact in a file even if there are thousands."""

    y: float
    height: float
    spans: tuple[tuple[float, float], ...]  # (left, right) of each, from left to right
    fill: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Straight lines from point to point."""

    points: tuple[Point, ...]
    stroke: str
    width: float = 1.0
    dashes: tuple[float, ...] = ()  # lengths of strokes and gaps, in turn
    title: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A cubic Bézier curve that ends in an arrow."""

    start: Point
    control: tuple[Point, Point]
    end: Point
    stroke: str
    width: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Area:
    points: tuple[Point, ...]
    fill: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float
    text: str
    size: float = 11.0
    fill: str = "#222222"
    anchor: Literal["start", "middle", "end"] = "start"
    is_bold: bool = False


Item: TypeAlias = "Rect | Bars | Line | Curve | Area | Text"


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture. Items are drawn in order."""

    width: float
    height: float
    items: tuple[Item, ...]
    title: str = ""  # for screen readers


def arrow_head(curve: Curve) -> tuple[Point, Point, Point]:
    """Returns the triangle at a curve's end, tip first."""
    (x, y), size = curve.end, 3.0 + 1.5 * curve.width
    back = next((p for p in (curve.control[1], curve.control[0], curve.start) if p != curve.end), (x - 1, y))
    length = hypot(x - back[0], y - back[1])
    dx, dy = (x - back[0]) / length * size, (y - back[1]) / length * size
    return (x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)
