"""How long a schedule takes, how much of that the devices idle, and what they hold: discrete events over its rows.

Every action starts as soon as its device has ended the one before and all that it needs has ended and, if that was on
another device, has arrived. Nothing is decided in between, for a schedule is an order; so one walk over the rows gives
every start and end, exactly.

>>> from fxpipe.scheduling import make_schedule
>>> print(simulate_schedule(make_schedule("1f1b", stages=3, micro_batches=4), [StageCost(forward=1, backward=2)] * 3))
1f1b: 3 stages, 4 micro-batches
device 0 |F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== |  busy 12 s, bubble 33.3 %
device 1 |...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......|  busy 12 s, bubble 33.3 %
device 2 |......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............|  busy 12 s, bubble 33.3 %
step 18 s, mean bubble 33.3 %

F and B of a stage need those of its neighbours, as every schedule has it, and beside that whatever `transfers` bring
them. What goes from one device to another takes a link, one for each direction of each pair of devices, which carries
one transfer at a time, in the order in which they are handed over: so a link can be what a pipeline waits for. All
transfers of a link leave one device, whose actions end in the order of its row, so the walk knows that order too.

Simpler than the real thing: a stage takes as long for every micro-batch; copying disturbs no computation; starting an
action costs nothing; updates (U) take no time; a value on its way takes no memory, nor do the gradients of values; the
gradient of an output that the loss takes from an earlier stage leaves with the last stage's B.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.scheduling import Kind, Schedule, validate
from fxpipe.scheduling.validation import NEIGHBOUR
from fxpipe.stage_costs import StageCost, Transfer, check_costs, transfers_of
from fxpipe.timelines import Memory, Span, memory_of, timeline

__all__ = ["Memory", "Simulation", "Span", "StageCost", "Transfer", "simulate_schedule", "transfers_of"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate_schedule` found. `print` draws it."""

    schedule: Schedule
    stages: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]
    spans: tuple[Span, ...]  # device after device, each in the order of its row
    step_seconds: float  # from the first start to the last end

    @property
    def busy(self) -> tuple[float, ...]:
        """For each device the seconds in which it computes or, where that does not overlap, copies."""
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

    @property
    def memory(self) -> tuple[Memory, ...]:
        """For each device the bytes in use over time, of all its stages together."""
        spans: list[list[Span]] = [[] for _ in self.schedule.rows]
        for span in self.spans:
            spans[span.device].append(span)
        return tuple(memory_of(found, self.stages) for found in spans)

    @property
    def stage_memory(self) -> tuple[Memory, ...]:
        """For each stage the bytes in use over time."""
        spans: list[list[Span]] = [[] for _ in self.stages]
        for span in self.spans:
            spans[span.action.stage].append(span)
        return tuple(memory_of(found, self.stages) for found in spans)

    @property
    def sent(self) -> dict[tuple[int, int], float]:
        """The bytes of a step for each link, (from device, to device), that carries any."""
        device_of = _device_of(self.schedule)
        trains = any(action.kind is Kind.BACKWARD for action in self.schedule.rows[device_of[0]])
        sent: defaultdict[tuple[int, int], float] = defaultdict(int)
        for transfer in self.transfers:
            link = device_of[transfer.source], device_of[transfer.target]
            if link[0] != link[1] and (trains or not transfer.is_gradient):
                sent[link] += transfer.bytes * self.schedule.micro_batches
        return dict(sorted(sent.items()))

    def __str__(self) -> str:
        head = str(self.schedule).partition("\n")[0]
        drawn = timeline(self.schedule, self.spans, self.step_seconds)
        lines = [
            f"device {d} |{line}|  busy {busy:.4g} s, bubble {bubble:.1%}".replace("%", " %")
            for d, (line, busy, bubble) in enumerate(zip(drawn, self.busy, self.bubble, strict=True))
        ]
        total = f"step {self.step_seconds:.4g} s, mean bubble {self.mean_bubble:.1%}".replace("%", " %")
        return "\n".join([head, *lines, total])


def simulate_schedule(
    schedule: Schedule,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    overlaps: bool = True,
) -> Simulation:
    """When every action of `schedule` runs, and what follows from that.

    The costs are those of the stages, whatever the schedule: so the same ones compare schedules with each other.

    Args:
        schedule: any that would run.
        stages: for each stage what it costs.
        transfers: what goes between stages, one way each; `transfers_of` makes those of a value and its gradient.
            Nothing is sent between stages on one device, and no gradient where the schedule has no backward.
        overlaps: transfers run beside computation, on their links. If not, the device that receives spends the time of
            all that an action is sent before it computes, one after the other, as the runtime does.

    Raises:
        ArgumentError: not one cost for each stage, a number that is negative or not finite, a stage that is not there.
        ScheduleError: a schedule that would not run.
    """
    validate(schedule)
    check_costs(stages, transfers, schedule.stages)
    spans = _run(schedule, _seconds(schedule, stages), _ways(schedule, transfers), overlaps)
    ordered = tuple(span for row in spans for span in row)
    return Simulation(schedule, tuple(stages), tuple(transfers), ordered, max(row[-1].end for row in spans if row))


