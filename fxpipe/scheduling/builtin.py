"""The schedules that are made stage by stage: pure functions from (micro-batches m, stages n) to rows, one for each.

They know nothing of devices: wherever a stage is, it does the same in the same order (`row_transforms` puts stages that
share a device into one row). So they go with any placement.

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

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.row_transforms import merge_stage_rows, there_and_back

# Interleaved 1F1B: several stages on each device, placed round and round, so that the bubble is as many times shorter.
#
# With v stages on each of p devices, each stage a v-th as long, a micro-batch goes round v times. A device that has
# begun goes on with its first stage until the first micro-batch of a group has come round; so groups have p
# micro-batches, and it never waits. One after the other the groups go through all of a device's stages, forward in
# their order, backward in the reverse. Two groups of two on two devices, stages 0 and 2 on the first; forward:
#
#     device 0    0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
#     device 1        1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3
#
# As in 1F1B, a device runs some forwards ahead, as many as fit in until the first gradient is there, and then one
# forward and one backward alternately. Ahead are: the first group in all stages but the last, and two for each device
# that comes later, one for the way there and one for the way back.
#
# Megatron-LM wants micro-batches in a multiple of p. Here groups are as equal as can be and have p or more; a larger
# one costs memory, since more goes ahead, but no time. Of fewer micro-batches than devices there is one group, and a
# device waits for what is missing in it.
#
# Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv
# 2104.04473, section 2.2.2.


def interleaved_1f1b(m: int, p: int, v: int) -> Rows:
    """The rows of p devices with v stages each: stage j is on device j modulo p."""
    groups = micro_batch_groups(m, p)
    return tuple(_interleaved_row(groups, range(d, v * p, p), hops=2 * (p - 1 - d)) for d in range(p))


# The same with backward split (interleaved ZB-H1): B alone is half as long, so the first gradient is there after one
# forward for each device that comes later, not two. W fills what would be bubble: as in `zero_bubble` it lags d behind
# on device d, whatever stages these are of, and every device keeps the first group in all of its stages.
#
# Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241; as interleaved by PyTorch's
# `ScheduleInterleavedZeroBubble`, whose steps are as long where it has one.


def interleaved_zero_bubble(m: int, p: int, v: int) -> Rows:
    """The rows of p devices with v stages each: stage j is on device j modulo p."""
    groups = micro_batch_groups(m, p)
    return tuple(_interleaved_row(groups, range(d, v * p, p), hops=p - 1 - d, lag=d) for d in range(p))


def micro_batch_groups(m: int, p: int) -> list[range]:
    """The micro-batches in groups of p or, where that does not come out even, a few more; of fewer than p, one group.

    >>> micro_batch_groups(7, 3)
    [range(0, 4), range(4, 7)]
    """
    count = max(1, m // p)
    size, larger = divmod(m, count)
    starts = [size * k + min(k, larger) for k in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _interleaved_row(groups: list[range], stages: range, hops: int, lag: int | None = None) -> tuple[Action, ...]:
    """Makes the row of a device with these stages; `hops`: forwards until a micro-batch has gone there and come back.

    Args:
        lag: by how many micro-batches of a stage W is behind B; None where backward is whole.
    """
    forward = [Action(ActionKind.FORWARD, j, i) for group in groups for j in stages for i in group]
    backward = [Action(ActionKind.BACKWARD, j, i) for group in groups for j in reversed(stages) for i in group]
    ahead = min((len(stages) - 1) * len(groups[0]) + hops, len(forward))
    row = forward[:ahead]
    for place, action in enumerate(backward):
        row += [*forward[ahead + place : ahead + place + 1], action]
        if lag is not None and place >= lag:
            row.append(_weight_of(backward[place - lag]))
    if lag is not None:
        row += map(_weight_of, backward[max(0, len(backward) - lag) :])
    return tuple(row)


def _weight_of(backward: Action) -> Action:
    return Action(ActionKind.WEIGHT, backward.stage, backward.micro_batch)


# -- The deterministic clock cycle: the order in which forwards of all micro-batches and stages begin ----------------
#
# A micro-batch i reaches stage j at the earliest i + j forwards after micro-batch 0 entered stage 0. Taking up the
# pairs by that distance keeps every device busy as soon as it can be; for 4 micro-batches and 3 stages:
#
#     clock k    0   1   2   3   4   5
#     stage 0    0   1   2   3
#     stage 1        0   1   2   3
#     stage 2            0   1   2   3      (the micro-batch i)
#
# Source: Kim et al. 2020, torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models, arXiv 2004.09910,
# section 3.2 ("deterministic clock-cycle"); counted from 0 here.


def clock_cycles(m: int, n: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields for each clock k = 0 ... m + n - 2 the pairs (micro-batch i, stage j) with i + j = k, j ascending.

    >>> for cycle in clock_cycles(m=3, n=2): print(*cycle)
    (0, 0)
    (1, 0) (0, 1)
    (2, 0) (1, 1)
    (2, 1)
    """
    for k in range(m + n - 1):
        yield tuple((k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n)))


