"""Schedules as data: what they look like, that they can run, and that what cannot run is refused with a reason."""

import ast
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from helpers.schedule_cases import ANYWHERE, ZERO_BUBBLE, rows, some_backwards_whole
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe.scheduling
from fxpipe.errors import ArgumentError, ArgumentTypeError, ScheduleError
from fxpipe.scheduling import (
    CHECKPOINTS,
    Action,
    ActionKind,
    Schedule,
    dependencies,
    make_schedule,
    parse_schedule,
    validate,
)
from fxpipe.scheduling.row_transforms import backward_part, forward_part, with_recompute

PLACEMENTS = [(0, 1, 0, 1), (0, 0, 0), (0, 1, 2) * 2, (0, 1, 1, 0), (1, 0), (0, 0, 1, 1, 0), (2, 0, 1, 0)]


def every_schedule() -> Iterator[Schedule]:
    for name, checkpoint, n, m in product(ANYWHERE, CHECKPOINTS, range(1, 7), range(1, 9)):
        yield make_schedule(name, n, m, checkpoint)


def every_shared_schedule() -> Iterator[Schedule]:
    """With several stages in a row."""
    for name, checkpoint, placement, m in product(ANYWHERE, CHECKPOINTS, PLACEMENTS, (1, 2, 3, 4, 7)):
        yield make_schedule(name, len(placement), m, checkpoint, placement)


def table(text: str, n: int, m: int) -> Schedule:
    """As `parse_schedule`, but not validated."""
    return Schedule("table", n, m, rows(text))


def test_gpipe_is_all_forwards_then_all_backwards():
    assert make_schedule("gpipe", stages=3, micro_batches=4).rows == rows("""
        0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
        1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0
        2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0
    """)


def test_inference_is_forwards_only():
    assert make_schedule("inference", stages=2, micro_batches=3, checkpoint="always").rows == rows("""
        0F0 0F1 0F2
        1F0 1F1 1F2
    """)


def test_except_last_keeps_the_last_micro_batch():
    assert make_schedule("1f1b", stages=2, micro_batches=2, checkpoint="except_last").rows == rows("""
        0F0 0F1 0R0 0B0 0B1
        1F0 1R0 1B0 1F1 1B1
    """)
    assert make_schedule("gpipe", 2, 1, "except_last") == make_schedule("gpipe", 2, 1, "never")


def test_stages_of_a_device_take_turns():
    assert make_schedule("gpipe", 4, 2, placement=(0, 1, 0, 1)).rows == rows("""
        0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """)
    assert make_schedule("1f1b", 3, 2, placement=(0, 1, 0)).rows == rows("""
        0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1
        1F0 1F1 1B0 1B1
    """)


def test_neighbours_on_a_device_are_as_one_stage():
    assert make_schedule("1f1b", 3, 2, placement=(0, 0, 0)).rows == rows("""
        0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1
    """)
    assert make_schedule("zero_bubble", 3, 2, placement=(1, 0, 0)).rows == rows("""
        1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 2W0 1W0 2W1 1W1
        0F0 0F1 0B0 0W0 0B1 0W1
    """)


def test_placement_is_where_a_stage_is_and_no_more():
    """Rows may be numbered in any way, and a stage does the same in the same order wherever it takes turns."""
    assert make_schedule("1f1b", 2, 3, placement=(1, 0)).rows == make_schedule("1f1b", 2, 3).rows[::-1]
    assert make_schedule("1f1b", 2, 3, placement=[0, 1]) is make_schedule("1f1b", 2, 3)
    for name, checkpoint, placement, m in product(ANYWHERE, CHECKPOINTS, PLACEMENTS, (1, 2, 5)):
        n = len(placement)
        if placement == (0, 0, 0):
            continue  # they are as one
        shared, alone = make_schedule(name, n, m, checkpoint, placement), make_schedule(name, n, m, checkpoint)
        for j, d in enumerate(placement):
            assert tuple(a for a in shared.rows[d] if a.stage == j) == alone.rows[j]


