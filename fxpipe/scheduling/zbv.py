"""ZB-V: two stages on each device, there and back again, and backward split: 1F1B's memory, and hardly a bubble.

Stage j of 2 p is on device j on the way there, and on device 2 p - 1 - j on the way back. So device 0 has the first
stage and the last, where backward begins: it need not wait for the gradient of its last stage, and the device that is
first to have a micro-batch is also the first that may let it go:

    device 0    stage 0   stage 5
    device 1    stage 1   stage 4
    device 2    stage 2   stage 3

A row in four parts; `-` is the device's first stage, `=` its second one, d its number:

- forwards of - until the first micro-batch has gone there and back, in the end by turns with =;
- F B W of = alone, p - d times: until its gradients have come round to -;
- in turns F B W of - and F B W of =, while there are micro-batches;
- what is left: the gradients of both on their way out, before all W that can wait.

W follows its B at once, but in the last part; so a device keeps no more than 2 p activations of a stage, each half of
what one of p stages has: as 1F1B at its first stage.

The parts are those of 2 p - 1 or more micro-batches. Of fewer, those that are not there are left out. Of p or fewer
any order keeps within that memory, so W may wait as long as it likes: as in `zero_bubble` of 2 p stages.

Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4 (V-ZB); the parts are
those of PyTorch's `ScheduleZBVZeroBubble`.
"""

from __future__ import annotations

from collections import Counter

from fxpipe.scheduling.actions import Action, Kind, Rows
from fxpipe.scheduling.by_stage import zero_bubble
from fxpipe.scheduling.merging import merged
from fxpipe.scheduling.placements import there_and_back


def zbv(m: int, p: int) -> Rows:
    """The rows of p devices."""
    if m <= p:
        return merged(zero_bubble(m, 2 * p), there_and_back(p, 2))
    return tuple(tuple(a for a in _row(max(m, 2 * p - 1), p, d) if a.micro_batch < m) for d in range(p))


def _row(m: int, p: int, d: int) -> list[Action]:
    stages = {"-": d, "=": 2 * p - 1 - d}
    row: list[Action] = []
    done: Counter[str] = Counter()

    def do(names: str, times: int = 1) -> None:
        """The next micro-batch of each: `F-` is the forward of the device's first stage."""
        for name in names.split() * times:
            row.append(Action(Kind(name[0]), stages[name[1]], done[name]))
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
