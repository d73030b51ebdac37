"""What threads of the host know of each other's waiting.

A thread that has waited for a device may tell another one, by whatever orders the two: starting it, joining it, a
queue, an event. What the other queues then comes behind all that the first has waited for. Where nothing orders the
two, it does not, though it may have come later this time.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

Told = Callable[[object], None]


def follow(tell: Told, hear: Told) -> None:
    """Has what orders threads tell the simulated machine, from now on."""
    _follow_threads(tell, hear)
    _follow_events(tell, hear)
    _follow_queues(tell, hear)


def follow_fences(fences: type, tell: Told, hear: Told) -> None:
    """Follows the fences of a step, too: a set that workers look into, which has no name elsewhere."""
    wait_behind, passed = fences.wait_behind, fences.passed  # type: ignore[attr-defined]

    def hearing_wait(self: Any, action: Any) -> None:
        wait_behind(self, action)
        hear((id(self), *action))

    def telling_passed(self: Any, run: Any, action: Any) -> None:
        tell((id(self), *action))
        passed(self, run, action)

    fences.wait_behind, fences.passed = hearing_wait, telling_passed  # type: ignore[attr-defined]


def _follow_threads(tell: Told, hear: Told) -> None:
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def telling_start(self: threading.Thread) -> None:
        tell(("start", id(self)))
        start(self)

    def hearing_run(self: threading.Thread) -> None:
        hear(("start", id(self)))
        try:
            run(self)
        finally:
            tell(("end", id(self)))

    def hearing_join(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            hear(("end", id(self)))

    threading.Thread.start = telling_start  # type: ignore[method-assign]
    threading.Thread.run = hearing_run  # type: ignore[method-assign]
    threading.Thread.join = hearing_join  # type: ignore[method-assign]


def _follow_events(tell: Told, hear: Told) -> None:
    put, wait = threading.Event.set, threading.Event.wait

    def telling_set(self: threading.Event) -> None:
        tell(("event", id(self)))
        put(self)

    def hearing_wait(self: threading.Event, timeout: float | None = None) -> bool:
        is_set = wait(self, timeout)
        hear(("event", id(self)))
        return is_set

    threading.Event.set = telling_set  # type: ignore[method-assign]
    threading.Event.wait = hearing_wait  # type: ignore[method-assign]


def _follow_queues(tell: Told, hear: Told) -> None:
    class SimpleQueue(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            tell(("queue", id(self)))
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get(block, timeout)
            hear(("queue", id(self)))
            return item

    queue.SimpleQueue = SimpleQueue  # type: ignore[misc]
