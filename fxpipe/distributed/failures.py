"""Reports of ranks to each other when a step has failed, through the store of the process group.

A failure goes round by itself: who fails closes its connections, whoever waits for it then fails too and closes its
own. What a closed connection does not say is why, so each rank leaves a report before it closes. The cause is the rank
whose own code raised; or, where all reports say "I was waiting", the rank that left none: it is gone, or hangs.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from fxpipe._torch.process_groups import Store
from fxpipe.errors import DistributedError

GRACE_SECONDS = 3.0  # that others have to leave their reports
POLL_SECONDS = 0.02


class ConnectionLost(Exception):
    """A transfer between ranks has failed; the cause is elsewhere."""

    def __init__(self, what: str, detail: str, is_timeout: bool) -> None:
        super().__init__(f"{what}: {detail}")
        self.what, self.detail, self.is_timeout = what, detail, is_timeout


@dataclass(frozen=True, slots=True)
class FailureReport:
    """One rank's report of a failed step."""

    rank: int
    doing: str  # the last action it began
    waiting: str = ""  # for what; empty where its own code raised
    error: str = ""  # what that raised, with its notes
    heard: dict[int, str] = field(default_factory=dict)  # by rank, the last message that came from there


def error_text(error: BaseException) -> str:
    """Returns an exception with its notes, as a few lines."""
    notes = getattr(error, "__notes__", [])
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


class FailureBoard:
    """The reports of one generation of connections."""

    def __init__(self, store: Store, rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size

    def leave(self, report: FailureReport) -> None:
        """Leaves this rank's report. Where the store itself is gone nobody can be told."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"report/{self._rank}", pickle.dumps(report).hex())

    def _read(self, ranks: Iterable[int]) -> dict[int, FailureReport]:
        return {
            rank: pickle.loads(bytes.fromhex(self._store.get(f"report/{rank}").decode()))
            for rank in ranks
            if self._store.check([f"report/{rank}"])
        }

    def cause(self, own: FailureReport, lost: ConnectionLost) -> DistributedError:
        """Waits a moment for the others' reports, and makes the error of them."""
        reports = {self._rank: own}
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            while True:
                reports |= self._read(set(range(self._size)) - reports.keys())
                raised = [reports[rank] for rank in sorted(reports) if reports[rank].error]
                if raised:
                    return _error_of_raised(raised[0])
                if len(reports) == self._size or time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store is gone with the process that holds it
            return DistributedError(
                f"the process that holds the store of the process group is gone, rank 0 as a rule; here, on rank "
                f"{self._rank}, {_waiting_words(own)}"
            )
        return _error_of_silent(set(range(self._size)) - reports.keys(), own, reports, lost)


def _error_of_raised(report: FailureReport) -> DistributedError:
    first, *rest = report.error.splitlines()
    return DistributedError("\n".join([f"rank {report.rank} has failed, and the step with it: {first}", *rest]))


def _waiting_words(report: FailureReport) -> str:
    doing = f"after {report.doing} " if report.doing else ""
    return f"{doing}it waited for {report.waiting}"


def _error_of_silent(
    silent: set[int], own: FailureReport, reports: dict[int, FailureReport], lost: ConnectionLost
) -> DistributedError:
    if not silent:
        late = next((report for report in reports.values() if "timed out" in report.waiting), None)
        if late is not None:
            return DistributedError(
                f"rank {late.rank} has given up: {_waiting_words(late)}; here, on rank {own.rank}, "
                f"{_waiting_words(own)}. Something takes longer than timeout= allows"
            )
        waits = "; ".join(f"rank {rank}: {_waiting_words(reports[rank])}" for rank in sorted(reports))
        return DistributedError(f"the connection between ranks was lost: {waits} ({lost.detail})")
    names = ", ".join(map(str, sorted(silent)))
    is_late = lost.is_timeout or any("timed out" in report.waiting for report in reports.values())
    state = "does not answer (it hangs, or takes longer than timeout=)" if is_late else "is gone: its process has ended"
    last = [
        f"the last that came from rank {rank}: {report.heard[rank]} (to rank {report.rank})"
        for rank in sorted(silent)
        for report in reports.values()
        if rank in report.heard
    ]
    return DistributedError(
        f"rank {names} {state}; here, on rank {own.rank}, {_waiting_words(own)}"
        + (f"; {'; '.join(last)}" if last else "; nothing has come from it in this step")
    )


def wait_for_ranks(store: Store, rank: int, size: int, timeout: float) -> None:
    """Returns when all ranks have called this with the same store.

    Raises:
        DistributedError: one has not, in `timeout` seconds.
    """
    store.set(f"here/{rank}", "1")
    keys = [f"here/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            store.delete_key(f"here/{rank}")  # whoever comes later finds nobody
        missing = [str(other) for other, key in enumerate(keys) if other != rank and not store.check([key])]
        raise DistributedError(
            f"rank {', '.join(missing) or 'unknown'} of {size} has not come in {timeout:g} s: every rank of the "
            "process group makes the pipe, and calls it as often as the others; is one gone, or was it started with "
            "another world size?"
        ) from None
