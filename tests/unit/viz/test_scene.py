"""A picture as data, drawn as SVG and by matplotlib."""

import io
import xml.etree.ElementTree as ElementTree

import pytest

from fxpipe.errors import ArgumentError
from fxpipe.viz.png_pdf import raster_of
from fxpipe.viz.scene import Area, Bars, Curve, Group, Line, Rect, Scene, Text, arrow_head, flatten_items
from fxpipe.viz.style import fit_text, text_width
from fxpipe.viz.svg import svg_of

SVG = "{http://www.w3.org/2000/svg}"
RED, BLUE = "#ff0000", "#0000ff"


def _scene(*items, title="") -> Scene:
    return Scene(100, 50, items, title)


def _pixels(scene: Scene):
    image = pytest.importorskip("matplotlib.image")
    return image.imread(io.BytesIO(raster_of(scene, "png")))


def _colour(pixels, x: float, y: float) -> str:
    """At a point of the picture."""
    return "#" + "".join(f"{round(float(part) * 255):02x}" for part in pixels[int(2 * y), int(2 * x)][:3])


def _elements(scene: Scene) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg_of(scene)))


def test_every_item_is_an_element_in_the_order_of_drawing():
    items = (
        Rect(1, 2, 3.005, 4, RED, BLUE, 2),
        Bars(10, 4, ((1, 3), (4, 4.5)), RED),
        Line(((0, 0), (5, 5)), RED, 2, (4, 2)),
        Curve((0, 0), ((1, 1), (2, 1)), (3, 0), RED, has_arrow=True),
        Area(((0, 0), (1, 0), (1, 1)), RED, 0.5),
        Text(5, 5, "a", 9, BLUE, "middle", True, 90),
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
    assert area.get("fill-opacity") == "0.5"
    assert text.attrib == {
        "x": "5", "y": "5", "font-size": "9", "fill": BLUE, "text-anchor": "middle", "font-weight": "bold",
        "transform": "rotate(90 5 5)",
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


def test_a_raster_has_the_colours_where_the_scene_has_them():
    pixels = _pixels(
        _scene(
            Rect(10, 10, 20, 10, RED),
            Bars(30, 10, ((10, 20), (30, 40)), BLUE),
            Line(((50, 5), (50, 45)), RED, 4),
            Area(((60, 10), (90, 10), (90, 40), (60, 40)), BLUE, 0.5),
            Rect(70, 20, 10, 10, RED),  # over the area
        )
    )
    assert pixels.shape[:2] == (100, 200)
    for x, y, colour in (
        (20, 15, RED), (20, 22, "#ffffff"), (15, 35, BLUE), (25, 35, "#ffffff"), (35, 35, BLUE), (50, 25, RED),
        (65, 15, "#8080ff"), (75, 25, RED),
    ):  # fmt: skip
        assert _colour(pixels, x, y) in (colour, colour.replace("80", "7f")), (x, y)


def test_a_text_is_as_wide_as_its_letters_are_said_to_be():
    text = "block.3.attn 12.3 µs – W"
    width = text_width(text, 20)
    pixels = _pixels(Scene(width + 40, 40, (Text(20, 25, text, 20),)))
    drawn = [x / 2 for x in range(pixels.shape[1]) if pixels[:, x, 0].min() < 0.5]
    assert 0.97 * width < drawn[-1] - drawn[0] < width  # letters that suit each other stand closer


def test_a_dollar_is_a_dollar():
    assert raster_of(_scene(Text(5, 20, r"$x_1$ \frac $")), "png").startswith(b"\x89PNG")


def test_the_settings_of_matplotlib_change_no_picture():
    matplotlib = pytest.importorskip("matplotlib")
    scene = _scene(Rect(10, 10, 20, 10, RED), Line(((0, 0), (9, 9)), BLUE), Text(40, 20, "text"))
    usual = raster_of(scene, "png")
    with matplotlib.rc_context({"savefig.bbox": "tight", "savefig.dpi": 10, "font.size": 30, "lines.marker": "o"}):
        assert raster_of(scene, "png") == usual


def test_a_large_picture_stays_one_that_can_be_opened():
    pytest.importorskip("matplotlib")
    content = raster_of(Scene(40_000, 100, (Rect(0, 0, 10, 10, RED),)), "png")
    assert int.from_bytes(content[16:20]) <= 30_000


def test_another_format_is_refused():
    with pytest.raises(ArgumentError, match="'gif': png or pdf"):
        raster_of(_scene(), "gif")
    pytest.importorskip("matplotlib")
    assert raster_of(_scene(), "pdf").startswith(b"%PDF")


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
