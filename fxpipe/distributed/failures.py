"""Reports of ranks to each other after a step has failed, through the store of the process group.

The failed rank closes its connections, so ranks that wait for it fail and close theirs, each after leaving a report.
The cause is the rank whose code raised, or else the rank without a report: its process has ended or hangs.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fxpipe._torch.process_groups import PrefixStore, Store
from fxpipe.errors import DistributedError

GRACE_SECONDS = 3.0  # for other ranks to leave their reports
STORE_SECONDS = 10.0  # timeout of the store after a failure
POLL_SECONDS = 0.02


class StoreSilentError(RuntimeError):
    """The store has not answered in time; a later answer is dropped."""


class BoundedStore:
    """Makes requests to a store. Raises `StoreSilentError` after `seconds`, or `RuntimeError` from torch."""

    # A daemon thread makes each request: clients of torch have no deadline, and if the host of the server is
    # disconnected, the kernel gives up after a quarter of an hour.

    def __init__(self, store: Store, seconds: float):
        self.store, self.seconds = store, seconds

    def ask(self, request: str, *arguments: Any) -> Any:
        """Returns the answer to a request, a method of the store."""
        answer = Future[Any]()

        def run() -> None:
            try:
                answer.set_result(getattr(self.store, request)(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="fxpipe store", daemon=True).start()
        try:
            return answer.result(self.seconds)
        except TimeoutError:
            if answer.done():  # the store has raised it
                raise
            text = f"the store of the process group has not answered for {self.seconds:g} s"
            raise StoreSilentError(text) from None


class ConnectionLost(Exception):
    """A failed transfer between ranks. `FailureBoard` finds the cause."""

    def __init__(self, what: str, detail: str, is_timeout: bool) -> None:
        super().__init__(f"{what}: {detail}")
        self.what, self.detail, self.is_timeout = what, detail, is_timeout


@dataclass(frozen=True, slots=True)
class FailureReport:
    """One rank's report of a failed step."""

    number: int  # rank number over all replicas
    doing: str  # the last action it began
    waiting: str = ""  # the awaited message; empty if its code raised
    error: str = ""  # the exception, with its notes


class FailureBoard:
    """The reports of all ranks of all replicas, for one generation of connections."""

    def __init__(self, store: Store, number: int, size: int, replicas: int = 1, timeout: float = STORE_SECONDS):
        """`number`: of this rank, over all replicas. `timeout`: of the store, in seconds, at most `STORE_SECONDS`."""
        self._store = BoundedStore(store, min(timeout, STORE_SECONDS))
        self._number, self._size, self._replicas = number, size, replicas

    def leave(self, report: FailureReport) -> None:
        with contextlib.suppress(RuntimeError):  # the store itself may have ended
            self._store.ask("set", f"report/{self._number}", pickle.dumps(report).hex())

    def _name(self, *numbers: int) -> str:
        return rank_names(numbers, self._size, self._replicas)

    def cause(self, own: FailureReport, lost: ConnectionLost) -> DistributedError:
        """Waits up to `GRACE_SECONDS` for the reports of other ranks, and returns the error that they show."""
        everybody = set(range(self._size * self._replicas))
        reports = {self._number: own}
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            while True:
                for number in sorted(everybody - reports.keys()):
                    if self._store.ask("check", [key := f"report/{number}"]):
                        reports[number] = pickle.loads(bytes.fromhex(self._store.ask("get", key).decode()))
                if raised := [number for number in sorted(reports) if reports[number].error]:
                    text = reports[raised[0]].error
                    return DistributedError(f"{self._name(raised[0])} has failed, and the step with it: {text}")
                if reports.keys() == everybody or time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError as error:  # the process that holds the store has ended
            is_silent = isinstance(error, StoreSilentError)
            state = "does not answer: it hangs, or its host cannot be reached" if is_silent else "is gone"
            return DistributedError(
                f"the process that holds the store of the process group, rank 0 as a rule, {state}; here, on "
                f"{self._name(self._number)}, {_waiting_words(own)}"
            )
        return self._error_of_silent(everybody - reports.keys(), own, reports, lost)

    def _error_of_silent(
        self, silent: set[int], own: FailureReport, reports: dict[int, FailureReport], lost: ConnectionLost
    ) -> DistributedError:
        here = f"here, on {self._name(own.number)}, {_waiting_words(own)}"
        if not silent:
            late = next((report for report in reports.values() if "timed out" in report.waiting), None)
            if late is not None:
                return DistributedError(
                    f"{self._name(late.number)} has given up: {_waiting_words(late)}; {here}. Something takes longer "
                    "than timeout= allows"
                )
            waits = "; ".join(f"{self._name(number)}: {_waiting_words(reports[number])}" for number in sorted(reports))
            return DistributedError(f"the connection between ranks was lost: {waits} ({lost.detail})")
        is_late = lost.is_timeout or any("timed out" in report.waiting for report in reports.values())
        hangs, ended = "does not answer (it hangs, or takes longer than timeout=)", "is gone: its process has ended"
        states = (f"{self._name(number)} {hangs if is_late else ended}" for number in sorted(silent))
        return DistributedError("; ".join((*states, here)))


