"""What the actions of a schedule need and how long they take: for each kind and stage the ways that lead from there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from fxpipe.scheduling import Kind, Schedule
from fxpipe.scheduling.validation import NEIGHBOUR
from fxpipe.stage_costs import StageCost, Transfer


@dataclass(frozen=True, slots=True)
class Way:
    """From an action to one of the same kind and micro-batch that needs it."""

    user: int  # stage
    seconds: float = 0.0
    link: tuple[int, int] | None = None  # (from device, to device); None: nothing is sent
    over: tuple[str, ...] = ()  # what the link shares with others

    @property
    def takes(self) -> tuple[Hashable, ...]:
        """What carries one transfer at a time."""
        return () if self.link is None else (self.link, *self.over)


Ways = dict[Kind, list[list[Way]]]  # for F and B, for each stage: to those who need it


@dataclass(slots=True)
class Receiving:
    """Where the device that receives copies: what it does before it computes."""

    seconds: float = 0.0
    over: dict[str, None] = field(default_factory=dict)  # shared ways that it takes, each once


def ways_of(schedule: Schedule, transfers: Sequence[Transfer]) -> Ways:
    """Between neighbours there is a way also where nothing is sent."""
    device_of = devices_of(schedule)
    ways: Ways = {kind: [[] for _ in device_of] for kind in NEIGHBOUR}
    for kind, step in NEIGHBOUR.items():
        for user in range(schedule.stages):
            if user + step in range(schedule.stages):
                ways[kind][user + step].append(Way(user))
    for transfer in transfers:
        link = device_of[transfer.source], device_of[transfer.target]
        kind = Kind.BACKWARD if transfer.is_gradient else Kind.FORWARD
        is_sent = link[0] != link[1]
        way = Way(transfer.target, float(transfer.seconds), link, transfer.over) if is_sent else Way(transfer.target)
        ways[kind][transfer.source].append(way)
    return ways


def receiving_of(ways: Ways) -> dict[Kind, list[Receiving]]:
    """For F and B, for each stage: all that comes, one after the other."""
    found = {kind: [Receiving() for _ in by_stage] for kind, by_stage in ways.items()}
    for kind, by_stage in ways.items():
        for way in (way for leaving in by_stage for way in leaving):
            found[kind][way.user].seconds += way.seconds
            if way.seconds:
                found[kind][way.user].over |= dict.fromkeys(way.over)
    return found


def counts_of(by_stage: list[list[Way]], m: int) -> list[list[int]]:
    """For each stage and micro-batch how many ways lead there."""
    counts = [0] * len(by_stage)
    for way in (way for leaving in by_stage for way in leaving):
        counts[way.user] += 1
    return [[count] * m for count in counts]


def seconds_of(schedule: Schedule, stages: Sequence[StageCost]) -> dict[Kind, list[float]]:
    """For each kind of action, for each stage: how long it takes."""
    split = {action.stage for row in schedule.rows for action in row if action.kind is Kind.WEIGHT}
    weight = [float(s.backward / 2 if s.weight is None else s.weight) for s in stages]
    own = {
        Kind.FORWARD: [float(s.forward) for s in stages],
        Kind.RECOMPUTE: [float(s.forward if s.recompute is None else s.recompute) for s in stages],
        Kind.BACKWARD: [float(s.backward) - (weight[j] if j in split else 0.0) for j, s in enumerate(stages)],
        Kind.WEIGHT: weight,
    }
    found = {kind: [time + s.action for time, s in zip(times, stages, strict=True)] for kind, times in own.items()}
    return found | {Kind.UPDATE: [float(s.update) for s in stages]}


def devices_of(schedule: Schedule) -> list[int]:
    """For each stage its device."""
    found = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    return [found[j] for j in range(schedule.stages)]
