"""Rows of replicas: several devices have the same stages, and take micro-batches in turn (PipeDream's 1F1B-RR).

Micro-batch i goes to replica i modulo their number, forward and backward. So a stage whose micro-batches take three
times as long as those of the next one keeps up with it on three devices:

    device 0    0F0         0F3 0B0             0B3              replicas 3-1: rows of replicas follow each other
    device 0'       0F1         0B1
    device 0''          0F2             0B2
    device 1        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

A row of a replica is made of the row of its device: it has the actions of the micro-batches whose turn it is, in their
order. It waits for a part of what the one device would wait for, so no schedule that runs comes to wait for ever.

1F1B is made differently. A stage that keeps few micro-batches for one device keeps too few for several: in a row of 3-1
above the second F would come after the first B, for which the replica waits. A stage has as many in flight as the next
one, and one more for each of its R_j replicas: W_j = R_j + W_j+1, made a multiple of R_j, and W of the last stage is R.
So a replica runs W_j / R_j forwards ahead. With one replica each, that is plain 1F1B; with 15-1 it is two, as the
paper's NOAM = ceil(workers / replicas of the input stage) says for any two stages. (With 1-3-1 NOAM is five, and the
middle stage, whose replicas run two ahead, would wait for the sixth: it takes seven.)

No row waits for another for ever. F of micro-batch i comes after B of i - W_j, and B of i after F of i + W_j - R_j.
Follow what waits for what, through stages up and down: at a turn at stage a the number falls by W_a, at the next one,
at b >= a, it grows by W_b - R_b < W_b <= W_a. So it falls each time, and no circle closes.

Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, section 3.2. Here
the replicas of a stage share a mini-batch, whose gradients are added up before the optimizer's step; mini-batches of a
stream, which has no such step, are in `fxpipe.scheduling.streams`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.builtin import alternating_row


def replica_of(micro_batch: int, count: int) -> int:
    """Returns the replica, of so many, whose turn it is."""
    return micro_batch % count


def rows_of_replicas(rows: Rows, replicas: Sequence[int]) -> Rows:
    """Rows of replicas from rows of devices: each has the actions of the micro-batches whose turn it is.

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
    """1F1B for one stage on each device, of so many replicas.

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
    in_flight = 0  # of the next stage
    for count in reversed(replicas):
        ahead.append(1 + -(-in_flight // count))
        in_flight = ahead[-1] * count
    return tuple(reversed(ahead))
