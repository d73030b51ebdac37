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

    `modes` has one for each stage. Where rows have an R already, it stays where it is.
    """
    recomputed = [{"always": m, "except_last": m - 1, "never": 0}[mode] for mode in modes]
    there = {action for row in rows for action in row if action.kind is Kind.RECOMPUTE}

    def put_in(action: Action) -> tuple[Action, ...]:
        again = Action(Kind.RECOMPUTE, action.stage, action.micro_batch)
        if action.kind is Kind.BACKWARD and action.micro_batch < recomputed[action.stage] and again not in there:
            return again, action
        return (action,)

    return tuple(tuple(new for action in row for new in put_in(action)) for row in rows)