@dataclass(frozen=True, slots=True)
class _Way:
    """From an action to one of the same kind and micro-batch that needs it."""

    user: int  # stage
    link: tuple[int, int] | None  # (from device, to device); None: nothing is sent
    seconds: float


def _run(
    schedule: Schedule,
    seconds: dict[Kind, list[float]],
    ways: dict[Kind, list[list[_Way]]],
    overlaps: bool,
) -> list[list[Span]]:
    """Walks along every row as far as what its actions need has ended, and comes back to it when more has."""
    m, rows = schedule.micro_batches, schedule.rows
    device_of = _device_of(schedule)
    missing = {kind: _counts(found, m) for kind, found in ways.items()}  # by stage and micro-batch: needs not met yet
    ready = {kind: [[0.0] * m for _ in found] for kind, found in ways.items()}  # when the last that was met arrived
    receiving = {kind: [0.0] * len(found) for kind, found in ways.items()}
    if not overlaps:
        for kind, found in ways.items():
            for way in (way for leaving in found for way in leaving):
                receiving[kind][way.user] += way.seconds
    free: defaultdict[tuple[int, int], float] = defaultdict(float)  # when a link has carried all it was given
    now = [0.0] * len(rows)  # of each device: the end of its last action
    spans: list[list[Span]] = [[] for _ in rows]

    moving = list(range(len(rows)))
    while moving:  # until all have ended: the schedule is validated
        d = moving.pop()
        while len(spans[d]) < len(rows[d]):
            action = rows[d][len(spans[d])]
            kind, j, i = action.kind, action.stage, action.micro_batch
            start, copying, leaving = now[d], 0.0, []
            if kind in ways:
                if missing[kind][j][i]:
                    break
                start, copying, leaving = max(start, ready[kind][j][i]), receiving[kind][j], ways[kind][j]
            end = now[d] = start + copying + seconds[kind][j]
            spans[d].append(Span(action, d, start, end, copying))
            for way in leaving:
                arrival = end
                if overlaps and way.link is not None:
                    arrival = free[way.link] = max(end, free[way.link]) + way.seconds
                ready[kind][way.user][i] = max(ready[kind][way.user][i], arrival)
                missing[kind][way.user][i] -= 1
                if not missing[kind][way.user][i] and device_of[way.user] != d:
                    moving.append(device_of[way.user])
    return spans


def _ways(schedule: Schedule, transfers: Sequence[Transfer]) -> dict[Kind, list[list[_Way]]]:
    """For F and B, for each stage: who needs it. Between neighbours also where nothing is sent."""
    device_of = _device_of(schedule)
    ways: dict[Kind, list[list[_Way]]] = {kind: [[] for _ in device_of] for kind in NEIGHBOUR}
    for kind, step in NEIGHBOUR.items():
        for user in range(schedule.stages):
            if user + step in range(schedule.stages):
                ways[kind][user + step].append(_Way(user, None, 0.0))
    for transfer in transfers:
        link = device_of[transfer.source], device_of[transfer.target]
        kind = Kind.BACKWARD if transfer.is_gradient else Kind.FORWARD
        is_sent = link[0] != link[1]
        ways[kind][transfer.source].append(
            _Way(transfer.target, link if is_sent else None, float(transfer.seconds) if is_sent else 0.0)
        )
    return ways


def _counts(ways: list[list[_Way]], m: int) -> list[list[int]]:
    """For each stage and micro-batch how many ways lead there."""
    counts = [0] * len(ways)
    for way in (way for leaving in ways for way in leaving):
        counts[way.user] += 1
    return [[count] * m for count in counts]


def _seconds(schedule: Schedule, stages: Sequence[StageCost]) -> dict[Kind, list[float]]:
    """For each kind of action, for each stage: how long it takes."""
    split = {action.stage for row in schedule.rows for action in row if action.kind is Kind.WEIGHT}
    weight = [float(s.backward / 2 if s.weight is None else s.weight) for s in stages]
    return {
        Kind.FORWARD: [float(s.forward) for s in stages],
        Kind.RECOMPUTE: [float(s.forward if s.recompute is None else s.recompute) for s in stages],
        Kind.BACKWARD: [float(s.backward) - (weight[j] if j in split else 0.0) for j, s in enumerate(stages)],
        Kind.WEIGHT: weight,
        Kind.UPDATE: [0.0] * len(stages),
    }


def _device_of(schedule: Schedule) -> list[int]:
    """For each stage its device."""
    found = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    return [found[j] for j in range(schedule.stages)]
