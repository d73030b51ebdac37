"""A schedule of one's own: a table or a function, checked against what it is to run on, and run."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import assert_step
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.scheduling import Action, Schedule, make_schedule, parse_schedule
from fxpipe.scheduling.builtin import one_f_one_b

TWO = """
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
"""
UNEVEN = "0F0 2F0 2B0 0F1 0B0 2F1 2B1 0B1 \n 1F0 1B0 1F1 1B1"  # three stages on two devices


def swapped(micro_batches, stages):
    """1F1B, the last micro-batch first."""
    return [
        [Action(a.kind, a.stage, micro_batches - 1 - a.micro_batch) for a in row]
        for row in one_f_one_b(micro_batches, stages)
    ]


def as_text(micro_batches, stages):
    return str(make_schedule("gpipe", stages, micro_batches))


def as_words(micro_batches, stages):
    return [" ".join(map(str, row)) for row in one_f_one_b(micro_batches, stages)]


def as_schedule(micro_batches, stages):
    return make_schedule("1f1b", stages, micro_batches)


def _chain(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)))


def _pipe(schedule, devices=2, chunks="auto", **options):
    return fxpipe.pipeline(_chain(), ["cpu"] * devices, chunks, schedule=schedule, profile_budget=0.1, **options)


def _assert_steps_equal_the_plain_model(pipe, batches):
    plain = _chain()
    for batch in batches:
        for one_pass in (True, False):  # the drop-in in gpipe's order, wherever stages are
            assert_step(pipe, plain, torch.randn(batch, 4), one_pass=one_pass)


# As data


@pytest.mark.parametrize("function", [swapped, as_text, as_words, as_schedule])
def test_a_function_is_asked_for_each_size(function):
    for stages, m in ((1, 1), (2, 3), (3, 2)):
        made = make_schedule(function, stages, m)
        assert (made.stages, made.micro_batches) == (stages, m)
        assert make_schedule(function, stages, m) is made
    assert make_schedule(swapped, 2, 3).name == "swapped"
    assert str(make_schedule(swapped, 2, 2)).splitlines()[1:] == [
        "device 0: 0F1 0F0 0B1 0B0",
        "device 1: 1F1 1B1 1F0 1B0",
    ]


def test_a_table_is_text_or_a_schedule():
    schedule = parse_schedule(TWO)
    assert make_schedule(TWO, 2, 3) == make_schedule(schedule, 2, 3) == make_schedule(str(schedule), 2, 3) == schedule
    assert make_schedule(Schedule("lists", 2, 3, [list(row) for row in schedule.rows]), 2, 3).rows == schedule.rows


def test_recomputation_is_put_in_where_there_is_none():
    made = make_schedule("0F0 0F1 0R1 0B0 0B1", 1, 2, "always")
    assert str(made).splitlines()[1] == "device 0: 0F0 0F1 0R1 0R0 0B0 0B1"


def test_a_table_says_where_stages_are():
    assert make_schedule(UNEVEN, 3, 2, placement=(0, 1, 0)).rows == parse_schedule(UNEVEN).rows
    with pytest.raises(
        ArgumentError, match=r"'custom' has its stages on devices \(0, 1, 0\), and they are on \(0, 1, 1\)"
    ):
        make_schedule(UNEVEN, 3, 2, placement=(0, 1, 1))


@pytest.mark.parametrize(
    ("schedule", "stages", "m", "words"),
    [
        (TWO, 3, 3, "schedule 'custom' is a table for 2 stages, but there are 3"),
        (
            TWO,
            2,
            4,
            r"'custom' is a table for 3 micro-batches, but there are 4: give so many \(chunks=3\), a longer table, or",
        ),
        ("one_f_one_b", 2, 3, "schedule='one_f_one_b' is unknown; there are 'gpipe', .* or give your own: a table"),
    ],
)
def test_what_cannot_be_used_is_refused(schedule, stages, m, words):
    with pytest.raises(ArgumentError, match=words):
        make_schedule(schedule, stages, m)


def test_a_function_whose_table_would_not_run_is_refused_with_the_grid():
    with pytest.raises(ScheduleError, match=r"(?s)schedule '<lambda>' .* would not run:.*device 0: 0F0 >0B0< 0F1 0B1"):
        make_schedule(lambda m, n: "0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1", 2, 2)
    with pytest.raises(ScheduleError, match=r"0F2 0F3 are missing \(2 of 4\)"):  # of other sizes than was asked for
        make_schedule(lambda m, n: "0F0 0F1 0B0 0B1", 1, 4)
    with pytest.raises(ScheduleError, match="1F0 is for stage 1; stages are 0 to 0"):
        make_schedule(lambda m, n: make_schedule("gpipe", 2, m), 1, 2)


@pytest.mark.parametrize("returned", [None, 3, [3]])
def test_a_function_that_returns_no_table_is_refused(returned):
    words = f"schedule function 'wrong' returned {returned!r} for micro_batches=2, stages=1; expected text, a Schedule"

    def wrong(m, n):
        return returned

    with pytest.raises(ScheduleError, match=re.escape(words)):
        make_schedule(wrong, 1, 2)


# In a pipe


@pytest.mark.parametrize("schedule", [TWO, parse_schedule(TWO, "mine"), UNEVEN])
def test_a_table_runs_and_so_does_a_mini_batch_with_fewer_samples(schedule):
    with _pipe(schedule) as pipe:
        _assert_steps_equal_the_plain_model(pipe, (6, 3, 2, 1))
        pipe.forward_backward(torch.randn(6, 4), target=torch.randn(6, 4), loss_fn=F.mse_loss)
        table = parse_schedule(schedule) if isinstance(schedule, str) else schedule
        assert pipe.last_step.schedule == table.name
        assert {r.action for r in pipe.last_step.actions} == {a for row in table.rows for a in row}
        assert pipe.plan.chunks == table.micro_batches


@pytest.mark.parametrize("function", [swapped, as_words])
def test_a_function_runs(function):
    with _pipe(function, chunks=3, checkpoint="except_last") as pipe:
        _assert_steps_equal_the_plain_model(pipe, (6, 2, 1))
        assert pipe.last_step.schedule == "gpipe"  # the drop-in's
    with _pipe(function, devices=1, chunks=2, stages_per_device=1) as pipe:
        _assert_steps_equal_the_plain_model(pipe, (4,))


@pytest.mark.parametrize("schedule", [UNEVEN, swapped])
def test_a_plan_keeps_the_table_as_text(schedule, tmp_path):
    devices = ["cpu"] * 2
    plan = fxpipe.plan(_chain(), devices=devices, chunks="auto" if schedule is UNEVEN else 3, schedule=schedule,
                       example_args=(torch.randn(6, 4),), profile_budget=0.1)  # fmt: skip
    name = "custom" if schedule is UNEVEN else "swapped"
    assert plan.schedule == str(make_schedule(schedule, len(plan.stages), plan.chunks))
    assert f"schedule {name}, checkpoint" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = fxpipe.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.in_flight(0) == plan.in_flight(0) == 2
    with fxpipe.pipeline(_chain(), plan=loaded, schedule=loaded.schedule) as pipe:
        _assert_steps_equal_the_plain_model(pipe, (6,))
        assert pipe.plan.schedule == plan.schedule


def test_a_table_says_how_many_micro_batches_whatever_the_plan_has():
    plan = fxpipe.plan(_chain(), devices=["cpu"] * 2, chunks=5, example_args=(torch.randn(6, 4),), profile_budget=0.1)
    with fxpipe.pipeline(_chain(), plan=plan, schedule=TWO) as pipe:
        _assert_steps_equal_the_plain_model(pipe, (6,))
        assert pipe.plan.chunks == 3


def test_a_plan_whose_table_is_damaged_is_refused(tmp_path):
    plan = fxpipe.plan(
        _chain(), devices=["cpu"] * 2, schedule=TWO, example_args=(torch.randn(6, 4),), profile_budget=0.1
    )
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("1F1 1B1", "1B1 1F1"))
    with pytest.raises(ArgumentError, match="the plan's schedule cannot be"):
        fxpipe.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("schedule", "options", "error", "words"),
    [
        (TWO, {"devices": 3}, ArgumentError, "'custom' has rows for 2 devices, but devices has 3 entries: give 2"),
        (TWO, {"chunks": 4}, ArgumentError, "chunks=4, but schedule 'custom' is a table for 3 micro-batches: leave"),
        (TWO, {"stages_per_device": 2}, ArgumentError, "has 2 stages, but with stages_per_device=2 there are 4"),
        ("0F0 0B0 0U0", {"devices": 1}, ArgumentError, "holds 0U0, but weights are updated by your optimizer"),
        ("0F0 0F1", {"devices": 1}, ArgumentError, "'custom' has no B, and so trains nothing: add every B"),
        ("0B0 0F0", {"devices": 1}, ScheduleError, "0B0 stands before 0F0, which it needs\ndevice 0: >0B0< 0F0"),
        (lambda m, n: "0F0 0F1", {"devices": 1, "chunks": 2}, ArgumentError, "'<lambda>' has no B"),
        (swapped, {"chunks": 2, "pin": {"0": 0, "5": 0}, "example_args": (torch.randn(4, 4),)}, ArgumentError, "pins"),
        (Schedule("idle", 1, 1, (*parse_schedule("0F0 0B0").rows, ())), {}, ArgumentError, "leaves device 1 idle"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(schedule, options, error, words):
    with pytest.raises(error, match=words):
        _pipe(schedule, **options)
