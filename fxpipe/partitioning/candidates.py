"""Of several ways to make a pipeline of one model, the one that a simulation says is the quickest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way: an order of the nodes, and a cut of it."""

    order: str  # its name, for people: "traced", "ordered"
    starts: tuple[int, ...]  # the place of the first node of each stage, in that order
    seconds: float  # of a step, simulated
    sent_bytes: float = 0.0  # between stages, for one micro-batch


def quickest(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the least seconds; of equally quick ones that with the least bytes sent, then the first.

        >>> quickest([Candidate("traced", (0, 3), 1.0, 64.0), Candidate("ordered", (0, 2), 1.0, 32.0)]).order
        'ordered'

    So with the order as it was traced in the first place, no other one makes a step slower.
    """
    return min(candidates, key=lambda candidate: (candidate.seconds, candidate.sent_bytes))