def test_recompute_stands_before_the_backward_of_later_stages_of_its_device_that_keep_what_they_made():
    row = "0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0"
    both = "0F0 1F0 0F1 1F1 0R1 1B1 0B1 0R0 1B0 0B0"
    assert with_recompute(rows(row), 2, ("always", "never")) == rows(both)
    own = "0F0 1F0 0F1 1F1 0R1 1B1 0B1 1R0 1B0 0R0 0B0"
    assert with_recompute(rows(row), 2, ("always", "except_last")) == rows(own)


def test_each_stage_may_have_its_own_checkpoint_mode():
    modes = ("always", "never", "except_last")
    assert make_schedule("gpipe", 3, 2, modes).rows == rows("""
        0F0 0F1 0R1 0B1 0R0 0B0
        1F0 1F1 1B1 1B0
        2F0 2F1 2B1 2R0 2B0
    """)
    assert make_schedule("gpipe", 3, 2, list(modes)) is make_schedule("gpipe", 3, 2, modes)
    for placement, m in product([(0, 1, 2), (0, 1, 0), (0, 0, 0)], (1, 3)):
        schedule = make_schedule("1f1b", 3, m, modes, placement)
        assert {str(a) for row in schedule.rows for a in row if a.kind is ActionKind.RECOMPUTE} == {
            f"{j}R{i}" for j, i in product(range(3), range(m)) if j == 0 or (j == 2 and i < m - 1)
        }


def test_forward_and_backward_part_make_the_whole():
    for schedule in (*every_schedule(), *every_shared_schedule()):
        if schedule.name in ("gpipe", "inference"):
            parts = zip(forward_part(schedule), backward_part(schedule), strict=True)
            assert tuple(f + b for f, b in parts) == schedule.rows
            assert {a.kind for row in forward_part(schedule) for a in row} == {ActionKind.FORWARD}
            assert not any(a.kind is ActionKind.FORWARD for row in backward_part(schedule) for a in row)


@pytest.mark.parametrize("part", [forward_part, backward_part])
def test_1f1b_has_no_parts(part):
    with pytest.raises(ArgumentError, match=r"0F2 stands behind 0B0. Use make_schedule\('gpipe', stages=2, micro_bat"):
        part(make_schedule("1f1b", 2, 3))


# Arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("1F1B", 2, 2),
            "schedule='1F1B' is unknown; there are 'gpipe', '1f1b', .*; or give your own: a table.* mean 1f1b",
        ),
        ((["gpipe"], 2, 2), r"schedule=\['gpipe'\] is unknown"),
        (("chimera", 2, 2), "'chimera' is bidirectional: .* each stage is on two devices, .* Use 'dualpipev'"),
        (("dualpipe", 2, 2), "'dualpipe' is bidirectional: .* each stage is on two devices, .* Use 'dualpipev'"),
        (("gpipe", 2, 2, "all"), "checkpoint='all' is unknown; there are 'always', 'except_last', 'never'"),
        (("gpipe", 2, 2, None), "checkpoint=None is unknown"),
        (("gpipe", 3, 2, ("never", "always")), r"checkpoint=\('never', 'always'\) has 2 modes for 3 stages: give one"),
        (("gpipe", 2, 2, ("never", "some")), "checkpoint='some' is unknown"),
        (("gpipe", 3, 2, "never", (0, 1)), "placement has 2 entries for 3 stages: give the device of each"),
        (("gpipe", 3, 2, "never", (0, 2, 0)), r"placement=\(0, 2, 0\) must name devices 0, 1, ... without a gap"),
        (("gpipe", 2, 2, "never", (0, -1)), r"placement=\(0, -1\) must name devices 0, 1, ... without a gap"),
        (("gpipe", 0, 2), "stages=0: expected a whole number, at least 1"),
        (("gpipe", 2, -1), "micro_batches=-1: expected a whole number"),
    ],
)
def test_bad_value_is_named(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        make_schedule(*arguments)


@pytest.mark.parametrize("count", [2.0, "2", True, None])
def test_count_that_is_no_integer_is_refused(count):
    with pytest.raises(ArgumentTypeError, match=f"stages={count!r}: expected a whole number"):
        make_schedule("gpipe", count, 2)


# Text


def test_every_schedule_is_valid_and_its_text_is_accepted_back():
    for schedule in (*every_schedule(), *every_shared_schedule()):
        assert parse_schedule(str(schedule)) == schedule
        text = "\n".join(" ".join(map(str, row)) for row in schedule.rows)
        assert parse_schedule(text, name=schedule.name) == schedule


def test_row_of_an_idle_device_parses_back():
    schedule = Schedule("idle", 1, 1, (rows("0F0")[0], ()))
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no actions: expected one line for each device, as in '0F0"),
        ("0F0 0X0", "action '0X0': expected stage, kind .* and micro-batch, as in '1F0'"),
        ("device 1: 0F0", "expected the row of device 0 here"),
        ("mine: 1 stages, 2 micro-batches\n0F0", "schedule 'mine' .* would not run:\n  - 0F1 is missing"),
    ],
)
def test_bad_text_is_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        parse_schedule(text)


