"""Which cuts keep every stage within a limit of seconds and within memory; `optimal.py` says how and why."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.ranges import Bytes, Clock, Seconds, below, bits_of, places_of

FIRST_STEP = 64  # the first limit above the lower bound is greater by this fraction
NEAR = 1024  # the values between two limits are listed where these differ by this fraction

Starts = list[int]  # for each stage the places where it can start, as bits


class Search:
    """The tests of one chain on its sites.

    Args:
        spare: bytes by which the memory of every site is taken to be larger.
    """

    def __init__(self, chain: Chain, sites: Sequence[Site], spare: float = 0.0) -> None:
        self._sites = sites
        self._n = len(chain)
        self._places = [place for place in range(1, self._n) if place not in chain.forbidden] + [self._n]
        self._all = bits_of(self._places)
        self._seconds = Seconds(chain, sites, self._places)
        limited = any(site.memory is not None for site in sites)
        self._bytes = Bytes(chain, sites) if limited else None
        self._spare = spare
        self._until = _until(chain, len(sites))
        self._last: dict[tuple[float, int, float, bool], dict[int, int]] = {}
        self._work = [self._seconds.work(j, site.must_recompute) for j, site in enumerate(sites)]
        self._limit: int | None = None
        self._ends: dict[Clock, dict[int, int]] = {}  # of that limit

    def fits(self) -> bool:
        """Whether there is a cut within memory, however long it takes."""
        return self.reach(None) is not None

    def least_bottleneck(self) -> int | None:
        """The least limit that a cut can keep, in the unit of `seconds`; None if none fits into memory."""
        low = self._lower_bound()
        if self.reach(low) is not None:
            return low
        if not self.fits():
            return None
        step = max(1, low // FIRST_STEP)
        high = low + step
        while (starts := self.reach(high)) is None:
            low, step = high, 2 * step
            high = low + step
        while high - low > max(1, low // NEAR):
            middle = (low + high) // 2
            if (reached := self.reach(middle)) is None:
                low = middle
            else:
                high, starts = middle, reached
        values = self._values_between(low, high, starts)
        return values[bisect_left(values, True, hi=len(values) - 1, key=lambda value: self.reach(value) is not None)]

    def cut(self, limit: int | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The starts of the stages and which of them recompute, for a limit that can be kept; (3) and (4)."""
        starts = self.reach(limit)
        assert starts is not None
        fewest = self._fewest(starts, limit)
        place, count = 0, min(fewest[0])
        cut, recompute = [], []
        for j in range(len(self._sites)):
            plain, again = self._ends_of(j, place, limit)
            options = [(end, False) for end in places_of(plain & fewest[j + 1].get(count, 0))]
            options += [(end, True) for end in places_of(again & fewest[j + 1].get(count - 1, 0))]
            cut.append(place)
            place, again_here = min(options, key=lambda option: self._unevenness(j, cut[-1], *option))
            count -= again_here
            recompute.append(again_here)
        return tuple(cut), tuple(recompute)

    def reach(self, limit: int | None) -> Starts | None:
        """Where each stage can start if all before it keep the limit; None if the stages cannot reach the end."""
        earliest = self._earliest(limit)
        if earliest[0] > 0:
            return None
        final = len(self._sites) - 1
        last = bits_of(
            start
            for start in places_of((self._all | 1) & below(self._n) & ~below(earliest[final]))
            if self._may_be_last(start, limit)
        )
        starts, found = [], 1
        for j in range(final):
            starts.append(found)
            found = 0
            for start in places_of(starts[-1]):
                plain, again = self._ends_of(j, start, limit)
                found |= plain | again
            found &= below(self._n) & ~below(earliest[j + 1])
            if not found or not last:
                return None
        starts.append(found & last)
        return starts if starts[-1] else None

    def _may_be_last(self, start: int, limit: int | None) -> bool:
        final = len(self._sites) - 1
        plain, any_way = self._last_ends(final, start)
        if any_way < self._n:
            return False
        return limit is None or self._seconds.clock(final, plain < self._n).seconds(start, self._n) <= limit

    def _ends_of(self, stage: int, start: int, limit: int | None) -> tuple[int, int]:
        """The ends within memory and the limit: without recomputation, and of those that need it with it."""
        plain, any_way = self._last_ends(stage, start)
        without = self._in_time(stage, False, start, limit) & below(plain + 1) if plain > start else 0
        if any_way == plain:
            return without, 0
        return without, self._in_time(stage, True, start, limit) & below(any_way + 1) & ~below(plain + 1)

    def _in_time(self, stage: int, recompute: bool, start: int, limit: int | None) -> int:
        if limit is None:
            return self._all & ~below(start + 1)
        if limit != self._limit:
            self._limit, self._ends = limit, {}
        clock = self._seconds.clock(stage, recompute)
        ends = self._ends.setdefault(clock, {})
        if start not in ends:
            ends[start] = clock.ends(start, limit)
        return ends[start]

    def _last_ends(self, stage: int, start: int) -> tuple[int, int]:
        """The last end within memory and bounds without recomputation, and the last one of all."""
        site, until = self._sites[stage], self._until[stage][start]
        plain = start if site.must_recompute else min(until, self._last_end(site, start, False))
        if plain == until or not (site.must_recompute or site.may_recompute):
            return plain, plain
        return plain, max(plain, min(until, self._last_end(site, start, True)))

    def _last_end(self, site: Site, start: int, recompute: bool) -> int:
        """The last end of a stage that fits into memory; `start` if there is none."""
        limit = self._bytes.limit(site.memory, self._spare) if self._bytes and site.memory is not None else None
        if self._bytes is None or site.memory is None or limit is None:
            return self._n
        known = self._last.setdefault((site.memory, site.in_flight, site.state, recompute), {})
        if start in known:
            return known[start]
        low, high = start, self._n + 1  # the one fits, the other does not
        end, step = max(known.get(start - 1, known.get(start + 1, self._n)), start + 1), 1
        while high - low > 1:
            if not low < end < high:
                end = (low + high) // 2
            if self._bytes.memory(site, start, end, recompute) <= limit:
                low, end = end, end + step
            else:
                high, end = end, end - step
            step *= 2
        known[start] = low
        return low

    def _earliest(self, limit: int | None) -> list[int]:
        """How early each stage can start so that it and the later ones can compute all from there on."""
        if limit is None:
            return [0] * len(self._sites)
        places = [self._n]
        for work in reversed(self._work):
            places.append(bisect_left(work, work[places[-1]] - limit))
        return places[:0:-1]

    def _lower_bound(self) -> int:
        """The least bottleneck if nothing but computation counted."""
        low, high = 0, max(work[-1] for work in self._work)
        while low < high:
            middle = (low + high) // 2
            if self._computes(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _computes(self, limit: int) -> bool:
        place = 0
        for work in self._work:
            furthest = bisect_right(work, work[place] + limit, lo=place) - 1
            count = bisect_right(self._places, furthest)
            place = max(place, self._places[count - 1] if count else 0)
        return place == self._n

    def _values_between(self, low: int, high: int, starts: Starts) -> list[int]:
        """The seconds of stages from these starts that are more than `low`, and `high` at most."""
        by_clock: Counter[Clock] = Counter()
        for j, site in enumerate(self._sites):
            for recompute in (False, True):
                if site.must_recompute <= recompute <= (site.must_recompute or site.may_recompute):
                    by_clock[self._seconds.clock(j, recompute)] |= starts[j]
        return sorted(
            {
                clock.seconds(start, end)
                for clock, bits in by_clock.items()
                for start in places_of(bits)
                for end in places_of(clock.ends(start, high) & ~clock.ends(start, low))
            }
        )

    def _fewest(self, starts: Starts, limit: int | None) -> list[dict[int, int]]:
        """For each stage and number of stages from there on that recompute: the starts for which it is the fewest."""
        rows: list[dict[int, int]] = [{0: 1 << self._n}]
        for j in reversed(range(len(self._sites))):
            later, row = rows[-1], Counter[int]()
            counts = sorted(later)
            for start in places_of(starts[j]):
                plain, again = self._ends_of(j, start, limit)
                options = [count for count in counts if plain & later[count]][:1]
                options += [count + 1 for count in counts if again & later[count]][:1]
                if options:
                    row[min(options)] |= 1 << start
            rows.append(dict(row))
        return rows[::-1]

    def _unevenness(self, stage: int, start: int, end: int, recompute: bool) -> tuple[float, float, int]:
        """What an end of a stage is chosen by; see (4)."""
        unit = self._seconds.unit
        seconds = self._seconds.clock(stage, recompute).seconds(start, end) / unit
        left = [(work[-1] - work[end]) / unit for work in self._work[stage + 1 :]]
        mean = 1 / sum(1 / seconds for seconds in left) if left and min(left) > 0 else 0.0
        return max(seconds, mean), seconds, end


def _until(chain: Chain, stages: int) -> list[list[int]]:
    """For each stage and start the first place from there on that the stage may not have."""
    n, required = len(chain), frozenset(chain.required)
    behind = [n] * (n + 1)  # of each start: the first place that a required cut separates from it
    for place in reversed(range(n)):
        behind[place] = place + 1 if place + 1 in required else behind[place + 1]
    if not (chain.low or chain.high):
        return [behind] * stages
    low, high = chain.low or (0,) * n, chain.high or (stages - 1,) * n
    rows = []
    for j in range(stages):
        row = [n]
        for place in reversed(range(n)):
            row.append(min(row[-1], behind[place]) if low[place] <= j <= high[place] else place)
        rows.append(row[::-1])
    return rows
