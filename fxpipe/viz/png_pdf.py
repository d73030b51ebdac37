"""A scene as PNG or PDF, drawn by matplotlib's own canvases: no window, no `pyplot`, none of the user's settings."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.viz.scene import Area, Bars, Curve, Line, Rect, Scene, Text, arrow_head, flatten_items
from fxpipe.viz.style import FONTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

POINTS_PER_INCH = 72
DOTS_PER_INCH = 144  # of a PNG
MAX_DOTS = 30_000  # on a side; matplotlib draws up to 65,536, and many viewers open no more than 32,767
RASTER_FORMATS = ("png", "pdf")


def raster_of(scene: Scene, form: str) -> bytes:
    """The file's content, for `form` "png" or "pdf". Raises `ArgumentError` where there is no matplotlib."""
    if form not in RASTER_FORMATS:
        raise ArgumentError(f"a picture as {form!r}: png or pdf")
    require_matplotlib(form)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure

    inches = scene.width / POINTS_PER_INCH, scene.height / POINTS_PER_INCH
    dots = min(DOTS_PER_INCH, MAX_DOTS / max(inches)) if form == "png" else POINTS_PER_INCH
    figure = Figure(figsize=inches, dpi=dots, facecolor=scene.background or "none", edgecolor="none", linewidth=0)
    _draw_scene(scene, figure)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a letter of a name that the font lacks is a box then
        if form == "png":
            FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None, "Title": scene.title})
        else:
            FigureCanvasPdf(figure).print_pdf(stream, metadata={"CreationDate": None, "Title": scene.title})
    return stream.getvalue()


def require_matplotlib(form: str) -> None:
    """Raises `ArgumentError` where there is none, before anything long is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArgumentError(
            f"a picture as {form} needs matplotlib, which is not installed: pip install fxpipe[plot], "
            "or take svg or html, which need nothing"
        ) from None


def _draw_scene(scene: Scene, figure: Figure) -> None:
    from matplotlib.transforms import Affine2D

    points = Affine2D().scale(1, -1).translate(0, scene.height).scale(1 / POINTS_PER_INCH) + figure.dpi_scale_trans
    for order, item in enumerate(flatten_items(scene.items)):
        if isinstance(item, Text):
            _add_text(item, figure, points, order)
            continue
        for artist in _artists(item):
            artist.set(transform=points, zorder=order, clip_on=False)
            figure.add_artist(artist, clip=False)


def _artists(item: Rect | Bars | Line | Curve | Area) -> list[Any]:
    from matplotlib import patches
    from matplotlib.lines import Line2D
    from matplotlib.path import Path as Outline

    match item:
        case Rect():
            style: dict[str, Any] = {"facecolor": item.fill, "edgecolor": item.stroke or "none"}
            style["linewidth"] = 1 if item.stroke else 0
            corner, radius = (item.x, item.y), min(item.radius, item.width / 2, item.height / 2)
            if radius <= 0:
                return [patches.Rectangle(corner, item.width, item.height, **style)]
            box = patches.BoxStyle("Round", pad=0, rounding_size=radius)
            return [patches.FancyBboxPatch(corner, item.width, item.height, boxstyle=box, **style)]
        case Bars():
            top, bottom = item.y, item.y + item.height
            corners = [p for a, b in item.spans for p in ((a, top), (b, top), (b, bottom), (a, bottom), (a, top))]
            codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
            outline = Outline(corners, codes * len(item.spans)) if corners else Outline([(0, 0)])
            return [patches.PathPatch(outline, facecolor=item.fill, edgecolor="none", linewidth=0)]
        case Line():
            lengths = [length / item.width for length in item.dashes]  # matplotlib counts them in widths of the line
            xs, ys = zip(*item.points, strict=True)
            line = Line2D(xs, ys, color=item.stroke, linewidth=item.width, linestyle=(0, lengths) if lengths else "-")
            line.set(solid_capstyle="butt", dash_capstyle="butt", solid_joinstyle="round", marker="")
            return [line]
        case Curve():
            codes = [Outline.MOVETO, Outline.CURVE4, Outline.CURVE4, Outline.CURVE4]
            outline = Outline([item.start, *item.control, item.end], codes)
            drawn: list[Any] = [
                patches.PathPatch(outline, facecolor="none", edgecolor=item.stroke, linewidth=item.width)
            ]
            if item.has_arrow:
                drawn.append(patches.Polygon(arrow_head(item), facecolor=item.stroke, edgecolor="none", linewidth=0))
            return drawn
        case Area():
            shape = patches.Polygon(item.points, closed=True, facecolor=item.fill, alpha=item.opacity, linewidth=0)
            return [shape]


def _add_text(item: Text, figure: Figure, points: Transform, order: int) -> None:
    figure.text(
        item.x,
        item.y,
        item.text,
        transform=points,
        fontfamily=FONTS[0],
        fontsize=item.size,
        fontweight="bold" if item.is_bold else "normal",
        color=item.fill,
        horizontalalignment={"start": "left", "middle": "center", "end": "right"}[item.anchor],
        verticalalignment="baseline",
        rotation=-item.angle,
        rotation_mode="anchor",
        usetex=False,
        parse_math=False,  # a dollar is a dollar
        zorder=order,
    )
