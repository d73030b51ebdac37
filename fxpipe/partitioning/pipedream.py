"""PipeDream's partition: stages and the number of their replicas (Narayanan et al., SOSP 2019, section 3.1).

Devices are workers of a hierarchy of levels: GPUs in a node, nodes in a cluster. Level k has m_k components of level
k - 1, with a bandwidth B_k between them. Replicas of a stage take mini-batches in turn and all-reduce their gradients.
So a stage of layers i to j on m components of level k takes for each mini-batch

    T_k(i, j, m) = max(A_(k-1)(i, j, m_(k-1)), 2 (m - 1) |w_i ... w_j| / B_k) / m

The best pipeline of these layers on m components is one stage, or a pipeline on m - m' components followed by a stage:

    A_k(i, j, m) = min(T_k(i, j, m), min over s, m' of max(A_k(i, s, m - m'), 2 a_s / B_k, T_k(s + 1, j, m')))

Here A_0(i, j) is the sum of the layers' seconds, forward and backward. All workers are used. A component has one stage
or a pipeline: 15-1, the paper's result for VGG-16 on 4 x 4, needs a single level of 16 workers. With a flush, m
replicas share a mini-batch, with the same result. Memory is not taken into account.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement, pairwise
from typing import TypeVar

from fxpipe.errors import PartitionError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BandwidthLevel:
    """A level of a hierarchy of workers."""

    workers: int  # components of the level below; devices on the lowest level
    bytes_per_second: float  # between any two of them, and to reduce; infinite within one process


@dataclass(frozen=True, slots=True)
class ReplicatedStage:
    """Layers `start` to `stop - 1`, on this number of workers, each of which has all of the layers."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ReplicatedPartition:
    stages: tuple[ReplicatedStage, ...]
    seconds: float  # for each mini-batch, of the slowest stage or boundary

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    def __str__(self) -> str:
        """Formats the partition as the paper does: `15-1`."""
        return "-".join(map(str, self.replicas))


def pipedream_partition(
    times: Sequence[float],  # seconds of each layer for a mini-batch, forward and backward
    activation_bytes: Sequence[float],  # of the output of each layer; the last is ignored
    weight_bytes: Sequence[float],  # of the trained parameters of each layer
    levels: Sequence[BandwidthLevel],  # the lowest first
    *,
    required: Sequence[int] = (),  # layers that must begin a stage
) -> ReplicatedPartition:
    """Finds the stages and replicas that minimize the seconds of the slowest stage or boundary.

        >>> str(pipedream_partition([9.0, 1.0], [0.0, 0.0], [0.0, 9e9], [BandwidthLevel(4, 1e9)]))
        '3-1'

    Raises `PartitionError` if no partition on all workers has a stage that begins with each required layer.
    """
    tables = list[_LevelTable]()
    for level in levels:
        below = tables[-1] if tables else None
        tables.append(_LevelTable(_LayerSums(times, activation_bytes, weight_bytes, required), level, below))
        if len(tables) < len(levels):
            tables[-1].solve()
    answer = tables[-1].fewest_stages()
    if answer is None:
        total = math.prod(level.workers for level in levels)
        raise PartitionError(f"stages have to begin with the layers {sorted(required)}, and cannot on {total} workers")
    return ReplicatedPartition(*answer)


class _LayerSums:
    def __init__(
        self, times: Sequence[float], activations: Sequence[float], weights: Sequence[float], required: Sequence[int]
    ) -> None:
        self.count, self.activations = len(times), activations
        self._seconds = list(accumulate(times, initial=0.0))  # before each layer, and of all layers
        self._weights = list(accumulate(weights, initial=0.0))
        self._cuts = list(accumulate(int(place in required) for place in range(len(times))))  # up to each layer

    def stage_seconds(self, i: int, j: int) -> float:
        """Computes the seconds of layers `i` to `j` on one device; infinite if a stage must begin between them."""
        return math.inf if self._cuts[i] < self._cuts[j] else max(0.0, self._seconds[j + 1] - self._seconds[i])

    def reduction_seconds(self, i: int, j: int, replicas: int, rate: float) -> float:
        return 2 * (replicas - 1) * max(0.0, self._weights[j + 1] - self._weights[i]) / rate

    def boundary_seconds(self, start: int, rate: float) -> float:
        return 2 * self.activations[start - 1] / rate