def gpipe(m: int, n: int) -> Rows:
    """Makes rows of all forwards by the clock cycle, then all backwards by its exact reverse."""
    forward = inference(m, n)
    return tuple(
        (*row, *(Action(ActionKind.BACKWARD, a.stage, a.micro_batch) for a in reversed(row))) for row in forward
    )


def inference(m: int, n: int) -> Rows:
    """Forwards by the clock cycle, and nothing else."""
    rows: list[list[Action]] = [[] for _ in range(n)]
    for cycle in clock_cycles(m, n):
        for i, j in cycle:
            rows[j].append(Action(ActionKind.FORWARD, j, i))
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
    row = [Action(ActionKind.FORWARD, j, i) for i in range(min(warm_up, m))]
    for i in range(m):
        if i + warm_up < m:
            row.append(Action(ActionKind.FORWARD, j, i + warm_up))
        row.append(Action(ActionKind.BACKWARD, j, i))
        if lag is not None and i >= lag:
            row.append(Action(ActionKind.WEIGHT, j, i - lag))
    if lag is not None:
        row += [Action(ActionKind.WEIGHT, j, i) for i in range(max(0, m - lag), m)]
    return tuple(row)


# ZB-V: two stages on each device, there and back again, and backward split: 1F1B's memory, and hardly a bubble.
#
# Stage j of 2 p is on device j on the way there, and on device 2 p - 1 - j on the way back. So device 0 has the first
# stage and the last, where backward begins: it need not wait for the gradient of its last stage, and the device that is
# first to have a micro-batch is also the first that may let it go:
#
#     device 0    stage 0   stage 5
#     device 1    stage 1   stage 4
#     device 2    stage 2   stage 3
#
# A row in four parts; `-` is the device's first stage, `=` its second one, d its number:
#
# - forwards of - until the first micro-batch has gone there and back, in the end by turns with =;
# - F B W of = alone, p - d times: until its gradients have come round to -;
# - in turns F B W of - and F B W of =, while there are micro-batches;
# - what is left: the gradients of both on their way out, before all W that can wait.
#
# W follows its B at once, but in the last part; so a device keeps no more than 2 p activations of a stage, each half of
# what one of p stages has: as 1F1B at its first stage.
#
# The parts are those of 2 p - 1 or more micro-batches. Of fewer, those that are not there are left out. Of p or fewer
# any order keeps within that memory, so W may wait as long as it likes: as in `zero_bubble` of 2 p stages.
#
# Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4 (V-ZB); the parts
# are those of PyTorch's `ScheduleZBVZeroBubble`.


def zbv(m: int, p: int) -> Rows:
    """The rows of p devices."""
    if m <= p:
        return merge_stage_rows(zero_bubble(m, 2 * p), there_and_back(p, 2))
    return tuple(tuple(a for a in _zbv_row(max(m, 2 * p - 1), p, d) if a.micro_batch < m) for d in range(p))


def _zbv_row(m: int, p: int, d: int) -> list[Action]:
    stages = {"-": d, "=": 2 * p - 1 - d}
    row: list[Action] = []
    done: Counter[str] = Counter()

    def do(names: str, times: int = 1) -> None:
        """The next micro-batch of each: `F-` is the forward of the device's first stage."""
        for name in names.split() * times:
            row.append(Action(ActionKind(name[0]), stages[name[1]], done[name]))
            done[name] += 1

    do("F-", 2 * (p - d) - 1)
    do("F= F-", d)
    do("F= B= W=", p - d)
    do("F- B- W- F= B= W=", m - done["F-"])
    do("B- W- F= B= W=", m - done["F="])
    do("B- B=", d)
    do("B- W-", p - d)
    do("W=", m - done["W="])
    do("W-", m - done["W-"])
    return row
