"""Whether a schedule can run: what every action needs, and the checks that each schedule passes when it is made.

Three questions, each asked only if the ones before it have been answered well:

1. Is every action there that must be, once, and in the one row of its stage?
2. Does every row keep the order that its own actions need?
3. Do the rows, run side by side, never wait for each other for ever?

For the third the rows run here in thought, over channels that hold nothing: a result that another row needs is handed
over only when both are there, its maker right after the action that made it, its user right before the action that
takes it. Between two of its actions a row opens the sends of the one and the receives of the other *together*, and goes
on when all have been met. We call such a place a gate:

    device 0    0F0 | 0F1     | 0B0       first gate:   0F0 is handed to 1F0
    device 1        | 1F0 1B0 | 1F1       second gate:  0F1 is handed to 1F1, and 1B0 to 0B0

At the second, both send and both receive; one after the other, each would wait for the other's receive. 1F1B needs this
over any channels without room, and so `torch.distributed` pairs its sends and receives (`batch_isend_irecv`). What runs
so runs all the more where a channel holds something, as between threads. Whoever is at a gate stays there until all is
met; so it does not matter in which order the rows are looked at, and one run answers for all.

Where some row holds several stages, channels have room. At a gate such a row would keep all its stages waiting for one
of them; so whatever runs it must let a result lie until it is taken, as threads do and as sends and receives that are
posted ahead do. A gate then waits for what it receives only. Two rows that want the forwards of four stages in the
order of the stages need this: device 0 has handed over 0F0 and 0F1 and will take nothing before 0F2 is taken, device 1
will take nothing before 1F0 is taken:

    device 0    0F0 0F1 0F2 2F0 2F1 2F2
    device 1    1F0 1F1 1F2 3F0 3F1 3F2
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fxpipe.errors import ScheduleError
from fxpipe.scheduling.actions import Action, Kind, Rows, Schedule

Cell: TypeAlias = tuple[int, int]  # (device, place in its row)
Transfer: TypeAlias = tuple[Action, Action]  # (the action that makes a result, the one on another device that takes it)

SHOWN_PROBLEMS = 8  # one slip often breaks many actions: the first few tell

# From which stage, counted from its own, an action takes the result of the same kind of action, micro-batch by
# micro-batch. All else that it needs is of its own stage, and so of its own row.
NEIGHBOUR = {Kind.FORWARD: -1, Kind.BACKWARD: 1}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a schedule."""

    words: str
    cells: tuple[Cell, ...] = ()  # to be marked in the grid


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions that must have ended before `action` may start, in the chain form: stage j talks to j - 1 and j + 1.

    R and W stand among them as if every schedule had them: leave out what yours does not hold.

        F(j, i)   F(j - 1, i)
        R(j, i)   F(j, i)
        B(j, i)   F(j, i), R(j, i), B(j + 1, i)
        W(j, i)   B(j, i)
        U(j, i)   B(j, 0) ... B(j, i), W(j, 0) ... W(j, i): with i = m - 1, all of its stage
    """
    j, i = action.stage, action.micro_batch
    match action.kind:
        case Kind.FORWARD:
            return (Action(Kind.FORWARD, j + NEIGHBOUR[Kind.FORWARD], i),) if j > 0 else ()
        case Kind.RECOMPUTE:
            return (Action(Kind.FORWARD, j, i),)
        case Kind.BACKWARD:
            own = (Action(Kind.FORWARD, j, i), Action(Kind.RECOMPUTE, j, i))
            return (*own, Action(Kind.BACKWARD, j + NEIGHBOUR[Kind.BACKWARD], i)) if j < stages - 1 else own
        case Kind.WEIGHT:
            return (Action(Kind.BACKWARD, j, i),)
        case Kind.UPDATE:
            return tuple(Action(kind, j, h) for kind in (Kind.BACKWARD, Kind.WEIGHT) for h in range(i + 1))


def validate(schedule: Schedule) -> None:
    """Raises `ScheduleError` if the schedule would not run; its message shows the rows, what is wrong `>marked<`."""
    problems = _find_wrong_actions(schedule) or _find_wrong_order(schedule) or _find_deadlock(schedule)
    if problems:
        raise ScheduleError(_message(schedule, problems))


def _message(schedule: Schedule, problems: list[Problem]) -> str:
    shown, more = problems[:SHOWN_PROBLEMS], len(problems) - SHOWN_PROBLEMS
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


def _find_wrong_actions(schedule: Schedule) -> list[Problem]:
    if schedule.stages < 1 or schedule.micro_batches < 1:
        return [Problem("a schedule has at least 1 stage and 1 micro-batch")]
    return [*_out_of_range(schedule), *_doubled(schedule), *_scattered(schedule), *_missing(schedule)]


def _cells(rows: Rows) -> Iterator[tuple[Cell, Action]]:
    return (((d, place), action) for d, row in enumerate(rows) for place, action in enumerate(row))


def _out_of_range(schedule: Schedule) -> Iterator[Problem]:
    for cell, action in _cells(schedule.rows):
        if not 0 <= action.stage < schedule.stages:
            yield Problem(f"{action} is for stage {action.stage}; stages are 0 to {schedule.stages - 1}", (cell,))
        if not 0 <= action.micro_batch < schedule.micro_batches:
            last = schedule.micro_batches - 1
            yield Problem(f"{action} is for micro-batch {action.micro_batch}; micro-batches are 0 to {last}", (cell,))


def _doubled(schedule: Schedule) -> Iterator[Problem]:
    counts = Counter(action for row in schedule.rows for action in row)
    for action, count in counts.items():
        if count > 1:
            cells = [cell for cell, other in _cells(schedule.rows) if other == action]
            yield Problem(f"{action} stands there {len(cells)} times: keep one", tuple(cells))


def _scattered(schedule: Schedule) -> Iterator[Problem]:
    """Stages in several rows. The row with most of a stage's actions is taken for its own, the others are marked."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for (d, _), action in _cells(schedule.rows):
        counts[action.stage][d] += 1
    own = {stage: devices.most_common(1)[0][0] for stage, devices in counts.items()}
    for (d, place), action in _cells(schedule.rows):
        if d != own[action.stage]:
            row = f"device {own[action.stage]}, where the rest of stage {action.stage} is"
            yield Problem(f"{action} stands with device {d}: a stage lives in one row, move it to {row}", ((d, place),))


