"""Cuts a chain into stages with the exact least bottleneck, within memory.

Stage j runs on site j; `chain.py` computes the seconds and bytes of stages. No stage is empty. In order of priority:

1. every stage fits into its memory; it recomputes if it must, or if it may and does not fit otherwise;
2. the *bottleneck*, the largest `seconds` of a stage, is minimal. So a cut is moved, instead of making a stage
   recompute, if that is faster;
3. the fewest stages recompute;
4. the stages are even: from the first on, each ends where the larger of its seconds and the mean of the remaining
   computation for each later stage is least, among the ends for which (1) to (3) still hold.

(1) to (3) are exact, by integer arithmetic (`intervals.py`). (4) is greedy, and ignores transfers.

The search (`CutSearch`) tests a limit L on seconds by going from stage to stage with the set of possible starts.

    starts of stage j      . . . x . x x . .        each start leads to the ends that L and its memory allow;
    starts of stage j + 1  . . . . . x . x x        all of them together are the starts of the next stage

The sets have holes, because a stage with one more node can be faster if it sends less. But the computation of a stage
is a lower bound on its seconds. This bound gives a least L, by bisection, and the earliest start of each stage. If that
L is too low, the search raises it in growing steps, then bisects until few values remain. The least bottleneck
is one of these values, since it is the seconds of some stage: about 25 tests in all. Most feasible limits are met by a
cut whose stages end near even shares; the search follows all starts only if that cut fails.

A test takes time in proportion to the starts that it reaches. Cutting 5,663 nodes into 8 stages takes 0.3 to 2 seconds,
10,000 nodes into 64 stages up to half a minute (one core at 2.5 GHz; tools/bench/README.md). Setup takes memory in
proportion to n times the number of values alive across a cut.
"""

from __future__ import annotations

import copy
import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.partitioning.block import least_integer
from fxpipe.partitioning.chain import Chain, StageLoad, StageSite, recompute_choices, stage_loads
from fxpipe.partitioning.intervals import StageClock, StageClocks, StageMemory, bits_below, bits_of, places_of
from fxpipe.partitioning.manual_cuts import NodeSequence
from fxpipe.utils.text_table import text_table
from fxpipe.utils.units import count_text, human_bytes

ATTEMPT_PRECISION = 1024  # relative precision of the best attempt, as 1 / ATTEMPT_PRECISION
SHORTAGE_HEADERS = (
    *("stage", "nodes", "parameters", "gradients, optimizer"),
    *("activations", "working", "needs", "limit", "over by"),
)


@dataclass(frozen=True, slots=True)
class RemedyTrial:
    """Another chain or other sites to try, with their description."""

    words: str  # "use 4 devices"
    chain: Chain
    sites: Sequence[StageSite]

    def fits(self) -> bool:
        return CutSearch(self.chain, self.sites).fits()


def recompute_trials(chain: Chain, sites: Sequence[StageSite]) -> Iterator[RemedyTrial]:
    """Yields a trial in which all stages may recompute, if some may not."""
    if not all(site.may_recompute or site.must_recompute for site in sites):
        yield RemedyTrial("let stages recompute", chain, [replace(site, may_recompute=True) for site in sites])


def _no_cut_fits(stages: int) -> str:
    return f"no cut into {count_text(stages, 'stage')} fits into memory"


def memory_limit_error(
    chain: Chain, sites: Sequence[StageSite], names: Sequence[str] = (), remedies: Iterable[Iterable[RemedyTrial]] = ()
) -> MemoryLimitError:
    """Returns the error if no cut fits: a table of the best attempt, the reason, and what would fit."""
    # `names`: of the nodes, or empty. `remedies`: each a list of trials, the mildest first; one that fits is named.
    starts, loads = best_attempt(chain, sites)
    over = [
        load.memory - site.memory if site.memory is not None else 0.0 for load, site in zip(loads, sites, strict=True)
    ]
    places = list(pairwise([*starts, len(chain)]))
    rows = [_shortage_row(j, *row) for j, row in enumerate(zip(places, loads, sites, strict=True))]
    worst = over.index(max(over))
    head = f"{_no_cut_fits(len(sites))}; the best one is over by {human_bytes(max(over))} in stage {worst}"
    sentences = [f"The problem: {_problem_message(chain, sites, names, loads[worst], worst, places[worst])}."]
    versions = _versions_message(loads, sites)
    sentences += [versions] if versions else []
    tried = [next((trial for trial in trials if trial.fits()), None) for trials in remedies]
    words = [trial.words for trial in tried if trial is not None]
    if versions:
        words.append(f"raise the memory limit of each stage by {human_bytes(max(over))}")
    if words:
        sentences.append(f"What would fit: {'; or '.join(words)}.")
    elif tried:
        sentences.append("Nothing that was tried would fit: the model needs devices with more memory.")
    message = "\n".join([f"{head}:", text_table(rows, SHORTAGE_HEADERS, has_rule=False), *sentences])
    return MemoryLimitError(message, " ".join([f"{head}.", *sentences]), max(over))


