"""Validation of schedules: what every action needs, and the checks that each schedule passes when it is made.

Three questions, each asked only if the ones before it have been answered well:

1. Is every action there that must be, once, and in the one row of its stage?
2. Does every row keep the order that its own actions need?
3. Do the rows, run side by side, never wait for each other for ever?

For the third the rows are simulated without time: each goes on while the results that its next action needs exist. An
action waits for results only, never until another row takes its own. So it is between threads, and between processes
if sends do not block and receives are posted in the order of the sends (`distributed.packet_link`). How far rows that
wait for results only come does not depend on the order in which they are visited, so one run answers for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

from fxpipe.errors import ScheduleError, StateError
from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule
from fxpipe.scheduling.replicas import replica_of

RowCell: TypeAlias = tuple[int, int]  # (device, place in its row)

MAX_SHOWN_PROBLEMS = 8  # one slip often breaks many actions: the first few tell

# From which stage, counted from its own, an action takes the result of the same kind of action, micro-batch by
# micro-batch. All else that it needs is of its own stage, and so of its own row.
NEIGHBOUR_STEP = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: 1}


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """One thing that is wrong with a schedule."""

    words: str
    cells: tuple[RowCell, ...] = ()  # to be marked in the grid


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions that must have ended before `action` may start, in the chain form: stage j talks to j - 1 and j + 1.

    R and W stand among them as if every micro-batch had them: leave out what your schedule does not hold.

        F(j, i)   F(j - 1, i)
        R(j, i)   F(j, i)
        B(j, i)   F(j, i), R(j, i), B(j + 1, i)
        W(j, i)   B(j, i)
        U(j, i)   B(j, 0) ... B(j, i), W(j, 0) ... W(j, i): with i = m - 1, all of its stage
    """
    j, i = action.stage, action.micro_batch
    match action.kind:
        case ActionKind.FORWARD:
            return (Action(ActionKind.FORWARD, j + NEIGHBOUR_STEP[ActionKind.FORWARD], i),) if j > 0 else ()
        case ActionKind.RECOMPUTE:
            return (Action(ActionKind.FORWARD, j, i),)
        case ActionKind.BACKWARD:
            own = (Action(ActionKind.FORWARD, j, i), Action(ActionKind.RECOMPUTE, j, i))
            return (
                (*own, Action(ActionKind.BACKWARD, j + NEIGHBOUR_STEP[ActionKind.BACKWARD], i))
                if j < stages - 1
                else own
            )
        case ActionKind.WEIGHT:
            return (Action(ActionKind.BACKWARD, j, i),)
        case ActionKind.UPDATE:
            return tuple(Action(kind, j, h) for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT) for h in range(i + 1))


def validate(schedule: Schedule, in_order: Collection[int] = ()) -> None:
    """Raises `ScheduleError` if the schedule would not run; its message shows the rows, what is wrong `>marked<`.

    `in_order`: stages of which F of a micro-batch also needs that of the one before, which a replica may have.
    """
    problems = _find_wrong_actions(schedule) or _find_wrong_order(schedule) or _find_deadlock(schedule, in_order)
    if problems:
        raise ScheduleError(_problems_message(schedule, problems))


@lru_cache(maxsize=16)
def check_order(schedule: Schedule, stages: frozenset[int], why: str) -> None:
    """Checks that F of these stages, which have replicas, can go in the order of micro-batches. `why`: it has to.

    Raises:
        StateError: in this schedule rows would then wait for each other.
    """
    try:
        validate(schedule, stages)
    except ScheduleError as error:
        raise StateError(
            f"stage {min(stages)} has replicas, and {why}; so F has to go in the order of micro-batches, and in this "
            f"schedule it does not: take one by name, or plan without replicas (data_parallel=1). {error}"
        ) from None


def _problems_message(schedule: Schedule, problems: list[ScheduleProblem]) -> str:
    shown, more = problems[:MAX_SHOWN_PROBLEMS], len(problems) - MAX_SHOWN_PROBLEMS
    words = [f"  - {problem.words}" for problem in shown] + ([f"  - and {more} more"] if more > 0 else [])
    marked = {cell for problem in shown for cell in problem.cells}
    rows = [
        " ".join(f">{action}<" if (d, place) in marked else str(action) for place, action in enumerate(row))
        for d, row in enumerate(schedule.rows)
    ]
    grid = [f"device {d}: {row}".rstrip() for d, row in enumerate(rows)]
    sizes = f"{schedule.stages} stages, {schedule.micro_batches} micro-batches"
    head = f"schedule {schedule.name!r} ({sizes}) would not run:"
    return "\n".join([head, *words, *grid])


# 1. Every action that must be, once, and in the one row of its stage