# What cannot run


@pytest.mark.parametrize(
    ("text", "words", "grid"),
    [
        ("0F0 0F0 0F1 0B0 0B1", "0F0 stands there 2 times: keep one", "device 0: >0F0< >0F0< 0F1 0B0 0B1"),
        (
            "0F0 0F1 0B0",
            "0B1 is missing (1 of 2): every stage has B for every micro-batch, or the schedule has no B at all",
            "device 0: 0F0 0F1 0B0",
        ),
        ("0B0 0F0 0F1 0B1", "0B0 stands before 0F0, which it needs", "device 0: >0B0< 0F0 0F1 0B1"),
        ("0F0 0F1 0B0 0R0 0B1", "0B0 stands before 0R0, which it needs", "device 0: 0F0 0F1 >0B0< 0R0 0B1"),
        ("0R0 0F0 0F1 0B0 0B1", "0R0 stands before 0F0, which it needs", "device 0: >0R0< 0F0 0F1 0B0 0B1"),
        (
            "0F0 0F1 0R0",
            "0R0 is of no use in a schedule without B: add every B, or take it out",
            "device 0: 0F0 0F1 >0R0<",
        ),
        ("0F0 0F1 0W0 0B0 0B1 0W1", "0W0 stands before 0B0, which it needs", "device 0: 0F0 0F1 >0W0< 0B0 0B1 0W1"),
        ("0F0 0F1 0B0 0U1 0B1", "0U1 stands before 0B1, which it needs", "device 0: 0F0 0F1 0B0 >0U1< 0B1"),
        (
            "0F0 0F1 0B0 0U0 0B1",
            "stage 0 is updated, but not with its last micro-batches: 0U1 is missing",
            "device 0: 0F0 0F1 0B0 0U0 0B1",
        ),
        ("0F0 0F1 1F0", "1F0 is for stage 1; stages are 0 to 0", "device 0: 0F0 0F1 >1F0<"),
        ("0F0 0F1 0F2", "0F2 is for micro-batch 2; micro-batches are 0 to 1", "device 0: 0F0 0F1 >0F2<"),
    ],
)
def test_illegal_row_is_shown_with_its_fault(text, words, grid):
    with pytest.raises(ScheduleError) as raised:
        validate(table(text, n=1, m=2))
    assert str(raised.value) == f"schedule 'table' (1 stages, 2 micro-batches) would not run:\n  - {words}\n{grid}"


def test_stage_in_two_rows_is_shown():
    with pytest.raises(ScheduleError) as raised:
        validate(table("0F0 0F1 1B0 0B0 0B1 \n 1F0 1F1 1B1", n=2, m=2))
    assert str(raised.value).splitlines()[1:] == [
        "  - 1B0 stands with device 0: a stage lives in one row, "
        "move it to device 1, where the rest of stage 1 is",
        "device 0: 0F0 0F1 >1B0< 0B0 0B1",
        "device 1: 1F0 1F1 1B1",
    ]  # fmt: skip


def test_a_stage_may_have_w_for_some_micro_batches_only():
    """Of the others B is the whole backward."""
    parse_schedule("0F0 0F1 0B0 0W0 0B1")
    with pytest.raises(ScheduleError, match=r"0B1 is missing \(1 of 2\)"):
        parse_schedule("0F0 0F1 0B0 0W0 0W1")


