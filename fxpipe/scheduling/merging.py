"""Several stages on a device: the rows of the stages, one for each, become rows of the devices.

(Where all stages of each device are neighbours, they are as one: `neighbours`.)

A schedule is made as if each stage had a device of its own. Here the stages of a device take turns. To see in which
order, the devices run in thought, every action as long as every other, and each takes up what it can as soon as it
can: of its stages' next actions one whose needs have ended. Where there are several, B goes before F, W comes last,
since nobody waits for it, and a later stage goes before an earlier one, so that micro-batches leave as soon as they
can. (Without W, on 18 sizes this rule made no longer steps than any of four others.) Three forwards through four stages
on two devices, stages 0 and 2 on the first:

    stages                      devices, taking turns
    0F0 0F1 0F2                 0F0 0F1 2F0 2F1 0F2     2F2
        1F0 1F1 1F2                 1F0 1F1 3F0 3F1 1F2     3F2
            2F0 2F1 2F2
                3F0 3F1 3F2

Each action starts after all that it needs has ended, in the one thought run of all devices; so the rows, which keep
its order, cannot wait for each other in a circle.
"""

from __future__ import annotations

from fxpipe.scheduling.actions import Action, Kind, Rows
from fxpipe.scheduling.validation import dependencies

_BY_URGENCY = (Kind.WEIGHT, Kind.FORWARD, Kind.BACKWARD)


def merged(rows: Rows, placement: tuple[int, ...]) -> Rows:
    """Rows of devices from rows of stages: `placement` says for each stage which device has it."""
    devices = max(placement) + 1
    if devices == len(placement):
        made: list[tuple[Action, ...]] = [()] * devices
        for row, d in zip(rows, placement, strict=True):
            made[d] = row
        return tuple(made)
    return _in_turns(rows, [[j for j, d in enumerate(placement) if d == e] for e in range(devices)])


def _in_turns(rows: Rows, stages_of: list[list[int]]) -> Rows:
    held = {action for row in rows for action in row}
    ended: set[Action] = set()  # before this clock
    place = [0] * len(rows)
    made: list[list[Action]] = [[] for _ in stages_of]
    while len(ended) < len(held):
        started = []
        for d, stages in enumerate(stages_of):
            heads = (rows[j][place[j]] for j in stages if place[j] < len(rows[j]))
            ready = [a for a in heads if all(b in ended or b not in held for b in dependencies(a, len(rows)))]
            if ready:
                action = max(ready, key=_urgency)
                place[action.stage] += 1
                made[d].append(action)
                started.append(action)
        assert started, "rows of stages that wait for each other"
        ended.update(started)
    return tuple(map(tuple, made))


def _urgency(action: Action) -> tuple[int, int]:
    return _BY_URGENCY.index(action.kind), action.stage
