"""Colours that everyone tells apart, by the simulation of Machado, Oliveira and Fernandes (2009), severity 1."""

from itertools import combinations, pairwise
from math import dist

import pytest

from fxpipe.inspect import style as colours

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
        {**{str(kind): colour for kind, colour in colours.KIND_COLOURS.items()}, "bubble": colours.PAPER},
        {name: colours.MEMORY_COLOURS[name] for name in ("activations", "portals", "working")},
    ],
    ids=["kinds of actions", "parts of memory"],
)
def test_any_two_are_told_apart(palette, eye):
    for one, two in combinations(palette, 2):
        assert dist(_seen(palette[one], eye), _seen(palette[two], eye)) > APART, (one, two)


def test_parts_of_memory_that_lie_on_each_other_are_told_apart():
    shown = list(colours.MEMORY_COLOURS.values())
    for eye in EYES:
        for one, two in pairwise(shown):
            assert dist(_seen(one, eye), _seen(two, eye)) > APART


def test_kinds_of_actions_differ_in_lightness_so_that_grey_will_do():
    lightness = sorted(_seen(colour, "usual")[0] for colour in colours.KIND_COLOURS.values())
    assert all(two - one > 10 for one, two in pairwise(lightness))


def test_letters_are_legible_on_every_colour():
    for colour in (*colours.KIND_COLOURS.values(), colours.RECEIVING_COLOUR):
        assert colours.contrast(colours.text_colour_on(colour), colour) >= 4.5
    for colour in (colours.INK, colours.FAINT, colours.LIMIT_COLOUR):
        assert colours.contrast(colour, colours.PAPER) >= 4.5
