"""Random problems of partitioning."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from fxpipe.cluster import Link
from fxpipe.partitioning.chain import Chain, Flow, HeldStorage, ParameterUse, StageSite
from fxpipe.partitioning.manual_cuts import NodeSequence, cut_by_block, cuts_by_names, is_by_names, starts_by_counts


@dataclass(frozen=True)
class BlockCut:
    """Nodes cut by their costs alone."""

    starts: tuple[int, ...]
    costs: tuple[float, ...]  # of each stage

    @property
    def bottleneck(self) -> float:
        return max(self.costs)


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    balance: Sequence[Any] | None = None,
    forbidden: Mapping[int, str] | None = None,
    names: Sequence[str] = (),
    modules: Sequence[str] = (),
) -> BlockCut:
    """Cuts as planning does where no transfer and no limit counts: by block, or by hand."""
    nodes = NodeSequence(tuple(costs), tuple(names), tuple(modules), forbidden or {})
    if stages > len(nodes.items()):
        raise nodes.too_many_stages_error(stages)
    if balance is None:
        starts = cut_by_block(nodes, stages)
    elif is_by_names(balance, stages):
        starts = cut_by_block(nodes, stages, cuts_by_names(balance, nodes))
    else:
        starts = starts_by_counts(balance, nodes)
    sums = (math.fsum(nodes.costs[start:stop]) for start, stop in pairwise([*starts, len(nodes.costs)]))
    return BlockCut(starts, tuple(sums))


seconds = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 20.0, 0.1, 0.2, 0.3, 0.1 + 0.2, 1e-17])


amounts = st.sampled_from([0.0, 1.0, 2.0, 3.0, 8.0])


@st.composite
def chains(draw: st.DrawFn, stages: int, kinds: int = 1) -> Chain:
    n = draw(st.integers(stages, 11))
    row = st.lists(seconds, min_size=n, max_size=n).map(tuple)

    def some_of(first: int, end: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.sets(st.integers(first, end - 1), min_size=1, max_size=4).map(lambda places: tuple(sorted(places)))

    flows, held = [], []
    for _ in range(draw(st.integers(0, 12))):
        maker = draw(st.integers(-1, n - 1))
        flows.append(Flow(draw(amounts), maker, draw(some_of(maker + 1, n + 1)), draw(st.booleans())))
    for _ in range(draw(st.integers(0, 12))):
        maker = draw(st.integers(-1, n - 1))
        held.append(HeldStorage(draw(amounts), maker, draw(some_of(max(maker, 0), n))))
    weights = [
        ParameterUse(draw(amounts), draw(some_of(0, n)), draw(st.booleans())) for _ in range(draw(st.integers(0, 6)))
    ]
    bounded = draw(st.sampled_from([False, False, True]))
    backward = tuple(draw(row) for _ in range(kinds))
    has_loss = draw(st.booleans())
    return Chain(
        tuple(draw(row) for _ in range(kinds)),
        backward,
        tuple(flows),
        tuple(held),
        tuple(weights),
        tuple(draw(amounts) for _ in range(n)) if draw(st.booleans()) else (),
        dict.fromkeys(draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else (), "they hang together"),
        tuple(draw(st.sampled_from([0, 0, 0, 0, 0, 1])) for _ in range(n)) if bounded else (),
        tuple(draw(st.sampled_from([stages - 1] * 5 + [0])) for _ in range(n)) if bounded else (),
        loss=tuple(seconds[-1] for seconds in backward) if has_loss else (),
        is_relayed=draw(st.booleans()),
    )


@st.composite
def sites(draw: st.DrawFn, stages: int, kinds: int = 1) -> list[StageSite]:
    limit = draw(st.sampled_from([None, 15.0, 30.0, 60.0]))
    alike = draw(st.booleans())

    def one() -> StageSite:
        return StageSite(
            kind=draw(st.integers(0, kinds - 1)),
            memory=None if limit is None else limit + draw(st.sampled_from([0.0, 5.5])),
            link=draw(st.sampled_from([None, Link(4.0), Link(3.0, 0.1), Link(1.0, 1.0)])),
            in_flight=draw(st.integers(1, 4)),
            recomputed=draw(st.sampled_from([1, 1, 2])),
            may_recompute=draw(st.booleans()),
            must_recompute=draw(st.sampled_from([False, False, False, True])),
            state=draw(st.sampled_from([3.0, 0.0, 0.5])),
        )

    if not alike:
        return [one() for _ in range(stages)]
    return [replace(site, in_flight=stages - j) for j, site in enumerate([one()] * stages)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, list[StageSite]]:
    stages, kinds = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    return draw(chains(stages, kinds)), draw(sites(stages, kinds))


def row(*costs: float, **fields: Any) -> Chain:
    return Chain((costs,), ((0.0,) * len(costs),), **fields)