def rank_names(numbers: Iterable[int], size: int, replicas: int = 1) -> str:
    """Returns the names of ranks, by number; each replica has `size` ranks.

    >>> rank_names([0, 3], 4), rank_names([0, 3], 2, replicas=2)
    ('ranks 0, 3', 'rank 0 of replica 0, rank 1 of replica 1')
    """
    numbers = list(numbers)
    if replicas == 1:
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return ", ".join(f"rank {number % size} of replica {number // size}" for number in numbers)


def _waiting_words(report: FailureReport) -> str:
    doing = f"after {report.doing} " if report.doing else ""
    return f"{doing}it waited for {report.waiting}"


def meet_ranks(store: Store, rank: int, size: int, timeout: float, kind: str = "rank") -> Store:
    """Returns a store for these calls, which all ranks make. Raises `DistributedError` after `timeout` seconds."""
    # The store may have keys of ended processes, since torchrun restarts ranks on the same store. So each rank leaves a
    # new token. Rank 0 answers to these with a new name for all; a rank only accepts an answer to its token.
    token, deadline, bounded = uuid.uuid4().hex, time.monotonic() + timeout, BoundedStore(store, timeout)
    name: str | None = token if rank == 0 else None
    tokens, here = ([f"{what}/{other}" for other in range(size)] for what in ("token", "here"))
    own: BoundedStore | None = None
    try:
        bounded.ask("set", tokens[rank], token)
        while time.monotonic() <= deadline:
            if rank == 0:
                left = [bounded.ask("get", key).decode() for key in tokens if bounded.ask("check", [key])]
                bounded.ask("set", "name", json.dumps({"name": token, "tokens": left}))
            elif name is None and bounded.ask("check", ["name"]):
                answer = json.loads(bounded.ask("get", "name"))
                name = str(answer["name"]) if token in answer["tokens"] else None
            if name is not None and own is None:
                own = BoundedStore(PrefixStore(name, store), timeout)
                own.ask("set", here[rank], "1")
            if own is not None and own.ask("check", here):
                return own.store
            time.sleep(POLL_SECONDS)
        missing = (
            ["0"] if own is None else [str(other) for other, key in enumerate(here) if not own.ask("check", [key])]
        )
    except StoreSilentError as error:
        raise DistributedError(
            f"{error}, on {kind} {rank} of {size}: the process that holds it, rank 0 as a rule, hangs, or its host "
            "cannot be reached"
        ) from None
    raise DistributedError(
        f"{kind} {', '.join(missing) or 'unknown'} of {size} has not come in {timeout:g} s: every rank of the process "
        "group makes the pipe, and calls it as often as the others; is one gone, or was it started with another world "
        "size?"
    )