def _missing(schedule: Schedule) -> Iterator[Problem]:
    held = {action: cell for cell, action in _cells(schedule.rows)}
    trains = any(action.kind is Kind.BACKWARD for action in held)
    split = {action.stage for action in held if action.kind is Kind.WEIGHT}
    updated = {action.stage for action in held if action.kind is Kind.UPDATE}
    if not trains:
        for action, cell in held.items():
            if action.kind is not Kind.FORWARD:
                yield Problem(f"{action} is of no use in a schedule without B: add every B, or take it out", (cell,))
    for j in range(schedule.stages):
        kinds = {Kind.FORWARD: True, Kind.BACKWARD: trains, Kind.WEIGHT: trains and j in split}
        for kind in (kind for kind, needed in kinds.items() if needed):
            lacking = [a for a in (Action(kind, j, i) for i in range(schedule.micro_batches)) if a not in held]
            if lacking:
                yield Problem(_lacking_words(lacking, schedule.micro_batches))
        last = Action(Kind.UPDATE, j, schedule.micro_batches - 1)
        if trains and j in updated and last not in held:
            yield Problem(f"stage {j} is updated, but not with its last micro-batches: {last} is missing")


def _lacking_words(lacking: list[Action], m: int) -> str:
    names = " ".join(map(str, lacking)) if len(lacking) <= 4 else f"{lacking[0]} ... {lacking[-1]}"
    match lacking[0].kind:
        case Kind.WEIGHT:
            rule = "a stage has W for every micro-batch or for none"
        case Kind.BACKWARD:
            rule = "every stage has B for every micro-batch, or the schedule has no B at all"
        case _:
            rule = "every stage has F for every micro-batch"
    return f"{names} {'is' if len(lacking) == 1 else 'are'} missing ({len(lacking)} of {m}): {rule}"


# 2. The order that a row's own actions need


