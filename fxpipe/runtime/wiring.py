"""Dependencies of actions, and routes of values and gradients, read from the program once.

The loss (or, in the drop-in, the gathering of outputs) counts as stage n: it uses the outputs and makes their
gradients.

A gradient goes from a user of a value to the next earlier user, and from the first user to the maker, and enters each
autograd graph as a root. So autograd makes every sum, in the order of the plain model:

    stage      0 (maker)      1 (user)      2 (user)     3 (loss: user)
    value      v ───────────▶ v ──────────▶ v ─────────▶ v
    gradient   ◀───────────── ◀──────────── ◀───────────
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxpipe.rewriting.program import PIPE_INPUT, Program, ReceivedValue, ValueKey, received_results, value_users
from fxpipe.scheduling.actions import Action, ActionKind


@dataclass(frozen=True, slots=True)
class ValueLink:
    """One value that a stage (or the loss) receives."""

    value: ReceivedValue
    gradient_target: int  # where its gradient goes: the next earlier user, or the maker
    later: int | None  # the user from which a further gradient comes, if any


Fence = tuple[ActionKind, int]  # F or B of a stage: one fence for each micro-batch


@dataclass(frozen=True, slots=True)
class Wiring:
    """The values that each stage receives, and the fences that stand before each action."""

    links: tuple[tuple[ValueLink, ...], ...]  # by stage, and last of the loss
    users: dict[tuple[int, str], tuple[int, ...]]  # (source, name) -> who receives it
    before: dict[Fence, tuple[Fence, ...]]  # of other stages, for the same micro-batch
    fences_with_loss: dict[Fence, tuple[Fence, ...]]  # where the loss is taken behind the last forward


def wire_program(program: Program) -> Wiring:
    """The wiring of a program."""
    rows = [*(stage.receives for stage in program.stages), received_results(program)]
    users = value_users(program)

    def link(user: int, value: ReceivedValue) -> ValueLink:
        others = users[value.source, value.name]
        return ValueLink(
            value,
            max((k for k in others if k < user), default=value.source),
            min((k for k in others if k > user), default=None),
        )

    links = tuple(tuple(link(user, value) for value in row) for user, row in enumerate(rows))
    stages = len(program.stages)
    before = [_fences_before(links, users, stages, has_loss) for has_loss in (False, True)]
    return Wiring(links, users, *before)


def _fences_before(
    links: tuple[tuple[ValueLink, ...], ...], users: Mapping[ValueKey, Sequence[int]], stages: int, has_loss: bool
) -> dict[Fence, tuple[Fence, ...]]:
    """Finds the fences: F waits for the makers of what it receives; B for all who still send it a gradient."""
    fences: dict[Fence, tuple[Fence, ...]] = {}
    for j in range(stages):
        rows = [links[j], links[stages]] if has_loss and j == stages - 1 else [links[j]]
        makers = {link.value.source for row in rows for link in row} - {PIPE_INPUT, j}
        fences[ActionKind.FORWARD, j] = tuple((ActionKind.FORWARD, source) for source in sorted(makers))
        senders = {k for (source, _), ks in users.items() if source == j for k in ks}
        senders |= {link.later for link in links[j] if link.later is not None}
        # The loss, as user number `stages`, sends its gradients within the last F.
        last = ((ActionKind.FORWARD, stages - 1),) if has_loss and stages in senders and j < stages - 1 else ()
        fences[ActionKind.BACKWARD, j] = (*((ActionKind.BACKWARD, k) for k in sorted(senders) if k < stages), *last)
    return fences


def fences_of(wirings: Sequence[Wiring], has_loss: bool) -> Mapping[Fence, tuple[Fence, ...]]:
    """The fences of a step. Where micro-batches run different programs, those of all stand before each."""
    tables = [wiring.fences_with_loss if has_loss else wiring.before for wiring in wirings]
    if len(tables) == 1:
        return tables[0]
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: tuple(dict.fromkeys(fence for table in tables for fence in table.get(key, ()))) for key in keys}


# -- Fences between actions on different devices: the second does not start before the first has passed --------------
#
# Most fences are open when somebody comes to them, and those of one row always are. So what has passed is noted in a
# set, and an event is made only by who has to wait. That misses no opening: who passes notes it first and then looks
# for an event, who waits leaves an event first and then looks at the notes.

_ActionKey = tuple[ActionKind, int, int]  # of an action, which is such a tuple


class Fences:
    """The fences of one step, one for each action that others wait for. They open for good."""

    def __init__(
        self, before: Mapping[Fence, tuple[Fence, ...]], in_order: Collection[int] = (), loss_stage: int | None = None
    ):
        """Makes the fences, all of them closed.

        Args:
            in_order: stages of which F waits for that of the micro-batch before, on another device.
            loss_stage: the stage behind which losses are taken in the order of micro-batches, on several devices.
        """
        self._before, self._in_order, self._loss_stage = before, in_order, loss_stage
        self._before_updates: Mapping[int, Sequence[Action]] = {}
        self._passed: set[_ActionKey] = set()
        self._events: dict[_ActionKey, threading.Event] = {}
        self._all_open = False

    def add_updates(self, before: Mapping[int, Sequence[Action]]) -> None:
        """Adds what U of a stage waits for, by stage: actions of any micro-batch."""
        self._before_updates = before

    def _keys_before(self, action: Action) -> Sequence[_ActionKey]:
        kind, stage, i = action
        if kind is ActionKind.UPDATE:
            return self._before_updates.get(stage, ())
        keys = [(*fence, i) for fence in self._before.get((kind, stage), ())]
        if i and kind is ActionKind.FORWARD and stage in self._in_order:
            keys.append((kind, stage, i - 1))
        return keys

    def _keys_before_loss(self, action: Action) -> Sequence[_ActionKey]:
        kind, stage, i = action
        return ((kind, stage, i - 1),) if i and kind is ActionKind.FORWARD and stage == self._loss_stage else ()

    def are_open(self, action: Action) -> bool:
        """Returns whether the action may start, and will wait for nothing."""
        return all(map(self.has_passed, (*self._keys_before(action), *self._keys_before_loss(action))))

    def wait(self, action: Action) -> None:
        """Returns when the action may start."""
        for key in self._keys_before(action):
            self.wait_behind(key)

    def wait_before_loss(self, action: Action) -> None:
        """Returns when the loss behind an F may be taken: F of the micro-batch before has ended, with its loss."""
        for key in self._keys_before_loss(action):
            self.wait_behind(key)

    def has_passed(self, key: _ActionKey) -> bool:
        """Returns whether this action has ended, or nobody is to wait any more."""
        return self._all_open or key in self._passed

    def wait_behind(self, key: _ActionKey) -> None:
        """Returns when this action has ended."""
        if key not in self._passed:
            event = self._events.setdefault(key, threading.Event())
            if key not in self._passed and not self._all_open:
                event.wait()

    def pass_on(self, action: Action) -> None:
        """Opens what stands behind an action that has ended."""
        self._passed.add(action)
        event = self._events.get(action)
        if event is not None:
            event.set()

    def open_all(self) -> None:
        self._all_open = True
        for event in list(self._events.values()):
            event.set()
