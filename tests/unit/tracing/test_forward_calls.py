"""What forward prints is shown once while planning; draws from a generator that the model holds are refused."""

from __future__ import annotations

import builtins
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.tracing.forward_rng import OwnGenerators
from fxpipe.tracing.print_calls import mute_repeated_prints


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("inner")
        return x * 2


class Prints(Layered, a=4, inner=Inner, b=4):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        print("to stderr", file=sys.stderr)
        print("outer", tuple(y.shape), end=";\n")
        return self.b(self.inner(y))


def _pipeline(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.pipeline(model, ["cpu", "cpu"], 2, profile_budget=0.0, **options)


def test_prints_are_shown_once_and_the_lines_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 4)
    with pytest.warns(
        UserWarning, match=r"Prints prints at .*test_forward_calls.py:\d+, .*:\d+: .* once .*not in a step"
    ):
        pipe = _pipeline(Prints(), example_args=(x,))
    assert capsys.readouterr().out.replace("(2,", "(4,") == "outer (4, 4);\ninner\n"
    with pipe:
        torch.testing.assert_close(pipe(x), pipe.model(x))
    assert capsys.readouterr().out == "outer (4, 4);\ninner\n"  # of the plain model
    assert builtins.print.__module__ == "builtins"


def test_a_module_kept_whole_prints_in_each_step_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    x, model = torch.randn(4, 4), nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = _pipeline(model, example_args=(x,), leaf_modules=[Inner])
    assert capsys.readouterr().out == "inner\n"
    with pipe:
        pipe(x)
    assert capsys.readouterr().out == "inner\n" * 2  # for each micro-batch


def test_other_threads_print_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with mute_repeated_prints(is_first_run=False):
        print("here")
        other = threading.Thread(target=print, args=("there",))
        other.start()
        other.join()
    assert capsys.readouterr().out == "there\n"
    assert builtins.print.__module__ == "builtins"


def test_print_is_itself_again_where_planning_fails() -> None:
    with pytest.raises(KeyError), mute_repeated_prints():
        {}["key"]
    assert builtins.print.__module__ == "builtins"


GLOBAL, TABLE = random.Random(3), {"any": [np.random.default_rng(4)]}


class Drops(Layered, layer=4, rng=lambda: None):
    """A layer that is left out by lot, as in stochastic depth."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.draw(self) < 0.5 else x * 2


def model(draw: Callable[[Any], float], held: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Drops(draw=draw, rng=held))


CASES: dict[str, tuple[Callable[[Any], float], Callable[[], Any], str]] = {
    "random.Random": (lambda m: m.rng.random(), lambda: random.Random(1), r"'1\.rng'"),
    "numpy.random.Generator": (lambda m: m.rng.random(), lambda: np.random.default_rng(1), r"'1\.rng'"),
    "numpy.random.RandomState": (lambda m: m.rng.rand(), lambda: np.random.RandomState(1), r"'1\.rng'"),
    "MT19937": (lambda m: m.rng.random(), lambda: np.random.Generator(np.random.MT19937(1)), r"'1\.rng'"),
    "in a list": (lambda m: m.rng[1].random(), lambda: [None, random.Random(1)], r"'1\.rng\[1\]'"),
    "a global": (lambda m: GLOBAL.random(), lambda: None, r"'test_forward_calls\.GLOBAL'"),
    "in a global": (lambda m: TABLE["any"][0].random(), lambda: None, r"\"test_forward_calls\.TABLE\['any'\]\[0\]\""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_forward_that_draws_from_a_generator_of_its_own_is_refused(name: str) -> None:
    """It was recorded, and its first choice was that of every step."""
    draw, held, place = CASES[name]
    given = model(draw, held())
    before = OwnGenerators(given)
    with pytest.raises(TraceError, match=rf"forward draws from {place}.*of its own.*draw with torch"):
        fxpipe.trace(given, (torch.randn(4, 4),))
    before.refuse_drawn()  # restored


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