def best_attempt(chain: Chain, sites: Sequence[StageSite]) -> tuple[tuple[int, ...], tuple[StageLoad, ...]]:
    """Returns starts and loads of the cut with the least excess over a memory limit; assumes that a cut exists."""
    search = CutSearch(chain, sites)
    low, high = 0.0, max(1.0, *(site.memory / ATTEMPT_PRECISION for site in sites if site.memory is not None))
    while not (fitting := search.with_spare(high)).fits():
        low, high = high, 2 * high
    while high - low > high / ATTEMPT_PRECISION:
        middle = (low + high) / 2
        if (other := search.with_spare(middle)).fits():
            high, fitting = middle, other
        else:
            low = middle
    starts, recompute = fitting.cut(None)
    return starts, stage_loads(chain, sites, starts, recompute)


def _shortage_row(stage: int, places: tuple[int, int], load: StageLoad, site: StageSite) -> tuple[str, ...]:
    cost, times = load.memory_cost, site.in_flight
    if load.recompute:
        saved = human_bytes(cost.saved_bytes) + (f" x {site.recomputed}" if site.recomputed > 1 else "")
        activations = f"{human_bytes(cost.received_bytes)} x {times} + {saved}, recomputed"
    else:
        activations = f"{human_bytes(cost.received_bytes + cost.saved_bytes)} x {times}"
    limit, over = ("none", "") if site.memory is None else (human_bytes(site.memory), "-")
    if site.memory is not None and load.memory > site.memory:
        over = human_bytes(load.memory - site.memory)
    return (
        str(stage),
        f"{places[0]}-{places[1] - 1}",
        human_bytes(cost.parameter_bytes),
        human_bytes(cost.static_bytes - cost.parameter_bytes),
        activations,
        human_bytes(cost.working_bytes),
        human_bytes(load.memory),
        limit,
        over,
    )


