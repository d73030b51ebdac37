"""When reductions of gradients start and end, and what of them a step is longer by: closed forms."""

from dataclasses import replace

import pytest
from helpers.schedule_cases import any_case
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.scheduling import make_schedule
from fxpipe.simulation import Simulation, StageCost, simulate_schedule

COST = StageCost(forward=1, backward=2)


def simulate(name: str, n: int, m: int, *reductions: tuple[float, int], **options: object) -> Simulation:
    stages = [replace(COST, reduction=seconds, reduction_buckets=buckets) for seconds, buckets in reductions]
    return simulate_schedule(make_schedule(name, n, m, **options), stages)


def test_one_bucket_is_reduced_when_the_last_backward_has_ended():
    simulation = simulate("1f1b", 1, 3, (5.0, 1))
    assert simulation.step_seconds == 9 + 5
    assert simulation.exposed_reduction_seconds == 5
    assert simulation.reduction_seconds == 5


def test_buckets_are_reduced_beside_the_last_backward():
    quick = simulate("1f1b", 1, 1, (1.0, 4))  # backward 1-3 s: full at 1.5, 2, 2.5, 3, each takes 0.25 s
    assert (quick.reductions[0].start, quick.step_seconds) == (1.5, 3.25)
    slow = simulate("1f1b", 1, 1, (8.0, 4))
    assert (slow.reductions[0].start, slow.step_seconds) == (1.5, 9.5)


def test_stages_on_one_device_reduce_one_after_the_other():
    simulation = simulate("1f1b", 2, 1, (3.0, 1), (6.0, 1), placement=(0, 0))
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
