"""The exact cut, and the cut of a later graph of a model, against every cut of small chains; loads; refusals."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import hypothesis
import pytest
from helpers.partition_problems import partition, problems, row
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cluster import Link
from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.partitioning.chain import (
    Chain,
    Flow,
    HeldStorage,
    ParameterUse,
    StageLoad,
    StageSite,
    recompute_choices,
    stage_loads,
)
from fxpipe.partitioning.intervals import StageClocks, StageMemory
from fxpipe.partitioning.manual_cuts import cut_least_misplaced
from fxpipe.partitioning.optimal import best_attempt, optimal_partition


def plain_load(
    chain: Chain, sites: Sequence[StageSite], stage: int, start: int, end: int, recompute: bool
) -> tuple[float, float]:
    """Seconds and memory as `chain.py` defines them, said as sets of places and exact fractions."""
    site, here = sites[stage], set(range(start, end))
    later = set(range(end, len(chain)))
    following = sites[stage + 1].link if stage + 1 < len(sites) else None

    def sending(flow: Flow, link: Link | None) -> Fraction:
        return Fraction(0) if link is None else Fraction(link.latency + flow.bytes / link.bytes_per_second)

    work = sum(Fraction(chain.forward[site.kind][p]) for p in here) * (2 if recompute else 1)
    work += sum(Fraction(chain.backward[site.kind][p]) for p in here)
    come = [i for i, flow in enumerate(chain.flows) if flow.maker in range(start) and here & {*flow.users}]
    if chain.is_relayed:
        before = [flow for flow in chain.flows if start > 0 and flow.maker < start <= flow.users[-1]]
        behind = [flow for flow in chain.flows if flow.returns and flow.maker < end <= flow.users[-1] and later]
        wire = sum((sending(flow, site.link) for flow in before), Fraction(0))
        wire += sum(sending(flow, following) for flow in behind)
    else:
        wire = sum((sending(chain.flows[i], site.link) for i in come), Fraction(0))
    for flow in () if chain.is_relayed else chain.flows:
        if flow.returns and here & {flow.maker, *flow.users} and later & {*flow.users}:
            wire += sending(flow, following)

    weights = [w for w in chain.weights if here & {*w.users}]
    memory = sum(Fraction(w.bytes) * (1 + Fraction(site.state) if w.is_trained else 1) for w in weights)
    memory += max((Fraction(chain.working[p]) for p in here), default=Fraction(0)) if chain.working else 0
    kept = {i for i in come if recompute or chain.flows[i].returns}
    held = Fraction(0)
    for maker in range(-1, len(chain)):
        by_size = [i for i, flow in enumerate(chain.flows) if flow.maker == maker]
        by_size.sort(key=lambda i: -chain.flows[i].bytes)
        outlive = [h for h in chain.held if h.maker == maker and h.savers[-1] > maker]
        outlive.sort(key=lambda h: -h.bytes)
        for h in (h for h in chain.held if h.maker == maker and here & {*h.savers}):
            place = next((k for k, other in enumerate(outlive) if other is h), len(by_size))
            if maker not in range(start) or place >= len(by_size):
                held += Fraction(h.bytes)
            elif by_size[place] in come:
                kept.add(by_size[place])
            else:
                held += Fraction(chain.flows[by_size[place]].bytes)
    memory += site.in_flight * sum(Fraction(chain.flows[i].bytes) for i in kept)
    memory += (site.recomputed if recompute else site.in_flight) * held
    return float(work + wire), float(memory)


def load_of(chain: Chain, sites: Sequence[StageSite], stage: int, start: int, end: int, recompute: bool) -> StageLoad:
    """Of a stage that holds the places `start` to `end - 1`; the stages before and behind it hold what is left."""
    starts = [0] * stage + [start] + [end] * (len(sites) - stage)
    last = StageSite()  # so that the last stage may end anywhere
    return stage_loads(chain, [*sites, last], starts, [recompute] * len(starts))[stage]


def fitting_load(chain: Chain, sites: Sequence[StageSite], stage: int, start: int, end: int) -> StageLoad | None:
    low, high = chain.first_stages or [0] * len(chain), chain.last_stages or [len(sites)] * len(chain)
    if not all(low[place] <= stage <= high[place] for place in range(start, end)):
        return None
    loads = (load_of(chain, sites, stage, start, end, way) for way in recompute_choices(sites[stage]))
    limit = sites[stage].memory
    return next((load for load in loads if limit is None or load.memory <= limit), None)


def best_of_all(chain: Chain, sites: Sequence[StageSite]) -> tuple[float, int] | None:
    """The least bottleneck and fewest stages that recompute, by trying every way to cut."""
    n, found, known = len(chain), [], {}
    allowed = [place for place in range(1, n) if place not in chain.forbidden_cuts]
    for cuts in combinations(allowed, len(sites) - 1):
        loads = []
        for j, (start, end) in enumerate(pairwise((0, *cuts, n))):
            if (j, start, end) not in known:
                known[j, start, end] = fitting_load(chain, sites, j, start, end)
            loads.append(known[j, start, end])
        if None not in loads:
            found.append((max(load.seconds for load in loads), sum(load.recompute for load in loads)))
    return min(found, default=None)


@settings(max_examples=250)
@given(problems())
def test_no_cut_is_better(problem: tuple[Chain, list[StageSite]]) -> None:
    chain, sites = problem
    best = best_of_all(chain, sites)
    if best is None:
        without_limits = [replace(site, memory=None) for site in sites]
        fits = best_of_all(chain, without_limits) is not None
        with pytest.raises(MemoryLimitError if fits else PartitionError, match="memory" if fits else "stages"):
            optimal_partition(chain, sites)
        return
    cut = optimal_partition(chain, sites)
    assert (cut.bottleneck, sum(cut.recompute)) == best
    ends = [*cut.starts[1:], len(chain)]
    loads = [fitting_load(chain, sites, j, *ends) for j, ends in enumerate(zip(cut.starts, ends, strict=True))]
    said = [[(load.seconds, load.memory, load.recompute) for load in some if load] for some in (cut.loads, loads)]
    assert said[0] == said[1]
    assert not {*cut.starts} & {*chain.forbidden_cuts}
    assert optimal_partition(chain, sites) == cut


@settings(max_examples=500)
@given(problems(), st.data())
def test_loads_are_what_they_are_defined_to_be(problem: tuple[Chain, list[StageSite]], data: st.DataObject) -> None:
    chain, sites = problem
    j, recompute = data.draw(st.integers(0, len(sites) - 1)), data.draw(st.booleans())
    start = data.draw(st.integers(0, len(chain) - 1))
    end = data.draw(st.integers(start + 1, len(chain)))
    load = load_of(chain, sites, j, start, end, recompute)
    time, memory = plain_load(chain, sites, j, start, end, recompute)
    assert (load.seconds, load.memory) == pytest.approx((time, memory), rel=1e-15)
    exact_time, exact_memory = StageClocks(chain, sites, [end]), StageMemory(chain, sites)
    assert exact_time.clock(j, recompute).seconds(start, end) / exact_time.unit == time
    assert exact_memory.memory(sites[j], recompute, start, end) / exact_memory.unit == memory


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [0.0, 400.0])
def test_ten_thousand_nodes_over_sixty_four_stages(heavy: float) -> None:
    n = 10_000
    flows = tuple(Flow(1.0 + place % 7, place, (place + 1,), True) for place in range(n - 1))
    chain = Chain(((*(1.0 + place % 3 for place in range(n - 1)), heavy),), ((2.0,) * n,), flows)
    cut = optimal_partition(chain, [StageSite(link=Link(10.0))] * 64)
    block = partition([f + b for f, b in zip(chain.forward[0], chain.backward[0], strict=True)], 64)
    loads = stage_loads(chain, [StageSite(link=Link(10.0))] * 64, block.starts, [False] * 64)
    assert block.bottleneck <= cut.bottleneck <= max(load.seconds for load in loads)


GIB = 2.0**30
NAMES = tuple("abcdefgh")


def model(weight: float = 1.0, held: float = 1.0, working: float = 0.5, forbidden: Sequence[int] = ()) -> Chain:
    """Eight equal nodes; all in GiB."""
    return Chain(
        ((1.0,) * 8,),
        ((2.0,) * 8,),
        tuple(Flow(0.125 * GIB, place, (place + 1,), True) for place in range(7)),
        tuple(HeldStorage(held * GIB, place, (place,)) for place in range(8)),
        tuple(ParameterUse(weight * GIB, (place,), True) for place in range(8)),
        (working * GIB,) * 8,
        dict.fromkeys(forbidden, "they hang together"),
    )


def devices(count: int, memory: float = 20.0, **fields: Any) -> list[StageSite]:
    return [StageSite(memory=memory * GIB, in_flight=count - j, **fields) for j in range(count)]


def refusal(chain: Chain, sites: Sequence[StageSite], **options: Any) -> str:
    with pytest.raises(MemoryLimitError) as caught:
        optimal_partition(chain, sites, **options)
    return str(caught.value)


def test_refusal_has_a_table_of_what_each_stage_needs() -> None:
    head, _, *stages, problem = refusal(model(), devices(2), names=NAMES).splitlines()
    assert head == "no cut into 2 stages fits into memory; the best one is over by 4.5 GiB in stage 0:"
    assert [re.split("  +", stage.strip()) for stage in stages] == [
        ["0", "0-3", "4.0 GiB", "12.0 GiB", "4.0 GiB x 2", "512.0 MiB", "24.5 GiB", "20.0 GiB", "4.5 GiB"],
        ["1", "4-7", "4.0 GiB", "12.0 GiB", "4.1 GiB x 1", "512.0 MiB", "20.6 GiB", "20.0 GiB", "640.0 MiB"],
    ]
    assert problem == (
        "The problem: the parameters: with gradients and optimizer state they take 16.0 GiB of the 24.5 GiB of stage 0 "
        "(activations: 8.0 GiB)."
    )


@pytest.mark.parametrize(
    ("chain", "problem"),
    [
        (model(weight=2.0), "the parameters: with gradients and optimizer state they take 64.0 GiB, and all devices"),
        (model(held=4.5, weight=0.1), "the activations: with 2 micro-batches in flight they take"),
        (model(held=0.2, weight=0.5, working=12.0), "working memory: node 'a' for a moment takes 12.0 GiB of the"),
        (model(weight=6.0), "node 'b' alone needs 25.6 GiB, more than any stage may take"),
        (model(weight=3.0, forbidden=[3]), "node 'c' to node 'd' alone needs 26.6 GiB, more than any stage may take"),
    ],
)
def test_refusal_names_the_part_at_fault(chain: Chain, problem: str) -> None:
    assert f"The problem: {problem}" in refusal(chain, devices(2), names=NAMES)


@given(problems())
def test_best_attempt_is_over_by_the_least(problem: tuple[Chain, list[StageSite]]) -> None:
    chain, sites = problem
    try:
        optimal_partition(chain, sites)
    except MemoryLimitError:
        limits = [site.memory or 0.0 for site in sites]
        starts, loads = best_attempt(chain, sites)
        over = max(load.memory - limit for load, limit in zip(loads, limits, strict=True))
        less = [replace(site, memory=limit + over * 60 / 64) for site, limit in zip(sites, limits, strict=True)]
        assert best_of_all(chain, less) is None
        assert starts[0] == 0
    except PartitionError:
        pass


def test_too_many_stages_are_refused_without_a_word_of_memory() -> None:
    with pytest.raises(PartitionError, match="stages=3, but the 2 nodes can be cut into 2 at most") as caught:
        optimal_partition(row(1.0, 1.0), [StageSite(memory=1.0)] * 3)
    assert not isinstance(caught.value, MemoryLimitError)
    with pytest.raises(PartitionError, match="some is out of order"):
        optimal_partition(row(1.0, 1.0, first_stages=(1, 0), last_stages=(1, 0)), [StageSite()] * 2)


def cost_of(misplaced, starts):
    stages = [sum(start <= place for start in starts) - 1 for place in range(len(misplaced))]
    return sum(row[stage] for row, stage in zip(misplaced, stages, strict=True))


@st.composite
def instances(draw):
    nodes, stages = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 3).map(float), min_size=stages, max_size=stages)
    misplaced = draw(st.lists(row, min_size=nodes, max_size=nodes))
    forbidden = draw(st.sets(st.integers(1, 8), max_size=4)) & set(range(1, nodes))
    return misplaced, stages, forbidden


@hypothesis.given(instances())
def test_it_is_the_first_of_the_best_of_all_cuts(instance):
    misplaced, stages, forbidden = instance
    every = combinations(range(1, len(misplaced)), stages - 1)
    cuts = [(0, *places) for places in every if not forbidden & {*places}]
    if not cuts:
        words = rf"{len(misplaced)} nodes, and fewer than {stages} blocks .* use fewer devices"
        with pytest.raises(PartitionError, match=words):
            cut_least_misplaced(misplaced, dict.fromkeys(forbidden, ""))
        return
    assert cut_least_misplaced(misplaced, dict.fromkeys(forbidden, "")) == min(
        cuts, key=lambda c: (cost_of(misplaced, c), c)
    )
