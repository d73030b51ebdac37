"""V-shaped schedules: each device has its stages on the way there and on the way back, `there_and_back`.

Where there are two of them, a device has one early stage, `-`, and one late one, `=`; that with the first stage has the
last as well. So what the early one keeps for long, the late one keeps for a short time: of a V each device keeps the
same. (`zbv` in `builtin` is one of them.)

A *building block* says when a device d of p works on one micro-batch, in slots of the length of one F; the others
follow six slots apart, and all devices are busy. The longer a micro-batch is on its way through the block, the more of
them are there at once.

                F-       F=           B=                B-
    V-Min       d        2p - 1 - d   2p + d            4p - 1 - d        and 2 more for both B where 3 divides p
    V-Half      2d       3p - 2 - d   3p - 1 + 2d       6p - 2 - d        and 3 more for both B where 2 divides p

(The additions are there because two actions would have the same slot.) V-Min of two devices, and where W finds room
when the block repeats:

    slot        0   1   2   3   4   5   6   7   8   9   10
    device 0    F-          F=  B=  W=      B-  W-
    device 1        F-  F=          B=  B-          W=  W-

Sources: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 (building blocks, V-Min and
V-Half). DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv 2412.19437, and
github.com/deepseek-ai/DualPipe (DualPipeV, which is DualPipe cut in half).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.builtin import zbv
from fxpipe.scheduling.row_transforms import there_and_back

_PERIOD = 6  # slots of a micro-batch on a device: F, B and W of two stages

# (device, devices) -> slots of F-, F=, B=, B-
BuildingBlock: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]

# -- V-Min and V-Half: building blocks that keep few micro-batches -----------------------------------------------------
#
# What the repeated block leaves idle before the first micro-batches have gone round, and after the last have turned, is
# filled: in the order of time each action moves to the first free slot after what it needs, where the device then
# keeps no more micro-batches than in between. So many micro-batches at most have to be there in any order, and of these
# `zbv` is the best.


def v_min(m: int, p: int) -> Rows:
    """The rows of p devices that keep (p + 4) / 3 micro-batches, a third of what `zbv` does."""
    return _limited_rows(m, p, _v_min_block, (p + 4) // 3)


def v_half(m: int, p: int) -> Rows:
    """The rows of p devices that keep (p + 2) / 2 micro-batches, half of what `zbv` does."""
    return _limited_rows(m, p, _v_half_block, (p + 2) // 2)


def _v_min_block(d: int, p: int) -> tuple[int, int, int, int]:
    later = 2 if p % 3 == 0 else 0
    return d, 2 * p - 1 - d, 2 * p + later + d, 4 * p - 1 + later - d


def _v_half_block(d: int, p: int) -> tuple[int, int, int, int]:
    later = 3 if p % 2 == 0 else 0
    return 2 * d, 3 * p - 2 - d, 3 * p - 1 + later + 2 * d, 6 * p - 2 + later - d


def _limited_rows(m: int, p: int, block: BuildingBlock, kept: int) -> Rows:
    """The rows of a block. `kept`: micro-batches that a device keeps at most."""
    if m <= kept:
        return zbv(m, p)
    devices = [_DeviceSlots(_repeated_block(m, p, d, block(d, p)), 2 * kept) for d in range(p)]
    _move_up(devices, p)
    return tuple(device.row for device in devices)


def _repeated_block(m: int, p: int, d: int, slots: Sequence[int]) -> dict[Action, int]:
    """The slots of a device's actions: its block for each micro-batch, and W in the first free slots."""
    early, late = d, 2 * p - 1 - d
    kinds = (ActionKind.FORWARD, ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD)
    slot_of = {
        Action(kind, stage, i): slot + _PERIOD * i
        for kind, stage, slot in zip(kinds, (early, late, late, early), slots, strict=True)
        for i in range(m)
    }
    taken, last = {*slot_of.values()}, -1
    for slot, (_, stage, i) in sorted((slot, a) for a, slot in slot_of.items() if a.kind is ActionKind.BACKWARD):
        last = max(last, slot) + 1
        while last in taken:
            last += 1
        slot_of[Action(ActionKind.WEIGHT, stage, i)] = last
    return slot_of


