"""A scene as SVG: one element, for a page or a file, without scripts and external resources; and HTML of pages.

All text passes through `escape_markup`: a module can be named `<script>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxpipe.inspect.scene import Area, Bars, Curve, Group, Item, Line, Point, Rect, Scene, Text, arrow_head
from fxpipe.inspect.style import FONTS, PAPER, printable

TEXT_DEFAULTS = Text(0, 0, "")  # attributes that elements omit


def svg_of(scene: Scene) -> str:
    """Formats an `svg` element. Titles of items are hover texts."""
    width, height = _number_text(scene.width), _number_text(scene.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"{_attribute("aria-label", scene.title)} font-family="{_font_families()}" '
        f'font-size="{TEXT_DEFAULTS.size:g}"'
        f' fill="{TEXT_DEFAULTS.fill}">'
    ]
    if scene.title:
        lines.append(f"<title>{escape_markup(scene.title)}</title>")
    lines.append(f'<rect width="{width}" height="{height}" fill="{PAPER}"/>')
    return "\n".join([*lines, *_item_elements(scene.items), "</svg>\n"])


def escape_markup(text: str) -> str:
    """Escapes text for content and attributes."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _item_elements(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        match item:
            case Group():
                yield f"<g{_attribute('class', item.name)}>"
                yield from _item_elements(item.items)
                yield "</g>"
            case Text():
                yield _text_element(item)
            case Curve():
                yield _titled_element("path", _curve_attributes(item), item.title)
                if item.has_arrow:
                    points = _points_text(arrow_head(item))
                    yield _titled_element("polygon", f'points="{points}" fill="{item.stroke}"', item.title)
            case Rect():
                yield _titled_element("rect", _rect_attributes(item), item.title)
            case Bars():
                yield _titled_element("path", _bars_attributes(item), item.title)
            case Line():
                yield _titled_element("polyline", _line_attributes(item), item.title)
            case Area():
                attributes = f'points="{_points_text(item.points)}" fill="{item.fill}"'
                yield _titled_element("polygon", attributes, item.title)


def _rect_attributes(item: Rect) -> str:
    return (
        f'x="{_number_text(item.x)}" y="{_number_text(item.y)}" width="{_number_text(item.width)}" '
        f'height="{_number_text(item.height)}"'
        f' fill="{item.fill}"'
        + (f' stroke="{item.stroke}"' if item.stroke else "")
        + (f' rx="{_number_text(item.radius)}"' if item.radius else "")
    )


def _bars_attributes(item: Bars) -> str:
    """Formats bars as one thick line with gaps along the middle of the row, which is compact."""
    moves, x = [], 0.0
    for left, right in item.spans:
        left, right = round(left, 2), round(right, 2)
        moves.append(f"m{_number_text(left - x)} 0h{_number_text(right - left)}")
        x = right
    start = f"M0 {_number_text(item.y + item.height / 2)}"
    return f'd="{start}{"".join(moves)}" fill="none" stroke="{item.fill}" stroke-width="{_number_text(item.height)}"'


def _line_attributes(item: Line) -> str:
    dashes = " ".join(map(_number_text, item.dashes))
    return (
        f'points="{_points_text(item.points)}" fill="none" stroke="{item.stroke}" '
        f'stroke-width="{_number_text(item.width)}"'
        ' stroke-linejoin="round"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
    )


def _curve_attributes(item: Curve) -> str:
    start, one, two, end = (
        f"{_number_text(x)} {_number_text(y)}" for x, y in (item.start, item.control[0], item.control[1], item.end)
    )
    return (
        f'd="M{start}C{one} {two} {end}" fill="none" stroke="{item.stroke}" stroke-width="{_number_text(item.width)}"'
    )


def _text_element(item: Text) -> str:
    x, y = _number_text(item.x), _number_text(item.y)
    return (
        f'<text x="{x}" y="{y}"'
        + ("" if item.size == TEXT_DEFAULTS.size else f' font-size="{_number_text(item.size)}"')
        + ("" if item.fill == TEXT_DEFAULTS.fill else f' fill="{item.fill}"')
        + ("" if item.anchor == TEXT_DEFAULTS.anchor else f' text-anchor="{item.anchor}"')
        + (' font-weight="bold"' if item.is_bold else "")
        + f">{escape_markup(item.text)}</text>"
    )


def _titled_element(tag: str, attributes: str, title: str) -> str:
    if not title:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{escape_markup(title)}</title></{tag}>"


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape_markup(value)}"' if value else ""


def _font_families() -> str:
    return ", ".join(f"'{name}'" if " " in name else name for name in FONTS)


def _points_text(points: Iterable[Point]) -> str:
    return " ".join(f"{_number_text(x)},{_number_text(y)}" for x, y in points)


def _number_text(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def list_markup(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape_markup(line)}</li>" for line in lines) + "\n</ul>"


# A page needs no other file and no network, and its content security policy forbids them.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_page(title: str, style: str, body: str, script: str) -> str:
    """Formats a page. `title` is text, `style` CSS, `body` markup, `script` JavaScript."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape_markup(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


# Notebook views have no style sheet, which would change the notebook's page, and no script, which it might refuse. They
# use the page's colours, and so are legible on light and dark.


def notebook_view(title: str, facts: str, *parts: str) -> str:
    """Formats a view: a title, a line of facts, and parts as markup."""
    return f"<div><div><b>{escape_markup(title)}</b></div>{notebook_note(facts)}{''.join(parts)}</div>"


def notebook_note(line: str) -> str:
    return f'<div style="opacity:.75">{escape_markup(line)}</div>'


def notebook_picture(svg: str) -> str:
    """Puts a picture on a white background."""
    return f'<div style="overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0">{svg}</div>'
