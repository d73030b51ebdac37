"""Validation of schedules: the dependencies of actions, and the checks of each new schedule.

Every required action exists, once, and in the row of its stage; every row keeps the order that its actions need; the
rows, run concurrently, do not deadlock. For the last check the rows are simulated without time. An action waits for
results only, as in threads, and in processes if sends do not block and receives are posted in the order of the sends
(`distributed.packets`). So the order in which rows are visited does not matter: one run is enough.
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

RowCell: TypeAlias = tuple[int, int]  # (device, position in its row)

MAX_SHOWN_PROBLEMS = 8  # one error often breaks many actions: the first few show it

# Offset of the stage from which an action takes the result of the same kind of action, for the same micro-batch. Its
# other dependencies are in its stage, and so in its row.
NEIGHBOUR_STEP = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: 1}


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    words: str
    cells: tuple[RowCell, ...] = ()  # marked in the grid


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """Returns the actions that must end before `action` starts, in the chain form: stage j talks to j - 1 and j + 1.

    R and W are included as if every micro-batch had them: skip the actions that your schedule does not contain.

        F(j, i)   F(j - 1, i)
        R(j, i)   F(j, i)
        B(j, i)   F(j, i), R(j, i), B(j + 1, i)
        W(j, i)   B(j, i)
        U(j, i)   B(j, 0) ... B(j, i), W(j, 0) ... W(j, i): with i = m - 1, all of its stage
    """
    j, i = action.stage, action.micro_batch
    next_stage = j + NEIGHBOUR_STEP.get(action.kind, 0)
    match action.kind:
        case ActionKind.FORWARD:
            return (Action(ActionKind.FORWARD, next_stage, i),) if j > 0 else ()
        case ActionKind.RECOMPUTE:
            return (Action(ActionKind.FORWARD, j, i),)
        case ActionKind.BACKWARD:
            own = (Action(ActionKind.FORWARD, j, i), Action(ActionKind.RECOMPUTE, j, i))
            return (*own, Action(ActionKind.BACKWARD, next_stage, i)) if j < stages - 1 else own
        case ActionKind.WEIGHT:
            return (Action(ActionKind.BACKWARD, j, i),)
        case ActionKind.UPDATE:
            return tuple(Action(kind, j, h) for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT) for h in range(i + 1))


def validate(schedule: Schedule, in_order: Collection[int] = ()) -> None:
    """Raises `ScheduleError` if the schedule cannot run; the message shows the rows, with errors `>marked<`.

    `in_order`: stages in which F of a micro-batch also needs F of the previous one, which a replica may have.
    """
    if schedule.stages < 1 or schedule.micro_batches < 1:
        problems = [ScheduleProblem("a schedule has at least 1 stage and 1 micro-batch")]
    else:
        problems = (
            [*_out_of_range_or_doubled(schedule), *_scattered(schedule), *_missing(schedule)]
            or list(_wrong_order(schedule))
            or _find_deadlock(schedule, in_order)
        )
    if not problems:
        return
    shown, more = problems[:MAX_SHOWN_PROBLEMS], len(problems) - MAX_SHOWN_PROBLEMS
    words = [f"  - {problem.words}" for problem in shown] + ([f"  - and {more} more"] if more > 0 else [])
    marked = {cell for problem in shown for cell in problem.cells}
    rows = [
        " ".join(f">{action}<" if (d, place) in marked else str(action) for place, action in enumerate(row))
        for d, row in enumerate(schedule.rows)
    ]
    grid = [f"device {d}: {row}".rstrip() for d, row in enumerate(rows)]
    sizes = f"{schedule.stages} stages, {schedule.micro_batches} micro-batches"
    raise ScheduleError("\n".join([f"schedule {schedule.name!r} ({sizes}) would not run:", *words, *grid]))


@lru_cache(maxsize=16)
def check_order(schedule: Schedule, stages: frozenset[int], why: str) -> None:
    """Raises `StateError` if rows deadlock with F of these stages, which have replicas, in order. `why`: the reason."""
    try:
        validate(schedule, stages)
    except ScheduleError as error:
        raise StateError(
            f"stage {min(stages)} has replicas, and {why}; so F has to go in the order of micro-batches, and in this "
            f"schedule it does not: take one by name, or plan without replicas (data_parallel=1). {error}"
        ) from None


def _cells(rows: Rows) -> Iterator[tuple[RowCell, Action]]:
    return (((d, place), action) for d, row in enumerate(rows) for place, action in enumerate(row))


def _out_of_range_or_doubled(schedule: Schedule) -> Iterator[ScheduleProblem]:
    for cell, action in _cells(schedule.rows):
        _, j, i = action
        if not 0 <= j < schedule.stages:
            yield ScheduleProblem(f"{action} is for stage {j}; stages are 0 to {schedule.stages - 1}", (cell,))
        if not 0 <= i < schedule.micro_batches:
            last = schedule.micro_batches - 1
            yield ScheduleProblem(f"{action} is for micro-batch {i}; micro-batches are 0 to {last}", (cell,))
    cells_of: defaultdict[Action, list[RowCell]] = defaultdict(list)
    for cell, action in _cells(schedule.rows):
        cells_of[action].append(cell)
    for action, cells in cells_of.items():
        if len(cells) > 1:
            yield ScheduleProblem(f"{action} stands there {len(cells)} times: keep one", tuple(cells))


def _scattered(schedule: Schedule) -> Iterator[ScheduleProblem]:
    """Yields actions in a wrong row. A stage belongs to the device with most of its actions; replicas take turns."""
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
    for action, cell in held.items() if not trains else ():
        if action.kind is not ActionKind.FORWARD:
            words = f"{action} is of no use in a schedule without B: add every B, or take it out"
            yield ScheduleProblem(words, (cell,))
    for j in range(schedule.stages):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) if trains else (ActionKind.FORWARD,):
            lacking = [a for a in (Action(kind, j, i) for i in range(schedule.micro_batches)) if a not in held]
            if lacking:
                names = " ".join(map(str, lacking)) if len(lacking) <= 4 else f"{lacking[0]} ... {lacking[-1]}"
                count = f"{'is' if len(lacking) == 1 else 'are'} missing ({len(lacking)} of {schedule.micro_batches})"
                rule = "every stage has F for every micro-batch"
                if kind is ActionKind.BACKWARD:
                    rule = "every stage has B for every micro-batch, or the schedule has no B at all"
                yield ScheduleProblem(f"{names} {count}: {rule}")
        last = Action(ActionKind.UPDATE, j, schedule.micro_batches - 1)
        if trains and j in updated and last not in held:
            yield ScheduleProblem(f"stage {j} is updated, but not with its last micro-batches: {last} is missing")


def _wrong_order(schedule: Schedule) -> Iterator[ScheduleProblem]:
    for d, row in enumerate(schedule.rows):
        place_of = {action: place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for needed in dependencies(action, schedule.stages):
                if place_of.get(needed, -1) > place:
                    yield ScheduleProblem(f"{action} stands before {needed}, which it needs", ((d, place),))


def _find_deadlock(schedule: Schedule, in_order: Collection[int]) -> list[ScheduleProblem]:
    """Simulates the rows, as in the module docstring, until all have ended or none can proceed."""
    rows, row_of = schedule.rows, schedule.row_of
    users: defaultdict[Action, list[int]] = defaultdict(list)  # rows in which an action waits for this one
    for waiting, needed in schedule.awaited.items():
        for one in needed:
            users[one].append(row_of[waiting.stage, waiting.micro_batch])
    ended: set[Action] = set()
    place = [0] * len(rows)  # by row: position of the next action
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
    waits: dict[int, tuple[Action, int]] = {}  # row -> the action it waits for, and its row
    for d, row in enumerate(rows):
        if place[d] < len(row):
            awaited = _awaited(schedule, row[place[d]], ended, in_order)
            assert awaited is not None
            waits[d] = awaited, row_of[awaited.stage, awaited.micro_batch]
    if not waits:
        return []
    path = [min(waits)]  # it ends in a cycle, since each device waits for a stuck device
    while path.count(path[-1]) < 2:
        path.append(waits[path[-1]][1])
    return [
        ScheduleProblem(
            f"device {d} waits before {rows[d][place[d]]} for the result of {waits[d][0]}, for ever", ((d, place[d]),)
        )
        for d in path[path.index(path[-1]) : -1]
    ]


def _awaited(schedule: Schedule, action: Action, ended: set[Action], in_order: Collection[int]) -> Action | None:
    """Returns an action of another row whose result is needed and missing, if any."""
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


@lru_cache(maxsize=16)  # printing a plan calls it for each stage
def micro_batches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Counts for each stage the most micro-batches between the start of F and the end of their last backward.

    If backward is split, the last part is W. Without backward a micro-batch is in flight during its F only.

    >>> from fxpipe.scheduling import make_schedule
    >>> micro_batches_in_flight(make_schedule("1f1b", stages=3, micro_batches=8))
    (3, 2, 1)
    """
    trains = any(action.kind is ActionKind.BACKWARD for row in schedule.rows for action in row)
    return _most_between(schedule, frozenset()) if trains else (1,) * schedule.stages


