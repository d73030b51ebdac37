"""Actions, and schedules as rows of actions for each device.

The text form of an action is stage, kind, micro-batch: `1F0` is the forward of micro-batch 0 on stage 1.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fxpipe.errors import ScheduleError


class ActionKind(enum.Enum):
    """The kind of an action; the value is its letter in the text form."""

    FORWARD = "F"
    RECOMPUTE = "R"  # runs forward again, for the activations that backward needs
    BACKWARD = "B"  # computes gradients of inputs and, if the micro-batch has no W in this stage, of weights
    WEIGHT = "W"  # computes gradients of weights
    UPDATE = "U"  # updates the stage's weights with the gradients of its micro-batches up to this one

    # Members are singletons, so hash by identity: actions are keys everywhere, and `Enum`'s hash runs in Python.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value

    @property
    def words(self) -> str:
        return "backward of weights" if self is ActionKind.WEIGHT else self.name.lower()


class Action(NamedTuple):  # as a key it hashes and compares three times as fast as a dataclass would
    """One piece of work of one device."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def range_name(self) -> str:
        """The name of the action in profilers and traces: `1F3` -> `fxpipe F stage 1 micro-batch 3`."""
        return f"fxpipe {self.kind} stage {self.stage} micro-batch {self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses the text form of an action.

        `I`, as written by `torch.distributed.pipelining`, is a `B` with a separate `W`; it parses as `B`.

        Raises:
            ScheduleError: `text` is not an action.
        """
        match = re.fullmatch(r"(\d+)([FRBIWU])(\d+)", text)
        if match is None:
            raise ScheduleError(f"action {text!r}: expected stage, kind (F, R, B, W or U) and micro-batch, as in '1F0'")
        return cls(ActionKind("B" if match[2] == "I" else match[2]), int(match[1]), int(match[3]))


Rows: TypeAlias = tuple[tuple[Action, ...], ...]  # for each device its actions, in order


def split_backwards(actions: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """Returns the (stage, micro-batch) pairs whose backward is split, i.e. that have W.

    A stage may have W for some micro-batches only; B of the others also computes the gradients of weights.
    """
    return frozenset((a.stage, a.micro_batch) for a in actions if a.kind is ActionKind.WEIGHT)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions that each device runs, in order. `print` shows the rows."""

    name: str
    stages: int
    micro_batches: int
    rows: Rows
    is_validated: bool = field(default=False, compare=False, repr=False)  # set by `make_schedule`
    replicas: tuple[int, ...] = ()  # replicas of each device, whose rows are adjacent; if empty, each has one
    # Actions in rows of the stage's other replicas that an action waits for, in addition to values; only in streams.
    awaited: Mapping[Action, tuple[Action, ...]] = field(default_factory=dict, compare=False, repr=False)
    _row_of: dict[tuple[int, int], int] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose backward is split."""
        return split_backwards(action for row in self.rows for action in row)

    @property
    def row_of(self) -> dict[tuple[int, int], int]:
        """The row of each stage and micro-batch; with replicas, the row of the replica that runs the micro-batch."""
        known = self._row_of
        if known is None:
            known = {
                (a.stage, a.micro_batch): d
                for d, row in enumerate(self.rows)
                for a in row
                if a.kind is not ActionKind.UPDATE  # it is for all micro-batches
            }
            object.__setattr__(self, "_row_of", known)  # cached for the simulation
        return known

    def __str__(self) -> str:
        rows = "\n".join(f"device {d}: {' '.join(map(str, row))}".rstrip() for d, row in enumerate(self.rows))
        return f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches\n{rows}"