def _find_wrong_actions(schedule: Schedule) -> list[ScheduleProblem]:
    if schedule.stages < 1 or schedule.micro_batches < 1:
        return [ScheduleProblem("a schedule has at least 1 stage and 1 micro-batch")]
    return [*_out_of_range(schedule), *_doubled(schedule), *_scattered(schedule), *_missing(schedule)]


def _cells(rows: Rows) -> Iterator[tuple[RowCell, Action]]:
    return (((d, place), action) for d, row in enumerate(rows) for place, action in enumerate(row))


def _out_of_range(schedule: Schedule) -> Iterator[ScheduleProblem]:
    for cell, action in _cells(schedule.rows):
        if not 0 <= action.stage < schedule.stages:
            yield ScheduleProblem(
                f"{action} is for stage {action.stage}; stages are 0 to {schedule.stages - 1}", (cell,)
            )
        if not 0 <= action.micro_batch < schedule.micro_batches:
            last = schedule.micro_batches - 1
            yield ScheduleProblem(
                f"{action} is for micro-batch {action.micro_batch}; micro-batches are 0 to {last}", (cell,)
            )


def _doubled(schedule: Schedule) -> Iterator[ScheduleProblem]:
    counts = Counter(action for row in schedule.rows for action in row)
    for action, count in counts.items():
        if count > 1:
            cells = [cell for cell, other in _cells(schedule.rows) if other == action]
            yield ScheduleProblem(f"{action} stands there {len(cells)} times: keep one", tuple(cells))


def _scattered(schedule: Schedule) -> Iterator[ScheduleProblem]:
    """Actions in a wrong row: a stage belongs to the device with most of its actions, replicas take them in turn."""
    replicas = schedule.replicas or (1,) * len(schedule.rows)
    if sum(replicas) != len(schedule.rows) or min(replicas, default=1) < 1:
        yield ScheduleProblem(f"there are {len(schedule.rows)} rows for devices with {replicas} replicas")
        return
    firsts = [*accumulate(replicas[:-1], initial=0)]
    device_of_row = [k for k, count in enumerate(replicas) for _ in range(count)]
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for (d, _), action in _cells(schedule.rows):
        counts[action.stage][device_of_row[d]] += 1
    own = {stage: devices.most_common(1)[0][0] for stage, devices in counts.items()}
    for (d, place), action in _cells(schedule.rows):
        k = own[action.stage]
        row = firsts[k] + replica_of(action.micro_batch, replicas[k])
        if d != row:
            words = (
                f"{action} stands in row {d}: its replica has row {row}"
                if schedule.replicas
                else f"{action} stands with device {d}: a stage lives in one row, move it to device {row}, where the "
                f"rest of stage {action.stage} is"
            )
            yield ScheduleProblem(words, ((d, place),))


def _missing(schedule: Schedule) -> Iterator[ScheduleProblem]:
    held = {action: cell for cell, action in _cells(schedule.rows)}
    trains = any(action.kind is ActionKind.BACKWARD for action in held)
    updated = {action.stage for action in held if action.kind is ActionKind.UPDATE}
    if not trains:
        for action, cell in held.items():
            if action.kind is not ActionKind.FORWARD:
                yield ScheduleProblem(
                    f"{action} is of no use in a schedule without B: add every B, or take it out", (cell,)
                )
    for j in range(schedule.stages):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) if trains else (ActionKind.FORWARD,):
            lacking = [a for a in (Action(kind, j, i) for i in range(schedule.micro_batches)) if a not in held]
            if lacking:
                yield ScheduleProblem(_lacking_words(lacking, schedule.micro_batches))
        last = Action(ActionKind.UPDATE, j, schedule.micro_batches - 1)
        if trains and j in updated and last not in held:
            yield ScheduleProblem(f"stage {j} is updated, but not with its last micro-batches: {last} is missing")


def _lacking_words(lacking: list[Action], m: int) -> str:
    names = " ".join(map(str, lacking)) if len(lacking) <= 4 else f"{lacking[0]} ... {lacking[-1]}"
    if lacking[0].kind is ActionKind.BACKWARD:
        rule = "every stage has B for every micro-batch, or the schedule has no B at all"
    else:
        rule = "every stage has F for every micro-batch"
    return f"{names} {'is' if len(lacking) == 1 else 'are'} missing ({len(lacking)} of {m}): {rule}"


# 2. The order that a row's own actions need


