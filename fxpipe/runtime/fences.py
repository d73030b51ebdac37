"""What stands between two actions on different devices: the second does not start before the first has passed.

Most fences are open when somebody comes to them, and those of one row always are. So what has passed is noted in a set,
and an event is made only by who has to wait. That misses no opening: who passes notes it first and then looks for an
event, who waits leaves an event first and then looks at the notes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from fxpipe.runtime.wiring import Fence
from fxpipe.scheduling.actions import Action, Kind

_Key = tuple[Kind, int, int]  # of an action, which is such a tuple


class Fences:
    """The fences of one step, one for each action that others wait for. They open for good."""

    def __init__(self, before: Mapping[Fence, tuple[Fence, ...]]):
        self._before = before
        self._passed: set[_Key] = set()
        self._events: dict[_Key, threading.Event] = {}
        self._all_open = False

    def are_open(self, action: Action) -> bool:
        """May the action start?"""
        kind, stage, i = action
        return self._all_open or all((*fence, i) in self._passed for fence in self._before.get((kind, stage), ()))

    def wait(self, action: Action) -> None:
        """Returns when the action may start."""
        kind, stage, i = action
        for fence in self._before.get((kind, stage), ()):
            key = (*fence, i)
            if key not in self._passed:
                event = self._events.setdefault(key, threading.Event())
                if key not in self._passed and not self._all_open:
                    event.wait()

    def pass_on(self, action: Action) -> None:
        """Opens what stands behind an action that has ended."""
        self._passed.add(action)
        event = self._events.get(action)
        if event is not None:
            event.set()

    def open_all(self) -> None:
        self._all_open = True
        for event in list(self._events.values()):
            event.set()
