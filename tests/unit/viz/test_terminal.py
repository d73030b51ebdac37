import io
import re
from functools import cache

import pytest
from helpers.drawn_steps import simulated

from fxpipe.scheduling import Action, ActionKind, make_schedule
from fxpipe.simulation import StageCost, simulate_schedule
from fxpipe.simulation.text_timeline import timeline_lines
from fxpipe.simulation.timeline import Span
from fxpipe.viz.terminal import KIND_SHADES, coloured_timeline, plain_timeline, shows_colours, timeline_text

CODES = re.compile(r"\x1b\[[0-9;]*m")


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def _shades(line: str) -> list[int | None]:
    """Behind each half of each character of a line."""
    halves, ink, shade = [], None, None
    for code, letter in re.findall(r"\x1b\[([0-9;]*)m|(.)", line):
        if not letter:
            found = re.search(r"38;5;(\d+)", code)
            ink = int(found[1]) if found else None
            found = re.search(r"48;5;(\d+)", code)
            shade = int(found[1]) if found else None
        else:
            halves += [ink if letter == "▌" else shade, ink if letter == "▐" else shade]
    return halves


@cache
def _many(devices, micro_batches):
    return simulated("1f1b", devices, micro_batches)


def _even():
    """3 stages, all alike: F takes 1 s, B 2 s, the step 18 s."""
    return simulate_schedule(make_schedule("1f1b", 3, 4), [StageCost(1, 2)] * 3)


def test_a_line_shows_names_kinds_and_bubble():
    found = _even()
    assert timeline_lines(found.spans, 3, found.step_seconds) == [
        "F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== ",
        "...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......",
        "......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............",
    ]
    assert timeline_lines(found.spans, 3, found.step_seconds, columns=18) == [
        "FFF....BBFBB.BB.BB",
        ".FF..BBFBBFBB.BB..",
        "..FBBFBBFBBFBB....",
    ]


def test_a_device_that_is_busy_looks_busy_however_short_its_actions():
    found = _many(64, 256)
    lines = timeline_lines(found.spans, 64, found.step_seconds)
    assert {len(line) for line in lines} == {100}
    for d, line in enumerate(lines):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            busy = sum(s.seconds for s in found.spans if s.device == d and s.action.kind is kind)
            assert line.count(str(kind)) / 100 == pytest.approx(busy / found.step_seconds, abs=0.03)


def test_actions_far_apart_and_far_shorter_than_a_column_are_no_busy_device():
    spans = [Span(Action(ActionKind.FORWARD, 0, i), 0, i * 1.0, i + 0.01) for i in range(100)]
    line = timeline_lines(spans, 1, 100.0, columns=50)[0]
    assert line.count("F") <= 1


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_step_without_time_has_nothing_to_show(seconds):
    spans = [Span(Action(ActionKind.FORWARD, 0, 0), 0, 0.0, 0.0)]
    assert timeline_lines(spans, 1, seconds) == [""]
    assert "device 0" in plain_timeline(simulated("1f1b", 2, 2, unit=0))
    assert "device 1" in coloured_timeline(simulated("1f1b", 2, 2, unit=0))


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 4), (64, 256)])
def test_lines_fit_the_window(devices, micro_batches, columns):
    found = _many(devices, micro_batches)
    for text in (plain_timeline(found, columns=columns), coloured_timeline(found, columns=columns)):
        lines = [CODES.sub("", line) for line in text.splitlines()]
        assert max(map(len, lines)) <= columns
        assert sum(line.startswith("device") for line in lines) == devices
        assert len({line.index("busy") for line in lines if line.startswith("device")}) == 1


def _without_codes(line: str) -> str:
    return CODES.sub("", line)


def test_colours_are_where_the_actions_are():
    found = _even()
    text = coloured_timeline(found, columns=100)
    lines = text.splitlines()
    start = len("device 0  ")
    width = len(_without_codes(lines[0]).split(" busy ")[0]) - start
    for d in range(3):
        halves = _shades(lines[d])[2 * start : 2 * (start + width)]
        for span in found.spans:
            if span.device == d:
                first, end = (round(time / found.step_seconds * 2 * width) for time in (span.start, span.end))
                assert set(halves[first:end]) == {KIND_SHADES[span.action.kind]}, span
        busy = sum(half is not None for half in halves) / len(halves)
        assert busy == pytest.approx(found.busy[d] / found.step_seconds, abs=0.03)
    assert "F0" in _without_codes(lines[0])
    assert _without_codes(lines[3]).split() == ["0", "5", "s", "10", "s", "15", "s"]
    assert _without_codes(lines[4]).split() == ["F", "forward", "B", "backward"]


def test_every_line_ends_in_the_terminals_own_colours():
    for line in coloured_timeline(simulated("zbv", 4, 8, per_device=2)).splitlines():
        codes = CODES.findall(line)
        assert not codes or codes[-1] == "\x1b[0m"


def test_text_never_has_colours_and_without_blocks_only_ascii():
    found = simulated("zero_bubble", 4, 8)
    assert "\x1b" not in str(found)
    assert str(found).isascii()
    assert plain_timeline(found).isascii()
    assert coloured_timeline(found, has_blocks=False).isascii()


@pytest.mark.parametrize(
    ("surroundings", "is_terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colours_are_for_terminals_and_the_user_has_the_last_word(monkeypatch, surroundings, is_terminal, expected):
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    stream = _Terminal() if is_terminal else io.StringIO()
    assert shows_colours(stream) is expected
    assert ("\x1b" in timeline_text(_even(), stream)) is expected


def test_an_old_windows_console_shows_no_codes(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.delenv("TERM")
    for name in ("WT_SESSION", "ANSICON", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    assert not shows_colours(_Terminal())
    monkeypatch.setenv("WT_SESSION", "x")
    assert shows_colours(_Terminal())


def test_a_terminal_without_blocks_gets_letters_and_colours():
    class Old(_Terminal):
        encoding = "cp1252"

    text = timeline_text(_even(), Old())
    assert "\x1b" in text
    assert text.isascii()


def test_the_width_is_the_windows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = timeline_text(_even(), _Terminal()).splitlines()
    assert max(len(_without_codes(line)) for line in lines[:3]) == 70
    monkeypatch.setenv("NO_COLOR", "1")
    assert max(map(len, timeline_text(_even(), _Terminal()).splitlines())) <= 70


def test_a_closed_stream_is_no_terminal():
    stream = io.StringIO()
    stream.close()
    assert not shows_colours(stream)


def test_numbers_of_devices_stand_below_each_other():
    found = simulated("1f1b", 11, 2)
    for text in (str(found), plain_timeline(found)):
        assert len({line.index("|") for line in text.splitlines() if line.startswith("device")}) == 1
