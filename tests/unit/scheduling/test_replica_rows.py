"""Rows of replicas: which run, how much they keep, and how long a step with them takes."""

from itertools import product

import pytest

from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.scheduling import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    make_schedule,
    micro_batches_in_flight,
    parse_schedule,
    validate,
)
from fxpipe.scheduling.row_transforms import with_updates
from fxpipe.simulation import StageCost, simulate_schedule

REPLICAS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 3), (4, 2), (1, 3, 1), (2, 1, 3), (3, 2, 1, 2)]


def placed(name: str, devices: int) -> tuple[int, ...]:
    recipe = SCHEDULES[name]
    return recipe.placement(devices, recipe.stages_per_device)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_of_replicas_of_every_schedule_run(name):
    for replicas, m in product(REPLICAS, (1, 2, 5, 12)):
        placement = placed(name, len(replicas))
        for modes in ("never", "except_last"):
            schedule = make_schedule(name, len(placement), m, modes, placement, replicas=replicas)
            validate(schedule)
            assert (
                len(schedule.rows) == sum(replicas)
                or schedule.rows == make_schedule(name, len(placement), m, modes, placement).rows
            )
            validate(with_updates(schedule))


def test_replicas_take_micro_batches_in_turn():
    schedule = make_schedule("gpipe", 2, 5, replicas=(2, 1))
    assert [" ".join(map(str, row)) for row in schedule.rows] == [
        "0F0 0F2 0F4 0B4 0B2 0B0",
        "0F1 0F3 0B3 0B1",
        "1F0 1F1 1F2 1F3 1F4 1B4 1B3 1B2 1B1 1B0",
    ]
    assert schedule.row_of[0, 3] == 1
    assert schedule.row_of[1, 3] == 2


@pytest.mark.parametrize("replicas", REPLICAS)
def test_1f1b_keeps_as_many_as_the_stage_behind_and_one_more_for_each_replica(replicas):
    kept = micro_batches_in_flight(make_schedule("1f1b", len(replicas), 96, replicas=replicas))
    in_flight = [own * count for own, count in zip(kept, replicas, strict=True)]  # by stage
    assert kept[-1] == 1
    for count, own, behind in zip(replicas, in_flight, in_flight[1:], strict=False):
        assert behind + count <= own < behind + 2 * count


@pytest.mark.parametrize(
    "replicas", [(3, 1), (1, 3), (2, 1), (15, 1), (2, 1, 1), (2, 4, 1), (1, 4, 1), (1, 2, 4), (4, 2, 1), (3, 1, 2)]
)
def test_a_stage_that_takes_as_many_times_as_long_keeps_up_with_so_many_replicas(replicas):
    m = 48 * max(replicas)
    costs = [StageCost(forward=count, backward=2 * count) for count in replicas]
    seconds = simulate_schedule(make_schedule("1f1b", len(replicas), m, replicas=replicas), costs).step_seconds
    assert 3 * m <= seconds <= 1.06 * 3 * m


def test_replicas_of_a_table_of_ones_own_keep_its_order():
    table = parse_schedule("0F0 0F1 0F2 0B1 0B2 0B0\n1F0 1F1 1B1 1F2 1B2 1B0")
    schedule = make_schedule(table, 2, 3, replicas=(1, 2))
    assert [" ".join(map(str, row)) for row in schedule.rows][1:] == ["1F0 1F2 1B2 1B0", "1F1 1B1"]
    named = Schedule("1f1b", 2, 3, table.rows)
    assert make_schedule(named, 2, 3, replicas=(1, 2)).rows == schedule.rows


def test_rows_out_of_turn_are_refused():
    schedule = make_schedule("gpipe", 1, 2, replicas=(2,))
    swapped = Schedule("mine", 1, 2, schedule.rows[::-1], replicas=(2,))
    with pytest.raises(ScheduleError, match="0F1 stands in row 0: its replica has row 1"):
        validate(swapped)
    with pytest.raises(ScheduleError, match=r"there are 2 rows for devices with \(3,\) replicas"):
        validate(Schedule("mine", 1, 2, schedule.rows, replicas=(3,)))
    with pytest.raises(ScheduleError, match="a stage lives in one row"):
        validate(Schedule("mine", 1, 2, schedule.rows))
    with pytest.raises(ArgumentError, match="has 3 entries for 2 devices"):
        make_schedule("gpipe", 2, 2, replicas=(2, 1, 1))
    with pytest.raises(ArgumentError, match="with replicas"):
        make_schedule(schedule, 1, 2)


def test_weights_are_updated_once_behind_the_last_micro_batch_of_all_replicas():
    rows = with_updates(make_schedule("1f1b", 2, 4, replicas=(1, 2))).rows
    updates = [(d, action) for d, row in enumerate(rows) for action in row if action.kind is ActionKind.UPDATE]
    assert updates == [(0, Action(ActionKind.UPDATE, 0, 3)), (2, Action(ActionKind.UPDATE, 1, 3))]


def test_buffers_are_handed_on_in_every_schedule_by_name():
    for name, replicas, m in product(SCHEDULES, REPLICAS, (1, 5, 12)):
        placement = placed(name, len(replicas))
        validate(make_schedule(name, len(placement), m, "never", placement, replicas=replicas), range(len(placement)))
