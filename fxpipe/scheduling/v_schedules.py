"""V-shaped schedules: each device has its stages on the way there and on the way back, `there_and_back`.

Stage j of 2 p is on device j on the way there, and on device 2 p - 1 - j on the way back. So a device has an early
stage, `-`, and a late stage, `=`; device 0 has the first stage and the last, where backward begins. The early stage
keeps micro-batches for long, the late stage for a short time, so all devices keep the same number.

- `zbv` keeps 2 p activations of a stage, each half the size of one of p stages: as much as 1F1B at its first stage.
- `dualpipev` is DualPipe cut in half and folded: the way back replaces the other direction. F of one stage and the full
  B of the other alternate, which overlap in DualPipe. Backward is split only if W fills a bubble.
- `v_min` and `v_half` repeat a *building block*: the slots, each as long as one F, in which device d of p works on one
  micro-batch. The next micro-batch follows six slots later, and all devices are busy. The longer a micro-batch takes
  through the block, the more micro-batches are in flight.

                F-       F=           B=                B-
    V-Min       d        2p - 1 - d   2p + d            4p - 1 - d        and 2 more for both B if 3 divides p
    V-Half      2d       3p - 2 - d   3p - 1 + 2d       6p - 2 - d        and 3 more for both B if 2 divides p

(The additions keep two actions out of the same slot.) V-Min of two devices, with W in the first free slots:

    slot        0   1   2   3   4   5   6   7   8   9   10
    device 0    F-          F=  B=  W=      B-  W-
    device 1        F-  F=          B=  B-          W=  W-

Sources: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 (building blocks, V-Min, V-Half
and, in section 4, V-ZB, with the parts of PyTorch's `ScheduleZBVZeroBubble`). DeepSeek-AI 2024, DeepSeek-V3 Technical
Report, arXiv 2412.19437, and github.com/deepseek-ai/DualPipe (DualPipeV).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.builtin import zero_bubble
from fxpipe.scheduling.row_transforms import merge_stage_rows, there_and_back
from fxpipe.scheduling.validation import dependencies

# Rows of ZB-V and DualPipeV have parts that need enough micro-batches. With fewer, actions of missing ones are dropped.


class _VRow:
    """The row of device d of p under construction, with its stages by their marks."""

    def __init__(self, p: int, d: int):
        self.actions: list[Action] = []
        self._stages = {"-": d, "=": 2 * p - 1 - d}
        self._done: Counter[tuple[ActionKind, str]] = Counter()
        self._waiting: deque[Action] = deque()  # deferred W

    def do(self, names: str, times: int = 1) -> None:
        """Appends the next micro-batch of each name."""
        # `B-` is B of the early stage, `I-` is `B-` with its W deferred, and `W` is the oldest deferred W.
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
        return self._done[ActionKind(name[0]), name[1]]

    def first(self, m: int) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.micro_batch < m)


def zbv(m: int, p: int) -> Rows:
    """Makes the rows of p devices; with at most p micro-batches memory suffices to defer W as in `zero_bubble`."""
    if m <= p:
        return merge_stage_rows(zero_bubble(m, 2 * p), there_and_back(p, 2))
    rows, count = [], max(m, 2 * p - 1)
    for d in range(p):
        row = _VRow(p, d)
        row.do("F-", 2 * (p - d) - 1)  # until the first micro-batch has gone there and back
        row.do("F= F-", d)
        row.do("F= B= W=", p - d)  # until its gradients have arrived at -
        row.do("F- B- W- F= B= W=", count - row.done("F-"))
        row.do("B- W- F= B= W=", count - row.done("F="))
        row.do("B- B=", d)  # the gradients of both leave first, before all W that can wait
        row.do("B- W-", p - d)
        row.do("W=", count - row.done("W="))
        row.do("W-", count - row.done("W-"))
        rows.append(row.first(m))
    return tuple(rows)


def dualpipev(m: int, p: int) -> Rows:
    """Makes the rows of p devices with two stages each."""
    rows = []
    for d in range(p):
        row, later = _VRow(p, d), p - 1 - d
        row.do("F-", 2 * later)
        row.do("F- F=", d + 1)
        row.do("I= W F=", later)
        row.do("F- B= F= B-", max(m, 2 * p) - 2 * p + d + 1)
        row.do("B= F= B-", later)
        half, odd = divmod(d + 1, 2)  # the second half defers W to the bubbles that follow
        row.do("B= B-", half)
        row.do("B= I-", odd)
        row.do("I= I-", half)
        row.do("W I-", later)
        row.do("W", d + 1)
        rows.append(row.first(m))
    return tuple(rows)


# -- V-Min and V-Half: building blocks that keep few micro-batches -----------------------------------------------------
#
# The repeated block idles before the first micro-batches have passed, and after the last have turned. To fill this,
# each action moves, in time order, to the first free slot after its dependencies, if the device then keeps no more
# micro-batches than in the steady state. With no more micro-batches than that, `zbv` is the best.

_PERIOD = 6  # slots per micro-batch on a device: F, B and W of two stages


def v_min(m: int, p: int) -> Rows:
    """Makes the rows of p devices that keep (p + 4) / 3 micro-batches, a third of `zbv`."""
    later = 2 if p % 3 == 0 else 0
    blocks = [(d, 2 * p - 1 - d, 2 * p + later + d, 4 * p - 1 + later - d) for d in range(p)]
    return _limited_rows(m, p, blocks, (p + 4) // 3)


def v_half(m: int, p: int) -> Rows:
    """Makes the rows of p devices that keep (p + 2) / 2 micro-batches, half of `zbv`."""
    later = 3 if p % 2 == 0 else 0
    blocks = [(2 * d, 3 * p - 2 - d, 3 * p - 1 + later + 2 * d, 6 * p - 2 + later - d) for d in range(p)]
    return _limited_rows(m, p, blocks, (p + 2) // 2)


def _limited_rows(m: int, p: int, blocks: Sequence[Sequence[int]], kept: int) -> Rows:
    """Makes the rows of a block: for each device the slots of F-, F=, B= and B-. `kept`: most micro-batches kept."""
    if m <= kept:
        return zbv(m, p)
    devices = [_DeviceSlots(m, p, d, slots, 2 * kept) for d, slots in enumerate(blocks)]
    # Move up all actions, in time order, as far as dependencies and the limits of the devices allow.
    placement = there_and_back(p, 2)
    actions = chain.from_iterable(device.slot_of.items() for device in devices)
    latest: Counter[tuple[ActionKind, int]] = Counter()  # slot of the previous micro-batch, by kind and stage
    for _, _, action in sorted((slot, action.stage, action) for action, slot in actions):
        kind, stage, i = action
        needs = (need for need in dependencies(action, 2 * p) if need.kind is not ActionKind.RECOMPUTE)
        after = max((devices[placement[need.stage]].slot_of[need] for need in needs), default=-1)
        if i:
            after = max(after, latest[kind, stage])
        own = devices[placement[stage]]
        own.move_up(action, after)
        latest[kind, stage] = own.slot_of[action]
    return tuple(tuple(sorted(device.slot_of, key=device.slot_of.__getitem__)) for device in devices)


class _DeviceSlots:
    """The slots of a device, used or free, and the number of (stage, micro-batch) pairs kept in each."""

    def __init__(self, m: int, p: int, d: int, slots: Sequence[int], most: int):
        """Begins with the block of the device for each micro-batch, at most `most` pairs kept, and W in free slots."""
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

    def move_up(self, action: Action, after: int) -> None:
        """Moves an action to the first free slot after `after` and before its current slot that the limit allows."""
        slot = self.slot_of[action]
        for place in range(bisect_left(self._free, after + 1), bisect_left(self._free, slot)):
            free = self._free[place]
            if action.kind is ActionKind.FORWARD:
                if max(self._kept[free:slot]) == self._most:
                    continue
                self._kept[free:slot] = [kept + 1 for kept in self._kept[free:slot]]
            elif action.kind is ActionKind.WEIGHT:
                self._kept[free + 1 : slot + 1] = [kept - 1 for kept in self._kept[free + 1 : slot + 1]]
            del self._free[place]
            insort(self._free, slot)
            self.slot_of[action] = free
            return
