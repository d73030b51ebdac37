"""What forward prints is shown once while a model is planned, and one is told that steps do not print."""

from __future__ import annotations

import builtins
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.tracing.print_calls import mute_repeated_prints


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("inner")
        return x * 2


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

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
        UserWarning, match=r"Prints prints at .*test_print_calls.py:\d+, .*:\d+: .* once .*not in a step"
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
