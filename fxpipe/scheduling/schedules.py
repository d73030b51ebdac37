"""The schedules by name: pure functions from (micro-batches m, stages n) to rows, one for each stage.

`make_schedule` is what the rest of the package calls: it puts stages that share a device in one row and recomputation
in front of backward, and validates what comes out. A new schedule is a function and a line in `SCHEDULES`.

| name        | backward                        | micro-batches kept at stage j | bubble (stages equally long)  |
|-------------|---------------------------------|-------------------------------|-------------------------------|
| `gpipe`     | after all forwards, in reverse  | m                             | (n - 1) / (m + n - 1)         |
| `1f1b`      | as soon as it can be, in order  | min(n - j, m)                 | the same                      |
| `inference` | none                            | 0                             | the same                      |

If in doubt: `1f1b`. It keeps the fewest activations and idles no longer.

Sources: Huang et al. 2019, GPipe, arXiv 1811.06965, section 2.3. Kim et al. 2020, torchgpipe, arXiv 2004.09910,
section 3 (order within a device, recomputation before the gradient arrives). Narayanan et al. 2021, Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv 2104.04473, section 2.2.1 (PipeDream-Flush,
here `1f1b`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, SupportsIndex, TypeAlias, cast

from fxpipe.counts import whole_number
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.scheduling.actions import Action, Kind, Rows, Schedule
from fxpipe.scheduling.clock import clock_cycles
from fxpipe.scheduling.merging import merged
from fxpipe.scheduling.validation import validate

Checkpoint: TypeAlias = Literal["always", "except_last", "never"]

# Of the last micro-batch backward comes (in GPipe's order) right after forward: keeping what it made costs no memory
# that the others do not cost a moment later, and saves a forward.
CHECKPOINTS: tuple[Checkpoint, ...] = ("always", "except_last", "never")


def gpipe(m: int, n: int) -> Rows:
    """All forwards by the clock cycle, then all backwards by its exact reverse."""
    forward = inference(m, n)
    return tuple((*row, *(Action(Kind.BACKWARD, a.stage, a.micro_batch) for a in reversed(row))) for row in forward)


def one_f_one_b(m: int, n: int) -> Rows:
    """Forwards until the first gradient can be there, then one forward and one backward alternately, then the flush."""
    return tuple(_one_f_one_b_row(m, n, j) for j in range(n))


def _one_f_one_b_row(m: int, n: int, j: int) -> tuple[Action, ...]:
    forward = [Action(Kind.FORWARD, j, i) for i in range(m)]
    backward = [Action(Kind.BACKWARD, j, i) for i in range(m)]
    warm_up = min(n - 1 - j, m)
    steady = (action for pair in zip(forward[warm_up:], backward[: m - warm_up], strict=True) for action in pair)
    return (*forward[:warm_up], *steady, *backward[m - warm_up :])


def inference(m: int, n: int) -> Rows:
    """Forwards by the clock cycle, and nothing else."""
    rows: list[list[Action]] = [[] for _ in range(n)]
    for cycle in clock_cycles(m, n):
        for i, j in cycle:
            rows[j].append(Action(Kind.FORWARD, j, i))
    return tuple(map(tuple, rows))


SCHEDULES: Mapping[str, Callable[[int, int], Rows]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "inference": inference}
)


def make_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    checkpoint: str | Sequence[str] = "never",
    placement: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of that name, validated. Made once for the same arguments, so that every step may ask for it.

    Args:
        name: one of `SCHEDULES`.
        stages: number of stages.
        micro_batches: number of micro-batches; fewer than stages is fine and idles more.
        checkpoint: which micro-batches are recomputed before their backward: one of `CHECKPOINTS`, or one for each
            stage. "except_last" is every one but the last, m - 1. A schedule without backward recomputes nothing.
        placement: for each stage the device that has it, and so the row; each stage its own if not given.

    Raises:
        ArgumentError: an unknown name or mode, a number below 1, or a device without a stage.
        ArgumentTypeError: a number that is no integer.

    >>> print(make_schedule("1f1b", stages=2, micro_batches=3))
    1f1b: 2 stages, 3 micro-batches
    device 0: 0F0 0F1 0B0 0F2 0B1 0B2
    device 1: 1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(make_schedule("inference", stages=4, micro_batches=3, placement=(0, 1, 0, 1)))
    inference: 4 stages, 3 micro-batches
    device 0: 0F0 0F1 2F0 2F1 0F2 2F2
    device 1: 1F0 1F1 3F0 3F1 1F2 3F2
    """
    n = _count("stages", stages)
    return _make_schedule(
        _one_of("schedule", name, SCHEDULES),
        n,
        _count("micro_batches", micro_batches),
        _modes(checkpoint, n),
        _placement(placement, n),
    )


