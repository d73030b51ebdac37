"""Dependencies of actions, and routes of values and gradients, read from the program once.

The loss (or, in the drop-in, the gathering of outputs) is stage n. A gradient is sent from a user of a value to the
previous user, and from the first user to the maker. So autograd computes every sum, in the order of the plain model:

    stage      0 (maker)      1 (user)      2 (user)     3 (loss: user)
    value      v ───────────▶ v ──────────▶ v ─────────▶ v
    gradient   ◀───────────── ◀──────────── ◀───────────
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxpipe.rewriting.program import (
    PIPE_INPUT,
    ConstantOutput,
    Program,
    ReceivedValue,
    ValueKey,
    received_results,
    value_users,
)
from fxpipe.scheduling.actions import Action, ActionKind


@dataclass(frozen=True, slots=True)
class ValueLink:
    """A value that a stage (or the loss) receives."""

    value: ReceivedValue
    gradient_target: int  # receiver of its gradient: the previous user, or the maker
    later: int | None  # the user that sends a further gradient, if any


Fence = tuple[ActionKind, int]  # F or B of a stage, in each micro-batch


@dataclass(frozen=True, slots=True)
class Wiring:
    """The values that each stage receives, and the fences before each action."""

    links: tuple[tuple[ValueLink, ...], ...]  # by stage, then the loss
    users: dict[tuple[int, str], tuple[int, ...]]  # (source, name) -> receivers
    outputs: tuple[int | ConstantOutput, ...]  # by output: the index of its link to the loss, or the constant
    before: dict[Fence, tuple[Fence, ...]]  # for the same micro-batch, in other stages


def wire_program(program: Program) -> Wiring:
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
    places = {value: place for place, value in enumerate(rows[-1])}
    outputs = tuple(o if isinstance(o, ConstantOutput) else places[o] for o in program.outputs)
    return Wiring(links, users, outputs, _fences_before(links, users, len(program.stages)))


def _fences_before(
    links: tuple[tuple[ValueLink, ...], ...], users: Mapping[ValueKey, Sequence[int]], stages: int
) -> dict[Fence, tuple[Fence, ...]]:
    """Returns the fences: F waits for the makers of received values, B for the senders of gradients."""
    # The loss, user number `stages`, receives its values and sends their gradients within the last F.
    fences: dict[Fence, tuple[Fence, ...]] = {}
    for j in range(stages):
        received = [*links[j], *links[stages]] if j == stages - 1 else links[j]
        makers = {link.value.source for link in received} - {PIPE_INPUT, j}
        fences[ActionKind.FORWARD, j] = tuple((ActionKind.FORWARD, source) for source in sorted(makers))
        senders = {k for (source, _), ks in users.items() if source == j for k in ks}
        senders |= {link.later for link in links[j] if link.later is not None}
        last = ((ActionKind.FORWARD, stages - 1),) if stages in senders and j < stages - 1 else ()
        fences[ActionKind.BACKWARD, j] = (*((ActionKind.BACKWARD, k) for k in sorted(senders) if k < stages), *last)
    return fences


def fences_of(wirings: Sequence[Wiring]) -> Mapping[Fence, tuple[Fence, ...]]:
    """Returns the fences of a step: if micro-batches run different programs, the union of all."""
    tables = [wiring.before for wiring in wirings]
    if len(tables) == 1:
        return tables[0]
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: tuple(dict.fromkeys(fence for table in tables for fence in table.get(key, ()))) for key in keys}


# Most fences are open when a worker reaches them. So passed actions are recorded in a set, and only a worker that has
# to wait creates an event. No opening is missed: the passing worker records the action first and then looks for an
# event, the waiting worker adds an event first and then looks at the record.

_ActionKey = tuple[ActionKind, int, int]  # has the form of an action


class Fences:
    """The fences of one step, one for each action that others wait for. An open fence stays open."""

    def __init__(
        self,
        before: Mapping[Fence, tuple[Fence, ...]],
        in_order: Collection[int] = (),  # stages whose F waits for F of the previous micro-batch, on another device
        last_forward: Action | None = None,  # after it the only loss of all micro-batches; all B wait for it
    ):
        self._before, self._in_order = before, in_order
        self._before_backward = () if last_forward is None else (last_forward,)
        self.before_updates: Mapping[int, Sequence[Action]] = {}  # by stage, the actions that U waits for
        self._passed: set[_ActionKey] = set()
        self._events: dict[_ActionKey, threading.Event] = {}
        self._all_open = False

    def wait(self, action: Action) -> None:
        kind, stage, i = action
        if kind is ActionKind.UPDATE:
            keys: list[_ActionKey] = [*self.before_updates.get(stage, ())]
        else:
            keys = [(*fence, i) for fence in self._before.get((kind, stage), ())]
        if i and kind is ActionKind.FORWARD and stage in self._in_order:
            keys.append((kind, stage, i - 1))
        if kind is ActionKind.BACKWARD:
            keys += self._before_backward
        for key in keys:
            self.wait_behind(key)

    def wait_behind(self, key: _ActionKey) -> None:
        if key not in self._passed:
            event = self._events.setdefault(key, threading.Event())
            if key not in self._passed and not self._all_open:
                event.wait()

    def pass_on(self, action: Action) -> None:
        self._passed.add(action)
        event = self._events.get(action)
        if event is not None:
            event.set()

    def open_all(self) -> None:
        self._all_open = True
        for event in list(self._events.values()):
            event.set()
