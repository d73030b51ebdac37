"""A picture as data, items with positions in points, y downwards; its SVG, one element without scripts; HTML of pages.

Every layout (a timeline, a graph) is a pure function that returns a `Scene`, so tests can check the data for items that
overlap or are cut off. All text passes through `escape_markup`: a module can be named `<script>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from typing import Literal, TypeAlias

PAPER = "#ffffff"
FONTS = ("DejaVu Sans", "Verdana", "Geneva", "sans-serif")  # in order of preference
UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # also invalid in XML

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
    width: float
    height: float
    items: tuple[Item, ...]  # drawn in order
    title: str = ""  # for screen readers


def arrow_head(curve: Curve) -> tuple[Point, Point, Point]:
    """Returns the triangle at a curve's end, tip first."""
    (x, y), size = curve.end, 3.0 + 1.5 * curve.width
    back = next((p for p in (curve.control[1], curve.control[0], curve.start) if p != curve.end), (x - 1, y))
    length = hypot(x - back[0], y - back[1])
    dx, dy = (x - back[0]) / length * size, (y - back[1]) / length * size
    return (x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)


TEXT_DEFAULTS = Text(0, 0, "")  # attributes that elements omit


def svg_of(scene: Scene) -> str:
    """Formats an `svg` element. Titles of items are hover texts."""
    width, height = _number_text(scene.width), _number_text(scene.height)
    label = f' aria-label="{escape_markup(scene.title)}"' if scene.title else ""
    fonts = ", ".join(f"'{name}'" if " " in name else name for name in FONTS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"{label} font-family="{fonts}" font-size="{TEXT_DEFAULTS.size:g}" fill="{TEXT_DEFAULTS.fill}">'
    ]
    if scene.title:
        lines.append(_title_element(scene.title))
    lines.append(f'<rect width="{width}" height="{height}" fill="{PAPER}"/>')
    return "\n".join([*lines, *map(_item_markup, scene.items), "</svg>\n"])


def printable(text: str) -> str:
    """Replaces unprintable characters (control codes, lone surrogates) by a mark."""
    return UNPRINTABLE.sub("\ufffd", text)


def escape_markup(text: str) -> str:
    """Escapes text for content and attributes."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _item_markup(item: Item) -> str:
    if isinstance(item, Text):
        style: dict[str, float | str] = {"font_size": item.size, "fill": item.fill, "text_anchor": item.anchor}
        usual = {"font_size": TEXT_DEFAULTS.size, "fill": TEXT_DEFAULTS.fill, "text_anchor": TEXT_DEFAULTS.anchor}
        style = {name: value for name, value in style.items() if value != usual[name]}
        weight = "bold" if item.is_bold else ""
        return _element("text", escape_markup(item.text), x=item.x, y=item.y, **style, font_weight=weight)
    title = _title_element(item.title)
    match item:
        case Rect(x, y, width, height, fill, stroke, radius):
            return _element(
                "rect", title, x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, rx=radius or ""
            )
        case Bars():  # one thick line with gaps along the middle of the row, which is compact
            path, at = f"M0 {_number_text(item.y + item.height / 2)}", 0.0
            for left, right in item.spans:
                left, right = round(left, 2), round(right, 2)
                path += f"m{_number_text(left - at)} 0h{_number_text(right - left)}"
                at = right
            return _element("path", title, d=path, fill="none", stroke=item.fill, stroke_width=item.height)
        case Line(points, stroke, width, dashes):
            return _element(
                "polyline",
                title,
                points=_points_text(points),
                fill="none",
                stroke=stroke,
                stroke_width=width,
                stroke_linejoin="round",
                stroke_dasharray=" ".join(map(_number_text, dashes)),
            )
        case Area(points, fill):
            return _element("polygon", title, points=_points_text(points), fill=fill)
        case Curve(start, control, end, stroke, width):
            first, *others = (f"{_number_text(x)} {_number_text(y)}" for x, y in (start, *control, end))
            path = f"M{first}C{' '.join(others)}"
            curve = _element("path", title, d=path, fill="none", stroke=stroke, stroke_width=width)
            return f"{curve}\n{_element('polygon', title, points=_points_text(arrow_head(item)), fill=stroke)}"


def _element(tag: str, content: str, **attributes: str | float) -> str:
    """Formats an element, without attributes that are empty."""
    shown = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, str) else _number_text(value)}"'
        for name, value in attributes.items()
        if value != ""
    )
    return f"<{tag}{shown}>{content}</{tag}>" if content else f"<{tag}{shown}/>"


def _title_element(title: str) -> str:
    return f"<title>{escape_markup(title)}</title>" if title else ""


def _points_text(points: Iterable[Point]) -> str:
    return " ".join(f"{_number_text(x)},{_number_text(y)}" for x, y in points)


def _number_text(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def list_markup(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape_markup(line)}</li>" for line in lines) + "\n</ul>"


# Notebook views have no style sheet, which would change the notebook's page, and no script, which it might refuse. They
# use the page's colours, and so are legible on light and dark.


def notebook_view(title: str, facts: str, *parts: str) -> str:
    """Formats a view: a title, a line of facts, and parts as markup."""
    return f"<div><div><b>{escape_markup(title)}</b></div>{notebook_note(facts)}{''.join(parts)}</div>"


def notebook_note(line: str) -> str:
    return f'<div style="opacity:.75">{escape_markup(line)}</div>'
