"""A list to which forward may append unseen: its class is made in C, which fxpipe does not look into."""

import queue
from collections.abc import Iterator
from typing import Any


class UnseenList:
    def __init__(self) -> None:
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.append, self._items = items.put, items

    def __iter__(self) -> Iterator[Any]:
        """Takes out all items."""
        while not self._items.empty():
            yield self._items.get()
