"""A scene as SVG: one element, for a page or a file, without scripts and external resources; and HTML of pages.

All text passes through `escape_markup`: a module can be named `<script>`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxpipe.inspect.scene import Area, Bars, Curve, Item, Line, Point, Rect, Scene, Text, arrow_head
from fxpipe.inspect.style import FONTS, PAPER, printable

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


def escape_markup(text: str) -> str:
    """Escapes text for content and attributes."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _item_markup(item: Item) -> str:
    if isinstance(item, Text):
        values: tuple[float | str, ...] = (item.size, item.fill, item.anchor)
        usual = (TEXT_DEFAULTS.size, TEXT_DEFAULTS.fill, TEXT_DEFAULTS.anchor)
        size, fill, anchor = ("" if own == default else own for own, default in zip(values, usual, strict=True))
        style: dict[str, float | str] = {"font_size": size, "fill": fill, "text_anchor": anchor}
        weight = "bold" if item.is_bold else ""
        return _element("text", escape_markup(item.text), x=item.x, y=item.y, **style, font_weight=weight)
    title = _title_element(item.title) if item.title else ""
    match item:
        case Rect(x, y, width, height, fill, stroke, radius):
            return _element(
                "rect", title, x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, rx=radius or ""
            )
        case Bars():
            return _element("path", title, d=_bars_path(item), fill="none", stroke=item.fill, stroke_width=item.height)
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
    return f"<title>{escape_markup(title)}</title>"


def _bars_path(item: Bars) -> str:
    """Formats bars as one thick line with gaps along the middle of the row, which is compact."""
    moves, x = [], 0.0
    for left, right in item.spans:
        left, right = round(left, 2), round(right, 2)
        moves.append(f"m{_number_text(left - x)} 0h{_number_text(right - left)}")
        x = right
    return f"M0 {_number_text(item.y + item.height / 2)}{''.join(moves)}"


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
