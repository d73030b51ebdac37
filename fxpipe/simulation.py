"""How long a schedule takes, and how much of that the devices idle: discrete events over its rows.

Every action starts as soon as its device has ended the one before and all that it needs has ended and, if that was on
another device, has arrived. Nothing is decided in between, for a schedule is an order; so one walk over the rows gives
every start and end, exactly.

>>> from fxpipe.scheduling import make_schedule
>>> print(simulate_schedule(make_schedule("1f1b", stages=3, micro_batches=4), forward=[1, 1, 1], backward=[2, 2, 2]))
1f1b: 3 stages, 4 micro-batches
device 0 |F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== |  busy 12 s, bubble 33.3 %
device 1 |...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......|  busy 12 s, bubble 33.3 %
device 2 |......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............|  busy 12 s, bubble 33.3 %
step 18 s, mean bubble 33.3 %

Simpler than the real thing: a stage takes as long for every micro-batch; links carry any number of transfers at once
and disturb no computation; starting an action costs nothing; updates (U) take no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.errors import ArgumentError
from fxpipe.scheduling import Action, Kind, Schedule, dependencies, validate

TIMELINE_COLUMNS = 100  # a timeline is drawn no wider


@dataclass(frozen=True, slots=True)
class Span:
    """When a device runs an action."""

    action: Action
    device: int
    start: float  # seconds since the step began
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate_schedule` found. `print` draws it."""

    schedule: Schedule
    spans: tuple[Span, ...]  # device after device, each in the order of its row
    step_seconds: float  # from the first start to the last end

    @property
    def busy(self) -> tuple[float, ...]:
        """For each device the seconds in which it computes."""
        seconds = [0.0] * len(self.schedule.rows)
        for span in self.spans:
            seconds[span.device] += span.seconds
        return tuple(seconds)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each device the share of the step, 0 to 1, in which it idles."""
        step = self.step_seconds
        return tuple(max(0.0, 1 - busy / step) if step else 0.0 for busy in self.busy)  # rounding may go below 0

    @property
    def mean_bubble(self) -> float:
        """The share of the step, 0 to 1, in which a device idles, over all devices."""
        return sum(self.bubble) / len(self.schedule.rows)

    def __str__(self) -> str:
        head = str(self.schedule).partition("\n")[0]
        lines = [
            f"device {d} |{line}|  busy {busy:.4g} s, bubble {bubble:.1%}".replace("%", " %")
            for d, (line, busy, bubble) in enumerate(zip(_timeline(self), self.busy, self.bubble, strict=True))
        ]
        total = f"step {self.step_seconds:.4g} s, mean bubble {self.mean_bubble:.1%}".replace("%", " %")
        return "\n".join([head, *lines, total])


def simulate_schedule(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    recompute: Sequence[float] | None = None,
    weight: Sequence[float] | None = None,
    send: Sequence[float] | None = None,
) -> Simulation:
    """The times of all actions of `schedule`, from seconds per stage for one micro-batch.

    The costs are those of the stages, whatever the schedule: so the same ones compare schedules with each other.

    Args:
        schedule: any that would run.
        forward: for each stage the seconds of F.
        backward: for each stage the seconds of the whole backward: of B or, where the schedule splits it, of B and W.
        recompute: for each stage the seconds of R; as long as F if not given.
        weight: for each stage the seconds of `backward` that go to the weights: what W takes and B then does not, where
            the schedule splits backward; half of it if not given.
        send: for each stage but the last the seconds from there to the next one, and of the gradient on its way back,
            where the two are on different devices; none if not given.

    Raises:
        ArgumentError: not one number for each stage, or one that is negative or not finite.
        ScheduleError: a schedule that would not run.
    """
    validate(schedule)
    n = schedule.stages
    forward = _seconds("forward", forward, n)
    backward = _seconds("backward", backward, n)
    recompute = forward if recompute is None else _seconds("recompute", recompute, n)
    weight = [b / 2 for b in backward] if weight is None else _seconds("weight", weight, n)
    send = [0.0] * (n - 1) if send is None else _seconds("send", send, n - 1)
    for j in range(n):
        if weight[j] > backward[j]:
            raise ArgumentError(
                f"weight[{j}]={weight[j]!r} is more than backward[{j}]={backward[j]!r}, of which it is a part: "
                "give in backward the seconds of inputs and weights together"
            )

    split = {action.stage for row in schedule.rows for action in row if action.kind is Kind.WEIGHT}
    seconds = {
        Kind.FORWARD: forward,
        Kind.RECOMPUTE: recompute,
        Kind.BACKWARD: [b - w if j in split else b for j, (b, w) in enumerate(zip(backward, weight, strict=True))],
        Kind.WEIGHT: weight,
        Kind.UPDATE: [0.0] * n,
    }
    return _run(schedule, seconds, send)


def _run(schedule: Schedule, seconds: dict[Kind, list[float]], send: list[float]) -> Simulation:
    """Walks along every row as far as its needs have known ends, again and again until all have ended."""
    device_of = {action: d for d, row in enumerate(schedule.rows) for action in row}
    spans: dict[Action, Span] = {}
    place = [0] * len(schedule.rows)
    while len(spans) < len(device_of):  # each round ends at least one action: the schedule is validated
        for d, row in enumerate(schedule.rows):
            while place[d] < len(row):
                action = row[place[d]]
                needed = [a for a in dependencies(action, schedule.stages) if a in device_of]
                if not all(a in spans for a in needed):
                    break
                start = max((_arrival(spans[a], action, d, send) for a in needed), default=0.0)
                if place[d]:
                    start = max(start, spans[row[place[d] - 1]].end)
                spans[action] = Span(action, d, start, start + seconds[action.kind][action.stage])
                place[d] += 1
    ordered = tuple(spans[action] for row in schedule.rows for action in row)
    return Simulation(schedule, ordered, max(span.end for span in ordered))


def _arrival(span: Span, user: Action, device: int, send: list[float]) -> float:
    if span.device == device:
        return span.end
    return span.end + send[min(span.action.stage, user.stage)]


def _seconds(argument: str, given: Sequence[float], count: int) -> list[float]:
    seconds = [float(value) for value in given]
    if len(seconds) != count:
        of = "pair of neighbouring stages" if argument == "send" else "stage"
        raise ArgumentError(f"{argument} has {len(seconds)} numbers; give {count}, the seconds of each {of}")
    for j, value in enumerate(seconds):
        if not (math.isfinite(value) and value >= 0):
            raise ArgumentError(f"{argument}[{j}]={value!r} is no time; give seconds, 0 or more and finite")
    return seconds


def _timeline(simulation: Simulation) -> list[str]:
    """One line for each device, as wide as the step is long: `F0`, `B0===` an action, `.` the bubble.

    Drawn as wide as the shortest action needs for its name; where that would be wider than `TIMELINE_COLUMNS`, as wide
    as those, and an action that is too short for its name shows the letter of its kind only.
    """
    several = len({span.device for span in simulation.spans}) < simulation.schedule.stages
    names = {s.action: str(s.action) if several else f"{s.action.kind}{s.action.micro_batch}" for s in simulation.spans}
    step = simulation.step_seconds
    wanted = ((len(names[s.action]) + 1) * (step / s.seconds) for s in simulation.spans if s.seconds > 0)
    columns = round(min(TIMELINE_COLUMNS, max(wanted, default=0)))

    lines = [["."] * columns for _ in simulation.schedule.rows]
    for span in simulation.spans:
        first, end = (round(seconds / step * columns) if step else 0 for seconds in (span.start, span.end))
        name, width = names[span.action], end - first
        drawn = name.ljust(width - 1, "=") + " " if width > len(name) else str(span.action.kind) * width
        lines[span.device][first:end] = drawn
    return ["".join(line) for line in lines]
