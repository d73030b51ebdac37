"""Who waits for whom, and which way values and gradients go: read off the program once.

The loss (or, in the drop-in, the gathering of outputs) counts as stage n: it is a user of the outputs and makes their
gradients.

A gradient does not go from every user of a value straight to its maker. It goes from a user to the next earlier user of
the same value, and from the first user to the maker, and enters each autograd graph as a root. So every sum is made by
autograd itself, in the order in which the plain model makes it:

    stage      0 (maker)      1 (user)      2 (user)     3 (loss: user)
    value      v ───────────▶ v ──────────▶ v ─────────▶ v
    gradient   ◀───────────── ◀──────────── ◀───────────
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.rewriting.program import INPUT, Program, Received
from fxpipe.scheduling.actions import Kind


@dataclass(frozen=True, slots=True)
class Link:
    """One value that a stage (or the loss) receives."""

    value: Received
    earlier: int  # where its gradient goes: the next earlier user, or the maker
    later: int | None  # the user from which a further gradient comes, if any


Fence = tuple[Kind, int]  # F or B of a stage: one fence for each micro-batch


@dataclass(frozen=True, slots=True)
class Wiring:
    """Who receives what, and which fences stand before which actions."""

    links: tuple[tuple[Link, ...], ...]  # by stage, and last of the loss
    users: dict[tuple[int, str], tuple[int, ...]]  # (source, name) -> who receives it
    before: dict[Fence, tuple[Fence, ...]]  # of other stages, for the same micro-batch
    before_with_loss: dict[Fence, tuple[Fence, ...]]  # where the loss is taken behind the last forward


def wire(program: Program) -> Wiring:
    """The wiring of a program."""
    results = (*program.outputs, *program.written.values(), *program.left.values())
    outputs = tuple(dict.fromkeys(o for o in results if isinstance(o, Received)))
    rows = [*(stage.receives for stage in program.stages), outputs]
    users: dict[tuple[int, str], list[int]] = {}
    for user, row in enumerate(rows):
        for value in row:
            users.setdefault((value.source, value.name), []).append(user)

    def link(user: int, value: Received) -> Link:
        others = users[value.source, value.name]
        return Link(
            value,
            max((k for k in others if k < user), default=value.source),
            min((k for k in others if k > user), default=None),
        )

    links = tuple(tuple(link(user, value) for value in row) for user, row in enumerate(rows))
    stages = len(program.stages)
    before = [_fences(links, users, stages, has_loss) for has_loss in (False, True)]
    return Wiring(links, {key: tuple(ks) for key, ks in users.items()}, *before)


def _fences(
    links: tuple[tuple[Link, ...], ...], users: dict[tuple[int, str], list[int]], stages: int, has_loss: bool
) -> dict[Fence, tuple[Fence, ...]]:
    """F waits for the makers of what it receives; B for everyone who still sends it a gradient."""
    found: dict[Fence, tuple[Fence, ...]] = {}
    for j in range(stages):
        rows = [links[j], links[stages]] if has_loss and j == stages - 1 else [links[j]]
        makers = {link.value.source for row in rows for link in row} - {INPUT, j}
        found[Kind.FORWARD, j] = tuple((Kind.FORWARD, source) for source in sorted(makers))
        senders = {k for (source, _), ks in users.items() if source == j for k in ks}
        senders |= {link.later for link in links[j] if link.later is not None}
        # The loss, as user number `stages`, sends its gradients within the last F.
        last = ((Kind.FORWARD, stages - 1),) if has_loss and stages in senders and j < stages - 1 else ()
        found[Kind.BACKWARD, j] = (*((Kind.BACKWARD, k) for k in sorted(senders) if k < stages), *last)
    return found
