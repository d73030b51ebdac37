"""What is noted while a step runs, by all workers at once: as little as can be, since each action pays for it.

`record` makes what people read of it, when they ask. An action on a CPU is timed by the host's clock. One on a GPU has
only been queued when the host is through with it: events on its stream are queued around it, and asked for their times
once the step is read. So no step waits for a GPU because it is timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from fxpipe.scheduling.actions import Action

Mark: TypeAlias = "float | torch.cuda.Event"  # a time of the host's clock, or a place in a stream


def mark(stream: torch.cuda.Stream | None) -> Mark:
    """Now: None for the host."""
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


@dataclass(frozen=True, slots=True)
class StepLog:
    """The notes of one step."""

    begun: list[float] = field(default_factory=list)  # when the rows were started: the drop-in has two parts
    times: dict[Action, tuple[Mark, Mark]] = field(default_factory=dict)
    on_core: dict[Action, float] = field(default_factory=dict)  # seconds; of actions on a CPU

    def now(self) -> StepLog:
        """As it is, for good."""
        return replace(self, begun=list(self.begun), times=dict(self.times), on_core=dict(self.on_core))


class HostClock:
    """Turns marks into seconds of the host's clock."""

    def __init__(self) -> None:
        self._now: dict[torch.device, tuple[float, torch.cuda.Event]] = {}  # a time that both clocks know

    def seconds(self, when: Mark) -> float:
        if isinstance(when, float):
            return when
        if when.device not in self._now:
            self._now[when.device] = self._common(when.device)
        host, event = self._now[when.device]
        return host - float(when.elapsed_time(event)) / 1e3

    @staticmethod
    def _common(device: torch.device) -> tuple[float, torch.cuda.Event]:
        """Read when the GPU has nothing left to do, so that it is at the event when the host is."""
        torch.cuda.synchronize(device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        return time.perf_counter(), event
