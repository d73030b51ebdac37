"""Rows of replicas: several devices have the same stages, and take micro-batches in turn (PipeDream's 1F1B-RR).

Micro-batch i goes to replica i modulo their number, forward and backward. So a stage that takes three times as long as
the next stage keeps up with it on three devices:

    device 0    0F0         0F3 0B0             0B3              replicas 3-1: rows of replicas are adjacent
    device 0'       0F1         0B1
    device 0''          0F2             0B2
    device 1        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

The row of a replica has the actions of its micro-batches, in the order of its device's row, so a schedule that runs
does not deadlock with replicas.

1F1B is built differently, so that a stage on several devices keeps enough micro-batches. A stage has as many in flight
as the next stage, plus one for each of its R_j replicas: W_j = R_j + W_j+1, rounded up to a multiple of R_j. So a
replica runs W_j / R_j forwards ahead. With one replica each this is plain 1F1B; for two stages it is the paper's
NOAM = ceil(workers / replicas of the input stage), which is too small for some others (1-3-1).

Rows do not deadlock: F of micro-batch i follows B of i - W_j, and B of i follows F of i + W_j - R_j. Along the
dependencies the number falls by W_a at a turn at stage a, and grows by W_b - R_b < W_a at the next turn, at b >= a. So
it falls each time, and no walk is a cycle.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2. Here the replicas of a stage share a mini-batch, whose
gradients are summed before the optimizer's step. Mini-batches of a stream are in `fxpipe.scheduling.streams`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.builtin import alternating_row


def replica_of(micro_batch: int, count: int) -> int:
    """Returns the index of the replica, of `count`, that runs a micro-batch."""
    return micro_batch % count


def rows_of_replicas(rows: Rows, replicas: Sequence[int]) -> Rows:
    """Makes rows of replicas from rows of devices: each has the actions of its micro-batches.

    >>> from fxpipe.scheduling import make_schedule
    >>> rows = make_schedule("gpipe", stages=2, micro_batches=3).rows
    >>> [" ".join(map(str, row)) for row in rows_of_replicas(rows, (2, 1))]
    ['0F0 0F2 0B2 0B0', '0F1 0B1', '1F0 1F1 1F2 1B2 1B1 1B0']
    """
    dealt: list[tuple[Action, ...]] = []
    for row, count in zip(rows, replicas, strict=True):
        if count == 1:
            dealt.append(row)
            continue
        turns = range(count)
        dealt += (tuple(action for action in row if replica_of(action.micro_batch, count) == turn) for turn in turns)
    return tuple(dealt)


def one_f_one_b_of_replicas(micro_batches: int, replicas: Sequence[int]) -> Rows:
    """Makes rows of 1F1B for one stage on each device. `replicas`: number of replicas of each device.

    >>> for row in one_f_one_b_of_replicas(4, (3, 1)):
    ...     print(*row)
    0F0 0F3 0B0 0B3
    0F1 0B1
    0F2 0B2
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    rows = []
    for j, (count, ahead) in enumerate(zip(replicas, forwards_ahead(replicas), strict=True)):
        for replica in range(count):
            forward, backward = (
                [Action(kind, j, i) for i in range(replica, micro_batches, count)]
                for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            )
            rows.append(alternating_row(forward, backward, ahead - 1))
    return tuple(rows)


def forwards_ahead(replicas: Sequence[int]) -> tuple[int, ...]:
    """Counts for each stage the forwards of each of its replicas before its first backward, in 1F1B.

    >>> forwards_ahead((15, 1)), forwards_ahead((2, 1, 1)), forwards_ahead((1, 2)), forwards_ahead((1, 3, 1))
    ((2, 1), (2, 2, 1), (3, 1), (7, 2, 1))
    """
    ahead: list[int] = []  # the last stage first
    in_flight = 0  # in the next stage
    for count in reversed(replicas):
        ahead.append(1 + -(-in_flight // count))
        in_flight = ahead[-1] * count
    return tuple(reversed(ahead))