class _LevelTable:
    """The best pipelines of a level: of each run of layers, on each number of its components.

    The last level needs only the pipeline of all layers on all components. It is found by a bisection of the seconds:
    for a limit, the possible numbers of components of a stage are a range, and the sufficient numbers for the first
    layers are the bits of an integer. So hundreds of workers take no longer than a few.
    """

    def __init__(self, sums: _LayerSums, level: BandwidthLevel, below: _LevelTable | None):
        self.sums, self.level, self.below = sums, level, below
        self.best: dict[tuple[int, int, int], float] = {}  # (first layer, last layer, components) -> seconds
        self.split: dict[tuple[int, int, int], tuple[int, int]] = {}  # -> (last layer before, components of the last)

    def solve(self) -> None:
        for i, j in combinations_with_replacement(range(self.sums.count), 2):
            for m in range(1, self.level.workers + 1):
                self._solve(i, j, m)

    def _solve(self, i: int, j: int, m: int) -> None:
        best, split = self.stage_seconds(i, j, m), None
        for own in range(1, m):
            for s in range(j - 1, i - 1, -1):
                last = self.stage_seconds(s + 1, j, own)
                if last >= best and self.below is None:
                    break  # a stage with more layers takes no less; one that is a pipeline of the level below may
                boundary = self.sums.boundary_seconds(s + 1, self.level.bytes_per_second)
                seconds = max(self.best[i, s, m - own], boundary, last)
                if seconds < best:
                    best, split = seconds, (s, own)
        self.best[i, j, m] = best
        if split is not None:
            self.split[i, j, m] = split

    def stage_seconds(self, i: int, j: int, m: int) -> float:
        reduction = self.sums.reduction_seconds(i, j, m, self.level.bytes_per_second)
        return max(self._inner_seconds(i, j), reduction) / m

    def _inner_seconds(self, i: int, j: int) -> float:
        below = self.below
        return self.sums.stage_seconds(i, j) if below is None else below.best[i, j, below.level.workers]

    def stages(self, i: int, j: int, m: int) -> list[ReplicatedStage]:
        """Lists the stages of the best pipeline, with replicas on all levels."""
        s, own = self.split.get((i, j, m), (i - 1, m))
        return [*(self.stages(i, s, m - own) if s >= i else ()), *self._stages_within(s + 1, j, own)]

    def fewest_stages(self) -> tuple[tuple[ReplicatedStage, ...], float] | None:
        """Returns the best pipeline of this level, of several the shortest, and its seconds; None if there is none."""
        rate = self.level.bytes_per_second

        def slowest(runs: Sequence[tuple[int, int, int]]) -> float:
            stages = (self.stage_seconds(start, stop - 1, own) for start, stop, own in runs)
            boundaries = (self.sums.boundary_seconds(start, rate) for start, _, _ in runs if start)
            return max(*stages, *boundaries, 0.0)

        best = _least_bottleneck(self._fewest_runs, slowest)
        if best is None:
            return None
        runs, seconds = best
        return tuple(one for start, stop, own in runs for one in self._stages_within(start, stop - 1, own)), seconds

    def _fewest_runs(self, limit: float) -> list[tuple[int, int, int]] | None:
        """Lists the fewest stages within the limit, each as (start, stop, components); None if there are none."""
        count, workers = self.sums.count, self.level.workers
        seen = [0] * (count + 1)
        reached = [{0: 1}]  # [stages][layers]: bits of the numbers of components that need this number of stages
        while not reached[-1].get(count, 0) >> workers & 1:
            new = dict[int, int]()
            for start, before in reached[-1].items():
                for stop in range(start + 1, count + 1):
                    if bits := self._extended(before, start, stop, limit) & ~seen[stop]:
                        new[stop] = new.get(stop, 0) | bits
            if not new:
                return None
            for stop, bits in new.items():
                seen[stop] |= bits
            reached.append(new)
        runs, stop, m = list[tuple[int, int, int]](), count, workers
        for starts in reversed(reached[:-1]):
            for start in sorted(start for start in starts if start < stop):
                counts = self._counts(start, stop, limit)
                counts = range(counts.start, min(counts.stop, m + 1))
                if bits := starts[start] & ((1 << len(counts)) - 1 << m + 1 - counts.stop):
                    runs.insert(0, (start, stop, m - bits.bit_length() + 1))
                    stop, m = start, bits.bit_length() - 1
                    break
        return runs

    def _extended(self, bits: int, start: int, stop: int, limit: float) -> int:
        """Adds a stage to the reached numbers of components; 0 if no number is within the limit."""
        counts, width = self._counts(start, stop, limit), 1
        if not counts:
            return 0
        while width < len(counts):
            step = min(width, len(counts) - width)
            bits |= bits << step
            width += step
        return bits << counts[0] & (2 << self.level.workers) - 1

    def _counts(self, start: int, stop: int, limit: float) -> range:
        """Returns the numbers of components for which a stage and the boundary before it are within the limit."""
        counts, rate, j = range(1, self.level.workers + 1), self.level.bytes_per_second, stop - 1
        if start and self.sums.boundary_seconds(start, rate) > limit:
            return counts[:0]
        inner = self._inner_seconds(start, j)
        first = bisect.bisect_left(counts, True, key=lambda m: inner / m <= limit)
        end = bisect.bisect_left(counts, True, key=lambda m: self.sums.reduction_seconds(start, j, m, rate) / m > limit)
        return counts[first:end]

    def _stages_within(self, i: int, j: int, m: int) -> list[ReplicatedStage]:
        """Lists the stages in one stage of this level, which may be a pipeline on the level below."""
        if self.below is None:
            return [ReplicatedStage(i, j + 1, m)]
        stages = self.below.stages(i, j, self.below.level.workers)
        return [ReplicatedStage(stage.start, stage.stop, stage.replicas * m) for stage in stages]