def test_rows_that_wait_for_each_other_are_shown():
    """Device 0 wants the gradient of 0 before it forwards 1, device 1 wants 1 before it gives the gradient of 0."""
    with pytest.raises(ScheduleError) as raised:
        validate(table("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1", n=2, m=2))
    assert str(raised.value).splitlines()[1:] == [
        "  - device 0 waits before 0B0 for the result of 1B0, for ever",
        "  - device 1 waits before 1F1 for the result of 0F1, for ever",
        "device 0: 0F0 >0B0< 0F1 0B1",
        "device 1: 1F0 >1F1< 1B0 1B1",
    ]


def test_results_lie_until_they_are_taken():
    """0F0 until device 1 has taken 0F1; and 0F1 until 1F0, whose result device 0 does not take before 0F2."""
    parse_schedule("0F0 0F1 \n 1F1 1F0")
    parse_schedule("0F0 0F1 0F2 2F0 2F1 2F2 \n 1F0 1F1 1F2 3F0 3F1 3F2")


def test_only_those_that_wait_in_a_circle_are_blamed():
    with pytest.raises(ScheduleError) as raised:
        validate(table("0F0 0B0 0F1 0B1 \n 1F0 1B0 1F1 1B1 \n 2F1 2B1 2F0 2B0", n=3, m=2))
    assert [line[:12] for line in str(raised.value).splitlines() if line.startswith("  -")] == [
        "  - device 1",
        "  - device 2",
    ]


@pytest.mark.parametrize(("n", "m"), [(0, 1), (1, 0)])
def test_nothing_to_do_is_refused(n, m):
    with pytest.raises(ScheduleError, match="at least 1 stage and 1 micro-batch"):
        validate(Schedule("nothing", n, m, ()))


def test_dependencies_are_a_chain():
    needs = {text: " ".join(map(str, dependencies(Action.parse(text), stages=3))) for text in
             ("0F1", "1F1", "1R1", "1B1", "2B1", "1W1", "1U1")}  # fmt: skip
    assert needs == {
        "0F1": "",
        "1F1": "0F1",
        "1R1": "1F1",
        "1B1": "1F1 1R1 2B1",
        "2B1": "2F1 2R1",
        "1W1": "1B1",
        "1U1": "1B0 1B1 1W0 1W1",
    }


# Against a naive executor


def is_right(schedule: Schedule) -> bool:
    """Runs each row as far as it comes, over and over; each action needs what others have left for it."""
    n, m = schedule.stages, schedule.micro_batches
    actions = [action for row in schedule.rows for action in row]
    homes = {(action.stage, d) for d, row in enumerate(schedule.rows) for action in row}
    if len({*actions}) < len(actions) or sorted(j for j, _ in homes) != [*range(n)]:
        return False
    split = {a[1:] for a in actions if a.kind is ActionKind.WEIGHT}
    values, saved, sent_back, owed, gradients, updated = (set() for _ in range(6))  # of (stage, micro-batch)

    def run(action: Action) -> bool:
        """Returns False if it cannot run yet."""
        j, i = here = action.stage, action.micro_batch
        match action.kind:
            case ActionKind.FORWARD if j == 0 or (j - 1, i) in values:
                values.add(here)
                saved.add(here)
            case ActionKind.RECOMPUTE if here in saved:
                pass
            case ActionKind.BACKWARD if here in saved and (j == n - 1 or (j + 1, i) in sent_back):
                saved.remove(here)
                sent_back.add(here)
                (owed if here in split else gradients).add(here)
            case ActionKind.WEIGHT if here in owed:
                owed.remove(here)
                gradients.add(here)
            case ActionKind.UPDATE if all((j, h) in gradients for h in range(i + 1)):
                updated.add(here)
            case _:
                return False
        return True

    left = [[*row] for row in schedule.rows]
    count = None
    while count != sum(map(len, left)):
        count = sum(map(len, left))
        for row in left:
            while row and run(row[0]):
                del row[0]
    every = {*product(range(n), range(m))}
    complete = gradients == every if sent_back else {a.kind for a in actions} == {ActionKind.FORWARD}
    return count == 0 and values == every and complete and all((j, m - 1) in updated for j, _ in updated)


