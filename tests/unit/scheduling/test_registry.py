"""All schedules that are known by name: what they look like, and in closed forms what they keep and how they idle."""

from itertools import product

import pytest
from helpers.schedule_cases import rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import ArgumentError
from fxpipe.scheduling import (
    CHECKPOINTS,
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    activations_in_flight,
    make_schedule,
    micro_batches_in_flight,
    validate,
)
from fxpipe.simulation import StageCost, simulate_schedule

SIZES = list(product(range(1, 7), range(1, 14)))  # devices, micro-batches
UNIT = StageCost(forward=1, backward=2, weight=1, saved_bytes=1)  # F, B and W as long as each other
SPLIT = ["zero_bubble", "zero_bubble_2p", "interleaved_zero_bubble", "zbv", "v_half", "v_min"]
PARTLY_SPLIT = ["dualpipev"]


def on(name: str, p: int, m: int, v: int | None = None, checkpoint: object = "never") -> Schedule:
    """On p devices with v stages each; as many as is usual, if not given."""
    recipe = SCHEDULES[name]
    each = v or recipe.stages_per_device
    return make_schedule(name, p * each, m, checkpoint, recipe.placement(p, each))


def simulated(schedule: Schedule, cost: StageCost = UNIT):
    return simulate_schedule(schedule, [cost] * schedule.stages)


# What they look like


