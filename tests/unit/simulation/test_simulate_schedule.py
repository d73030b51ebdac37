"""Simulated times, bytes and reductions against closed forms and a slow world, and a drawing as a person would make."""

from collections import deque
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.models import BY_NAME
from helpers.schedule_cases import any_case
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
import fxpipe.simulation
import fxpipe.simulation.costs
from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.rewriting.program import PIPE_INPUT
from fxpipe.scheduling import Action, ActionKind, Schedule, make_schedule, parse_schedule
from fxpipe.simulation import (
    HostCost,
    MemoryTimeline,
    Simulation,
    Span,
    StageCost,
    Transfer,
    simulate_schedule,
    transfers_of,
)

SIZES = list(product(range(1, 7), range(1, 9)))
TRAINING = ["gpipe", "1f1b"]
COST = StageCost(forward=1, backward=2)


def simulate(name: str, n: int, m: int, checkpoint: str = "never", **options: object) -> Simulation:
    """Every forward 1 s, every backward 2 s, unless said otherwise."""
    stages = options.pop("stages", [COST] * n)
    placement = options.pop("placement", None)
    return simulate_schedule(make_schedule(name, n, m, checkpoint, placement), stages, **options)


def span(simulation: Simulation, text: str) -> Span:
    return next(s for s in simulation.spans if s.action == Action.parse(text))


def starts(simulation: Simulation, texts: str) -> list[float]:
    return [span(simulation, text).start for text in texts.split()]


# Time: closed forms


@pytest.mark.parametrize("name", TRAINING)
def test_bubble_is_n_minus_1_of_m_plus_n_minus_1(name):
    for n, m in SIZES:
        simulation = simulate(name, n, m)
        assert simulation.step_seconds == 3 * (m + n - 1)
        assert simulation.busy == (3.0 * m,) * n
        assert simulation.bubble == pytest.approx([(n - 1) / (m + n - 1)] * n)
        assert simulation.mean_bubble == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize("name", TRAINING)
def test_recompute_seconds_are_their_own(name):
    longer = [StageCost(1, 2, recompute=3)]
    assert simulate(name, 1, 4, "always", stages=longer).step_seconds == 4 * (1 + 3 + 2)
    assert simulate(name, 1, 4, "never", stages=longer).step_seconds == 4 * (1 + 2)


# Sending: closed forms


def test_sending_takes_its_time_both_ways():
    ways = [Transfer(0, 1, 8, 0.5), Transfer(1, 0, 8, 0.75), Transfer(1, 2, 8, 0.25), Transfer(2, 1, 8, 0.125)]
    simulation = simulate("gpipe", 3, 1, transfers=ways)
    assert starts(simulation, "0F0 1F0 2F0 2B0 1B0 0B0") == [
        0.0,
        1.0 + 0.5,
        1.0 + 0.5 + 1.0 + 0.25,
        3.75,
        3.75 + 2.0 + 0.125,
        3.75 + 2.0 + 0.125 + 2.0 + 0.75,
    ]


def test_nothing_is_sent_within_a_device():
    schedule = parse_schedule("0F0 1F0 1B0 0B0")
    for overlaps in (True, False):
        found = simulate_schedule(
            schedule, [COST] * 2, transfers_of(0, [1], 8, seconds=lambda *_: 9), overlaps=overlaps
        )
        assert found.step_seconds == 6
        assert found.sent == {}


def test_a_link_carries_one_transfer_at_a_time():
    for m in range(1, 9):
        slow = [Transfer(0, 1, 8, 5.0)]
        assert simulate("inference", 2, m, transfers=slow).step_seconds == 1 + 5 * m + 1
        assert simulate("inference", 2, m, transfers=[Transfer(0, 1, 8, 1.0)] * 5).step_seconds == 1 + 5 * m + 1
    both_ways = simulate("gpipe", 2, 1, transfers=[Transfer(0, 1, 8, 1.0), Transfer(1, 0, 8, 1.0)])
    assert both_ways.step_seconds == 1 + 1 + 1 + 2 + 1 + 2


