"""The figures of `chain.py` for a stage with any start and end, as exact integers that are fast to compute after setup.

Costs of single places are differences of prefix sums. A thing that several places share counts once in a stage:

    place           0    1    2    3    4    5        three places share a thing
    thing           .    x    x    .    x    .        a stage from 2 to 4 has two of them; the first is before the stage

So a stage from `start` has everything whose first place is in the stage (prefix sums by first place), and everything
whose first place is before `start` and whose next place is before `end`: a row for each start, sorted by next place,
with running sums (`CutCrossings`). For gradients there is a row for each end, sorted by the last place before it. With
w things alive across a cut, setup takes O(n * w) time and memory, and each query a bisection. Seconds and bytes are
integers as in `block.py`, rounded only for a single transfer. Sets of places are integers, bit p for place p.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

from fxpipe.cluster import Link
from fxpipe.partitioning.block import exact_integers
from fxpipe.partitioning.chain import Chain, Flow, StageSite, flow_of_storage, sending_seconds
from fxpipe.simulation.costs import stage_memory

ENDS_PER_BLOCK = 16  # ends in one step of a clock's sorted sets

CrossingEntry = tuple[range, int, int]  # the cuts that a thing crosses, each as the place after it; its key; its value


class CutCrossings:
    """Sums of the values, by key, of things that cross the cut before a place."""

    def __init__(self, n: int, things: Iterable[CrossingEntry]) -> None:
        rows: list[list[tuple[int, int]]] = [[] for _ in range(n + 1)]
        for cuts, key, value in things:
            entry = (key, value)
            for place in cuts:
                rows[place].append(entry)
        for row in rows:
            row.sort()
        self.keys = [[key for key, _ in row] for row in rows]
        self._sums = [list(accumulate((value for _, value in row), initial=0)) for row in rows]

    def before(self, place: int, key: int) -> int:
        """Computes the sum of the values that cross the cut before `place` with a smaller key."""
        return self._sums[place][bisect_left(self.keys[place], key)]

    def total(self, place: int) -> int:
        return self._sums[place][-1]


class StageClock:
    """The seconds of stages on one site.

    Let C be the prefix sums of computation, A(s) all arrivals that cross a cut at s, and G(e) all gradients that cross
    a cut at e. A stage takes at most C(e) - C(s) + A(s) + G(e), and exactly that if nothing skips the stage. So
    bisection in the ends sorted by C(e) + G(e) finds nearly all ends within a limit; further ends are tried one by one
    if something skips the stage.
    """

    def __init__(self, work: list[int], arrivals: CutCrossings, gradients: CutCrossings, ends: Sequence[int]) -> None:
        n = len(work) - 1
        self.work = work  # prefix sums
        self._arrivals, self._gradients = arrivals, gradients
        self._limit, self._ends_by_start = -1, dict[int, int]()  # the last limit, and its ends by start
        self._gain = [work[s] - arrivals.total(s) for s in range(n + 1)]
        ranked = sorted((work[e] + gradients.total(e), e) for e in ends)
        self._costs, self._ranked = [cost for cost, _ in ranked], [e for _, e in ranked]
        blocks = (bits_of(self._ranked[i : i + ENDS_PER_BLOCK]) for i in range(0, len(ranked), ENDS_PER_BLOCK))
        self._blocks = list(accumulate(blocks, int.__or__, initial=0))
        self._all_ends = bits_of(ends)
        # By start: the ends crossed by a gradient of a flow without a maker or user since that start.
        by_oldest: list[list[int]] = [[] for _ in range(n + 1)]
        for e in ends:
            if keys := gradients.keys[e]:
                by_oldest[keys[0] + 1].append(e)
        self._older = list(accumulate(map(bits_of, by_oldest), int.__or__))

    def seconds(self, start: int, end: int) -> int:
        work = self.work[end] - self.work[start]
        gradients = self._gradients.total(end) - self._gradients.before(end, start)
        return work + self._arrivals.before(start, end) + gradients

    def ends(self, start: int, limit: int) -> int:
        """Returns the ends, as bits, of the stages from `start` within `limit`."""
        if limit != self._limit:
            self._limit, self._ends_by_start = limit, {}
        if start not in self._ends_by_start:
            self._ends_by_start[start] = self._find_ends(start, limit) if limit >= 0 else 0
        return self._ends_by_start[start]

    def _find_ends(self, start: int, limit: int) -> int:
        stop = bisect_right(self.work, self.work[start] + limit, lo=start)
        reached = bits_below(stop) & ~bits_below(start + 1)
        rank = bisect_right(self._costs, self._gain[start] + limit)
        ends = self._blocks[rank // ENDS_PER_BLOCK]
        for e in self._ranked[rank - rank % ENDS_PER_BLOCK : rank]:
            ends |= 1 << e
        ends &= reached
        keys = self._arrivals.keys[start]
        skipped = self._older[start] | (self._all_ends & bits_below(keys[-1] + 1) if keys else 0)
        for e in places_of(skipped & reached & ~ends):
            if self.seconds(start, e) <= limit:
                ends |= 1 << e
        return ends


class StageClocks:
    """The clocks of all sites of a chain, in one unit."""

    def __init__(self, chain: Chain, sites: Sequence[StageSite], ends: Sequence[int]) -> None:
        self._chain, self._sites, self._ends = chain, sites, ends
        self._flows = chain.transferred
        links = dict.fromkeys(site.link for site in sites if site.link is not None)
        rows = [*chain.forward, *chain.backward, *([sending_seconds(f, link) for f in chain.flows] for link in links)]
        *integers, self.unit = exact_integers([*(value for row in rows for value in row), 1])
        parts = iter(integers)
        exact = [[next(parts) for _ in row] for row in rows]
        kinds = len(chain.forward)
        self._forward, self._backward = exact[:kinds], exact[kinds : 2 * kinds]
        self._sending: dict[Link | None, list[int]] = dict(zip(links, exact[2 * kinds :], strict=True))
        self._arriving, self._returning = cache(self._find_arrivals), cache(self._find_gradients)
        self._clocks: dict[tuple[int, bool, Link | None, Link | None], StageClock] = {}

    def clock(self, stage: int, recompute: bool) -> StageClock:
        site = self._sites[stage]
        following = self._sites[stage + 1].link if stage + 1 < len(self._sites) else None
        key = (site.kind, recompute, site.link, following)
        if key not in self._clocks:
            work = self.work(stage, recompute)
            self._clocks[key] = StageClock(work, self._arriving(site.link), self._returning(following), self._ends)
        return self._clocks[key]

    def work(self, stage: int, recompute: bool) -> list[int]:
        kind, times = self._sites[stage].kind, 2 if recompute else 1
        pairs = zip(self._forward[kind], self._backward[kind], strict=True)
        return list(accumulate((times * f + b for f, b in pairs), initial=0))

    def _find_arrivals(self, link: Link | None) -> CutCrossings:
        values = self._sending.get(link, ())
        return CutCrossings(len(self._chain), _arrivals(self._chain, self._flows if values else (), values))

    def _find_gradients(self, link: Link | None) -> CutCrossings:
        things = list[CrossingEntry]()
        for flow, value in zip(self._flows, self._sending.get(link, ()), strict=link is not None):
            if flow.returns:
                touched = [*([flow.maker] if flow.maker >= 0 else []), *_users_in_chain(flow, self._chain)]
                things += [(range(a + 1, b + 1), a, value) for a, b in pairwise(touched)]
        return CutCrossings(len(self._chain), things)


class SharedBytes:
    """Bytes of things that places share; each counts once in a stage."""

    def __init__(self, n: int, first: Iterable[tuple[int, int]], things: Iterable[CrossingEntry]) -> None:
        begun = [0] * n
        for place, value in first:
            begun[place] += value
        self._begun = list(accumulate(begun, initial=0))
        self._crossing = CutCrossings(n, things)

    def bytes(self, start: int, end: int) -> int:
        return self._begun[end] - self._begun[start] + self._crossing.before(start, end)


class StageMemory:
    def __init__(self, chain: Chain, sites: Sequence[StageSite]) -> None:
        self._chain = chain
        rows = [
            [flow.bytes for flow in chain.flows],
            [held.bytes for held in chain.held],
            [w.bytes for w in chain.weights],
            chain.working or [0.0] * len(chain),
        ]
        *integers, unit = exact_integers([*(value for row in rows for value in row), 1])
        *states, fine = exact_integers([*(site.state for site in sites), 1])
        parts = iter(integers)
        self._flows, self._helds, self._weights, working = ([next(parts) * fine for _ in row] for row in rows)
        self.unit = unit * fine
        self._states = dict(zip((site.state for site in sites), states, strict=True))
        self._fine = fine
        self._working = [working]  # table k has the maxima of each 2**k neighbors
        while 2 * (width := 1 << len(self._working) - 1) <= len(working):
            last = self._working[-1]
            self._working.append([max(last[i], last[i + width]) for i in range(len(last) - width)])
        self._with_state = cache(self._sum_weights)
        self._pairs = flow_of_storage(chain)
        n = len(chain)
        self._received = SharedBytes(n, (), _arrivals(chain, chain.flows, self._flows))
        first = [(held.savers[0], value) for held, value in zip(chain.held, self._helds, strict=True)]
        self._kept = SharedBytes(n, first, self._of_older(recompute=False))
        self._held = SharedBytes(n, first, self._of_older(recompute=True))

    def exact(self, *numbers: float) -> int:
        """Computes the sum of byte counts in the unit of `memory`, rounded down."""
        return int(sum(map(Fraction, numbers)) * self.unit)

    def memory(self, site: StageSite, recompute: bool, start: int, end: int) -> int:
        """Returns the bytes of a stage in memory; they never decrease as `end` grows."""
        static = self._with_state(site.state).bytes(start, end)
        power = (end - start).bit_length() - 1
        working = max(self._working[power][start], self._working[power][end - (1 << power)])
        received = self._received.bytes(start, end) if recompute else 0  # without recomputation, `saved` includes them
        saved = (self._held if recompute else self._kept).bytes(start, end)
        return stage_memory(static, received, saved, working, site.in_flight, site.activations(recompute))

    def _sum_weights(self, state: float) -> SharedBytes:
        first, older = list[tuple[int, int]](), list[CrossingEntry]()
        for weights, value in zip(self._chain.weights, self._weights, strict=True):
            if weights.users:
                total = value + (value // self._fine * self._states[state] if weights.is_trained else 0)
                first.append((weights.users[0], total))
                older += _crossings_between(weights.users, total)
        return SharedBytes(len(self._chain), first, older)

    def _of_older(self, recompute: bool) -> Iterator[CrossingEntry]:
        """Yields what a stage keeps of things that begin before it, less what the prefix sums count for them."""
        # Without recomputation these are all saved values; with it, the saved values that are not received flows.
        for i, (held, value) in enumerate(zip(self._chain.held, self._helds, strict=True)):
            if i in self._pairs:  # after its maker it is counted as a flow
                yield range(held.maker + 1, held.savers[0] + 1), held.savers[0], -value
            else:
                yield from _crossings_between(held.savers, value)
        helds = {flow: self._chain.held[i] for i, flow in self._pairs.items()}
        for i, (flow, value) in enumerate(zip(self._chain.flows, self._flows, strict=True)):
            if flow.maker < 0:
                continue
            savers = [place for place in helds[i].savers if place > flow.maker] if i in helds else []
            users = _users_in_chain(flow, self._chain)
            if recompute:
                yield from _saved_but_not_used(flow.maker, users, savers, value)
            else:
                keepers = sorted({*users, *savers}) if flow.returns else savers
                yield from _crossings_between([flow.maker, *keepers], value)


def bits_of(places: Iterable[int]) -> int:
    bits = 0
    for place in places:
        bits |= 1 << place
    return bits


def places_of(bits: int) -> Iterator[int]:
    text = f"{bits:b}"[::-1]
    place = text.find("1")
    while place >= 0:
        yield place
        place = text.find("1", place + 1)


def bits_below(place: int) -> int:
    return (1 << place) - 1


def _users_in_chain(flow: Flow, chain: Chain) -> list[int]:
    return [user for user in flow.users if user < len(chain)]


def _arrivals(chain: Chain, flows: Sequence[Flow], values: Sequence[int]) -> Iterator[CrossingEntry]:
    """Yields the crossings of the values of flows from earlier stages, with the next user as key."""
    for flow, value in zip(flows, values, strict=True):
        if flow.maker >= 0:
            yield from _crossings_between([flow.maker, *_users_in_chain(flow, chain)], value)


def _crossings_between(places: Sequence[int], value: int) -> Iterator[CrossingEntry]:
    """Yields the crossings of a thing of several places, at all starts after the first; the key is the next place."""
    return ((range(a + 1, b + 1), b, value) for a, b in pairwise(places))


def _saved_but_not_used(maker: int, users: Sequence[int], savers: Sequence[int], value: int) -> Iterator[CrossingEntry]:
    """Yields the crossings of a flow from its next saver to its next user, at starts where the saver comes first."""
    for earlier, saver in pairwise([maker, *savers]):
        known = bisect_right(users, saver)
        starts = range(max(earlier, users[known - 1] if known else maker) + 1, saver + 1)
        yield starts, saver, value
        if known < len(users):
            yield starts, users[known], -value