def _versions_message(loads: Sequence[StageLoad], sites: Sequence[StageSite]) -> str:
    """Describes how many weight versions fit into each stage; empty if one version suffices."""

    def fitting(load: StageLoad, site: StageSite) -> int:
        if site.memory is None or load.memory <= site.memory:
            return site.versions
        older = load.memory_cost.version_bytes
        spare = site.memory - (load.memory - older)
        if spare < 0 or not older:
            return 0
        return 1 + int(spare // (older / (site.versions - 1)))

    if max(site.versions for site in sites) == 1:
        return ""
    counts = ", ".join(
        f"{fitting(load, site)} of {site.versions} in stage {j}"
        for j, (load, site) in enumerate(zip(loads, sites, strict=True))
    )
    return f"Versions of the weights, for the mini-batches in flight, that would fit: {counts}."


def _beside_parameters(sites: Sequence[StageSite]) -> str:
    versions = max(site.versions for site in sites)
    return f"gradients, optimizer state and {versions} versions" if versions > 1 else "gradients and optimizer state"


def _problem_message(
    chain: Chain, sites: Sequence[StageSite], names: Sequence[str], load: StageLoad, stage: int, places: tuple[int, int]
) -> str:
    if single := _single_node_message(chain, sites, names):
        return single
    state = min(site.state for site in sites)
    everything = sum(w.bytes * (1 + state if w.is_trained else 1) for w in chain.weights)
    together = sum(math.inf if site.memory is None else site.memory for site in sites)
    if everything > together:
        return (
            f"the parameters: with {_beside_parameters(sites)} they take {human_bytes(everything)}, and all devices "
            f"together have {human_bytes(together)}"
        )
    lasting, working = load.memory_cost.static_bytes, load.memory_cost.working_bytes
    activations, in_flight = load.memory - lasting - working, sites[stage].in_flight
    of_places = chain.of_memory.working
    momentary = _node_label(max(range(*places), key=lambda place: of_places[place] if of_places else 0.0), names)
    *_, (second, _, other), (size, words, _) = sorted(
        [
            (lasting, f"the parameters: with {_beside_parameters([sites[stage]])} they take", "parameters"),
            (activations, f"the activations: with {in_flight} micro-batches in flight they take", "activations"),
            (working, f"working memory: {momentary} for a moment takes", "working memory"),
        ]
    )
    return (
        f"{words} {human_bytes(size)} of the {human_bytes(load.memory)} of stage {stage} "
        f"({other}: {human_bytes(second)})"
    )


def _single_node_message(chain: Chain, sites: Sequence[StageSite], names: Sequence[str]) -> str:
    """Describes the largest group of inseparable nodes that fits into no stage; empty if there is none."""
    search = CutSearch(chain, sites)
    stages = list({site: j for j, site in enumerate(sites)}.values())
    largest, message = 0.0, ""
    items = [place for place in range(len(chain)) if place not in chain.forbidden_cuts]
    for start, end in pairwise([*items, len(chain)]):
        needs = [(search.memory(j, start, end), sites[j].memory) for j in stages]
        least = min(need for need, _ in needs)
        if least > largest and all(limit is not None and need > limit for need, limit in needs):
            largest = least
            alone = " to ".join(_node_label(place, names) for place in sorted({start, end - 1}))
            message = f"{alone} alone needs {human_bytes(largest)}, more than any stage may take"
    return message


def _node_label(place: int, names: Sequence[str]) -> str:
    return f"node {names[place]!r}" if names else f"the node at place {place}"


@dataclass(frozen=True, slots=True)
class OptimalCut:
    """The cut with the least bottleneck."""

    starts: tuple[int, ...]  # place of the first node of each stage; starts[0] == 0
    recompute: tuple[bool, ...]  # by stage
    loads: tuple[StageLoad, ...]

    @property
    def bottleneck(self) -> float:
        return max(load.seconds for load in self.loads)


def optimal_partition(
    chain: Chain,  # at least one node
    sites: Sequence[StageSite],  # one for each stage, in order
    *,
    names: Sequence[str] = (),  # of the nodes, for errors
    remedies: Iterable[Iterable[RemedyTrial]] = (),  # tried if no cut fits into memory; see `memory_limit_error`
    explains: bool = True,  # explain why no cut fits, which takes several times as long
) -> OptimalCut:
    """Cuts a chain into one stage for each site; the module's docstring defines the best cut.

        >>> chain = Chain(forward=((1.0, 1.0, 2.0, 2.0),), backward=((2.0, 2.0, 4.0, 4.0),))
        >>> optimal_partition(chain, [StageSite(), StageSite()]).starts
        (0, 2)

    Raises `MemoryLimitError` if no cut fits into memory, `PartitionError` if none is possible, regardless of memory.
    """
    search = CutSearch(chain, sites)
    limit = search.least_bottleneck()
    if limit is None:
        if not CutSearch(chain, [replace(site, memory=None) for site in sites]).fits():
            nodes = NodeSequence(chain.forward[0], tuple(names), (), chain.forbidden_cuts)
            if len(sites) > len(nodes.items()):
                raise nodes.too_many_stages_error(len(sites))
            raise PartitionError(
                f"no cut into {len(sites)} stages puts every node into a stage where it may be: of what is pinned, "
                "some is out of order, leaves a stage without nodes, or hangs together with what is pinned elsewhere"
            )
        if not explains:
            raise MemoryLimitError(_no_cut_fits(len(sites)))
        raise memory_limit_error(chain, sites, names, remedies)
    starts, recompute = search.cut(limit)
    return OptimalCut(starts, recompute, stage_loads(chain, sites, starts, recompute))


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
