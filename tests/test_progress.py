"""Long steps show a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import progress as progress_module
from fxpipe.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None, delay: float) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(progress_module, "DELAY", delay)
    with progress("counting", 3) as step:
        for _ in range(3):
            step()


def test_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    run(monkeypatch, terminal, 0.0)
    assert "counting:" in terminal.getvalue()
    assert "/3" in terminal.getvalue()


def test_no_bar_for_a_short_step(monkeypatch):
    terminal = Terminal()
    run(monkeypatch, terminal, 60.0)
    assert terminal.getvalue().strip("\r ") == ""


def test_no_bar_without_a_terminal(monkeypatch):
    file = io.StringIO()
    run(monkeypatch, file, 0.0)
    assert file.getvalue() == ""
    run(monkeypatch, None, 0.0)


def test_planning_shows_its_long_steps(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress_module, "DELAY", 0.0)
    fxpipe.plan(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), 2, example_args=(torch.randn(4, 6),))
    for step in ("shapes", "checking", "profiling"):
        assert f"{step}:" in terminal.getvalue()
