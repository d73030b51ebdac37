"""What stands between two actions on different devices: the second does not start before the first has passed."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from fxpipe.runtime.wiring import Fence
from fxpipe.scheduling.actions import Action


class Fences:
    """The fences of one step, one for each micro-batch. They open for good."""

    def __init__(self, before: Mapping[Fence, tuple[Fence, ...]], micro_batches: int):
        self._before = before
        self._events = {fence: [threading.Event() for _ in range(micro_batches)] for fence in before}

    def _events_before(self, action: Action) -> list[threading.Event]:
        fences = self._before.get((action.kind, action.stage), ())
        return [self._events[fence][action.micro_batch] for fence in fences]

    def are_open(self, action: Action) -> bool:
        """May the action start?"""
        return all(event.is_set() for event in self._events_before(action))

    def wait(self, action: Action) -> None:
        """Returns when the action may start."""
        for event in self._events_before(action):
            event.wait()

    def pass_on(self, action: Action) -> None:
        """Opens what stands behind an action that has ended."""
        events = self._events.get((action.kind, action.stage))
        if events is not None:
            events[action.micro_batch].set()

    def open_all(self) -> None:
        for events in self._events.values():
            for event in events:
                event.set()