@lru_cache(maxsize=128)
def _make_schedule(name: str, n: int, m: int, modes: tuple[Checkpoint, ...], placement: tuple[int, ...]) -> Schedule:
    rows = merged(SCHEDULES[name](m, n), placement)
    schedule = Schedule(name, n, m, _with_recompute(rows, m, modes))
    validate(schedule)
    return schedule


def _with_recompute(rows: Rows, m: int, modes: tuple[Checkpoint, ...]) -> Rows:
    """R directly before its B: it waits for no other stage, and so runs while the gradient is still on its way."""
    recomputed = [{"always": m, "except_last": m - 1, "never": 0}[mode] for mode in modes]

    def put_in(action: Action) -> tuple[Action, ...]:
        if action.kind is Kind.BACKWARD and action.micro_batch < recomputed[action.stage]:
            return (Action(Kind.RECOMPUTE, action.stage, action.micro_batch), action)
        return (action,)

    return tuple(tuple(new for action in row for new in put_in(action)) for row in rows)


def forward_part(schedule: Schedule) -> Rows:
    """What each row does before its first R or B. `backward_part` is the rest.

    The drop-in runs forward and backward as two calls, with the caller's loss in between; so no F may stand in the
    rest: `ArgumentError` where one does (`1f1b`).
    """
    return tuple(row[:cut] for row, cut in zip(schedule.rows, _cuts(schedule), strict=True))


def backward_part(schedule: Schedule) -> Rows:
    """What each row does from its first R or B on; see `forward_part`."""
    return tuple(row[cut:] for row, cut in zip(schedule.rows, _cuts(schedule), strict=True))


def _cuts(schedule: Schedule) -> list[int]:
    cuts = [next((p for p, a in enumerate(row) if a.kind is not Kind.FORWARD), len(row)) for row in schedule.rows]
    for row, cut in zip(schedule.rows, cuts, strict=True):
        late = next((action for action in row[cut:] if action.kind is Kind.FORWARD), None)
        if late is not None:
            raise ArgumentError(
                f"schedule {schedule.name!r} cannot be run as forward, then backward: {late} stands behind {row[cut]}. "
                f"Use make_schedule('gpipe', stages={schedule.stages}, micro_batches={schedule.micro_batches})"
            )
    return cuts


def _modes(checkpoint: str | Sequence[str], n: int) -> tuple[Checkpoint, ...]:
    """A mode for each stage."""
    given = tuple(checkpoint) if isinstance(checkpoint, (tuple, list)) else (cast(str, checkpoint),) * n
    if len(given) != n:
        raise ArgumentError(
            f"checkpoint={checkpoint!r} has {len(given)} modes for {n} stages: give one for each, or one for all"
        )
    return tuple(cast(Checkpoint, _one_of("checkpoint", mode, CHECKPOINTS)) for mode in given)


def _placement(placement: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """The device of each stage."""
    if placement is None:
        return tuple(range(n))
    if len(placement) != n:
        raise ArgumentError(f"placement has {len(placement)} entries for {n} stages: give the device of each")
    try:
        found = tuple(map(operator.index, placement))
    except TypeError:
        raise ArgumentTypeError(f"placement={placement!r}: expected the number of a device for each stage") from None
    if set(found) != set(range(max(found) + 1)):
        raise ArgumentError(
            f"placement={found} must name devices 0, 1, ... without a gap, since one without a stage would have "
            "nothing to do"
        )
    return found


def _one_of(argument: str, given: str, known: Iterable[str]) -> str:
    known = tuple(known)
    if given not in known:
        raise ArgumentError(f"{argument}={given!r} is unknown; there are {', '.join(map(repr, known))}")
    return given


def _count(argument: str, given: SupportsIndex) -> int:
    """As an int: one form in the cache for whatever stands for an integer (numpy's too, but not True)."""
    count = whole_number(given)
    if count is None:
        raise ArgumentTypeError(f"{argument}={given!r} is no number of {argument}: give an integer of at least 1")
    if count < 1:
        raise ArgumentError(f"{argument}={given!r} is too few: give an integer of at least 1")
    return count
