"""Interleaved 1F1B: several stages on each device, placed round and round, so that the bubble is as many times shorter.

With v stages on each of p devices, each stage a v-th as long, a micro-batch goes round v times. A device that has begun
goes on with its first stage until the first micro-batch of a group has come round; so groups have p micro-batches, and
it never waits. One after the other the groups go through all of a device's stages, forward in their order, backward in
the reverse. Two groups of two on two devices, stages 0 and 2 on the first; forward:

    device 0    0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    device 1        1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

As in 1F1B, a device runs some forwards ahead, as many as fit in until the first gradient is there, and then one forward
and one backward alternately. Ahead are: the first group in all stages but the last, and two for each device that comes
later, one for the way there and one for the way back.

Megatron-LM wants micro-batches in a multiple of p. Here groups are as equal as can be and have p or more; a larger one
costs memory, since more goes ahead, but no time. Of fewer micro-batches than devices there is one group, and a device
waits for what is missing in it.

Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv
2104.04473, section 2.2.2.
"""

from __future__ import annotations

from itertools import pairwise

from fxpipe.scheduling.actions import Action, Kind, Rows


def interleaved_1f1b(m: int, p: int, v: int) -> Rows:
    """The rows of p devices with v stages each: stage j is on device j modulo p."""
    return tuple(_row(_groups(m, p), range(d, v * p, p), later=p - 1 - d) for d in range(p))


def _groups(m: int, p: int) -> list[range]:
    """The micro-batches in groups of p or, where that does not come out even, a few more; of fewer than p, one group.

    >>> _groups(7, 3)
    [range(0, 4), range(4, 7)]
    """
    count = max(1, m // p)
    size, larger = divmod(m, count)
    starts = [size * k + min(k, larger) for k in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _row(groups: list[range], stages: range, later: int) -> tuple[Action, ...]:
    """Of a device with these stages, which `later` others come after."""
    forward = [Action(Kind.FORWARD, j, i) for group in groups for j in stages for i in group]
    backward = [Action(Kind.BACKWARD, j, i) for group in groups for j in reversed(stages) for i in group]
    ahead = min((len(stages) - 1) * len(groups[0]) + 2 * later, len(forward))
    steady = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(action for pair in steady for action in pair), *backward[len(forward) - ahead :])