def _least_bottleneck(within: Callable[[float], T | None], seconds: Callable[[T], float]) -> tuple[T, float] | None:
    """Returns the answer with the fastest bottleneck, and its seconds; None if there is none."""
    # `within` returns an answer within a limit or None, `seconds` the seconds of the bottleneck of an answer.
    best, least = within(sys.float_info.max), 0.0
    if best is None:
        return None
    most = seconds(best)
    while most > 0 and (better := within(math.nextafter(most, 0.0))) is not None:
        best, most = better, seconds(better)
        middle = (least + most) / 2
        if (better := within(middle)) is not None:
            best, most = better, seconds(better)
        else:
            least = middle
    return best, most


@dataclass(frozen=True, slots=True)
class StageWorkers:
    replicas: int = 1
    kind: int = 0
    reduces: float = math.inf  # bytes per second, to reduce gradients
    receives: float = math.inf  # bytes per second, from the stage before


def bounds_for_replicas(
    times: Sequence[Sequence[float]],
    activation_bytes: Sequence[float],
    weight_bytes: Sequence[float],
    workers: Sequence[StageWorkers],
    *,
    forbidden: Sequence[int] = (),
    required: Sequence[int] = (),
) -> tuple[tuple[int, ...], float] | None:
    """Finds the first layers of stages with the given replicas that minimize the slowest stage or boundary.

        >>> bounds_for_replicas([[4.0, 2.0, 2.0]], [0.0] * 3, [0.0] * 3, [StageWorkers(3), StageWorkers(1)])
        ((0, 2), 2.0)

    Returns the first layer of each stage, and the seconds of the slowest stage or boundary; None if there are none.
    `times` are for each kind of device; `forbidden` and `required` layers must not, or must, begin a stage.
    """
    sums = [_LayerSums(row, activation_bytes, weight_bytes, required) for row in times]
    count, closed = sums[0].count, frozenset(forbidden)

    def stage_seconds(own: StageWorkers, start: int, stop: int) -> float:
        reduction = sums[own.kind].reduction_seconds(start, stop - 1, own.replicas, own.reduces)
        return max(sums[own.kind].stage_seconds(start, stop - 1), reduction) / own.replicas

    def slowest(starts: Sequence[int]) -> float:
        stages = map(stage_seconds, workers, starts, [*starts[1:], count])
        rates = [own.receives for own in workers]
        boundaries = (sums[0].boundary_seconds(*one) for one in zip(starts[1:], rates[1:], strict=True))
        return max(*stages, *boundaries, 0.0)

    def within(limit: float) -> tuple[int, ...] | None:
        """Finds a cut whose stages and boundaries are within the limit."""
        # For each end of a stage its latest possible start is the best, since a stage with fewer layers takes less.
        begins = [0]  # possible starts of a stage, ascending
        befores: list[dict[int, int]] = []  # for each stage: from the next stage's start to this stage's start
        for own, following in zip(workers, [*workers[1:], None], strict=True):
            ends: dict[int, int] = {}
            place = -1
            for stop in (count,) if following is None else (stop for stop in range(1, count) if stop not in closed):
                while place + 1 < len(begins) and begins[place + 1] < stop:
                    place += 1
                if place < 0 or (following and sums[0].boundary_seconds(stop, following.receives) > limit):
                    continue
                seconds = stage_seconds(own, begins[place], stop)
                if seconds <= limit and not math.isinf(seconds):
                    ends[stop] = begins[place]
            befores.append(ends)
            begins = list(ends)
        if count not in befores[-1]:
            return None
        starts = [count]
        for ends in reversed(befores):
            starts.append(ends[starts[-1]])
        return tuple(reversed(starts[1:]))

    return _least_bottleneck(within, slowest)


MOST_LAYERS = 48  # for which replication is decided; lower levels take cubic time


def group_into_layers(
    times: Sequence[float], weight_bytes: Sequence[float], forbidden: Sequence[int], required: Sequence[int] = ()
) -> tuple[int, ...]:
    """Groups nodes into at most `MOST_LAYERS` layers, merging the lightest neighbors; returns their first nodes."""
    # Layers never begin at forbidden cuts, and always at required cuts.
    closed, needed = frozenset(forbidden), frozenset(required)
    starts = [place for place in range(len(times)) if place == 0 or place not in closed]
    shares = [0.0] * len(times)
    for figures in (times, weight_bytes):
        total = math.fsum(figures) or 1.0
        shares = [share + figure / total for share, figure in zip(shares, figures, strict=True)]
    sums = [math.fsum(shares[start:stop]) for start, stop in pairwise([*starts, len(times)])]
    while len(starts) > max(MOST_LAYERS, len(needed) + 1):
        second = min(
            (place for place in range(1, len(starts)) if starts[place] not in needed),
            key=lambda place: sums[place - 1] + sums[place],
        )
        sums[second - 1] += sums.pop(second)
        starts.pop(second)
    return tuple(starts)
