"""Recomputation put into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from fxpipe.scheduling.actions import Action, Kind, Rows

Checkpoint: TypeAlias = Literal["always", "except_last", "never"]

# Of the last micro-batch backward comes (in GPipe's order) right after forward: keeping what it made costs no memory
# that the others do not cost a moment later, and saves a forward.
CHECKPOINTS: tuple[Checkpoint, ...] = ("always", "except_last", "never")


def with_recompute(rows: Rows, m: int, modes: Sequence[Checkpoint]) -> Rows:
    """R directly before its B: it waits for no other stage, and so runs while the gradient is still on its way.

    `modes` has one for each stage. Where rows have an R already, it stays where it is. A gradient that comes through
    stages on the same device, which keep what they made, has to come to these first: R goes before their B.
    """
    recomputed = [{"always": m, "except_last": m - 1, "never": 0}[mode] for mode in modes]
    there = {action for row in rows for action in row if action.kind is Kind.RECOMPUTE}

    def filled(row: tuple[Action, ...]) -> tuple[Action, ...]:
        made: list[Action] = []
        for action in row:
            again = Action(Kind.RECOMPUTE, action.stage, action.micro_batch)
            if action.kind is Kind.BACKWARD and action.micro_batch < recomputed[action.stage] and again not in there:
                made.insert(_before_what_it_waits_for(made, action, recomputed), again)
            made.append(action)
        return tuple(made)

    return tuple(map(filled, rows))


def _before_what_it_waits_for(row: Sequence[Action], action: Action, recomputed: Sequence[int]) -> int:
    """The place of the first of the B at the end of the row through which the gradient comes to `action`."""
    i, place = action.micro_batch, len(row)
    for stage in range(action.stage + 1, len(recomputed)):
        if not place or i < recomputed[stage] or row[place - 1] != Action(Kind.BACKWARD, stage, i):
            break
        place -= 1
    return place
