"""The schedules that are made stage by stage: pure functions from (micro-batches m, stages n) to rows, one for each.

They know nothing of devices: wherever a stage is, it does the same in the same order (`merging` puts stages that share
a device into one row). So they go with any placement.

In the two of zero bubble backward is split. B makes the gradients of a stage's inputs, for which the stage before it
waits; W those of its weights, for which nobody waits until the step ends, and so it fills what would be bubble:

    clock      0  1  2  3  4  5  6  7  8  9
    device 0  F0 F1 .. B0 W0 F2 B1 W1 B2 W2            `zero_bubble` of 2 stages, 3 micro-batches, F, B, W equally long:
    device 1     F0 B0 F1 B1 W0 F2 B2 W1 W2            10 clocks, where 1F1B takes 12

What B leaves for W is kept until then. The later a stage, the shorter 1F1B keeps a micro-batch there, so the longer its
W may wait: in `zero_bubble` stage j lags j behind with W, and every stage keeps n micro-batches, as stage 0 does in
1F1B. `zero_bubble_2p` takes in up to n - 1 more before the first gradient comes back, and lags as many more behind; so
it has work for twice as long a wait.

Sources: Huang et al. 2019, GPipe, arXiv 1811.06965, section 2.3. Kim et al. 2020, torchgpipe, arXiv 2004.09910,
section 3 (order within a device). Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM, arXiv 2104.04473, section 2.2.1 (PipeDream-Flush, here `1f1b`). Qi et al. 2023, Zero Bubble Pipeline
Parallelism, arXiv 2401.10241, section 2 (ZB-H1 and ZB-H2); its update of weights without waiting for all stages, which
takes the rest of the bubble, is not taken from there: a step ends for all devices at once.
"""

from __future__ import annotations

from fxpipe.scheduling.actions import Action, Kind, Rows
from fxpipe.scheduling.clock import clock_cycles


def gpipe(m: int, n: int) -> Rows:
    """All forwards by the clock cycle, then all backwards by its exact reverse."""
    forward = inference(m, n)
    return tuple((*row, *(Action(Kind.BACKWARD, a.stage, a.micro_batch) for a in reversed(row))) for row in forward)


def inference(m: int, n: int) -> Rows:
    """Forwards by the clock cycle, and nothing else."""
    rows: list[list[Action]] = [[] for _ in range(n)]
    for cycle in clock_cycles(m, n):
        for i, j in cycle:
            rows[j].append(Action(Kind.FORWARD, j, i))
    return tuple(map(tuple, rows))


def one_f_one_b(m: int, n: int) -> Rows:
    """Forwards until the first gradient can be there, then one forward and one backward alternately, then the flush."""
    return tuple(_alternating(m, j, warm_up=n - 1 - j) for j in range(n))


def zero_bubble(m: int, n: int) -> Rows:
    """ZB-H1: 1F1B with backward split, and no more micro-batches kept than its first stage keeps."""
    return _zero_bubble(m, n, more=0)


def zero_bubble_2p(m: int, n: int) -> Rows:
    """ZB-H2: with nearly twice as many micro-batches kept. Of fewer than 2 n - 1 it takes in what there are."""
    return _zero_bubble(m, n, more=max(0, min(n - 1, m - n)))


def _zero_bubble(m: int, n: int, more: int) -> Rows:
    return tuple(_alternating(m, j, warm_up=n - 1 - j + min(n - 1 - j, more), lag=j + min(j, more)) for j in range(n))


def _alternating(m: int, j: int, warm_up: int, lag: int | None = None) -> tuple[Action, ...]:
    """`warm_up` forwards, then F and B by turns while there are any, and so many micro-batches later W, if at all."""
    row = [Action(Kind.FORWARD, j, i) for i in range(min(warm_up, m))]
    for i in range(m):
        if i + warm_up < m:
            row.append(Action(Kind.FORWARD, j, i + warm_up))
        row.append(Action(Kind.BACKWARD, j, i))
        if lag is not None and i >= lag:
            row.append(Action(Kind.WEIGHT, j, i - lag))
    if lag is not None:
        row += [Action(Kind.WEIGHT, j, i) for i in range(max(0, m - lag), m)]
    return tuple(row)
