"""A picture as data, drawn as SVG."""

import xml.etree.ElementTree as ElementTree

import pytest
from helpers.drawn_steps import flatten_items

from fxpipe.inspect.scene import Area, Bars, Curve, Group, Line, Rect, Scene, Text, arrow_head
from fxpipe.inspect.style import fit_text, text_width
from fxpipe.inspect.svg import svg_of

SVG = "{http://www.w3.org/2000/svg}"
RED, BLUE = "#ff0000", "#0000ff"


def _scene(*items, title="") -> Scene:
    return Scene(100, 50, items, title)


def _elements(scene: Scene) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg_of(scene)))


def test_every_item_is_an_element_in_the_order_of_drawing():
    items = (
        Rect(1, 2, 3.005, 4, RED, BLUE, 2),
        Bars(10, 4, ((1, 3), (4, 4.5)), RED),
        Line(((0, 0), (5, 5)), RED, 2, (4, 2)),
        Curve((0, 0), ((1, 1), (2, 1)), (3, 0), RED, has_arrow=True),
        Area(((0, 0), (1, 0), (1, 1)), RED),
        Text(5, 5, "a", 9, BLUE, "middle", True),
        Group((Text(1, 1, "b"),), "inner"),
    )
    background, rect, bars, line, curve, arrow, area, text, group = _elements(_scene(*items))
    assert background.attrib == {"width": "100", "height": "50", "fill": "#ffffff"}
    assert rect.attrib == {
        "x": "1", "y": "2", "width": "3", "height": "4", "fill": RED, "stroke": BLUE, "rx": "2",
    }  # fmt: skip
    assert bars.get("d") == "M0 12m1 0h2m1 0h0.5"
    assert bars.get("stroke-width") == "4"
    assert (line.get("points"), line.get("stroke-dasharray")) == ("0,0 5,5", "4 2")
    assert curve.get("d") == "M0 0C1 1 2 1 3 0"
    assert arrow.get("points").startswith("3,0 ")
    assert area.get("points") == "0,0 1,0 1,1"
    assert text.attrib == {
        "x": "5", "y": "5", "font-size": "9", "fill": BLUE, "text-anchor": "middle", "font-weight": "bold",
    }  # fmt: skip
    assert group.get("class") == "inner"
    assert [child.text for child in group] == ["b"]
    assert len(list(flatten_items(items))) == 7


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", 'a & "b"', "]]>", "\x00\x1b[31m\ud800", "é 中 µ", "  "])
def test_any_text_stays_text(text):
    shown = "".join("\ufffd" if c in "\x00\x1b\ud800" else c for c in text)
    root = ElementTree.fromstring(svg_of(_scene(Text(1, 1, text), Rect(0, 0, 1, 1, RED, title=text), title=text)))
    assert root.get("aria-label") == shown
    assert [e.text for e in root.iter(f"{SVG}text")] == [shown]
    assert [e.text for e in root.iter(f"{SVG}title")] == [shown, shown]
    assert not list(root.iter(f"{SVG}script"))


def test_a_text_is_shortened_in_its_middle():
    assert fit_text("short", 100, 10) == "short"
    shorter = fit_text("a name that is far too long", 80, 10)
    assert shorter.startswith("a na")
    assert shorter.endswith("ong")
    assert text_width(shorter, 10) <= 80 < text_width("a name that is far too long", 10)
    assert fit_text("wide", 3, 10) == ""


@pytest.mark.parametrize("end", [(10, 0), (0, 10), (-7, -7)])
def test_an_arrow_points_to_where_its_curve_ends(end):
    tip, left, right = arrow_head(Curve((0, 0), ((end[0] / 3, end[1] / 3), (end[0] / 2, end[1] / 2)), end, RED))
    assert tip == end
    middle = (left[0] + right[0]) / 2, (left[1] + right[1]) / 2
    assert middle[0] * end[1] == pytest.approx(middle[1] * end[0])
    assert abs(middle[0]) + abs(middle[1]) < abs(end[0]) + abs(end[1])