def test_bytes_of_each_link():
    ways = (*transfers_of(0, [1, 2, 3], 10), Transfer(1, 2, 3), Transfer(2, 1, 4))
    four = simulate("1f1b", 4, 5, transfers=ways)
    assert four.sent == {(0, 1): 50, (0, 2): 50, (0, 3): 50, (1, 0): 50, (1, 2): 15, (2, 1): 70, (3, 2): 50}
    loop = simulate("1f1b", 4, 5, transfers=ways, placement=(0, 1, 0, 1))
    assert loop.sent == {(0, 1): 50 + 50 + 70, (1, 0): 50 + 50 + 15}
    assert simulate("inference", 4, 5, transfers=ways).sent == {(0, 1): 50, (0, 2): 50, (0, 3): 50, (1, 2): 15}


# Against a world of its own, in which time passes


class World:
    """Devices and links, one instant after another, and lists of what has arrived: slow, and nothing worked out."""

    def __init__(self, schedule: Schedule, stages: list[StageCost], transfers: list[Transfer], overlaps: bool):
        self.schedule, self.stages, self.transfers, self.overlaps = schedule, stages, transfers, overlaps
        self.home = {a.stage: d for d, row in enumerate(schedule.rows) for a in row}
        self.split = {a[1:] for row in schedule.rows for a in row if a.kind is ActionKind.WEIGHT}
        self.waiting = [deque(row) for row in schedule.rows]
        self.running: dict[int, tuple[Action, float, float]] = {}  # by device: action, start, end
        self.queues: dict[tuple[int, int], deque[tuple[int, int]]] = {}  # by link: (number of the transfer, i)
        self.carrying: dict[tuple[int, int], tuple[int, int, float]] = {}
        self.arrived: set[tuple[int, int]] = set()
        self.ended_modules: set[Action] = set()
        self.spans: dict[Action, tuple[float, float]] = {}
        self.now = 0.0

    def run(self) -> None:
        while any(self.waiting) or self.running:
            while self._change():
                pass
            times = [end for *_, end in self.running.values()] + [end for *_, end in self.carrying.values()]
            if not times:
                break
            self.now = min(times)
        assert not any(self.waiting), "nothing moves any more"

    def _change(self) -> bool:
        for d, (action, start, end) in list(self.running.items()):
            if end == self.now:
                del self.running[d]
                self.ended_modules.add(action)
                self.spans[action] = start, end
                self._hand_over(action)
                return True
        for link, (k, i, end) in list(self.carrying.items()):
            if end == self.now:
                del self.carrying[link]
                self.arrived.add((k, i))
                return True
        for link, queue in self.queues.items():
            if queue and link not in self.carrying:
                k, i = queue.popleft()
                self.carrying[link] = k, i, self.now + self.transfers[k].seconds
                return True
        for d, row in enumerate(self.waiting):
            if row and d not in self.running and self._can_start(row[0]):
                action = row.popleft()
                self.running[d] = action, self.now, self.now + self._copies(action) + self._takes(action)
                return True
        return False

    def _hand_over(self, action: Action) -> None:
        for k, transfer in enumerate(self.transfers):
            if transfer.source == action.stage and self._kind(transfer) is action.kind:
                link = self.home[transfer.source], self.home[transfer.target]
                if link[0] == link[1] or not self.overlaps:
                    self.arrived.add((k, action.micro_batch))
                else:
                    self.queues.setdefault(link, deque()).append((k, action.micro_batch))

    def _can_start(self, action: Action) -> bool:
        j, i = action.stage, action.micro_batch
        if (
            action.kind is ActionKind.FORWARD
            and j > 0
            and Action(ActionKind.FORWARD, j - 1, i) not in self.ended_modules
        ):
            return False
        last = self.schedule.stages - 1
        if (
            action.kind is ActionKind.BACKWARD
            and j < last
            and Action(ActionKind.BACKWARD, j + 1, i) not in self.ended_modules
        ):
            return False
        return all((k, i) in self.arrived for k in self._incoming(action))

    def _incoming(self, action: Action) -> list[int]:
        return [k for k, t in enumerate(self.transfers) if t.target == action.stage and self._kind(t) is action.kind]

    def _kind(self, transfer: Transfer) -> ActionKind:
        return ActionKind.FORWARD if transfer.source < transfer.target else ActionKind.BACKWARD

    def _copies(self, action: Action) -> float:
        found = [self.transfers[k] for k in self._incoming(action)]
        return 0 if self.overlaps else sum(t.seconds for t in found if self.home[t.source] != self.home[t.target])

    def _takes(self, action: Action) -> float:
        cost = self.stages[action.stage]
        weight = cost.backward / 2 if cost.weight is None else cost.weight
        return {
            ActionKind.FORWARD: cost.forward,
            ActionKind.RECOMPUTE: cost.forward if cost.recompute is None else cost.recompute,
            ActionKind.BACKWARD: cost.backward - (weight if action[1:] in self.split else 0),
            ActionKind.WEIGHT: weight,
            ActionKind.UPDATE: 0,
        }[action.kind]

    def bytes_at(self, time: float, device: int) -> float:
        """In use, at a time at which nothing begins or ends."""
        total = 0.0
        for j, cost in enumerate(self.stages):
            if self.home[j] == device:
                total += cost.static_bytes
                total += sum(self._held(j, i, time) for i in range(self.schedule.micro_batches))
        active = [a for a, (start, end) in self.spans.items() if start < time < end and self.home[a.stage] == device]
        return total + sum(self.stages[a.stage].working_bytes for a in active)

    def _held(self, j: int, i: int, time: float) -> float:
        begin, end = self.spans[Action(ActionKind.FORWARD, j, i)]
        saves = begin
        for kind in (ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.WEIGHT):
            if (found := self.spans.get(Action(kind, j, i))) is not None:
                end = found[1]
                saves = found[0] if kind is ActionKind.RECOMPUTE else saves
        trains = Action(ActionKind.BACKWARD, j, i) in self.spans
        cost = self.stages[j]
        return (cost.input_bytes + cost.portal_bytes if begin < time < end else 0) + (
            cost.saved_bytes if trains and saves < time < end else 0
        )


