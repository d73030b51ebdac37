"""Stages played out in time, action by action: what a schedule is made against that is made of what stages cost.

Each stage has a device of its own, takes micro-batches in order, and splits backward. It needs what its neighbours
made: the value of the stage before, the gradient of the stage behind. Both are on their way for a while, on a link for
each direction that carries one after the other. (`fxpipe.simulation` plays out any rows, once they are there.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxpipe.scheduling.actions import Action, Kind, Rows


@dataclass(frozen=True, slots=True)
class Demand:
    """What the actions of a stage take: seconds, and memory in any unit."""

    forward: float  # seconds of F
    backward: float  # of B, without what is left to W
    weight: float  # of W
    recompute: float = 0.0  # of R, right before B: it need not wait for the gradient
    sending: float = 0.0  # on the way to the next stage, and of a gradient from there
    taken: float = 1.0  # memory that F takes
    retaken: float = 0.0  # that R takes
    freed: float = 0.0  # of both, what B gives back when it ends; W gives back the rest
    limit: float | None = None  # memory that may be taken at once; None: what `zero_bubble_2p` takes here


@dataclass(slots=True)
class Stage:
    """A stage, as far as it has been played."""

    demand: Demand
    values: list[float]  # when what F needs is here, by micro-batch, of those that have been sent
    gradients: list[float] = field(default_factory=list)  # the same of B
    row: list[Action] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    end: float = 0.0  # of its last action
    idle: float = 0.0  # seconds of waiting since its first action
    most: float = 0.0  # memory that was taken at once

    @property
    def held(self) -> float:
        """Memory that is taken."""
        demand, waiting = self.demand, self.backwards - self.weights
        return demand.taken * (self.forwards - self.weights) + (demand.retaken - demand.freed) * waiting

    def can(self, kind: Kind) -> bool:
        """Has what the next action of that kind needs been made?"""
        if kind is Kind.WEIGHT:
            return self.weights < self.backwards
        if kind is Kind.BACKWARD:
            return self.backwards < len(self.gradients)
        return self.forwards < len(self.values)


class Play:
    """Stages, as far as they have been played."""

    def __init__(self, m: int, demands: Sequence[Demand]):
        self.stages = [Stage(demand, []) for demand in demands]
        self.stages[0].values = [0.0] * m

    @property
    def seconds(self) -> float:
        return max(stage.end for stage in self.stages)

    @property
    def rows(self) -> Rows:
        return tuple(tuple(stage.row) for stage in self.stages)

    def put(self, j: int, kind: Kind) -> None:
        """The next action of a stage, as soon as it can be: what it needs must have been put before."""
        stage = self.stages[j]
        if kind is Kind.FORWARD:
            self._forward(j, stage, stage.demand)
        elif kind is Kind.BACKWARD:
            self._backward(j, stage, stage.demand)
        else:
            stage.row.append(Action(kind, j, stage.weights))
            stage.weights += 1
            stage.end += stage.demand.weight

    def _forward(self, j: int, stage: Stage, demand: Demand) -> None:
        i = stage.forwards
        start = max(stage.end, stage.values[i])
        if i:
            stage.idle += start - stage.end
        stage.row.append(Action(Kind.FORWARD, j, i))
        stage.forwards += 1
        stage.most = max(stage.most, stage.held)
        stage.end = start + demand.forward
        if j + 1 < len(self.stages):
            _send(stage.end, demand.sending, self.stages[j + 1].values)
        else:
            stage.gradients.append(stage.end)

    def _backward(self, j: int, stage: Stage, demand: Demand) -> None:
        i, ready = stage.backwards, stage.end + demand.recompute
        start = max(ready, stage.gradients[i])
        stage.idle += start - ready
        stage.row.append(Action(Kind.BACKWARD, j, i))
        stage.most = max(stage.most, stage.held + demand.retaken)
        stage.backwards += 1
        stage.end = start + demand.backward
        if j:
            _send(stage.end, self.stages[j - 1].demand.sending, self.stages[j - 1].gradients)


def _send(made: float, seconds: float, arrivals: list[float]) -> None:
    arrivals.append((max(made, arrivals[-1]) if arrivals else made) + seconds)


def played(rows: Rows, m: int, demands: Sequence[Demand]) -> Play:
    """Rows of F, B and W, one for each stage, that can run."""
    play, place = Play(m, demands), [0] * len(rows)
    while any(place[j] < len(row) for j, row in enumerate(rows)):
        for j, row in enumerate(rows):
            while place[j] < len(row) and play.stages[j].can(row[place[j]].kind):
                play.put(j, row[place[j]].kind)
                place[j] += 1
    return play
