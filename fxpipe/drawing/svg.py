"""A scene as SVG: one element that stands in a page or, as it is, in a file; no scripts, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxpipe.drawing.letters import FONTS, printable
from fxpipe.drawing.scene import Area, Bars, Curve, Group, Item, Line, Point, Rect, Scene, Text, arrow_head

DEFAULTS = Text(0, 0, "")  # what a text has that says nothing else


def svg_of(scene: Scene) -> str:
    """The text of an `svg` element. What has a title shows it where the pointer rests on it."""
    width, height = _number(scene.width), _number(scene.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"{_attribute("aria-label", scene.title)} font-family="{_fonts()}" font-size="{DEFAULTS.size:g}"'
        f' fill="{DEFAULTS.fill}">'
    ]
    if scene.title:
        lines.append(f"<title>{escaped(scene.title)}</title>")
    if scene.background:
        lines.append(f'<rect width="{width}" height="{height}" fill="{scene.background}"/>')
    return "\n".join([*lines, *_elements(scene.items), "</svg>\n"])


def escaped(text: str) -> str:
    """For content and attributes alike."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _elements(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        match item:
            case Group():
                yield f"<g{_attribute('class', item.name)}>"
                yield from _elements(item.items)
                yield "</g>"
            case Text():
                yield _text(item)
            case Curve():
                yield _titled("path", _curve(item), item.title)
                if item.has_arrow:
                    points = _points(arrow_head(item))
                    yield _titled("polygon", f'points="{points}" fill="{item.stroke}"', item.title)
            case Rect():
                yield _titled("rect", _rect(item), item.title)
            case Bars():
                yield _titled("path", _bars(item), item.title)
            case Line():
                yield _titled("polyline", _line(item), item.title)
            case Area():
                opacity = "" if item.opacity == 1 else f' fill-opacity="{_number(item.opacity)}"'
                yield _titled("polygon", f'points="{_points(item.points)}" fill="{item.fill}"{opacity}', item.title)


def _rect(item: Rect) -> str:
    return (
        f'x="{_number(item.x)}" y="{_number(item.y)}" width="{_number(item.width)}" height="{_number(item.height)}"'
        f' fill="{item.fill}"'
        + (f' stroke="{item.stroke}"' if item.stroke else "")
        + (f' rx="{_number(item.radius)}"' if item.radius else "")
    )


def _bars(item: Bars) -> str:
    """A line along the middle of the row, as wide as the row is high, with gaps: a few letters for each bar."""
    moves, x = [], 0.0
    for left, right in item.spans:
        left, right = round(left, 2), round(right, 2)
        moves.append(f"m{_number(left - x)} 0h{_number(right - left)}")
        x = right
    start = f"M0 {_number(item.y + item.height / 2)}"
    return f'd="{start}{"".join(moves)}" fill="none" stroke="{item.fill}" stroke-width="{_number(item.height)}"'


def _line(item: Line) -> str:
    dashes = " ".join(map(_number, item.dashes))
    return (
        f'points="{_points(item.points)}" fill="none" stroke="{item.stroke}" stroke-width="{_number(item.width)}"'
        ' stroke-linejoin="round"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
    )


def _curve(item: Curve) -> str:
    start, one, two, end = (
        f"{_number(x)} {_number(y)}" for x, y in (item.start, item.control[0], item.control[1], item.end)
    )
    return f'd="M{start}C{one} {two} {end}" fill="none" stroke="{item.stroke}" stroke-width="{_number(item.width)}"'


def _text(item: Text) -> str:
    x, y = _number(item.x), _number(item.y)
    return (
        f'<text x="{x}" y="{y}"'
        + ("" if item.size == DEFAULTS.size else f' font-size="{_number(item.size)}"')
        + ("" if item.fill == DEFAULTS.fill else f' fill="{item.fill}"')
        + ("" if item.anchor == DEFAULTS.anchor else f' text-anchor="{item.anchor}"')
        + (' font-weight="bold"' if item.is_bold else "")
        + (f' transform="rotate({_number(item.angle)} {x} {y})"' if item.angle else "")
        + f">{escaped(item.text)}</text>"
    )


def _titled(tag: str, attributes: str, title: str) -> str:
    if not title:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{escaped(title)}</title></{tag}>"


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escaped(value)}"' if value else ""


def _fonts() -> str:
    return ", ".join(f"'{name}'" if " " in name else name for name in FONTS)


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Two places, which nobody sees beyond, and no zeros that say nothing."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
