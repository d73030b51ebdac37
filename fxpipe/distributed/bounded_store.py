"""A store that is asked for so long and no longer.

The store of a process group is a server in one process, rank 0's or torchrun's. Its clients wait for an answer on their
connection, without a deadline of their own: where the server's host is cut off no packet comes that would end the wait,
and the kernel gives up after a quarter of an hour. So each question is asked in a thread that nobody has to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fxpipe._torch.process_groups import Store

T = TypeVar("T")


class StoreSilentError(RuntimeError):
    """The store has not answered; an answer that comes later is dropped."""


class BoundedStore:
    """Asks a store what this package asks, each time for so many seconds.

    Raises:
        StoreSilentError: it does not answer.
        RuntimeError: torch's own, where the connection is closed.
    """

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