def is_valid(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def test_naive_executor_runs_every_schedule():
    for schedule in (*every_schedule(), *every_shared_schedule()):
        assert is_right(schedule), schedule


SOME_SCHEDULES = st.one_of(
    st.builds(
        make_schedule,
        st.sampled_from(sorted(ANYWHERE)),
        st.integers(1, 6),
        st.integers(1, 8),
        st.sampled_from(CHECKPOINTS),
    ),
    st.just(parse_schedule(ZERO_BUBBLE)),
    st.sampled_from(list(every_shared_schedule())),
    st.builds(make_schedule, st.just("zero_bubble"), st.integers(1, 4), st.integers(1, 6)).flatmap(
        some_backwards_whole
    ),
)


def mutated(schedule: Schedule, data: st.DataObject) -> Schedule:
    """One slip of the pen."""
    table = [list(row) for row in schedule.rows]

    def draw_row() -> int:
        return data.draw(st.sampled_from([d for d, row in enumerate(table) if row]))

    d = draw_row()
    p = data.draw(st.integers(0, len(table[d]) - 1))
    slip = data.draw(st.sampled_from(["drop", "double", "swap", "swap neighbours", "move", "wrong row", "rename"]))
    match slip:
        case "drop":
            del table[d][p]
        case "double":
            table[d].insert(data.draw(st.integers(0, len(table[d]))), table[d][p])
        case "swap":
            e = draw_row()
            q = data.draw(st.integers(0, len(table[e]) - 1))
            table[d][p], table[e][q] = table[e][q], table[d][p]
        case "swap neighbours":
            q = max(p - 1, 0)
            table[d][p], table[d][q] = table[d][q], table[d][p]
        case "move":
            action = table[d].pop(p)
            table[d].insert(data.draw(st.integers(0, len(table[d]))), action)
        case "wrong row":
            action = table[d].pop(p)
            e = data.draw(st.integers(0, len(table) - 1))
            table[e].insert(data.draw(st.integers(0, len(table[e]))), action)
        case "rename":
            stage, micro_batch = data.draw(st.integers(0, schedule.stages)), data.draw(st.integers(0, 8))
            table[d][p] = Action(data.draw(st.sampled_from(ActionKind)), stage, micro_batch)
    return Schedule(slip, schedule.stages, schedule.micro_batches, tuple(map(tuple, table)))


@settings(max_examples=400, deadline=None)
@given(SOME_SCHEDULES, st.data())
def test_mutated_schedule_is_accepted_exactly_if_it_still_runs_right(schedule, data):
    once = mutated(schedule, data)
    twice = mutated(once, data) if data.draw(st.booleans()) and any(once.rows) else once
    assert is_valid(twice) == is_right(twice), twice


def shuffled(schedule: Schedule, turns: random.Random) -> Schedule:
    """Any order that a row's own actions allow: what is left to find is waiting for ever."""
    found = []
    for row in schedule.rows:
        left, order = list(row), []
        while left:
            free = [a for a in left if not set(dependencies(a, schedule.stages)) & set(left)]
            order.append(turns.choice(free))
            left.remove(order[-1])
        found.append(tuple(order))
    return Schedule("shuffled", schedule.stages, schedule.micro_batches, tuple(found))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["gpipe", "inference"]),
    st.sampled_from([*PLACEMENTS, *(tuple(range(n)) for n in range(1, 5))]),
    st.integers(1, 4),
    st.sampled_from(CHECKPOINTS),
    st.randoms(use_true_random=False),
)
def test_shuffled_rows_are_accepted_exactly_if_they_run_right(name, placement, m, checkpoint, turns):
    schedule = shuffled(make_schedule(name, len(placement), m, checkpoint, placement), turns)
    assert is_valid(schedule) == is_right(schedule), schedule


# The room


SOURCES = sorted(Path(fxpipe.scheduling.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_scheduling_is_plain_data(source):
    """No torch, and nothing of fxpipe but the exceptions and what whole numbers are."""
    for node in ast.walk(ast.parse(source.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            ours = name.startswith(("fxpipe.scheduling", "fxpipe.errors", "fxpipe.utils.units"))
            assert ours or name.split(".")[0] in sys.stdlib_module_names, name
