"""Search for cuts whose stages are within a limit of seconds and within memory; `optimal.py` explains the algorithm."""

from __future__ import annotations

import copy
import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from fxpipe.partitioning.block import least_integer
from fxpipe.partitioning.chain import Chain, StageSite, recompute_choices
from fxpipe.partitioning.intervals import StageClock, StageClocks, StageMemory, bits_below, bits_of, places_of

FIRST_STEP = 64  # the first step above the lower bound is the bound divided by this
NEAR_FRACTION = 1024  # values between two limits are listed if they differ by at most the lower one divided by this

StageStarts = list[int]  # for each stage, its possible starts, as bits


class CutSearch:
    """Feasibility tests of cuts of a chain on its sites."""

    def __init__(self, chain: Chain, sites: Sequence[StageSite]) -> None:
        self._sites = sites
        self._n = len(chain)
        self._places = [place for place in range(1, self._n) if place not in chain.forbidden_cuts] + [self._n]
        self._all = bits_of(self._places)
        self._seconds = StageClocks(chain, sites, self._places)
        self._bytes = StageMemory(chain.of_memory, sites) if any(site.memory is not None for site in sites) else None
        self._bounded = bool(chain.first_stages or chain.last_stages)
        self._until = _first_barred_places(chain, len(sites))
        self._work = [self._seconds.work(j, site.must_recompute) for j, site in enumerate(sites)]
        self._set_spare(0.0)

    def with_spare(self, spare: float) -> CutSearch:
        """Returns a copy of the search in which every limited memory is larger by `spare` bytes."""
        other = copy.copy(self)
        other._set_spare(spare)
        return other

    def _set_spare(self, spare: float) -> None:
        @functools.cache
        def room(site: StageSite, recompute: bool) -> Callable[[int], int] | None:
            """Returns a function from a start to the last end of a stage that fits; to the start if there is none."""
            if self._bytes is None or site.memory is None or site.memory == math.inf:
                return None
            most, memory = self._bytes.exact(site.memory, spare), functools.partial(self._bytes.memory, site, recompute)

            @functools.cache
            def last_end(start: int) -> int:
                ends = range(start + 1, self._n + 1)
                return start + bisect_right(ends, most, key=functools.partial(memory, start))

            return last_end

        self._ways = [  # by stage, to recompute or not, the preferred one first
            {way: (self._seconds.clock(j, way), room(site, way)) for way in recompute_choices(site)}
            for j, site in enumerate(self._sites)
        ]

    def _ends(self, j: int, start: int, limit: int | None) -> tuple[int, int]:
        """Returns the ends of a stage, as bits, within memory and the limit, and those that need recomputation."""
        last, until, ends = start, self._until[j][start], [0, 0]
        for again, (clock, room) in self._ways[j].items():
            before = last
            if last < until:
                last = max(last, until if room is None else min(until, room(start)))
            if last > before:
                in_time = -1 if limit is None else clock.ends(start, limit)
                ends[again] = in_time & bits_below(last + 1) & ~bits_below(before + 1)
        return ends[0], ends[1]

    def memory(self, stage: int, start: int, end: int) -> float:
        """Returns the least bytes of a stage, with or without recomputation; requires a limit on some site."""
        assert self._bytes is not None
        site = self._sites[stage]
        return min(self._bytes.memory(site, way, start, end) for way in recompute_choices(site)) / self._bytes.unit

    def least_bottleneck(self) -> int | None:
        """Returns the least feasible limit, in the unit of `seconds`; None if no cut fits into memory."""

        def computes(limit: int) -> bool:  # are stages within the limit if only computation takes time
            place = 0
            for work in self._work:
                furthest = bisect_right(work, work[place] + limit, lo=place) - 1
                count = bisect_right(self._places, furthest)
                place = max(place, self._places[count - 1] if count else 0)
            return place == self._n

        low = least_integer(0, max(work[-1] for work in self._work), computes)
        if self.fits(low):
            return low
        if (self._bytes is not None or self._bounded or len(self._places) < len(self._sites)) and not self.fits():
            return None
        step = max(1, low // FIRST_STEP)
        high = low + step
        while not self.fits(high):
            low, step = high, 2 * step
            high = low + step
        while high - low > max(1, low // NEAR_FRACTION):
            middle = (low + high) // 2
            if self.fits(middle):
                high = middle
            else:
                low = middle
        values = self._values_between(low, high)
        return values[bisect_left(values, True, hi=len(values) - 1, key=self.fits)]

    def fits(self, limit: int | None = None) -> bool:
        """Returns True if a cut fits into memory and is within the limit on seconds; None: no limit."""
        return self._finds_even_cut(limit) or self.reach(limit) is not None

    def cut(self, limit: int | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Returns the starts of the stages, and which of them recompute, for a feasible limit; see (3) and (4)."""
        starts = self.reach(limit)
        assert starts is not None
        fewest = self._fewest(starts, limit)
        place, count = 0, min(fewest[0])
        cut, recompute = [], []
        for j in range(len(self._sites)):
            plain, again = self._ends(j, place, limit)
            options = [(end, False) for end in places_of(plain & fewest[j + 1].get(count, 0))]
            options += [(end, True) for end in places_of(again & fewest[j + 1].get(count - 1, 0))]
            cut.append(place)
            place, again_here = min(options, key=lambda option: self._unevenness(j, cut[-1], *option))
            count -= again_here
            recompute.append(again_here)
        return tuple(cut), tuple(recompute)

    def reach(self, limit: int | None) -> StageStarts | None:
        """Finds the starts of each stage such that all earlier stages are within the limit; None if there is no cut."""
        allowed = self._allowed(limit)
        starts: StageStarts = []
        reached = 1
        for j, (here, following) in enumerate(zip(allowed, [*allowed[1:], 0], strict=True)):
            starts.append(reached & here)
            reached = 0
            for start in places_of(starts[-1] if following else 0):
                plain, again = self._ends(j, start, limit)
                reached |= plain | again
        return starts if starts[-1] else None

    def _allowed(self, limit: int | None) -> StageStarts:
        """Finds the possible starts of each stage by computation alone; exact for the last stage."""

        def may_be_last(start: int) -> bool:  # recomputes only if it must
            if self._until[-1][start] < self._n:
                return False
            ways = self._ways[-1].values()
            clock = next((clock for clock, room in ways if room is None or room(start) == self._n), None)
            return clock is not None and (limit is None or clock.seconds(start, self._n) <= limit)

        *others, last = self._windows(limit)
        fitting = bits_of(start for start in places_of(last) if may_be_last(start))
        return [*others, fitting] if fitting else [0] * len(self._sites)

    def _finds_even_cut(self, limit: int | None) -> bool:
        """Returns True if a greedy cut, with each stage near an even share of the rest, is within the limit."""
        allowed = self._allowed(limit)
        start = 0
        for j, following in enumerate(allowed[1:]):
            plain, again = self._ends(j, start, limit)
            ends = (plain | again) & following
            if not ends:
                return False
            work = self._work[j]
            share = (work[-1] - work[start]) // (len(self._sites) - j)
            target = bisect_left(work, work[start] + share)
            before, behind = ends & bits_below(target + 1), ends >> target << target
            start = before.bit_length() - 1 if before else (behind & -behind).bit_length() - 1
        return bool(allowed[-1] >> start & 1)

    def _windows(self, limit: int | None) -> StageStarts:
        """Finds the possible starts of each stage if stages are not empty and only computation takes time."""
        stages, none = len(self._sites), [0] * len(self._sites)
        if len(self._places) < stages:
            return none
        first, last = [0, *self._places[: stages - 1]], [0, *self._places[-stages:-1]]
        if limit is not None:
            place = self._n
            for j in reversed(range(stages)):
                place = bisect_left(self._work[j], self._work[j][place] - limit)
                first[j] = max(first[j], place)
            if place > 0:
                return none
            for j in range(stages - 1):
                place = bisect_right(self._work[j], self._work[j][place] + limit) - 1
                last[j + 1] = min(last[j + 1], place)
        return [
            (self._all | 1) & bits_below(end + 1) & ~bits_below(start) for start, end in zip(first, last, strict=True)
        ]

    def _values_between(self, low: int, high: int) -> list[int]:
        """Lists the seconds above `low` that a stage can have in a cut within `high`."""
        by_clock: Counter[StageClock] = Counter()
        for j, (site, bits) in enumerate(zip(self._sites, self._windows(high), strict=True)):
            for way in recompute_choices(site):
                by_clock[self._seconds.clock(j, way)] |= bits
        return sorted(
            {
                clock.seconds(start, end)
                for clock, bits in by_clock.items()
                for start in places_of(bits)
                for end in places_of(clock.ends(start, high) & ~clock.ends(start, low))
            }
        )

    def _fewest(self, starts: StageStarts, limit: int | None) -> list[dict[int, int]]:
        """Finds for each stage its starts, as bits, by the least number of stages from there on that recompute."""
        rows: list[dict[int, int]] = [{0: 1 << self._n}]
        for j in reversed(range(len(self._sites))):
            later, row = rows[-1], Counter[int]()
            counts = sorted(later)
            for start in places_of(starts[j]):
                plain, again = self._ends(j, start, limit)
                options = [count for count in counts if plain & later[count]][:1]
                options += [count + 1 for count in counts if again & later[count]][:1]
                if options:
                    row[min(options)] |= 1 << start
            rows.append(dict(row))
        return rows[::-1]

    def _unevenness(self, stage: int, start: int, end: int, recompute: bool) -> tuple[float, float, int]:
        """Computes the key that selects the end of a stage; see (4)."""
        unit, clock = self._seconds.unit, self._seconds.clock(stage, recompute)
        seconds = clock.seconds(start, end) / unit
        left = [(work[-1] - work[end]) / unit for work in self._work[stage + 1 :]]
        mean = 1 / sum(1 / seconds for seconds in left) if left and min(left) > 0 else 0.0
        return max(seconds, mean), seconds, end


def _first_barred_places(chain: Chain, stages: int) -> list[list[int]]:
    """Finds for each stage and start the first place that the stage must not contain."""
    n, required = len(chain), frozenset(chain.required_cuts)
    behind = [n] * (n + 1)  # for each start, the first place after a required cut
    for place in reversed(range(n)):
        behind[place] = place + 1 if place + 1 in required else behind[place + 1]
    if not (chain.first_stages or chain.last_stages):
        return [behind] * stages
    low, high = chain.first_stages or (0,) * n, chain.last_stages or (stages - 1,) * n
    rows = []
    for j in range(stages):
        row = [n]
        for place in reversed(range(n)):
            row.append(min(row[-1], behind[place]) if low[place] <= j <= high[place] else place)
        rows.append(row[::-1])
    return rows
