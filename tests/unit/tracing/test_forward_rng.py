"""Forward draws from a generator of Python's or numpy's that the model holds: refused, or a graph freezes what came."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cases import each_once
from helpers.graph_functions import exporting
from torch import nn

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.tracing.forward_rng import OwnGenerators

GLOBAL, TABLE = random.Random(3), {"any": [np.random.default_rng(4)]}


class Drops(nn.Module):
    """A layer that is left out by lot, as in stochastic depth."""

    def __init__(self, draw: Callable[[Any], float], held: Any = None):
        super().__init__()
        self.layer, self.draw, self.rng = nn.Linear(4, 4), draw, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.draw(self) < 0.5 else x * 2


def model(draw: Callable[[Any], float], held: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Drops(draw, held))


CASES: dict[str, tuple[Callable[[Any], float], Callable[[], Any], str]] = {
    "random.Random": (lambda m: m.rng.random(), lambda: random.Random(1), r"'1\.rng'"),
    "numpy.random.Generator": (lambda m: m.rng.random(), lambda: np.random.default_rng(1), r"'1\.rng'"),
    "numpy.random.RandomState": (lambda m: m.rng.rand(), lambda: np.random.RandomState(1), r"'1\.rng'"),
    "MT19937": (lambda m: m.rng.random(), lambda: np.random.Generator(np.random.MT19937(1)), r"'1\.rng'"),
    "in a list": (lambda m: m.rng[1].random(), lambda: [None, random.Random(1)], r"'1\.rng\[1\]'"),
    "a global": (lambda m: GLOBAL.random(), lambda: None, r"'test_forward_rng\.GLOBAL'"),
    "in a global": (lambda m: TABLE["any"][0].random(), lambda: None, r"\"test_forward_rng\.TABLE\['any'\]\[0\]\""),
}


@pytest.mark.parametrize(("name", "tracer"), each_once(CASES, ["record", exporting(torch.randn(4, 4))]))
def test_a_forward_that_draws_from_a_generator_of_its_own_is_refused(name: str, tracer: Any) -> None:
    """It was recorded, and its first choice was that of every step."""
    draw, held, place = CASES[name]
    given = model(draw, held())
    before = OwnGenerators(given)
    with pytest.raises(TraceError, match=rf"forward draws from {place}.*of its own.*draw with torch"):
        fxpipe.trace(given, (torch.randn(4, 4),), tracer=tracer)
    assert before.drawn_from() == []


def test_in_a_module_kept_whole_it_is_refused_too() -> None:
    """A micro-batch that is recomputed would draw others."""
    given = model(lambda m: m.rng.random(), random.Random(1))
    with pytest.raises(TraceError, match=r"forward draws from '1\.rng'"):
        fxpipe.trace(given, (torch.randn(4, 4),), leaf_modules=["1"])


def test_generators_that_are_not_drawn_from_are_no_trouble() -> None:
    given = model(lambda m: 0.0, [random.Random(1), np.random.default_rng(1), random.SystemRandom()])
    plain_next = random.Random(1).random()
    fxpipe.trace(given, (torch.randn(4, 4),))
    assert given[1].rng[0].random() == plain_next
