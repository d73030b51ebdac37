"""The tables that `torch.distributed.pipelining` makes, as schedules of fxpipe."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as torch_schedules

from fxpipe.scheduling import Action, ActionKind, Schedule

# One stage on each device. (What `Schedule1F1B` writes down is not what it runs: the row of its last device lacks
# micro-batch 0.)
SINGLE = ("ScheduleGPipe",)
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")  # any number, round
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # two, there and back
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")

_KINDS = {"F": ActionKind.FORWARD, "I": ActionKind.BACKWARD, "B": ActionKind.BACKWARD, "W": ActionKind.WEIGHT}


@cache
def torch_table(name: str, p: int, v: int, m: int, is_merged: bool = False) -> Schedule | None:
    """The table of p devices with v stages each; None where torch makes none for these numbers.

    Args:
        is_merged: W that follows its B at once becomes one with it, as torch has it for speed.
    """
    if name in SINGLE and v > 1:
        return None
    try:
        rows = _torch_rows(name, p, v, m)
    except ValueError:
        return None
    if is_merged:
        rows = {rank: torch_schedules._merge_bw(list(row)) for rank, row in rows.items()}
    ours = tuple(tuple(_own_actions(rows[rank])) for rank in sorted(rows))
    return Schedule(name, p * v, m, ours)


def torch_text(name: str, p: int, v: int, m: int) -> str:
    """The table as torch writes it into a file: a line for each device, an empty word for an idle slot."""
    rows = _torch_rows(name, p, v, m)
    return "\n".join(",".join("" if action is None else str(action) for action in rows[rank]) for rank in sorted(rows))


def _torch_rows(name: str, p: int, v: int, m: int) -> dict[int, list]:
    cls = getattr(torch_schedules, name)
    if name in SINGLE:
        return cls._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    stages = [
        SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, stage_index=p * k, submod=None) for k in range(v)
    ]
    return cls(stages, m).pipeline_order


def _own_actions(row: list) -> Iterator[Action]:
    for action in row:
        for one in () if action is None else action.sub_actions or (action,):
            if one.computation_type.value in _KINDS:  # not what reduces gradients over replicas
                yield Action(_KINDS[one.computation_type.value], one.stage_index, one.microbatch_index)


def torch_tables(devices: range, micro_batches: range) -> Iterator[Schedule]:
    """Every table of these sizes, as torch makes it and merged."""
    sizes = [(name, 1) for name in SINGLE]
    sizes += [*product(LOOPED, (1, 2, 3))] + [(name, 2) for name in V_SHAPED]
    for (name, v), p, m in product(sizes, devices, micro_batches):
        for is_merged in (False, True) if name in SPLIT else (False,):
            table = torch_table(name, p, v, m, is_merged)
            if table is not None:
                yield table