def test_interleaved_1f1b_goes_round_in_groups():
    assert make_schedule("interleaved_1f1b", stages=4, micro_batches=4).rows == rows("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_zero_bubble_lags_behind_with_w_the_more_the_later_the_stage():
    assert make_schedule("zero_bubble", stages=3, micro_batches=4).rows == rows("""
        0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
    """)


def test_zero_bubble_2p_takes_in_more():
    assert make_schedule("zero_bubble_2p", stages=2, micro_batches=4).rows == rows("""
        0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3
    """)


def test_zbv_goes_there_and_back():
    assert make_schedule("zbv", stages=4, micro_batches=4).rows == rows("""
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3
        1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3
    """)


def test_of_one_micro_batch_zbv_leaves_all_w_to_the_end():
    assert make_schedule("zbv", stages=4, micro_batches=1).rows == rows("""
        0F0 3F0 3B0 3W0 0B0 0W0
        1F0 2F0 2B0 1B0 2W0 1W0
    """)


# Whatever the sizes


@st.composite
def any_known(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    recipe = SCHEDULES[name]
    v = draw(st.sampled_from([each for each in range(1, 5) if recipe.takes(each)]))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    modes = draw(st.lists(st.sampled_from(CHECKPOINTS), min_size=p * v, max_size=p * v))
    return on(name, p, m, v, modes)


@settings(max_examples=300, deadline=None)
@given(any_known())
def test_every_known_schedule_can_run_and_has_what_belongs_there(schedule):
    validate(schedule)
    place = {action: (d, k) for d, row in enumerate(schedule.rows) for k, action in enumerate(row)}
    kinds = [ActionKind.FORWARD] if schedule.name == "inference" else [ActionKind.FORWARD, ActionKind.BACKWARD]
    kinds += [ActionKind.WEIGHT] if schedule.name in SPLIT else []
    want = {Action(k, j, i) for k, j, i in product(kinds, range(schedule.stages), range(schedule.micro_batches))}
    others = {ActionKind.RECOMPUTE, *([ActionKind.WEIGHT] if schedule.name in PARTLY_SPLIT else [])}
    assert {a for a in place if a.kind not in others} == want
    for action, (d, k) in place.items():
        if action.kind is ActionKind.WEIGHT:
            assert place[Action(ActionKind.BACKWARD, *action[1:])] < (d, k)
        if action.kind is ActionKind.RECOMPUTE:
            j, i = action[1:]
            # Between it and its B nothing but the B through which the gradient comes, on the same device.
            behind = schedule.rows[d][k + 1 : place[Action(ActionKind.BACKWARD, j, i)][1]]
            assert all(a.kind is ActionKind.BACKWARD and a.stage > j and a.micro_batch == i for a in behind)
    simulation, m = simulated(schedule), schedule.micro_batches
    # A device is never idle for longer than all micro-batches would take to go through, one after the other.
    assert max(simulation.busy) <= simulation.step_seconds <= sum(simulation.busy)
    flights = zip(activations_in_flight(schedule), micro_batches_in_flight(schedule), strict=True)
    assert all(1 <= a <= f <= m for a, f in flights) or schedule.name == "inference"


# What they keep: of a device, activations of one stage and one micro-batch


def kept(schedule: Schedule) -> list[float]:
    return [memory.peak for memory in simulated(schedule).memory]


def test_interleaved_1f1b_keeps_the_first_group_and_two_for_each_later_device():
    for (p, m), v in product(SIZES, (2, 3)):
        largest = -(-m // max(1, m // p))
        ahead = [(v - 1) * largest + 2 * (p - 1 - d) for d in range(p)]
        assert kept(on("interleaved_1f1b", p, m, v)) == [min(m * v, a + 1) for a in ahead]


def test_interleaved_zero_bubble_keeps_p_micro_batches_where_p_divides_their_number():
    """On every device: what the shorter way ahead saves, W keeps."""
    for (p, m), v in product(SIZES, (2, 3)):
        largest = -(-m // max(1, m // p))
        assert kept(on("interleaved_zero_bubble", p, m, v)) == [min(m * v, (v - 1) * largest + p)] * p
        if m % p == 0:
            assert (v - 1) * largest + p == v * p


def test_v_half_and_v_min_keep_a_half_and_a_third_of_what_zbv_keeps():
    for p, m in SIZES:
        assert max(kept(on("v_half", p, m))) <= 2 * min(m, (p + 2) // 2)
        assert max(kept(on("v_min", p, m))) <= 2 * min(m, (p + 4) // 3)
        if m >= p:
            assert max(kept(on("v_half", p, m))) == 2 * ((p + 2) // 2) or p == 1
            assert max(kept(on("v_min", p, m))) == 2 * ((p + 4) // 3) or p == 1
    assert [max(kept(on(name, 16, 40))) / 2 for name in ("zbv", "v_half", "v_min")] == [16, 9, 6]


def test_zero_bubble_keeps_what_the_first_stage_of_1f1b_keeps():
    for p, m in SIZES:
        assert kept(on("zero_bubble", p, m)) == [min(p, m)] * p
        assert kept(on("1f1b", p, m))[0] == min(p, m)


def test_the_figures_of_several_stages_on_each_device():
    def rounded(name, figure):
        return [round(figure(on(name, 8, 48, v), v), 1) for v in (1, 2, 3, 4)]

    def keeps(schedule, v):
        return max(kept(schedule)) / v

    def idles(schedule, v):
        return simulated(schedule).step_seconds / v - 3 * 48

    assert rounded("1f1b", keeps) == [8, 12, 15.7, 19.5]
    assert rounded("1f1b", idles) == [21, 18.5, 20, 27.8]
    assert rounded("zero_bubble", keeps) == [8, 16, 24, 32]
    assert rounded("zero_bubble", idles) == [7, 5.5, 5, 5.5]


def test_recomputing_holds_one_where_backward_is_whole_and_what_waits_for_w_where_it_is_split():
    for p, m in SIZES:
        assert set(activations_in_flight(on("interleaved_1f1b", p, m, 2, "always"))) == {1}
        again = activations_in_flight(on("zero_bubble", p, m, checkpoint="always"))
        assert again == tuple(min(j + 1, m) for j in range(p))


# How long they take


def test_interleaved_1f1b_makes_the_bubble_as_many_times_shorter():
    """(p - 1) / (v m + p - 1) of the step, whether or not m is a multiple of p."""
    for (p, m), v in product(SIZES, (2, 3)):
        simulation = simulated(on("interleaved_1f1b", p, m, v))
        if m >= p:
            assert simulation.step_seconds == 3 * (v * m + p - 1)
            assert simulation.mean_bubble == pytest.approx((p - 1) / (v * m + p - 1))
        else:  # it goes round as one group
            assert simulation.step_seconds == 3 * (v * p + m - 1)


def test_zero_bubble_idles_a_third_of_1f1b():
    for p, m in SIZES:
        step = simulated(on("zero_bubble", p, m)).step_seconds
        assert step == (3 * m + (p - 1) if m >= p else 2 * m + 2 * p - 1)
        assert simulated(on("1f1b", p, m)).step_seconds == 3 * m + 3 * (p - 1)


def test_interleaved_zero_bubble_idles_a_third_of_interleaved_1f1b():
    """As long as the last device waits for its first value; of fewer than p, until one has gone round."""
    for (p, m), v in product(SIZES, (2, 3, 4)):
        step = simulated(on("interleaved_zero_bubble", p, m, v)).step_seconds
        round_trip = max(2 * v * p + 2 * m - 1, 2 * v * m + (v + 1) * p - 1)
        assert step == (3 * v * m + (p - 1) if m >= p else round_trip)
    assert simulated(on("interleaved_zero_bubble", 8, 16, 4)).step_seconds == 199


def test_dualpipev_idles_as_long_as_zbv():
    for p, m in SIZES:
        steps = [simulated(on(name, p, m)).step_seconds for name in ("dualpipev", "zbv")]
        if m >= 2 * p:
            assert steps == [6 * m + (p - 1)] * 2
        assert steps[0] >= steps[1]


def test_v_half_and_v_min_idle_longer_the_less_they_keep():
    for p, m in product(range(1, 10), range(1, 20)):
        bubbles = [simulated(on(name, p, m)).step_seconds - 6 * m for name in ("v_half", "v_min")]
        half = (7 * (p - 1) - (3 if p % 2 == 0 else 0)) // 2
        least = max(0, 4 * p - 5 - (p % 3 == 2 or p == 3))
        for bubble, name, most, usual in zip(
            bubbles, ("v_half", "v_min"), ((p + 2) // 2, (p + 4) // 3), (half, least), strict=True
        ):
            if m <= most:  # any order keeps within that
                assert make_schedule(name, 2 * p, m).rows == make_schedule("zbv", 2 * p, m).rows
            elif m >= p:
                assert bubble == usual
            else:
                assert bubble <= usual


def test_zbv_idles_a_sixth_of_1f1b():
    """Stages are half as long here. Of a few more micro-batches than devices it idles up to 7 % of the step longer."""
    for p, m in SIZES:
        step = simulated(on("zbv", p, m)).step_seconds
        ideal = 6 * m + p - 1
        if m == p or m >= 2 * p - 1:
            assert step == ideal
        elif m > p:
            assert ideal <= step <= 1.07 * ideal
        else:
            assert step <= 4 * p + 3 * m - 1


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_recomputing_fills_the_bubble(name):
    """It takes its own time, on the device that has most to do, and none beside."""
    for p, m in SIZES:
        if m >= 2 * p:
            schedule = on(name, p, m, checkpoint="always")
            work = m * schedule.stages / p
            without = simulated(on(name, p, m)).step_seconds
            assert simulated(schedule).step_seconds <= without + work


# Where they can be


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("zbv", 3, 2),
            "schedule 'zbv' has 2 stages on each device, and 3 cannot be shared out so: give a multiple of 2",
        ),
        (("interleaved_1f1b", 5, 2), "'interleaved_1f1b' has 2 stages on each device, and 5 cannot"),
        (
            ("zbv", 4, 2, "never", (0, 1, 0, 1)),
            r"schedule 'zbv' needs 2 stages on each device, placed as in \(0, 1, 1, 0\), but is given 4 stages on 2 "
            r"devices, placed as in \(0, 1, 0, 1\): put them there, or use '1f1b' or",
        ),
        (("zbv", 6, 2, "never", (0, 1, 1, 0, 0, 1)), "'zbv' needs 2 stages on each device, .* is given 6 stages on 2"),
        (("zbv", 2, 2, "never", (0, 1)), r"'zbv' needs 2 stages on each device, .* placed as in \(0, 1\)"),
        (("interleaved_1f1b", 2, 2, "never", (0, 1)), "'interleaved_1f1b' needs 2 or more stages on each device"),
        (("interleaved_1f1b", 5, 2, "never", (0, 1, 0, 1, 0)), "needs 2 or more .* is given 5 stages on 2 devices"),
    ],
)
def test_stages_where_a_schedule_cannot_have_them_are_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        make_schedule(*arguments)
