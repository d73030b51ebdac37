"""The schedules that are made stage by stage: pure functions from (micro-batches m, stages n) to one row per stage.

They work with any placement: `row_transforms` merges the rows of stages that share a device.

The two zero-bubble schedules split backward. B computes the gradients of a stage's inputs, for which the previous stage
waits; W computes the gradients of its weights, and fills bubbles. With F, B and W of equal length `zero_bubble` takes
10 clocks here, 1F1B 12:

    clock      0  1  2  3  4  5  6  7  8  9
    device 0  F0 F1 .. B0 W0 F2 B1 W1 B2 W2
    device 1     F0 B0 F1 B1 W0 F2 B2 W1 W2

The later a stage, the shorter 1F1B keeps a micro-batch there, so the longer its W can wait: in `zero_bubble` W of stage
j lags j micro-batches, and every stage keeps n, as stage 0 does in 1F1B. `zero_bubble_2p` takes up to n - 1 more before
the first gradient returns, and W lags that many more.

Interleaved schedules have v stages on each of p devices, placed round-robin. Each stage is 1/v as long, and so is the
bubble. A device runs its first stage until the first micro-batch of a group has passed all devices, so with groups of p
micro-batches it never waits. The groups go in turn through all stages of a device, forward in their order, backward in
the reverse. Two groups of two on two devices, stages 0 and 2 on the first; forward:

    device 0    0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    device 1        1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

Before the first B run the first group in all stages but the last, and two forwards for each later device (one if
backward is split). Groups are as equal as possible, with at least p micro-batches, or all if there are fewer.

Sources: Huang et al. 2019, GPipe, arXiv 1811.06965. Kim et al. 2020, torchgpipe, arXiv 2004.09910, section 3. Narayanan
et al. 2021, Megatron-LM, arXiv 2104.04473, sections 2.2.1 (PipeDream-Flush, here `1f1b`) and 2.2.2 (interleaved). Qi et
al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2 (ZB-H1 and ZB-H2, without updates that wait for
no other stage), interleaved as in PyTorch's `ScheduleInterleavedZeroBubble`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from fxpipe.scheduling.actions import Action, ActionKind, Rows


def clock_cycles(m: int, n: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields for each clock k = 0 ... m + n - 2 the pairs (micro-batch i, stage j) with i + j = k, j ascending.

    Micro-batch i reaches stage j at the earliest i + j forwards after micro-batch 0 entered stage 0. Starting the pairs
    in this order (torchgpipe's deterministic clock cycle) keeps every device as busy as possible.

    >>> for cycle in clock_cycles(m=3, n=2): print(*cycle)
    (0, 0)
    (1, 0) (0, 1)
    (2, 0) (1, 1)
    (2, 1)
    """
    for k in range(m + n - 1):
        yield tuple((k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n)))


def gpipe(m: int, n: int) -> Rows:
    """Makes rows of all forwards by the clock cycle, then all backwards in exactly the reverse order."""
    forward = inference(m, n)
    return tuple(
        (*row, *(Action(ActionKind.BACKWARD, a.stage, a.micro_batch) for a in reversed(row))) for row in forward
    )


def inference(m: int, n: int) -> Rows:
    """Makes rows of forwards only, by the clock cycle."""
    rows: list[list[Action]] = [[] for _ in range(n)]
    for cycle in clock_cycles(m, n):
        for i, j in cycle:
            rows[j].append(Action(ActionKind.FORWARD, j, i))
    return tuple(map(tuple, rows))


def one_f_one_b(m: int, n: int) -> Rows:
    """Makes rows of forwards until the first gradient can arrive, then F and B alternately, then the flush."""
    return tuple(_interleaved_row([range(m)], range(j, j + 1), hops=n - 1 - j) for j in range(n))


def zero_bubble(m: int, n: int, more: int = 0) -> Rows:
    """Makes rows of ZB-H1: 1F1B with backward split, keeping at most as many as 1F1B's first stage, and `more`."""
    rows = []
    for j in range(n):
        ahead = n - 1 - j + min(n - 1 - j, more)
        rows.append(_interleaved_row([range(m)], range(j, j + 1), ahead, lag=j + min(j, more)))
    return tuple(rows)


def zero_bubble_2p(m: int, n: int) -> Rows:
    """Makes rows of ZB-H2, which keeps nearly twice as many micro-batches, or all if there are fewer than 2 n - 1."""
    return zero_bubble(m, n, more=max(0, min(n - 1, m - n)))


def interleaved_1f1b(m: int, p: int, v: int) -> Rows:
    """Makes the rows of p devices with v stages each: stage j is on device j modulo p."""
    groups = micro_batch_groups(m, p)
    return tuple(_interleaved_row(groups, range(d, v * p, p), hops=2 * (p - 1 - d)) for d in range(p))


def interleaved_zero_bubble(m: int, p: int, v: int) -> Rows:
    """Makes the rows of p devices with v stages each: stage j is on device j modulo p."""
    groups = micro_batch_groups(m, p)
    return tuple(_interleaved_row(groups, range(d, v * p, p), hops=p - 1 - d, lag=d) for d in range(p))


def micro_batch_groups(m: int, p: int) -> list[range]:
    """Splits micro-batches into groups of p or, if m is not a multiple, a few more; fewer than p are one group.

    >>> micro_batch_groups(7, 3)
    [range(0, 4), range(4, 7)]
    """
    count = max(1, m // p)
    size, larger = divmod(m, count)
    starts = [size * k + min(k, larger) for k in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _interleaved_row(groups: list[range], stages: range, hops: int, lag: int | None = None) -> tuple[Action, ...]:
    """Makes the row of a device; `hops`: forwards during a micro-batch's way to the last device and back."""
    forward = [Action(ActionKind.FORWARD, j, i) for group in groups for j in stages for i in group]
    backward = [Action(ActionKind.BACKWARD, j, i) for group in groups for j in reversed(stages) for i in group]
    return alternating_row(forward, backward, (len(stages) - 1) * len(groups[0]) + hops, lag)


def alternating_row(
    forward: Sequence[Action], backward: Sequence[Action], ahead: int, lag: int | None = None
) -> tuple[Action, ...]:
    """Makes a row of `ahead` forwards, then F and B alternately; W is `lag` B after its B; None: not split."""
    row = list(forward[:ahead])
    weight = [Action(ActionKind.WEIGHT, a.stage, a.micro_batch) for a in backward if lag is not None]
    for place, action in enumerate(backward):
        row += [*forward[ahead + place : ahead + place + 1], action]
        if lag is not None and place >= lag:
            row.append(weight[place - lag])
    return (*row, *weight[max(0, len(weight) - (lag or 0)) :])