def at(memory: MemoryTimeline, time: float) -> float:
    return [parts.total for start, parts in memory.steps if start <= time][-1]


@settings(max_examples=300, deadline=None)
@given(any_case())
def test_every_action_runs_when_it_does_in_a_slow_world(case):
    schedule, stages, transfers, overlaps = case
    world = World(*case)
    world.run()
    simulation = simulate_schedule(schedule, stages, transfers, overlaps=overlaps)
    assert [s.action for s in simulation.spans] == [action for row in schedule.rows for action in row]
    assert {s.action: (s.start, s.end) for s in simulation.spans} == world.spans
    assert all(s.device == world.home[s.action.stage] for s in simulation.spans)
    assert simulation.step_seconds == max(end for _, end in world.spans.values())
    assert all(0 <= bubble <= 1 for bubble in simulation.bubble)
    assert len({len(line.partition("|  ")[0]) for line in str(simulation).splitlines() if "|  " in line}) == 1


@settings(max_examples=150, deadline=None)
@given(any_case())
def test_memory_is_what_is_held_in_a_slow_world(case):
    """All times are whole numbers, so that nothing begins or ends at the halves."""
    schedule, stages, transfers, overlaps = case
    world = World(*case)
    world.run()
    memory = simulate_schedule(schedule, stages, transfers, overlaps=overlaps).memory
    for d, found in enumerate(memory):
        times = [time for time, _ in found.steps]
        assert times == sorted(times)
        sizes = {k: world.bytes_at(k + 0.5, d) for k in range(int(world.now) + 2)}
        assert {k: at(found, k + 0.5) for k in sizes} == sizes
        assert found.peak >= max(sizes.values())


