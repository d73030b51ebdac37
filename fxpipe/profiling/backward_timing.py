"""Measures the backward of nodes, many in a row, as in a real backward.

Nodes wait until the forwards have created `WINDOW_BYTES` bytes, or copied parameters take too much memory; then all run
backward, the last first. Directly after its forward a small node would take up to twice as long, a large node less.
"""

from __future__ import annotations

import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import fx

from fxpipe._torch.error_messages import has_no_way_back
from fxpipe.tracing.interpreter import naming_node
from fxpipe.tracing.tensors import bytes_in
from fxpipe.utils import accelerator

WINDOW_BYTES = 32 << 20  # bytes created by nodes with a pending backward
# Limit of memory for parameters that were copied to a device for such nodes, as a share of its free memory.
_PARAMETER_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class PendingBackward:
    """A node whose forward has run and whose backward has not."""

    node: fx.Node
    ends: list[torch.Tensor]  # its backward starts from these
    starts: list[torch.Tensor]  # and ends at these
    totals: list[torch.Tensor | None]  # sums of gradients of parameters
    times: list[float]  # the list to append its seconds to


class BackwardQueue:
    def __init__(self, clock: Clock, device: torch.device | None):
        figures = None if device is None else accelerator.memory_figures(device)
        self.clock = clock
        # Bytes for parameters that were copied to the device.
        self.room = math.inf if figures is None else _PARAMETER_SHARE * figures.available
        self.waiting: list[PendingBackward] = []
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def wait(self, waiting: PendingBackward) -> None:
        self.waiting.append(waiting)
        self._bytes += bytes_in(waiting.ends)
        if self._bytes > WINDOW_BYTES or self.parameter_bytes > self.room:
            self.go()

    def go(self) -> None:
        """Times all pending backwards. Each starts from ones: gradients after many nodes may become denormal: slow."""
        while self.waiting:
            waiting = self.waiting.pop()
            ones = list(map(torch.ones_like, waiting.ends))
            with naming_node(waiting.node, "measuring"):
                seconds = self.clock.backward_seconds(waiting.ends, waiting.starts, ones, waiting.totals)
            waiting.times.append(seconds)
        self.clear()

    def clear(self) -> None:
        self.waiting.clear()
        self._bytes = 0  # of their ends
        self.parameter_bytes = 0  # of parameters that were copied to the device for them


_TICKS = 30
_LEAST_SHARE = 0.25  # of the seconds by `mark`: a shorter wait counts as inaccuracy
_LEAST_WAIT = 1e-4  # seconds; both parts have separate clocks, which differ by less
_SCHEDULED = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core and waiting for one, time slices


