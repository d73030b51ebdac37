"""Cuts a chain into stages with the exact least bottleneck, within memory.

Stage j runs on site j; `chain.py` computes the seconds and bytes of stages. No stage is empty. In order of priority:

1. every stage fits into its memory; it recomputes if it must, or if it may and does not fit otherwise;
2. the *bottleneck*, the largest `seconds` of a stage, is minimal. So a cut is moved, instead of making a stage
   recompute, if that is faster;
3. the fewest stages recompute;
4. the stages are even: from the first on, each ends where the larger of its seconds and the mean of the remaining
   computation for each later stage is least, among the ends for which (1) to (3) still hold.

(1) to (3) are exact, by integer arithmetic (`intervals.py`). (4) is greedy, and ignores transfers.

The search (`search.py`) tests a limit L on seconds by going from stage to stage with the set of possible starts.

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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.partitioning.chain import Chain, StageLoad, StageSite, stage_loads
from fxpipe.partitioning.manual_cuts import NodeSequence
from fxpipe.partitioning.search import CutSearch
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
    """Returns the error if no cut fits: a table of the best attempt, the reason, and what would fit.

    `names`: of the nodes, or empty. `remedies`: each a list of trials, the mildest first; the first that fits is named.
    """
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
    chain: Chain,
    sites: Sequence[StageSite],
    *,
    names: Sequence[str] = (),
    remedies: Iterable[Iterable[RemedyTrial]] = (),
    explains: bool = True,
) -> OptimalCut:
    """Cuts a chain into one stage for each site; the module's docstring defines the best cut.

        >>> chain = Chain(forward=((1.0, 1.0, 2.0, 2.0),), backward=((2.0, 2.0, 4.0, 4.0),))
        >>> optimal_partition(chain, [StageSite(), StageSite()]).starts
        (0, 2)

    Args:
        chain: at least one node.
        sites: one for each stage, in order.
        names: of the nodes, for errors; or empty.
        remedies: tried if no cut fits into memory, and named if they fit; see `memory_limit_error`.
        explains: explain why no cut fits, which takes several times as long.

    Raises:
        MemoryLimitError: no cut fits into memory.
        PartitionError: no cut is possible, regardless of memory.
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