@lru_cache(maxsize=16)
def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Counts for each stage the most micro-batches with all activations that backward needs.

    They are held from F on, or from R on if the micro-batch is recomputed, to the end of B, or of W if backward is
    split. W needs less than all: the inputs that weights were applied to, and the gradients of the results.

    >>> from fxpipe.scheduling import make_schedule
    >>> activations_in_flight(make_schedule("1f1b", stages=3, micro_batches=8, checkpoint="always"))
    (1, 1, 1)
    """
    recomputed = (a for row in schedule.rows for a in row if a.kind is ActionKind.RECOMPUTE)
    return _most_between(schedule, frozenset((a.stage, a.micro_batch) for a in recomputed))


def _most_between(schedule: Schedule, recomputed: frozenset[tuple[int, int]]) -> tuple[int, ...]:
    """Counts the most micro-batches between F (R for `recomputed`) and the end of backward."""
    split = schedule.split_backwards
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for kind, j, i in (action for row in schedule.rows for action in row):
        first = ActionKind.RECOMPUTE if (j, i) in recomputed else ActionKind.FORWARD
        last = ActionKind.WEIGHT if (j, i) in split else ActionKind.BACKWARD
        now[j] += (kind is first) - (kind is last)
        most[j] = max(most[j], now[j])
    return tuple(most)
