"""A picture as data, drawn as SVG, in colours that everyone tells apart."""

import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise
from math import dist
from operator import mul

import pytest

from fxpipe.inspect import style as colours
from fxpipe.inspect.style import fit_text, text_width
from fxpipe.inspect.svg import PAPER, Area, Bars, Curve, Line, Rect, Scene, Text, arrow_head, svg_of

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
        Curve((0, 0), ((1, 1), (2, 1)), (3, 0), RED),
        Area(((0, 0), (1, 0), (1, 1)), RED),
        Text(5, 5, "a", 9, BLUE, "middle", True),
    )
    background, rect, bars, line, curve, arrow, area, text = _elements(_scene(*items))
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


def test_an_arrow_comes_from_the_last_control_point_that_is_not_its_end():
    tip, left, right = arrow_head(Curve((0, 0), ((10, 5), (10, 0)), (10, 0), RED))
    assert tip == (10, 0)
    assert (left[0] + right[0]) / 2 == pytest.approx(10)
    assert (left[1] + right[1]) / 2 > 0


EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
APART = 20  # CIE 1976; 2.3 is what an eye just sees


def _linear(colour: str) -> list[float]:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _lab(linear) -> tuple[float, float, float]:
    xyz = _times(((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)), linear)
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (part / white for part, white in zip(xyz, (0.9505, 1, 1.089), strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _seen(colour: str, eye: str) -> tuple[float, float, float]:
    return _lab([min(1, max(0, part)) for part in _times(EYES[eye], _linear(colour))])


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(
    "palette",
    [
        {**{str(kind): colour for kind, colour in colours.KIND_COLOURS.items()}, "bubble": PAPER},
        {name: colours.MEMORY_COLOURS[name] for name in ("activations", "portals", "working")},
        *(dict((one, two)) for one, two in pairwise(colours.MEMORY_COLOURS.items())),  # which lie on each other
    ],
)
def test_any_two_are_told_apart(palette, eye):
    for one, two in combinations(palette, 2):
        assert dist(_seen(palette[one], eye), _seen(palette[two], eye)) > APART, (one, two)


def test_kinds_of_actions_differ_in_lightness_so_that_grey_will_do():
    lightness = sorted(_seen(colour, "usual")[0] for colour in colours.KIND_COLOURS.values())
    assert all(two - one > 10 for one, two in pairwise(lightness))


def _contrast(one: str, other: str) -> float:
    """From 1 to 21 (black on white); text needs 4.5 (WCAG 2.1, 1.4.3)."""
    lower, higher = sorted(sum(map(mul, (0.2126, 0.7152, 0.0722), _linear(colour))) for colour in (one, other))
    return (higher + 0.05) / (lower + 0.05)


def test_letters_are_legible_on_every_colour():
    for kind, colour in colours.KIND_COLOURS.items():
        assert _contrast(PAPER if kind in colours.DARK_KINDS else colours.INK, colour) >= 4.5
    for colour in (colours.INK, colours.FAINT, colours.LIMIT_COLOUR):
        assert _contrast(colour, PAPER) >= 4.5
