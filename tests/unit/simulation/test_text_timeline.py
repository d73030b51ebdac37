"""Timelines as text."""

from functools import cache

import pytest
from helpers.drawn_steps import simulated

from fxpipe.inspect.step_summary import timeline_text
from fxpipe.scheduling import Action, ActionKind, make_schedule
from fxpipe.simulation import StageCost, simulate_schedule
from fxpipe.simulation.timeline import Span, timeline_lines
from fxpipe.utils.text_table import use_text_width


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
    assert "device 0" in timeline_text(simulated("1f1b", 2, 2, unit=0))


@pytest.mark.parametrize(("devices", "micro_batches", "columns"), [(2, 4, 200), (64, 256, 60)])
def test_lines_fit_the_window(devices, micro_batches, columns):
    with use_text_width(columns):
        lines = timeline_text(_many(devices, micro_batches)).splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line.startswith("device") for line in lines)
    assert len(lines) == devices
    assert len({line.index("busy") for line in lines}) == 1
