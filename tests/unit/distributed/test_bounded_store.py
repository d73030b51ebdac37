"""A store that does not answer is an error after a time, not a wait without end."""

import threading

import pytest
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
    bounded.set("name", "value")
    assert bounded.get("name") == b"value"
    assert bounded.check(["name"])
    assert not bounded.check(["name", "other"])
    with pytest.raises(AttributeError, match="get"):
        BoundedStore(None, 10.0).get("name")


def test_a_question_without_an_answer_is_an_error_after_so_many_seconds(silent):
    bounded = BoundedStore(silent, 0.05)
    for question in (
        lambda: bounded.set("name", "value"),
        lambda: bounded.get("name"),
        lambda: bounded.check(["name"]),
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
