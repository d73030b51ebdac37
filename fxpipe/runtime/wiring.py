"""Who waits for whom, and which way values and gradients go: read off the program once.

The loss (or, in the drop-in, the gathering of outputs) counts as stage n: it is a user of the outputs and makes their
gradients.

A gradient does not go from every user of a value straight to its maker. It goes from a user to the next earlier user of the
same value, and from the first user to the maker, and enters each autograd graph as a root. So every sum is made by autograd
itself, in the order in which the plain model makes it:

    stage      0 (maker)      1 (user)      2 (user)     3 (loss: user)
    value      v ───────────▶ v ──────────▶ v ─────────▶ v
    gradient   ◀───────────── ◀──────────── ◀───────────
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.rewriting.program import Program, Received
from fxpipe.scheduling.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class Link:
    """One value that a stage (or the loss) receives."""

    value: Received
    earlier: int  # where its gradient goes: the next earlier user, or the maker
    later: int | None  # the user from which a further gradient comes, if any


@dataclass(frozen=True, slots=True)
class Wiring:
    """For each stage, and last for the loss: its links. For each stage: the stages whose B must come before its own."""

    links: tuple[tuple[Link, ...], ...]
    backward_after: tuple[tuple[int, ...], ...]  # stage n stands for the loss
    users: dict[tuple[int, str], tuple[int, ...]]  # (source, name) -> who receives it

    @property
    def stages(self) -> int:
        return len(self.backward_after)

    def dependencies(self, action: Action, has_loss: bool) -> tuple[Action, ...]:
        """Actions of other stages that must have passed before this one starts."""
        n, j, i = self.stages, action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            rows = [j, n] if has_loss and j == n - 1 else [j]
            sources = {link.value.source for row in rows for link in self.links[row]}
            return tuple(Action(Kind.FORWARD, s, i) for s in sorted(sources) if s >= 0 and s != j)
        if action.kind is Kind.BACKWARD:
            after = [
                Action(Kind.BACKWARD, k, i) if k < n else Action(Kind.FORWARD, n - 1, i)
                for k in self.backward_after[j]
                if k < n or (has_loss and j < n - 1)
            ]
            return tuple(after)
        return ()


def wire(program: Program) -> Wiring:
    """The wiring of a program."""
    outputs = tuple(dict.fromkeys(o for o in program.outputs if isinstance(o, Received)))
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
    backward_after = tuple(
        tuple(
            sorted(
                {k for (source, _), ks in users.items() if source == j for k in ks}
                | {one.later for one in links[j] if one.later is not None}
            )
        )
        for j in range(len(program.stages))
    )
    return Wiring(links, backward_after, {key: tuple(ks) for key, ks in users.items()})
