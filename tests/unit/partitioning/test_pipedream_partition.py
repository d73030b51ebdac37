"""PipeDream's partition: the least bottleneck against brute force, the paper's configurations, every refusal."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import pytest
from helpers.pipedream_profiles import RESNET_50, VGG_16, ProfiledLayers
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe.partitioning.pipedream
from fxpipe.errors import PartitionError
from fxpipe.partitioning.pipedream import (
    MOST_LAYERS,
    BandwidthLevel,
    StageWorkers,
    bounds_for_replicas,
    group_into_layers,
    pipedream_partition,
)

figures = st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e6))
layers = st.integers(1, 5).flatmap(lambda n: st.tuples(*(st.lists(figures, min_size=n, max_size=n) for _ in range(3))))
rates = st.sampled_from([0.25, 1.0, 3.0, math.inf])


def runs(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut layers into runs of them."""
    places = range(first + 1, last + 1)
    for count in range(len(places) + 1):
        for cuts in combinations(places, count):
            yield [(one, two - 1) for one, two in pairwise([first, *cuts, last + 1])]


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each part at least one."""
    yield from (one for one in product(range(1, total + 1), repeat=parts) if sum(one) == total)


def least_seconds(profile: ProfiledLayers, levels: Sequence[BandwidthLevel], first: int, last: int) -> float:
    """By trying all pipelines on all components of the last level, each stage with the best ones within."""
    if not levels:
        return max(0.0, math.fsum(profile.times[first : last + 1]))
    *below, level = levels
    best = math.inf
    for stages in runs(first, last):
        for replicas in shares(level.workers, len(stages)):
            slowest = 0.0
            for (i, j), m in zip(stages, replicas, strict=True):
                weights = math.fsum(profile.weight_bytes[i : j + 1])
                inner = least_seconds(profile, below, i, j)
                slowest = max(slowest, max(inner, 2 * (m - 1) * weights / level.bytes_per_second) / m)
                if i > first:
                    slowest = max(slowest, 2 * profile.activation_bytes[i - 1] / level.bytes_per_second)
            best = min(best, slowest)
    return best


@settings(max_examples=80, deadline=None)
@given(layers, st.lists(st.tuples(st.integers(1, 3), rates), min_size=1, max_size=2))
def test_bottleneck_is_least_of_all_stages_replicas_and_levels(profile, figures_of_levels):
    profile, levels = ProfiledLayers(*profile), [BandwidthLevel(*one) for one in figures_of_levels]
    partition = pipedream_partition(*profile, levels)
    expected = least_seconds(profile, levels, 0, len(profile.times) - 1)
    assert partition.seconds == pytest.approx(expected, rel=1e-9, abs=1e-300)
    ends = [(stage.start, stage.stop) for stage in partition.stages]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == len(profile.times)
    assert sum(partition.replicas) == math.prod(level.workers for level in levels)


def test_hundreds_of_workers_take_no_longer_than_a_few(monkeypatch):
    """The stages that are looked at are counted: for each number of workers about as many."""
    looked_at = 0
    counts = fxpipe.partitioning.pipedream._LevelTable._counts

    def counted(*args):
        nonlocal looked_at
        looked_at += 1
        return counts(*args)

    monkeypatch.setattr(fxpipe.partitioning.pipedream._LevelTable, "_counts", counted)
    numbers = {}
    for workers in (32, 512):
        looked_at = 0
        partition = pipedream_partition(*VGG_16, [BandwidthLevel(workers, 1e9)])
        assert sum(partition.replicas) == workers
        assert partition.seconds >= sum(VGG_16.times) / workers
        numbers[workers] = looked_at
    assert numbers[512] < 4 * numbers[32]


def test_a_stage_begins_where_it_has_to():
    level = BandwidthLevel(4, math.inf)
    assert str(pipedream_partition([1.0] * 4, [0.0] * 4, [0.0] * 4, [level])) == "4"
    partition = pipedream_partition([1.0] * 4, [0.0] * 4, [0.0] * 4, [level], required=[1])
    assert str(partition) == "1-3"  # not 1-1-1-1, which takes as long
    assert partition.stages[1].start == 1
    with pytest.raises(PartitionError, match=r"begin with the layers \[1\], and cannot on 1 workers"):
        pipedream_partition([1.0] * 4, [0.0] * 4, [0.0] * 4, [BandwidthLevel(1, 1.0)], required=[1])


# -- The paper's configurations, with the profiles that its authors have published -------------------------------------
#
# The paper reports 15-1 for VGG-16 and 16, data parallelism, for ResNet-50, on 4 nodes of 4 V100 (10 Gb/s) and on 2
# nodes of 8 (25 Gb/s), from profiles on those machines. What its equations make of the profiles that were published:
#
# - VGG-16 is 15-1 on 16 workers of one level, at either bandwidth. It is no partition of nodes of 4 or 8: by these
#   equations a node is given to one stage, or has a pipeline of its own.
# - ResNet-50 is data parallel on 2 nodes of 8. On 16 workers, or 4 nodes of 4, at 10 Gb/s it is not: to reduce all
#   gradients once for a mini-batch takes 153 ms of the network, a mini-batch 28 ms of 16 devices. The authors' program
#   reckons with 4 (m - 1) / m^2 of the bytes where the equation has 2 (m - 1) / m, and comes to 16 there.

FAST, SLOW = 25e9 / 8, 10e9 / 8  # bytes per second between nodes


@pytest.mark.parametrize("rate", [FAST, SLOW])
def test_vgg_16_has_15_replicas_of_its_convolutions_and_one_of_its_linear_layers(rate):
    partition = pipedream_partition(*VGG_16, [BandwidthLevel(16, rate)])
    assert str(partition) == "15-1"
    data_parallel = max(sum(VGG_16.times), 2 * 15 * sum(VGG_16.weight_bytes) / rate) / 16
    assert data_parallel > 7 * partition.seconds
    linear = len(VGG_16.times) - 3
    assert partition.stages[1].start <= linear  # with what is around them


def test_resnet_50_is_data_parallel_over_nodes_of_eight():
    assert str(pipedream_partition(*RESNET_50, [BandwidthLevel(8, 12 * 20e9), BandwidthLevel(2, FAST)])) == "16"


def test_a_slow_network_keeps_the_weights_of_vgg_16_in_one_node():
    partition = pipedream_partition(*VGG_16, [BandwidthLevel(4, 12e9), BandwidthLevel(4, SLOW)])
    assert partition.replicas[0] == 12
    first = partition.stages[0]
    assert sum(VGG_16.weight_bytes[first.stop :]) > 0.85 * sum(VGG_16.weight_bytes)


@settings(max_examples=150, deadline=None)
@given(layers, st.lists(st.tuples(st.integers(1, 3), rates, rates), min_size=1, max_size=4), st.data())
def test_bounds_for_replicas_are_best_of_all_bounds(profile, ways, data):
    profile = ProfiledLayers(*profile)
    count = len(profile.times)
    forbidden = data.draw(st.sets(st.integers(1, max(1, count - 1))))
    required = data.draw(st.sets(st.integers(1, max(1, count - 1)), max_size=1)) - forbidden
    workers = [StageWorkers(replicas, 0, reduces, receives) for replicas, reduces, receives in ways]

    def slowest(stages: list[tuple[int, int]]) -> float:
        seconds = [0.0]
        for k, (i, j) in enumerate(stages):
            own = workers[k]
            weights = math.fsum(profile.weight_bytes[i : j + 1])
            work = math.fsum(profile.times[i : j + 1])
            seconds.append(max(work, 2 * (own.replicas - 1) * weights / own.reduces) / own.replicas)
            seconds.append(2 * profile.activation_bytes[i - 1] / own.receives if k else 0.0)
        return max(seconds)

    def is_possible(starts: set[int]) -> bool:
        return not starts & forbidden and {place for place in required if place < count} <= starts

    every = [stages for stages in runs(0, count - 1) if len(stages) == len(workers)]
    possible = [stages for stages in every if is_possible({i for i, _ in stages} - {0})]
    answer = bounds_for_replicas(
        [profile.times], *profile[1:], workers, forbidden=sorted(forbidden), required=sorted(required)
    )
    if not possible:
        assert answer is None
        return
    assert answer is not None
    starts, seconds = answer
    assert seconds == pytest.approx(min(map(slowest, possible)), rel=1e-9, abs=1e-300)
    assert is_possible({*starts} - {0})
    assert len(starts) == len(workers)
    assert starts[0] == 0


def test_bounds_follow_the_kind_of_each_device():
    fast_and_slow = [[1.0] * 6, [2.0] * 6]
    starts, seconds = bounds_for_replicas(
        fast_and_slow, [0.0] * 6, [0.0] * 6, [StageWorkers(kind=1), StageWorkers(kind=0)]
    ) or ((), 0.0)
    assert (starts, seconds) == ((0, 2), 4.0)


def test_layers_are_grouped_where_cuts_may_stand_and_no_more_than_needed():
    assert group_into_layers([1.0] * 5, [0.0] * 5, forbidden=[2]) == (0, 1, 3, 4)
    count = 3 * MOST_LAYERS
    starts = group_into_layers([1.0] * count, [1.0] * count, forbidden=[5], required=[7])
    assert len(starts) == MOST_LAYERS
    assert 5 not in starts
    assert 7 in starts
    assert max(two - one for one, two in pairwise([*starts, count])) <= 6  # as even as can be
