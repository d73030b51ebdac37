"""Simulated times against closed forms, and a drawing that a person would make."""

from __future__ import annotations

import doctest
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe.simulation
from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.scheduling import (
    CHECKPOINTS,
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    dependencies,
    make_schedule,
    parse_schedule,
)
from fxpipe.simulation import Simulation, Span, simulate_schedule

SIZES = list(product(range(1, 7), range(1, 9)))
TRAINING = ["gpipe", "1f1b"]
ZERO_BUBBLE = """
    0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2 0U2
    1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2 1U2
"""


def simulate(name: str, n: int, m: int, checkpoint: str = "never", **seconds: list[float]) -> Simulation:
    """Every forward 1 s, every backward 2 s, unless said otherwise."""
    seconds = {"forward": [1.0] * n, "backward": [2.0] * n, **seconds}
    return simulate_schedule(make_schedule(name, n, m, checkpoint), **seconds)


def span(simulation: Simulation, text: str) -> Span:
    return next(s for s in simulation.spans if s.action == Action.parse(text))


# Closed forms


@pytest.mark.parametrize("name", TRAINING)
def test_bubble_is_n_minus_1_of_m_plus_n_minus_1(name):
    for n, m in SIZES:
        simulation = simulate(name, n, m)
        assert simulation.step_seconds == 3 * (m + n - 1)
        assert simulation.busy == (3.0 * m,) * n
        assert simulation.bubble == pytest.approx([(n - 1) / (m + n - 1)] * n)
        assert simulation.mean_bubble == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_has_no_bubble(name):
    assert simulate(name, n=1, m=5).bubble == (0.0,)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_micro_batches_one_device_works_at_a_time(name):
    for n in range(1, 7):
        assert simulate(name, n, m=1).mean_bubble == pytest.approx((n - 1) / n)


def test_inference_takes_one_forward_per_clock():
    for n, m in SIZES:
        assert simulate("inference", n, m).step_seconds == m + n - 1


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_gpipe_recomputes_in_the_bubble(checkpoint):
    """Each recompute takes its time once, not once for every device that a gradient passes."""
    for n, m in SIZES:
        recomputed = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
        assert simulate("gpipe", n, m, checkpoint).step_seconds == 3 * (m + n - 1) + recomputed


@pytest.mark.parametrize("name", TRAINING)
def test_first_recompute_is_over_before_its_gradient_arrives(name):
    for n in range(2, 7):
        simulation = simulate(name, n, m=8, checkpoint="always")
        first = next(s.action for s in simulation.spans if s.action.stage == 0 and s.action.kind is Kind.BACKWARD)
        assert span(simulation, f"0R{first.micro_batch}").end <= span(simulation, f"1B{first.micro_batch}").start


@pytest.mark.parametrize("name", TRAINING)
def test_recompute_seconds_are_their_own(name):
    longer = simulate(name, 1, 4, "always", recompute=[3.0])
    assert longer.step_seconds == 4 * (1 + 3 + 2)
    assert simulate(name, 1, 4, "never", recompute=[3.0]).step_seconds == 4 * (1 + 2)


@pytest.mark.parametrize("name", TRAINING)
def test_one_slow_stage_sets_the_pace(name):
    """It has all micro-batches to do, and at best one way to it and one way back are added."""
    for m in range(1, 9):
        simulation = simulate(name, 3, m, forward=[1.0, 10.0, 2.0], backward=[3.0, 20.0, 5.0])
        assert simulation.busy == (4.0 * m, 30.0 * m, 7.0 * m)
        assert simulation.step_seconds >= 30 * m + 1 + 3


def test_sending_takes_its_time_both_ways():
    simulation = simulate("gpipe", 3, 1, send=[0.5, 0.25])
    assert [(span(simulation, text).start) for text in ("0F0", "1F0", "2F0", "2B0", "1B0", "0B0")] == [
        0.0,
        1.0 + 0.5,
        1.0 + 0.5 + 1.0 + 0.25,
        3.75,
        3.75 + 2.0 + 0.25,
        3.75 + 2.0 + 0.25 + 2.0 + 0.5,
    ]


def test_nothing_is_sent_within_a_device():
    schedule = parse_schedule("0F0 1F0 1B0 0B0")
    assert simulate_schedule(schedule, [1, 1], [2, 2], send=[100]).step_seconds == 6


def test_split_backward_takes_as_long_as_the_whole():
    schedule = parse_schedule(ZERO_BUBBLE)
    simulation = simulate_schedule(schedule, [1, 1], [2, 2])
    assert simulation.busy == (9.0, 9.0)
    assert simulation.step_seconds == 10 < simulate("1f1b", 2, 3).step_seconds
    assert span(simulation, "0U2") == Span(Action.parse("0U2"), 0, 10, 10)
    uneven = simulate_schedule(schedule, [1, 1], [2, 2], weight=[0.5, 0.0])
    assert (span(uneven, "0B0").seconds, span(uneven, "0W0").seconds) == (1.5, 0.5)
    assert (span(uneven, "1B0").seconds, span(uneven, "1W0").seconds) == (2.0, 0.0)


