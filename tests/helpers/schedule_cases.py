"""Random schedules and costs."""

from dataclasses import replace

from hypothesis import strategies as st

from fxpipe.scheduling import CHECKPOINTS, SCHEDULES, Action, ActionKind, Rows, Schedule, make_schedule, parse_schedule
from fxpipe.simulation import StageCost, Transfer

ANYWHERE = [name for name, recipe in SCHEDULES.items() if not recipe.has_fixed_placement]


ZERO_BUBBLE = """
    0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2 0U2
    1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2 1U2
"""


def rows(text: str) -> Rows:
    return tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())


NUMBER = st.integers(0, 6)


@st.composite
def some_backwards_whole(draw, schedule: Schedule) -> Schedule:
    """The schedule without some W: B of these micro-batches is the whole backward."""
    split = sorted(schedule.split_backwards)
    gone = draw(st.sets(st.sampled_from(split))) if split and draw(st.booleans()) else set()
    rows = (tuple(a for a in row if a.kind is not ActionKind.WEIGHT or a[1:] not in gone) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


@st.composite
def any_schedule(draw) -> Schedule:
    if draw(st.integers(0, 9)) == 0:
        return parse_schedule(ZERO_BUBBLE)
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    placement = draw(st.none() | st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    if placement is not None:  # without gaps
        used = sorted(set(placement))
        placement = tuple(map(used.index, placement))
    modes = draw(st.lists(st.sampled_from(CHECKPOINTS), min_size=n, max_size=n))
    if draw(st.booleans()):
        return draw(
            some_backwards_whole(make_schedule(draw(st.sampled_from(sorted(ANYWHERE))), n, m, modes, placement))
        )
    name = draw(st.sampled_from([name for name, recipe in SCHEDULES.items() if recipe.stages_per_device == 2]))
    return draw(some_backwards_whole(make_schedule(name, 2 * n, m, modes * 2)))


@st.composite
def any_case(draw) -> tuple[Schedule, list[StageCost], list[Transfer], bool]:
    """Whole numbers, so that sums are exact in whatever order they are made."""
    schedule = draw(any_schedule())
    n = schedule.stages
    stages = []
    for _ in range(n):
        forward, recompute, weight, more = draw(st.tuples(NUMBER, st.none() | NUMBER, NUMBER, NUMBER))
        sizes = draw(st.tuples(*[st.integers(0, 50)] * 7))
        stages.append(StageCost(forward, weight + more, recompute, weight, *sizes))
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
    pairs = draw(st.lists(ends, max_size=6)) if n > 1 else []
    return schedule, stages, [Transfer(s, t, draw(NUMBER), draw(NUMBER)) for s, t in pairs], draw(st.booleans())
