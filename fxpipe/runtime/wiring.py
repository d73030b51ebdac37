"""Dependencies of actions, and routes of values and gradients, read from the program once.

The loss (or, in the drop-in, the gathering of outputs) is stage n. A gradient is sent from a user of a value to the
previous user, and from the first user to the maker. So autograd computes every sum, in the order of the plain model:

    stage      0 (maker)      1 (user)      2 (user)     3 (loss: user)
    value      v ───────────▶ v ──────────▶ v ─────────▶ v
    gradient   ◀───────────── ◀──────────── ◀───────────
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from fxpipe.scheduling.actions import ActionKind


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
