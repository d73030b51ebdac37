"""A later graph of a model is cut so that its nodes go to their parameters: exactly, against all cuts there are."""

from itertools import combinations

import hypothesis
import hypothesis.strategies as st
import pytest

from fxpipe.errors import PartitionError
from fxpipe.partitioning import cut_least_misplaced


def cost_of(misplaced, starts):
    stages = [sum(start <= place for start in starts) - 1 for place in range(len(misplaced))]
    return sum(row[stage] for row, stage in zip(misplaced, stages, strict=True))


def every_cut(nodes, stages, forbidden):
    for places in combinations(range(1, nodes), stages - 1):
        if not forbidden & set(places):
            yield (0, *places)


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
    cuts = list(every_cut(len(misplaced), stages, forbidden))
    if not cuts:
        with pytest.raises(PartitionError, match=f"fewer than {stages} blocks"):
            cut_least_misplaced(misplaced, dict.fromkeys(forbidden, ""))
        return
    assert cut_least_misplaced(misplaced, dict.fromkeys(forbidden, "")) == min(
        cuts, key=lambda c: (cost_of(misplaced, c), c)
    )


def test_too_few_places_say_how_many_nodes_there_are():
    with pytest.raises(PartitionError, match=r"2 nodes, and fewer than 3 blocks .* use fewer devices"):
        cut_least_misplaced([[0.0] * 3] * 2, {})
