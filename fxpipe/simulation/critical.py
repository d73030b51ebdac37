"""The critical path: the chain of actions and transfers that the end of a step hangs on, read backwards.

    device 0  |F0 F1 F2 .........B0=== ...       F0, its value on its way to device 1, F0 there, its B0, the gradient
    device 1  |...F0 B0===F1 B1=== ...           on its way back, and so on: make one of these faster, and the step is

Its legs follow each other without a gap, from the beginning of the step to its end. Of several chains that are as long,
it is the one that stays on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.simulation.events import Begun
from fxpipe.timelines import Span

SENDING, WAITING = "sending", "waiting"  # on a link: on the way, or until the link has carried what was there before


@dataclass(frozen=True, slots=True)
class Leg:
    """A piece of the critical path."""

    kind: str  # of the action ("F", "R", "B", "W", "U"), or "sending" or "waiting" for what it needs
    start: float  # seconds since the step began
    end: float
    span: Span  # the action that runs or, where something is on its way, that will

    @property
    def seconds(self) -> float:
        return self.end - self.start


def critical_legs(begun: Sequence[Sequence[Begun]]) -> tuple[Leg, ...]:
    """In order of time."""
    legs: list[Leg] = []
    device = max((d for d, row in enumerate(begun) if row), key=lambda d: begun[d][-1].span.end)
    place = len(begun[device]) - 1
    while place >= 0:
        one = begun[device][place]
        span, received = one.span, one.span.start + one.span.receiving
        legs.append(Leg(str(span.action.kind), received, span.end, span))
        _add(legs, SENDING, span.start, received, span)
        _add(legs, WAITING, one.could, span.start, span)
        if one.after is None:
            place -= 1
            continue
        maker = begun[one.after.device][one.after.place].span
        _add(legs, SENDING, one.after.left, one.after.arrived, span)
        _add(legs, WAITING, maker.end, one.after.left, span)
        device, place = one.after.device, one.after.place
    return tuple(reversed(legs))


def _add(legs: list[Leg], kind: str, start: float, end: float, span: Span) -> None:
    if end > start:
        legs.append(Leg(kind, start, end, span))