# Transfers of a value


def test_transfers_of_a_value():
    assert transfers_of(1, [4, 2, 4], 8, seconds=lambda source, target, size: 10 * source + target + size / 100) == (
        Transfer(1, 2, 8, 12.08),
        Transfer(1, 4, 8, 14.08),
        Transfer(2, 1, 8, 21.08),
        Transfer(4, 2, 8, 42.08),
    )
    assert transfers_of(1, [4, 2], 8, returns=False) == (Transfer(1, 2, 8), Transfer(1, 4, 8))
    assert transfers_of(1, [1], 8) == ()


def test_transfers_are_those_of_the_runtime():
    """Of a program with portals: every way that a value or its gradient goes there is one here, and no other."""
    case = BY_NAME["unet"]
    model, args = case.make(), case.inputs(2)[0]
    n = len(fxpipe.trace(model, args, chunks=2).nodes)
    balance = [n // 4] * 3 + [n - n // 4 * 3]
    with fxpipe.pipeline(model, ["cpu"] * 4, 2, example_args=args, balance=balance) as pipe:
        with torch.no_grad():
            pipe(*args)
        assembly = pipe._fxpipe.graphs[0].bound
    wiring = assembly.wiring
    links = [(user, link) for user, row in enumerate(wiring.links) for link in row if link.value.source != PIPE_INPUT]
    assert any(user > link.value.source + 1 for user, link in links)
    want = sorted(pair for user, link in links for pair in ((link.value.source, user), (user, link.gradient_target)))
    have = sorted((t.source, t.target) for (maker, _), users in wiring.users.items() if maker != PIPE_INPUT
                  for t in transfers_of(maker, users, 1))  # fmt: skip
    assert have == want


# Arguments


@pytest.mark.parametrize(
    ("stages", "transfers", "words"),
    [
        ([COST], [], "stages has 1 costs; give 2, one for each stage of the schedule"),
        ([COST] * 3, [], "stages has 3 costs; give 2"),
        ([COST, StageCost(-1.0, 1)], [], r"stages\[1\].forward=-1.0 is no time; give seconds, 0 or more and finite"),
        ([StageCost(1, float("inf")), COST], [], r"stages\[0\].backward=inf is no time"),
        ([StageCost(1, 2, recompute=float("nan")), COST], [], r"stages\[0\].recompute=nan is no time"),
        ([StageCost(1, 1, host=HostCost(forward=-1)), COST], [], r"stages\[0\]\.host\.forward=-1 is no time"),
        ([COST, StageCost(1, 2, saved_bytes=-1)], [], r"stages\[1\].saved_bytes=-1 is no size; give bytes, 0 or more"),
        (
            [COST, StageCost(1, 2, weight=3.0)],
            [],
            r"stages\[1\].weight=3.0 is more than its backward=2, of which it is",
        ),
        ([COST] * 2, [Transfer(0, 2, 1)], r"transfers\[0\].target=2 is no stage; stages are 0 to 1"),
        ([COST] * 2, [Transfer(0, 1, 1), Transfer(1, 1, 1)], r"transfers\[1\] goes from stage 1 to itself"),
        ([COST] * 2, [Transfer(0, 1, -1)], r"transfers\[0\].bytes=-1 is no size"),
        ([COST] * 2, [Transfer(0, 1, 1, float("nan"))], r"transfers\[0\].seconds=nan is no time"),
    ],
)
def test_bad_costs_are_named(stages, transfers, words):
    with pytest.raises(ArgumentError, match=words):
        simulate("gpipe", 2, 2, stages=stages, transfers=transfers)


def test_schedule_that_would_not_run_is_refused():
    rows = ((Action.parse("0B0"), Action.parse("0F0")),)
    with pytest.raises(ScheduleError, match="0B0 stands before 0F0"):
        simulate_schedule(Schedule("mine", 1, 1, rows), [COST])


def test_a_device_that_copies_over_a_shared_way_begins_no_sooner_than_there_is_something_to_copy() -> None:
    """Also where the way has been free for long."""
    schedule = make_schedule("inference", 2, 2)
    ways = [Transfer(0, 1, 8, seconds=1.0, over=("bus",))]
    simulation = simulate_schedule(schedule, [StageCost(2, 0), StageCost(5, 0)], ways, overlaps=False)
    spans = {str(span.action): (span.start, span.end) for span in simulation.spans}
    assert spans == {"0F0": (0, 2), "0F1": (2, 4), "1F0": (2, 8), "1F1": (8, 14)}


def reduced(name: str, n: int, m: int, *reductions: tuple[float, int], **options: object) -> Simulation:
    stages = [replace(COST, reduction=seconds, reduction_buckets=buckets) for seconds, buckets in reductions]
    return simulate_schedule(make_schedule(name, n, m, **options), stages)


def test_one_bucket_is_reduced_when_the_last_backward_has_ended():
    simulation = reduced("1f1b", 1, 3, (5.0, 1))
    assert simulation.step_seconds == 9 + 5
    assert simulation.exposed_reduction_seconds == 5
    assert simulation.reduction_seconds == 5


def test_buckets_are_reduced_beside_the_last_backward():
    quick = reduced("1f1b", 1, 1, (1.0, 4))  # backward 1-3 s: full at 1.5, 2, 2.5, 3, each takes 0.25 s
    assert (quick.reductions[0].start, quick.step_seconds) == (1.5, 3.25)
    slow = reduced("1f1b", 1, 1, (8.0, 4))
    assert (slow.reductions[0].start, slow.step_seconds) == (1.5, 9.5)


def test_stages_on_one_device_reduce_one_after_the_other():
    simulation = reduced("1f1b", 2, 1, (3.0, 1), (6.0, 1), placement=(0, 0))
    first, second = sorted(simulation.reductions, key=lambda one: one.start)
    assert (first.stage, first.start, first.end) == (1, 4, 10)
    assert (second.stage, second.start, second.end) == (0, 10, 13)
    legs = [(leg.kind, leg.start, leg.end) for leg in simulation.legs]
    assert legs == [("F", 0, 1), ("F", 1, 2), ("B", 2, 4), ("reducing", 4, 10), ("reducing", 10, 13)]


@settings(max_examples=80, deadline=None)
@given(any_case(), st.floats(0, 50), st.integers(1, 9))
def test_a_step_is_longer_by_what_cannot_be_beside_its_backward(case, seconds, buckets):
    schedule, stages, transfers, overlaps = case
    reducing = [replace(one, reduction=seconds, reduction_buckets=buckets) for one in stages]
    plain = simulate_schedule(schedule, stages, transfers, overlaps=overlaps)
    simulation = simulate_schedule(schedule, reducing, transfers, overlaps=overlaps)
    assert simulation.spans == plain.spans
    for one in simulation.reductions:
        span = [own for own in simulation.spans if own.device == one.device][one.place]
        assert one.start >= span.start + span.receiving
        assert one.end >= span.end + seconds / buckets - 1e-9  # the last bucket is full when the action has ended
        assert one.end - one.start >= seconds - 1e-9
    most = len(stages) * seconds
    assert 0 <= simulation.exposed_reduction_seconds <= most + 1e-9
    assert simulation.legs[-1].end == simulation.step_seconds
    assert simulation.legs[0].start == 0
    for before, after in zip(simulation.legs, simulation.legs[1:], strict=False):
        assert before.end == pytest.approx(after.start)