def _find_wrong_order(schedule: Schedule) -> list[Problem]:
    problems = []
    for d, row in enumerate(schedule.rows):
        place_of = {action: place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for needed in dependencies(action, schedule.stages):
                if place_of.get(needed, -1) > place:
                    problems.append(Problem(f"{action} stands before {needed}, which it needs", ((d, place),)))
    return problems


# 3. No row waits for ever


@dataclass(frozen=True, slots=True)
class _Gates:
    """The places between the actions of the rows, with what is handed over there: numbers of transfers.

    Transfer 0 stands for none.
    """

    transfers: list[Transfer | None]
    gives: list[list[int]]  # by row and gate, of which there are one more than actions: what the action before it made
    takes: list[list[int]]  # what the action behind it needs


def _find_deadlock(schedule: Schedule) -> list[Problem]:
    """Runs the rows in thought, as the head of this file says, until all have ended or none can go on."""
    cell_of = {action: cell for cell, action in _cells(schedule.rows)}
    have_room = any(len({action.stage for action in row}) > 1 for row in schedule.rows)
    gates = _gates(cell_of, schedule.rows)
    transfers, gives, takes = gates.transfers, gates.gives, gates.takes
    place = [0] * len(schedule.rows)  # of each device, the gate it stands at
    sides = [0] * len(transfers)  # that have opened: it is met by both
    sides[0] = 2
    moving: list[int] = list(range(len(schedule.rows)))

    def arrive(d: int) -> None:
        """Opens what is at the gate of `d`; who waits for it may go on."""
        for t in (gives[d][place[d]], takes[d][place[d]]):
            sides[t] += 1
            if sides[t] == 2:
                moving.extend(cell_of[action][0] for action in transfers[t] or ())

    for d in range(len(schedule.rows)):
        arrive(d)
    while moving:
        d = moving.pop()
        while place[d] < len(gives[d]):
            if sides[takes[d][place[d]]] < 2 or (sides[gives[d][place[d]]] < 2 and not have_room):
                break
            place[d] += 1
            if place[d] < len(gives[d]):
                arrive(d)

    stuck = {}
    for d in range(len(schedule.rows)):
        if place[d] < len(gives[d]):
            needs = (takes[d][place[d]], *(() if have_room else (gives[d][place[d]],)))
            stuck[d] = [transfer for t in needs if sides[t] < 2 and (transfer := transfers[t])]
    return [_wait(schedule, d, transfer) for d, transfer in _circle(cell_of, stuck)] if stuck else []


def _gates(cell_of: dict[Action, Cell], rows: Rows) -> _Gates:
    gates = _Gates([None], [[0] * (len(row) + 1) for row in rows], [[0] * (len(row) + 1) for row in rows])
    for action, (d, place) in cell_of.items():
        step = NEIGHBOUR.get(action.kind)
        if step is None:
            continue
        maker = Action(action.kind, action.stage + step, action.micro_batch)
        e, before = cell_of.get(maker, (d, 0))
        if e != d:
            gates.gives[e][before + 1] = gates.takes[d][place] = len(gates.transfers)
            gates.transfers.append((maker, action))
    return gates


def _circle(cell_of: dict[Action, Cell], stuck: dict[int, list[Transfer]]) -> list[tuple[int, Transfer]]:
    """The devices that wait for each other in a circle, each with what it waits for.

    There is one: whom a device waits for is stuck too, since a row that has ended has met all of its own.
    """
    path: dict[int, tuple[Transfer, int]] = {}
    d = next(iter(stuck))
    while d not in path:
        transfer = min(stuck[d], key=str)
        (maker, _), (user, _) = map(cell_of.__getitem__, transfer)
        path[d] = (transfer, maker if d == user else user)
        d = path[d][1]
    circle: list[tuple[int, Transfer]] = []
    while d not in (seen for seen, _ in circle):
        circle.append((d, path[d][0]))
        d = path[d][1]
    return circle


def _wait(schedule: Schedule, d: int, transfer: Transfer) -> Problem:
    maker, user = transfer
    row = schedule.rows[d]
    if user in row:
        return Problem(f"device {d} waits before {user} for the result of {maker}, for ever", ((d, row.index(user)),))
    return Problem(f"device {d} waits after {maker} for {user} to take its result, for ever", ((d, row.index(maker)),))