def _find_wrong_order(schedule: Schedule) -> list[ScheduleProblem]:
    problems = []
    for d, row in enumerate(schedule.rows):
        place_of = {action: place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for needed in dependencies(action, schedule.stages):
                if place_of.get(needed, -1) > place:
                    problems.append(ScheduleProblem(f"{action} stands before {needed}, which it needs", ((d, place),)))
    return problems


# 3. No row waits for ever


def _find_deadlock(schedule: Schedule, in_order: Collection[int]) -> list[ScheduleProblem]:
    """Runs the rows in thought, as the head of this file says, until all have ended or none can go on."""
    rows, row_of = schedule.rows, schedule.row_of
    users: defaultdict[Action, list[int]] = defaultdict(list)  # rows in which an action waits for this one
    for waiting, needed in schedule.awaited.items():
        for one in needed:
            users[one].append(row_of[waiting.stage, waiting.micro_batch])
    ended: set[Action] = set()
    place = [0] * len(rows)  # of each device: its next action
    moving = list(range(len(rows)))
    while moving:
        d = moving.pop()
        while place[d] < len(rows[d]) and _awaited(schedule, rows[d][place[d]], ended, in_order) is None:
            action = rows[d][place[d]]
            ended.add(action)
            place[d] += 1
            user = row_of.get((action.stage - NEIGHBOUR_STEP.get(action.kind, 0), action.micro_batch), d)
            if user != d:
                moving.append(user)
            if action.kind is ActionKind.FORWARD and action.stage in in_order:
                moving.append(row_of.get((action.stage, action.micro_batch + 1), d))
            moving += users.get(action, ())
    waits: dict[int, tuple[Action, int]] = {}  # device -> what it waits for, and whom
    for d, row in enumerate(rows):
        if place[d] < len(row):
            awaited = _awaited(schedule, row[place[d]], ended, in_order)
            assert awaited is not None
            waits[d] = awaited, row_of[awaited.stage, awaited.micro_batch]
    return [
        ScheduleProblem(
            f"device {d} waits before {rows[d][place[d]]} for the result of {waits[d][0]}, for ever", ((d, place[d]),)
        )
        for d in _wait_cycle(waits)
    ]


def _awaited(schedule: Schedule, action: Action, ended: set[Action], in_order: Collection[int]) -> Action | None:
    """The result of another row that an action needs, if it is not there yet; the order of its own row is right."""
    if action.kind is ActionKind.FORWARD and action.stage in in_order and action.micro_batch:
        before = action._replace(micro_batch=action.micro_batch - 1)
        if before not in ended:
            return before
    missing = next((one for one in schedule.awaited.get(action, ()) if one not in ended), None)
    if missing is not None:
        return missing
    step = NEIGHBOUR_STEP.get(action.kind)
    if step is None or action.stage + step not in range(schedule.stages):
        return None
    maker = Action(action.kind, action.stage + step, action.micro_batch)
    return None if maker in ended else maker


def _wait_cycle(waits: dict[int, tuple[Action, int]]) -> list[int]:
    """The devices that wait for each other in a circle. There is one: whom a device waits for is stuck, too."""
    if not waits:
        return []
    path = [min(waits)]
    while path.count(path[-1]) < 2:
        path.append(waits[path[-1]][1])
    return path[path.index(path[-1]) : -1]


# -- Numbers of micro-batches that a stage holds at once, and of which it has all activations: counted ---------------


@lru_cache(maxsize=16)  # printing a plan asks once for each stage
def micro_batches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Counts for each stage the most micro-batches that are between the start of F and the end of their last backward.

    If backward is split, the last piece is W. If nothing goes back, a micro-batch is there during its F only.

    >>> from fxpipe.scheduling import make_schedule
    >>> micro_batches_in_flight(make_schedule("1f1b", stages=3, micro_batches=8))
    (3, 2, 1)
    """
    trains = any(action.kind is ActionKind.BACKWARD for row in schedule.rows for action in row)
    return _most_between(schedule, frozenset()) if trains else (1,) * schedule.stages


@lru_cache(maxsize=16)
def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Counts for each stage of how many micro-batches it has all that backward needs, at most.

    That is from F on or, if the micro-batch is recomputed, from R on. If backward is split it is to the end of W, which
    needs less than all: what weights were applied to, and the gradients of the results.

    >>> from fxpipe.scheduling import make_schedule
    >>> activations_in_flight(make_schedule("1f1b", stages=3, micro_batches=8, checkpoint="always"))
    (1, 1, 1)
    """
    recomputed = (a for row in schedule.rows for a in row if a.kind is ActionKind.RECOMPUTE)
    return _most_between(schedule, frozenset((a.stage, a.micro_batch) for a in recomputed))


def _most_between(schedule: Schedule, recomputed: frozenset[tuple[int, int]]) -> tuple[int, ...]:
    """Counts the micro-batches between F (R of `recomputed`) and the end of backward."""
    split = schedule.split_backwards
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for kind, j, i in (action for row in schedule.rows for action in row):
        first = ActionKind.RECOMPUTE if (j, i) in recomputed else ActionKind.FORWARD
        last = ActionKind.WEIGHT if (j, i) in split else ActionKind.BACKWARD
        now[j] += (kind is first) - (kind is last)
        most[j] = max(most[j], now[j])
    return tuple(most)