# What holds for all


SECONDS = st.floats(0, 10) | st.integers(0, 3)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 8), st.sampled_from(CHECKPOINTS), st.data()
)
def test_every_action_starts_as_soon_as_it_can(name, n, m, checkpoint, data):
    def draw(count: int) -> list[float]:
        return data.draw(st.lists(SECONDS, min_size=count, max_size=count))

    schedule, send = make_schedule(name, n, m, checkpoint), draw(n - 1)
    simulation = simulate_schedule(schedule, draw(n), draw(n), recompute=draw(n), send=send)
    assert [s.action for s in simulation.spans] == [action for row in schedule.rows for action in row]

    spans = {s.action: s for s in simulation.spans}
    for d, row in enumerate(schedule.rows):
        for before, action in zip((None, *row), row, strict=False):
            ready = [spans[before].end] if before else [0.0]
            for a in dependencies(action, n):
                if a in spans:
                    ready.append(spans[a].end + (send[min(a.stage, action.stage)] if a.stage != action.stage else 0))
            assert spans[action].start == max(ready)
            assert spans[action].device == d
    assert simulation.step_seconds == max(s.end for s in simulation.spans)
    assert simulation.step_seconds >= max(simulation.busy) - 1e-6
    assert all(0 <= bubble <= 1 for bubble in simulation.bubble)
    assert len({len(line.partition("|  ")[0]) for line in str(simulation).splitlines()[1:-1]}) == 1


# Arguments


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"forward": [1.0]}, "forward has 1 numbers; give 2, the seconds of each stage"),
        ({"backward": [1.0] * 3}, "backward has 3 numbers; give 2"),
        ({"recompute": []}, "recompute has 0 numbers; give 2"),
        ({"weight": [1.0]}, "weight has 1 numbers; give 2"),
        ({"send": [1.0, 1.0]}, "send has 2 numbers; give 1, the seconds of each pair of neighbouring stages"),
        ({"forward": [1.0, -1.0]}, r"forward\[1\]=-1.0 is no time; give seconds, 0 or more and finite"),
        ({"send": [float("nan")]}, r"send\[0\]=nan is no time"),
        ({"backward": [float("inf"), 1.0]}, r"backward\[0\]=inf is no time"),
        ({"weight": [1.0, 3.0]}, r"weight\[1\]=3.0 is more than backward\[1\]=2.0, of which it is a part: give in"),
    ],
)
def test_bad_seconds_are_named(seconds, words):
    with pytest.raises(ArgumentError, match=words):
        simulate("gpipe", 2, 2, **seconds)


def test_schedule_that_would_not_run_is_refused():
    rows = ((Action.parse("0B0"), Action.parse("0F0")),)
    with pytest.raises(ScheduleError, match="0B0 stands before 0F0"):
        simulate_schedule(Schedule("mine", 1, 1, rows), [1], [1])


def test_nothing_takes_no_time():
    simulation = simulate("gpipe", 2, 2, forward=[0.0, 0.0], backward=[0.0, 0.0])
    assert (simulation.step_seconds, simulation.bubble) == (0.0, (0.0, 0.0))
    assert str(simulation).endswith("step 0 s, mean bubble 0.0 %")


# The drawing


def test_timeline_is_the_triangle_a_person_would_draw():
    assert str(simulate("gpipe", n=3, m=3)) == (
        "gpipe: 3 stages, 3 micro-batches\n"
        "device 0 |F0 F1 F2 ..................B2=== B1=== B0=== |  busy 9 s, bubble 40.0 %\n"
        "device 1 |...F0 F1 F2 .........B2=== B1=== B0=== ......|  busy 9 s, bubble 40.0 %\n"
        "device 2 |......F0 F1 F2 B2=== B1=== B0=== ............|  busy 9 s, bubble 40.0 %\n"
        "step 15 s, mean bubble 40.0 %"
    )


def test_timeline_names_stages_where_a_device_has_several():
    simulation = simulate_schedule(parse_schedule("0F0 1F0 1B0 0B0"), [1, 1], [1, 1])
    assert "device 0 |0F0 1F0 1B0 0B0 |  busy 4 s" in str(simulation)


def test_long_timeline_keeps_its_width_and_shows_kinds():
    lines = str(simulate("gpipe", n=4, m=50)).splitlines()[1:-1]
    drawn = [line.split("|")[1] for line in lines]
    assert drawn[0] == "F" * 31 + "." * 6 + "B" * 63
    assert drawn[3] == "." * 2 + "F" * 31 + "B" * 63 + "." * 4


def test_example_in_docstring_prints_what_it_says():
    result = doctest.testmod(fxpipe.simulation)
    assert result.attempted
    assert not result.failed
