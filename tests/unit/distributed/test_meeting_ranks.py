"""Ranks meet on a store in which processes that are gone may have left all that they say to each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fxpipe.distributed.failures import meet_ranks
from fxpipe.errors import DistributedError


def meet(store, ranks, size, timeout=20.0):
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: meet_ranks(store, rank, size, timeout), ranks))


def test_ranks_that_are_started_again_meet_each_other_and_not_those_that_are_gone():
    store = dist.HashStore()
    for start in range(3):
        own = meet(store, range(3), 3)
        assert not own[1].check(["left"])  # by the ranks of the start before
        own[0].set("left", str(start))
        assert {one.get("left").decode() for one in own} == {str(start)}


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_has_not_come_again_is_named(missing):
    store = dist.HashStore()
    meet(store, range(3), 3)
    others = [rank for rank in range(3) if rank != missing]
    with pytest.raises(DistributedError, match=rf"rank {missing} of 3 has not come in 0\.3 s"):
        meet(store, others, 3, timeout=0.3)
    assert len(meet(store, range(3), 3)) == 3
