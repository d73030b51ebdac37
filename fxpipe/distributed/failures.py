"""Reports of ranks to each other when a step has failed, through the store of the process group.

A failure goes round by itself: who fails closes its connections, whoever waits for it then fails too and closes its
own. What a closed connection does not say is why, so each rank leaves a report before it closes. The cause is the rank
whose own code raised; or, where all reports say "I was waiting", the rank that left none: it is gone, or hangs.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from fxpipe._torch.process_groups import PrefixStore, Store
from fxpipe.distributed.bounded_store import BoundedStore, StoreSilentError
from fxpipe.errors import DistributedError

GRACE_SECONDS = 3.0  # that others have to leave their reports
STORE_SECONDS = 10.0  # that the store has to answer, once something has failed
POLL_SECONDS = 0.02


class ConnectionLost(Exception):
    """A transfer between ranks has failed; the cause is elsewhere."""

    def __init__(self, what: str, detail: str, is_timeout: bool) -> None:
        super().__init__(f"{what}: {detail}")
        self.what, self.detail, self.is_timeout = what, detail, is_timeout


@dataclass(frozen=True, slots=True)
class FailureReport:
    """One rank's report of a failed step."""

    number: int  # of the rank, among those of all replicas
    doing: str  # the last action it began
    waiting: str = ""  # for what; empty where its own code raised
    error: str = ""  # what that raised, with its notes
    heard: dict[int, str] = field(default_factory=dict)  # by number of a rank, the last message that came from there


def error_text(error: BaseException) -> str:
    """Returns an exception with its notes, as a few lines."""
    notes = getattr(error, "__notes__", [])
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


class FailureBoard:
    """The reports of one generation of connections, of the ranks of all replicas."""

    def __init__(self, store: Store, number: int, size: int, replicas: int = 1, timeout: float = STORE_SECONDS):
        """
        Args:
            number: of this rank, among `size * replicas`: those of the first replica come first.
            timeout: seconds that the store has to answer, as far as they are fewer than `STORE_SECONDS`.
        """
        self._store = BoundedStore(store, min(timeout, STORE_SECONDS))
        self._number, self._size, self._replicas = number, size, replicas

    def leave(self, report: FailureReport) -> None:
        """Leaves this rank's report. Where the store itself is gone nobody can be told."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"report/{self._number}", pickle.dumps(report).hex())

    def _read(self, numbers: Iterable[int]) -> dict[int, FailureReport]:
        return {
            number: pickle.loads(bytes.fromhex(self._store.get(f"report/{number}").decode()))
            for number in numbers
            if self._store.check([f"report/{number}"])
        }

    def _name(self, *numbers: int) -> str:
        return rank_names(numbers, self._size, self._replicas)

    def cause(self, own: FailureReport, lost: ConnectionLost) -> DistributedError:
        """Waits a moment for the others' reports, and makes the error of them."""
        everybody = set(range(self._size * self._replicas))
        reports = {self._number: own}
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            while True:
                reports |= self._read(everybody - reports.keys())
                raised = [reports[number] for number in sorted(reports) if reports[number].error]
                if raised:
                    return self._error_of_raised(raised[0])
                if reports.keys() == everybody or time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError as error:  # the store is gone with the process that holds it
            is_silent = isinstance(error, StoreSilentError)
            state = "does not answer: it hangs, or its host cannot be reached" if is_silent else "is gone"
            return DistributedError(
                f"the process that holds the store of the process group, rank 0 as a rule, {state}; here, on "
                f"{self._name(self._number)}, {_waiting_words(own)}"
            )
        return self._error_of_silent(everybody - reports.keys(), own, reports, lost)

    def _error_of_raised(self, report: FailureReport) -> DistributedError:
        first, *rest = report.error.splitlines()
        name = self._name(report.number)
        return DistributedError("\n".join([f"{name} has failed, and the step with it: {first}", *rest]))

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
        one, more = (
            ("does not answer (it hangs, or takes", "do not answer (they hang, or take")
            if is_late
            else ("is gone: its process has ended", "are gone: their processes have ended")
        )
        state = (one if len(silent) == 1 else more) + (" longer than timeout=)" if is_late else "")
        last = [
            f"the last that came from {self._name(number)}: {report.heard[number]} (to {self._name(report.number)})"
            for number in sorted(silent)
            for report in reports.values()
            if number in report.heard
        ]
        return DistributedError(
            f"{self._name(*sorted(silent))} {state}; {here}"
            + (f"; {'; '.join(last)}" if last else "; nothing has come from it in this step")
        )


def rank_names(numbers: Iterable[int], size: int, replicas: int = 1) -> str:
    """Names ranks, of which each of so many replicas has `size`.

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
    """Waits until all ranks have called this with the same store, and returns one that only they know.

    In the store may be what processes have left that are gone: torchrun starts ranks that have failed again on the same
    one. So each rank leaves a token that is new, and believes who answers to this token: rank 0, by a new name for all.

    Args:
        kind: "rank", or "replica" of which this is one.

    Raises:
        DistributedError: one has not come in `timeout` seconds, or the store does not answer.
    """
    try:
        return _meet_ranks(store, rank, size, timeout, kind)
    except StoreSilentError as error:
        raise DistributedError(
            f"{error}, on {kind} {rank} of {size}: the process that holds it, rank 0 as a rule, hangs, or its host "
            "cannot be reached"
        ) from None


def _meet_ranks(shared: Store, rank: int, size: int, timeout: float, kind: str) -> Store:
    token, deadline, store = uuid.uuid4().hex, time.monotonic() + timeout, BoundedStore(shared, timeout)
    store.set(f"token/{rank}", token)
    name: str | None = token if rank == 0 else None
    here = [f"here/{other}" for other in range(size)]
    own: BoundedStore | None = None
    while True:
        if rank == 0:
            _give_name(store, size, token)
        elif name is None:
            name = _name_for(store, token)
        if name is not None:
            if own is None:
                own = BoundedStore(PrefixStore(name, shared), timeout)
                own.set(here[rank], "1")
            if own.check(here):
                return own.store
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    missing = ["0"] if own is None else [str(other) for other, key in enumerate(here) if not own.check([key])]
    raise DistributedError(
        f"{kind} {', '.join(missing) or 'unknown'} of {size} has not come in {timeout:g} s: every rank of the process "
        "group makes the pipe, and calls it as often as the others; is one gone, or was it started with another world "
        "size?"
    )


def _give_name(store: BoundedStore, size: int, name: str) -> None:
    """Gives the ranks a name, by the tokens that they have left so far."""
    keys = [f"token/{other}" for other in range(size)]
    tokens = [store.get(key).decode() for key in keys if store.check([key])]
    store.set("name", json.dumps({"name": name, "tokens": tokens}))


def _name_for(store: BoundedStore, token: str) -> str | None:
    """Returns the name that rank 0 has given to whoever has this token; None where it has not yet."""
    if not store.check(["name"]):
        return None
    answer = json.loads(store.get("name"))
    return str(answer["name"]) if token in answer["tokens"] else None
