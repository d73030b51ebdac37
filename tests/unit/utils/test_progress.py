"""Long steps show a bar on a terminal and in a notebook, and a line in a log."""

import importlib
import io
import re
import threading
import time

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentTypeError
from fxpipe.utils import progress as progress_module
from fxpipe.utils.progress import phase, progress, show_phases, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def looked_at(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in stderr's place, on which bars appear at once."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress_module, "BAR_DELAY", 0.0)
    return terminal


def count(parts: int = 3) -> None:
    with progress("counting", parts) as step:
        for _ in range(parts):
            step()


def lines_of(text: str) -> list[str]:
    """What stands on a terminal after it was sent `text`."""
    screen, row, column = [[]], 0, 0
    place = 0
    while place < len(text):
        character = text[place]
        place += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            screen += [[]] * (row == len(screen))
        elif character == "\x1b":
            assert text[place : place + 2] == "[A", "the only sequence of control that a bar sends is: up"
            row, place = max(row - 1, 0), place + 2
        else:
            screen[row] = screen[row] + [" "] * (column - len(screen[row]))
            screen[row][column : column + 1] = [character]
            column += 1
    return ["".join(line).rstrip() for line in screen]


def test_bar_on_a_terminal(monkeypatch):
    terminal = looked_at(monkeypatch)
    count()
    assert "counting:" in terminal.getvalue()
    assert "/3 nodes" in terminal.getvalue()


def test_no_bar_for_a_short_step(monkeypatch):
    terminal = looked_at(monkeypatch)
    monkeypatch.setattr(progress_module, "BAR_DELAY", 60.0)
    count()
    assert terminal.getvalue().strip("\r ") == ""


class OnlyWrites:
    """What some programs put in stderr's place."""

    def write(self, text: str) -> int:
        raise AssertionError(f"a bar where nobody looks: {text!r}")


def closed() -> Terminal:
    terminal = Terminal()
    terminal.close()
    return terminal


@pytest.mark.parametrize(
    "stderr", [io.StringIO(), None, OnlyWrites(), closed()], ids=["file", "None", "writer", "closed"]
)
def test_no_bar_without_a_terminal(monkeypatch, stderr):
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(progress_module, "BAR_DELAY", 0.0)
    count()
    assert not isinstance(stderr, io.StringIO) or stderr.closed or stderr.getvalue() == ""


def test_a_log_has_one_line(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(progress_module, "BAR_DELAY", 0.0)
    with show_phases("planning"):
        phase("cutting")
        count()
    assert log.getvalue() == "fxpipe: planning takes more than 0 s; now cutting\n"
    with show_progress(False), show_phases("planning"):
        phase("cutting")
    monkeypatch.setattr(progress_module, "BAR_DELAY", 60.0)
    with show_phases("planning"):
        phase("cutting")
    assert log.getvalue().count("\n") == 1


def test_threads_have_their_own_say(monkeypatch):
    """A plan without bars in one thread does not take those of another away, and bars start no thread that stays."""
    terminal = looked_at(monkeypatch)
    before = threading.active_count()
    with show_progress(False):
        other = threading.Thread(target=count)
        other.start()
        other.join()
        assert "counting:" in terminal.getvalue()
    assert threading.active_count() == before
    assert not any(lines_of(terminal.getvalue()))


@pytest.mark.parametrize(
    ("module", "slow_pass", "shown"),
    [
        ("fxpipe.profiling", "count_flops_and_bytes", "counting operations"),
        ("fxpipe.tracing.strategies", "check_against_model", "comparing the graph with the model"),
        ("fxpipe.planning.passes", "choose_cut", "cutting"),
    ],
)
def test_a_pass_that_takes_long_is_named_while_it_runs(monkeypatch, module, slow_pass, shown):
    """The pass says nothing of itself, and waits until it is shown."""
    terminal = looked_at(monkeypatch)
    own = getattr(importlib.import_module(module), slow_pass)
    seen = []

    def times_shown():
        return len(re.findall(rf"planning: \[\d\d:\d\d, {shown}\]", terminal.getvalue()))

    def slow(*args, **kwargs):
        until = time.monotonic() + 20.0
        while time.monotonic() < until and times_shown() < 3:
            time.sleep(0.01)
        seen.append((times_shown(), lines_of(terminal.getvalue())))
        return own(*args, **kwargs)

    monkeypatch.setattr(f"{module}.{slow_pass}", slow)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(4, 6)
    fxpipe.plan(model, 2, example_args=(x,), hardware="cpu", chunks=2)
    times, lines = seen[0]
    assert times >= 3, "the seconds go on while the pass runs"
    assert any(shown in line for line in lines)
    assert not any(lines_of(terminal.getvalue()))


def test_no_thread_where_nobody_looks():
    before = threading.active_count()
    with show_phases("planning"):
        phase("cutting")
        assert threading.active_count() == before


def test_entry_points_take_the_wish(monkeypatch):
    terminal = looked_at(monkeypatch)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(4, 6)
    fxpipe.plan(model, 2, example_args=(x,), progress=False)
    traced = fxpipe.trace(model, (x,), progress=False)
    fxpipe.profile(traced, (x,), budget=0.05, progress=False)
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, progress=False) as pipe:
        pipe(x)  # planned now
        model.eval()
        pipe(x)  # and another graph
    assert terminal.getvalue() == ""
    with pytest.raises(ArgumentTypeError, match="progress='no': expected True or False"):
        fxpipe.plan(model, 2, example_args=(x,), progress="no")