@dataclass(slots=True)
class Clock:
    """Measures the seconds of calls.

    - Accelerators: events in the device's stream. The device is kept busy (`HeadStart`) while the host queues the node
      and both events, as in a step whose host runs ahead, so the time of a node covers its kernels, not their launches
      (see `planning.plans.retarget`).
    - The CPU with one thread, on Linux: the processor time of this thread, which stops while another process has the
      core. Time in which the node waits (for a disk, a lock, a server) is added.
    - Else wall-clock time.
    """

    mark: Callable[[], Any]  # returns the current moment
    between: Callable[[Any, Any], float] = operator.sub  # seconds between the later moment and the earlier one
    settle: Callable[[], object] = bool  # returns when the device is idle; `bool`: at once
    device: torch.device | None = None  # device for the overhead of autograd; None: no overhead is subtracted
    tick: float = 0.0  # seconds between two marks with nothing in between
    waited: Callable[[], float] = float  # seconds that this thread has waited so far, but not for a core
    overheads: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # seconds; by numbers of tensors

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        if device.type != "cpu":
            clock = _event_clock(device)
        elif torch.get_num_threads() == 1 and _SCHEDULED.exists():
            file = os.open(_SCHEDULED, os.O_RDONLY)
            scheduled = lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9  # noqa: E731  # waiting for a core
            waited = lambda: time.perf_counter() - time.thread_time() - scheduled()  # noqa: E731
            weakref.finalize(waited, os.close, file)
            clock = cls(time.thread_time, device=device, waited=waited)
        else:
            clock = cls(time.perf_counter, device=device)
        clock.tick = median([clock.seconds(bool)[0] for _ in range(_TICKS)])
        return clock

    def seconds(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
        self.settle()
        waited_before = self.waited()
        start = self.mark()
        result = function(*args, **kwargs)
        end = self.mark()
        waited = self.waited() - waited_before
        seconds = max(0.0, self.between(end, start) - self.tick)
        return seconds + (waited if waited > max(_LEAST_WAIT, _LEAST_SHARE * seconds) else 0.0), result

    def backward_seconds(
        self,
        ends: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor | None],
    ) -> float:
        """Measures backward from `ends` to `starts`, as a part of a longer backward.

        Calling autograd takes longer than a small node, and a real backward calls it once for all nodes. So the
        overhead is measured, too, and subtracted; by chance the result may be negative.

        Args:
            gradients: gradients of `ends`.
            totals: tensors to which the gradients of `starts` are added; None for no sum.
        """
        if not ends or not starts:
            return 0.0
        with torch.autograd.set_multithreading_enabled(False):  # as in a stage: in this thread, on all devices
            overheads = self.overheads.setdefault((len(ends), len(starts)), [])
            if self.device is not None and len(overheads) < _TICKS:
                count = max(len(ends), len(starts))
                tensors = [torch.zeros((), device=self.device, requires_grad=True) for _ in range(count)]
                ones = [torch.ones_like(t) for t in tensors[: len(ends)]]
                empty = tensors[: len(ends)], tensors[: len(starts)], ones, ()
                overheads.append(self.seconds(_run_backward, *empty)[0])
            try:
                seconds, _ = self.seconds(_run_backward, ends, starts, gradients, totals)
            except RuntimeError as error:
                if not has_no_way_back(error):
                    raise
                return 0.0
        return seconds - median(overheads) if overheads else seconds


def _run_backward(
    ends: Sequence[torch.Tensor],
    starts: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor | None],
) -> None:
    results = torch.autograd.grad(ends, starts, gradients, allow_unused=True)
    for gradient, total in zip(results, totals, strict=False):
        if total is not None and gradient is not None:
            total.add_(gradient)


_HEAD_START = 3e-4  # seconds for the host to queue the timed work: a call from Python, or of autograd, takes less
_LONG_LAUNCH = 5e-5  # seconds of the device for one product: queueing the next takes less
_SIDES = (256, 512, 1024, 2048, 4096)


class HeadStart:
    """Products of small matrices, which spare the caches, to keep a device busy while the host queues timed work."""

    def __init__(self, device: torch.device):
        self._device, stream = device, accelerator.current_stream(device)
        for side in _SIDES:
            self._matrices = [torch.zeros(side, side, device=device) for _ in range(3)]
            for _ in range(2):  # the first is a warm-up
                self._multiply()
                accelerator.synchronize(device)
                start = accelerator.record_event(stream, timing=True)
                self._multiply()
                end = accelerator.record_event(stream, timing=True)
            of_one = accelerator.seconds_between(start, end)
            if of_one >= _LONG_LAUNCH:
                break
        self._count = math.ceil(_HEAD_START / max(of_one, _LONG_LAUNCH))

    def _multiply(self) -> None:
        with torch.no_grad():
            torch.mm(*self._matrices[:2], out=self._matrices[2])  # autocast ignores calls with `out`

    def give(self) -> None:
        """Waits until the device is idle, and queues this work."""
        accelerator.synchronize(self._device)
        for _ in range(self._count):
            self._multiply()


def _event_clock(device: torch.device) -> Clock:

    def mark() -> torch.Event:
        return accelerator.record_event(accelerator.current_stream(device), timing=True)

    return Clock(mark, lambda later, earlier: accelerator.seconds_between(earlier, later), HeadStart(device).give)
