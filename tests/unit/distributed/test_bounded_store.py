"""Ranks meet on a store that old processes may have filled; a store that does not answer is an error after a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from fxpipe.distributed.failures import (
    BoundedStore,
    ConnectionLost,
    FailureBoard,
    FailureReport,
    StoreSilentError,
    meet_ranks,
)
from fxpipe.errors import DistributedError


class SilentStore:
    """As a client whose server is cut off: each call waits, until `answer` is set."""

    def __init__(self):
        self.answer = threading.Event()

    def _wait(self, *arguments):
        self.answer.wait(60)
        return True

    set = get = check = _wait


@pytest.fixture
def silent():
    store = SilentStore()
    yield store
    store.answer.set()


def test_answers_and_errors_are_those_of_the_store():
    bounded = BoundedStore(HashStore(), 10.0)
    bounded.ask("set", "name", "value")
    assert bounded.ask("get", "name") == b"value"
    assert bounded.ask("check", ["name"])
    assert not bounded.ask("check", ["name", "other"])
    with pytest.raises(AttributeError, match="get"):
        BoundedStore(None, 10.0).ask("get", "name")


def test_a_question_without_an_answer_is_an_error_after_so_many_seconds(silent):
    bounded = BoundedStore(silent, 0.05)
    for question in (
        lambda: bounded.ask("set", "name", "value"),
        lambda: bounded.ask("get", "name"),
        lambda: bounded.ask("check", ["name"]),
    ):
        with pytest.raises(StoreSilentError, match=r"not answered for 0.05 s"):
            question()


def test_ranks_that_meet_on_it_are_told(silent):
    with pytest.raises(DistributedError, match=r"on rank 1 of 2: .* or its host cannot be reached"):
        meet_ranks(silent, 1, 2, 0.05)


def test_the_cause_of_a_failure_is_then_the_store_as_far_as_can_be_told(silent):
    board = FailureBoard(silent, 1, 2, timeout=0.05)
    report = FailureReport(1, "1B0", "the gradient of 1B0 (timed out)")
    board.leave(report)
    error = board.cause(report, ConnectionLost("the gradient of 1B0", "timed out", True))
    assert "does not answer: it hangs, or its host cannot be reached; here, on rank 1, after 1B0" in str(error)


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
