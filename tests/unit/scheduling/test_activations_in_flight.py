"""Micro-batches in flight, and those with all their activations: against the sets of them that are there."""

from helpers.schedule_cases import some_backwards_whole
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.scheduling import (
    CHECKPOINTS,
    ActionKind,
    Schedule,
    activations_in_flight,
    make_schedule,
    micro_batches_in_flight,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages = draw(st.integers(1, 6))
    workers = draw(st.integers(1, stages))
    modes = draw(st.lists(st.sampled_from(CHECKPOINTS), min_size=stages, max_size=stages))
    placement = [j % workers for j in range(stages)]
    m = draw(st.integers(1, 9))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["interleaved_1f1b", "zbv"]))
        return draw(some_backwards_whole(make_schedule(name, 2 * stages, m, modes * 2)))
    names = ["1f1b", "gpipe", "zero_bubble", "zero_bubble_2p"]
    return draw(some_backwards_whole(make_schedule(draw(st.sampled_from(names)), stages, m, modes, placement)))


def most_at_once(schedule: Schedule, begins: ActionKind, stage: int, otherwise: ActionKind | None = None) -> int:
    """The largest set of micro-batches that are between their first action of a kind and their last one."""
    row = next(row for row in schedule.rows if any(a.stage == stage for a in row))
    row = tuple(action for action in row if action.stage == stage)
    again = {a.micro_batch for a in row if a.kind is begins}
    there: set[int] = set()
    most = 0
    for place, action in enumerate(row):
        is_first = action.kind is begins or (action.kind is otherwise and action.micro_batch not in again)
        if is_first:
            there.add(action.micro_batch)
        most = max(most, len(there))
        if not any(later.micro_batch == action.micro_batch for later in row[place + 1 :]):
            there.discard(action.micro_batch)
    return most


@given(schedules())
def test_they_are_the_largest_set_that_is_there(schedule: Schedule) -> None:
    stages = range(schedule.stages)
    assert micro_batches_in_flight(schedule) == tuple(most_at_once(schedule, ActionKind.FORWARD, j) for j in stages)
    assert activations_in_flight(schedule) == tuple(
        most_at_once(schedule, ActionKind.RECOMPUTE, j, ActionKind.FORWARD) for j in stages
    )


def test_the_last_of_1f1b_is_there_beside_one_that_is_recomputed() -> None:
    def held(schedule: str, checkpoint: str) -> tuple[int, ...]:
        return activations_in_flight(make_schedule(schedule, 3, 8, checkpoint))

    assert held("1f1b", "except_last") == (2, 2, 1)
    assert held("gpipe", "except_last") == held("1f1b", "always") == held("gpipe", "always") == (1, 1, 1)
    assert held("1f1b", "never") == (3, 2, 1)
    assert held("gpipe", "never") == (8, 8, 8)


def test_where_nothing_goes_back_one_is_there() -> None:
    assert micro_batches_in_flight(make_schedule("inference", 3, 8)) == (1, 1, 1)
