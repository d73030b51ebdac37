"""A store with a timeout for each request.

The store of a process group is a server in one process: rank 0 or torchrun. Its clients wait for an answer without a
deadline: if the server's host is disconnected, no packet ends the wait, and the kernel gives up after a quarter of an
hour. So a daemon thread makes each request, and the caller stops waiting for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fxpipe._torch.process_groups import Store

T = TypeVar("T")


class StoreSilentError(RuntimeError):
    """The store has not answered in time; a later answer is dropped."""


class BoundedStore:
    """Makes requests to a store. Raises `StoreSilentError` after `seconds`, or `RuntimeError` from torch."""

    def __init__(self, store: Store, seconds: float):
        self.store, self.seconds = store, seconds

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self.store.get(key)))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: bool(self.store.check(keys)))

    def _ask(self, question: Callable[[], T]) -> T:
        answers: list[T] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(question())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="fxpipe store", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if errors:
            raise errors[0]
        if not answers:
            raise StoreSilentError(f"the store of the process group has not answered for {self.seconds:g} s")
        return answers[0]
