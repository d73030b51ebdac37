"""V-shaped schedules: each device has its stages on the way there and on the way back, `there_and_back`.

Stage j of 2 p is on device j on the way there, and on device 2 p - 1 - j on the way back. So a device has an early
stage, `-`, and a late one, `=`; device 0 has the first stage and the last, where backward begins:

    device 0    stage 0   stage 5
    device 1    stage 1   stage 4
    device 2    stage 2   stage 3

What the early stage keeps for long, the late one keeps for a short time, so all devices keep the same number of
micro-batches.

- `zbv` keeps 2 p activations of a stage, each half of what one of p stages has: as 1F1B at its first stage.
- `dualpipev` is DualPipe cut in half and folded: what the other direction did on this device is done on the way back. F
  of one stage and the whole B of the other run alternately. (In DualPipe the two overlap, one's communication with the
  other's computation.) Backward is split only where W fills a bubble.
- `v_min` and `v_half` repeat a *building block*, which says when a device d of p works on one micro-batch, in slots of
  the length of one F; the others follow six slots apart, and all devices are busy. The longer a micro-batch is on its
  way through the block, the more of them there are at the same time.

                F-       F=           B=                B-
    V-Min       d        2p - 1 - d   2p + d            4p - 1 - d        and 2 more for both B if 3 divides p
    V-Half      2d       3p - 2 - d   3p - 1 + 2d       6p - 2 - d        and 3 more for both B if 2 divides p

(The additions prevent that two actions have the same slot.) V-Min of two devices, with W in the first free slots:

    slot        0   1   2   3   4   5   6   7   8   9   10
    device 0    F-          F=  B=  W=      B-  W-
    device 1        F-  F=          B=  B-          W=  W-

Sources: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 (building blocks, V-Min, V-Half
and, in section 4, V-ZB, whose parts are those of PyTorch's `ScheduleZBVZeroBubble`). DeepSeek-AI 2024, DeepSeek-V3
Technical Report, arXiv 2412.19437, and github.com/deepseek-ai/DualPipe (DualPipeV).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.builtin import zero_bubble
from fxpipe.scheduling.row_transforms import merge_stage_rows, there_and_back
from fxpipe.scheduling.validation import dependencies

# -- ZB-V and DualPipeV: rows in parts --------------------------------------------------------------------------------
#
# The parts are those of enough micro-batches. Of fewer, the actions of the missing ones are left out.


class _VRow:
    """The row of device d of p as it grows: its stages by their marks."""

    def __init__(self, p: int, d: int):
        self.actions: list[Action] = []
        self._stages = {"-": d, "=": 2 * p - 1 - d}
        self._done: Counter[tuple[ActionKind, str]] = Counter()
        self._waiting: deque[Action] = deque()  # W

    def do(self, names: str, times: int = 1) -> None:
        """Appends the next micro-batch of each name.

        `B-` is B of the early stage, `I-` the same, which leaves W for later, and `W` the oldest W that was left.
        """
        for name in names.split() * times:
            if name == "W":
                self.actions += [self._waiting.popleft()] if self._waiting else []
                continue
            kind, mark = ActionKind("B" if name[0] == "I" else name[0]), name[1]
            self.actions.append(Action(kind, self._stages[mark], self._done[kind, mark]))
            if name[0] == "I":
                self._waiting.append(self.actions[-1]._replace(kind=ActionKind.WEIGHT))
            self._done[kind, mark] += 1

    def done(self, name: str) -> int:
        """Returns the number of micro-batches that have done this."""
        return self._done[ActionKind(name[0]), name[1]]

    def first(self, m: int) -> tuple[Action, ...]:
        """Returns the actions of the first m micro-batches."""
        return tuple(action for action in self.actions if action.micro_batch < m)


def zbv(m: int, p: int) -> Rows:
    """The rows of p devices.

    Of p or fewer micro-batches any order keeps within the memory, so W may wait as long as in `zero_bubble`.
    """
    if m <= p:
        return merge_stage_rows(zero_bubble(m, 2 * p), there_and_back(p, 2))
    return tuple(_zbv_row(max(m, 2 * p - 1), p, d).first(m) for d in range(p))


def _zbv_row(m: int, p: int, d: int) -> _VRow:
    row = _VRow(p, d)
    row.do("F-", 2 * (p - d) - 1)  # until the first micro-batch has gone there and back
    row.do("F= F-", d)
    row.do("F= B= W=", p - d)  # until its gradients have come round to -
    row.do("F- B- W- F= B= W=", m - row.done("F-"))
    row.do("B- W- F= B= W=", m - row.done("F="))
    row.do("B- B=", d)  # the gradients of both on their way out, before all W that can wait
    row.do("B- W-", p - d)
    row.do("W=", m - row.done("W="))
    row.do("W-", m - row.done("W-"))
    return row


def dualpipev(m: int, p: int) -> Rows:
    """The rows of p devices with two stages each."""
    return tuple(_dualpipev_row(max(m, 2 * p), p, d).first(m) for d in range(p))


def _dualpipev_row(m: int, p: int, d: int) -> _VRow:
    row, later = _VRow(p, d), p - 1 - d
    row.do("F-", 2 * later)
    row.do("F- F=", d + 1)
    row.do("I= W F=", later)
    row.do("F- B= F= B-", m - 2 * p + d + 1)
    row.do("B= F= B-", later)
    half, odd = divmod(d + 1, 2)  # the second half leaves W, for the bubbles that come
    row.do("B= B-", half)
    row.do("B= I-", odd)
    row.do("I= I-", half)
    row.do("W I-", later)
    row.do("W", d + 1)
    return row


# -- V-Min and V-Half: building blocks that keep few micro-batches -----------------------------------------------------
#
# What the repeated block leaves idle before the first micro-batches have gone round, and after the last have turned, is
# filled: in the order of time each action moves to the first free slot after what it needs, if the device then keeps no
# more micro-batches than in between. Of no more micro-batches than that, `zbv` is the best.

_PERIOD = 6  # slots of a micro-batch on a device: F, B and W of two stages

# (device, devices) -> slots of F-, F=, B=, B-
BuildingBlock: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]


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
        needs = (need for need in dependencies(action, 2 * p) if need.kind is not ActionKind.RECOMPUTE)
        after = max((devices[placement[need.stage]].slot_of[need] for need in needs), default=-1)
        if i:
            after = max(after, latest[kind, stage])
        own = devices[placement[stage]]
        own.move_up(action, after)
        latest[kind, stage] = own.slot_of[action]
