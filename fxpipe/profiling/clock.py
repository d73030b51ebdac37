"""Clocks for each kind of device, and the overhead of a call of autograd.

- Accelerators: events in the device's stream. The device is kept busy (`HeadStart`) while the host queues the node and
  both events, as in a step whose host runs ahead, so the time of a node covers its kernels, not their launches (see
  `planning.plans.host_time`).
- The CPU with one thread: the processor time of this thread, which stops while another process has the core. Time in
  which the node waits (for a disk, a lock, a server) is added.
- The CPU with several threads: wall-clock time.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fxpipe._torch.error_messages import has_no_way_back
from fxpipe.utils import accelerator

_TICKS = 30
_LEAST_WAIT = 1e-4  # seconds; both parts have separate clocks, which differ by less
_NOT_BUSY = 10.0  # ratio of time off the core to time on it: no machine is so busy in every sample
_SCHEDULED = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core and waiting for one, time slices


BackwardGradients = tuple[torch.Tensor | None, ...]


def _do_nothing() -> None:
    pass


@dataclass(slots=True)
class Clock:
    """Measures the seconds of calls."""

    mark: Callable[[], Any]  # returns the current moment
    between: Callable[[Any, Any], float] = operator.sub  # seconds between the later moment and the earlier one
    settle: Callable[[], object] = _do_nothing  # returns when the device is idle
    device: torch.device | None = None  # device for the overhead of autograd; None: no overhead is subtracted
    tick: float = 0.0  # seconds between two marks with nothing in between
    waited: Callable[[], float] = float  # seconds that this thread has waited so far, but not for a core
    share: float = 0.25  # relative to the seconds by `mark`: a shorter wait counts as inaccuracy

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        if device.type != "cpu":
            clock = _event_clock(device)
        elif torch.get_num_threads() > 1:
            clock = cls(time.perf_counter, device=device)
        elif _SCHEDULED.exists():
            clock = cls(time.thread_time, device=device, waited=_seconds_without_work)
        else:
            clock = cls(time.thread_time, device=device, waited=_seconds_off_core, share=_NOT_BUSY)
        ticks = [clock.seconds(_do_nothing)[0] for _ in range(_TICKS)]
        clock.tick = median(ticks)
        return clock

    def seconds(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
        """Measures the seconds of a call; returns them and its result."""
        self.settle()
        waited_before = self.waited()
        start = self.mark()
        result = function(*args, **kwargs)
        end = self.mark()
        waited = self.waited() - waited_before
        seconds = max(0.0, self.between(end, start) - self.tick)
        return seconds + (waited if waited > max(_LEAST_WAIT, self.share * seconds) else 0.0), result

    def backward_seconds(
        self,
        ends: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor | None],
        keeps_graph: bool = False,
    ) -> tuple[float, BackwardGradients]:
        """Measures backward from `ends` to `starts`, as a part of a longer backward; returns also the gradients.

        Calling autograd takes longer than a small node, and a real backward calls it once for all nodes. So the
        overhead, measured just before, is subtracted; by chance the result may be negative.

        Args:
            gradients: gradients of `ends`.
            totals: tensors to which the gradients of `starts` are added; None for no sum.
            keeps_graph: keep the graph for another backward.
        """
        if not ends or not starts:
            return 0.0, ()
        with torch.autograd.set_multithreading_enabled(False):  # as in a stage: in this thread, on all devices
            by_itself = self._overhead(len(ends), len(starts))
            try:
                seconds, results = self.seconds(_run_backward, ends, starts, gradients, totals, keeps_graph)
            except RuntimeError as error:
                if not has_no_way_back(error):
                    raise
                return 0.0, ()
        return seconds - by_itself, results

    def _overhead(self, ends: int, starts: int) -> float:
        """Measures an empty call of autograd with these numbers of tensors."""
        if self.device is None:
            return 0.0
        tensors = [torch.zeros((), device=self.device, requires_grad=True) for _ in range(max(ends, starts))]
        ones = [torch.ones_like(t) for t in tensors[:ends]]
        return self.seconds(_run_backward, tensors[:ends], tensors[:starts], ones, ())[0]


def _run_backward(
    ends: Sequence[torch.Tensor],
    starts: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor | None],
    keeps_graph: bool = False,
) -> BackwardGradients:
    results = torch.autograd.grad(ends, starts, gradients, retain_graph=keeps_graph, allow_unused=True)
    for gradient, total in zip(results, totals, strict=False):
        if total is not None and gradient is not None:
            total.add_(gradient)
    return results


def _seconds_off_core() -> float:
    return time.perf_counter() - time.thread_time()


def _seconds_without_work() -> float:
    """Returns the seconds in which this thread has neither run nor waited for a core."""
    return _seconds_off_core() - int(_SCHEDULED.read_bytes().split()[1]) / 1e9


_HEAD_START = 3e-4  # seconds for the host to queue the timed work: a call from Python, or of autograd, takes less
_LONG_LAUNCH = 5e-5  # seconds of the device for one product: queueing the next takes less
_SIDES = (256, 512, 1024, 2048, 4096)


class HeadStart:
    """Work that keeps a device busy while the host queues the timed work.

    It multiplies small matrices, to leave the caches alone, with `out=`, which autocast ignores.
    """

    def __init__(self, device: torch.device, seconds: float = _HEAD_START):
        self._device = device
        for side in _SIDES:
            self._matrices = [torch.zeros(side, side, device=device) for _ in range(3)]
            of_one = self._product_seconds()
            if of_one >= _LONG_LAUNCH:
                break
        self._count = math.ceil(seconds / max(of_one, _LONG_LAUNCH))

    def _product_seconds(self) -> float:
        """Measures one product, after a warm-up."""
        stream, marks = accelerator.current_stream(self._device), []
        for _ in range(2):
            self._multiply()
            accelerator.synchronize(self._device)
            marks = [accelerator.record_event(stream, timing=True)]
            self._multiply()
            marks.append(accelerator.record_event(stream, timing=True))
        return accelerator.seconds_between(*marks)

    def _multiply(self) -> None:
        with torch.no_grad():
            torch.mm(*self._matrices[:2], out=self._matrices[2])

    def give(self) -> None:
        """Waits until the device is idle, and queues this work."""
        accelerator.synchronize(self._device)
        for _ in range(self._count):
            self._multiply()


def _event_clock(device: torch.device) -> Clock:
    """Makes a clock of a device. Its times exclude the host's calls of autograd, so no overhead is subtracted."""

    def mark() -> torch.Event:
        return accelerator.record_event(accelerator.current_stream(device), timing=True)

    return Clock(mark, lambda later, earlier: accelerator.seconds_between(earlier, later), HeadStart(device).give)