class _DeviceSlots:
    """The slots of a device, each with an action or free, and what is kept in each: of a stage and a micro-batch."""

    def __init__(self, slot_of: dict[Action, int], most: int):
        """`most`: what may be kept at once."""
        self.slot_of, self._most = slot_of, most
        actions = {slot: action for action, slot in slot_of.items()}
        self._free = [slot for slot in range(max(actions)) if slot not in actions]
        self._kept: list[int] = []
        kept = 0
        for slot in range(max(actions) + 1):
            kind = actions[slot].kind if slot in actions else None
            kept += kind is ActionKind.FORWARD
            self._kept.append(kept)
            kept -= kind is ActionKind.WEIGHT

    @property
    def row(self) -> tuple[Action, ...]:
        return tuple(sorted(self.slot_of, key=self.slot_of.__getitem__))

    def move_up(self, action: Action, after: int) -> None:
        """Moves an action to the first free slot after `after`, if there is one before its own that it may have."""
        slot = self.slot_of[action]
        for place in range(bisect_left(self._free, after + 1), bisect_left(self._free, slot)):
            free = self._free[place]
            if action.kind is ActionKind.FORWARD:
                if max(self._kept[free:slot]) == self._most:
                    continue
                self._add(range(free, slot), 1)
            elif action.kind is ActionKind.WEIGHT:
                self._add(range(free + 1, slot + 1), -1)
            del self._free[place]
            insort(self._free, slot)
            self.slot_of[action] = free
            return

    def _add(self, slots: range, more: int) -> None:
        for slot in slots:
            self._kept[slot] += more


def _move_up(devices: Sequence[_DeviceSlots], p: int) -> None:
    """Moves up all actions, in the order of time, as far as what they need and what a device keeps allow."""
    placement = there_and_back(p, 2)
    actions = chain.from_iterable(device.slot_of.items() for device in devices)
    latest: Counter[tuple[ActionKind, int]] = Counter()  # slot of the micro-batch before, of a kind and stage
    for _, _, action in sorted((slot, action.stage, action) for action, slot in actions):
        kind, stage, i = action
        needs = [*_needs(action, 2 * p)]
        after = max((devices[placement[need.stage]].slot_of[need] for need in needs), default=-1)
        if i:
            after = max(after, latest[kind, stage])
        own = devices[placement[stage]]
        own.move_up(action, after)
        latest[kind, stage] = own.slot_of[action]


def _needs(action: Action, stages: int) -> Iterator[Action]:
    kind, stage, i = action
    if kind is ActionKind.FORWARD and stage:
        yield Action(kind, stage - 1, i)
    elif kind is ActionKind.BACKWARD:
        yield Action(ActionKind.FORWARD, stage, i)
        if stage < stages - 1:
            yield Action(kind, stage + 1, i)
    elif kind is ActionKind.WEIGHT:
        yield Action(ActionKind.BACKWARD, stage, i)


# -- DualPipeV: one half of DualPipe, in which backward is split only where W fills a bubble ---------------------------
#
# In DualPipe, micro-batches go in at both ends, and each device has two stages, with the weights of both directions.
# Cut in half and folded, it is a V: what the other direction did on this device is done on the way back. In turns run F
# of one stage and the whole B of the other. (There the two overlap, the one's communication with the other's
# computation.)
#
# The parts are those of 2 p or more micro-batches. Of fewer, those that are not there are left out.


def dualpipev(m: int, p: int) -> Rows:
    """The rows of p devices with two stages each."""
    return tuple(tuple(a for a in _dualpipev_row(max(m, 2 * p), p, d) if a.micro_batch < m) for d in range(p))


def _dualpipev_row(m: int, p: int, d: int) -> list[Action]:
    stages = {"-": d, "=": 2 * p - 1 - d}
    row: list[Action] = []
    done: Counter[tuple[ActionKind, int]] = Counter()
    waiting: deque[Action] = deque()  # W

    def do(names: str, times: int = 1) -> None:
        """The next micro-batch of each: `B-` is a whole backward of the early stage, `I-` one that leaves `W`."""
        for name in names.split() * times:
            if name == "W":
                row.extend([waiting.popleft()] if waiting else ())
                continue
            kind, stage = ActionKind.FORWARD if name[0] == "F" else ActionKind.BACKWARD, stages[name[1]]
            row.append(Action(kind, stage, done[kind, stage]))
            if name[0] == "I":
                waiting.append(Action(ActionKind.WEIGHT, stage, done[kind, stage]))
            done[kind, stage] += 1

    later = p - 1 - d
    do("F-", 2 * later)
    do("F- F=", d + 1)
    do("I= W F=", later)
    do("F- B= F= B-", m - 2 * p + d + 1)
    do("B= F= B-", later)
    half, odd = divmod(d + 1, 2)  # the second half leaves W, for the bubbles that come
    do("B= B-", half)
    do("B= I-", odd)
    do("I= I-", half)
    do("W I-", later)
    do("W", d + 1)
    return row
