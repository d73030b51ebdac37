"""Measures the backward of nodes, many in a row, as in a real backward.

Nodes wait until the forwards have created `WINDOW_BYTES` bytes, or parameters copied to the device take too much
memory; then all run backward, the last first. If each node ran backward directly after its forward, small nodes would
take up to twice as long, since their code is cold, and large nodes too little, since their values are still in caches.

A node with inputs and parameters runs backward twice: to all of them, and to its inputs alone. The second pass follows
after the first pass of all nodes, with two exceptions, which reuse the graph: a product, whose gradients of inputs and
parameters share nothing and are timed separately; and a node that takes long, for which warm caches matter little.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import fx

from fxpipe._torch.error_messages import has_no_way_back
from fxpipe.profiling.node_kinds import NodeValue, TensorSignature
from fxpipe.tracing.interpreter import naming_node
from fxpipe.tracing.node_arguments import set_node_device
from fxpipe.tracing.tensors import bytes_in, storage_of
from fxpipe.tracing.traced import CALL_OPS, Traced
from fxpipe.utils import accelerator

WINDOW_BYTES = 32 << 20  # bytes created by nodes with a pending backward
# Limit of memory for parameters that were copied to a device for such nodes, as a share of its free memory.
_PARAMETER_SHARE = 1 / 8
_SUM_SAMPLES = 5  # samples of the seconds to add gradients


@dataclass(frozen=True, slots=True)
class PendingBackward:
    """A node whose forward has run and whose backward has not."""

    node: fx.Node
    ends: list[torch.Tensor]  # its backward starts from these
    starts: list[torch.Tensor]  # and ends at these
    totals: list[torch.Tensor | None]  # sums of gradients of parameters
    times: list[float]  # the list to append its seconds to
    then: PendingBackward | None = None  # a second pass over the same graph, to run immediately
    includes_second_pass: bool = False  # its time includes the time of `then`


@dataclass(slots=True)
class BackwardQueue:
    """The nodes with a pending backward."""

    clock: Clock
    room: float = math.inf  # bytes for parameters that were copied to the device
    first: list[PendingBackward] = field(default_factory=list)
    again: list[tuple[PendingBackward, list[torch.Tensor]]] = field(
        default_factory=list
    )  # with the ends of the first way
    _bytes: int = 0
    _parameter_bytes: int = 0
    _strides: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)  # strides of gradients, by the tensor

    @classmethod
    def on(cls, clock: Clock, device: torch.device | None) -> BackwardQueue:
        figures = None if device is None else accelerator.memory_figures(device)
        return cls(clock) if figures is None else cls(clock, _PARAMETER_SHARE * figures.available)

    def __bool__(self) -> bool:
        return bool(self.first)

    def wait(self, waiting: PendingBackward) -> None:
        self.first.append(waiting)
        self._count(waiting)

    def add_second_pass(self, waiting: PendingBackward, ends: list[torch.Tensor]) -> None:
        """Queues a second pass over a new graph; `ends` are the ends of the first pass."""
        self.again.append((waiting, ends))
        self._count(waiting)

    def _count(self, waiting: PendingBackward) -> None:
        self._bytes += bytes_in(waiting.ends)

    def hold_parameters(self, size: int) -> None:
        """Counts the bytes of parameters that were copied to the device for pending nodes."""
        self._parameter_bytes += size

    @property
    def is_full(self) -> bool:
        return self._bytes > WINDOW_BYTES or self._parameter_bytes > self.room

    def go(self) -> None:
        """Times all pending backwards.

        Each starts from ones, since gradients after many nodes may become denormal, which is slow. The ones have the
        strides of the gradients that the users of the node return.
        """
        while self.first:
            waiting = self.first.pop()
            self._one(waiting, waiting.ends)
            if waiting.then is not None:
                self._one(waiting.then, waiting.ends)
                if waiting.includes_second_pass:
                    waiting.times[-1] += waiting.then.times[-1]
        while self.again:
            self._one(*self.again.pop())
        self.clear()

    def clear(self) -> None:
        self.first.clear()
        self.again.clear()
        self._strides.clear()
        self._bytes = self._parameter_bytes = 0

    def _one(self, waiting: PendingBackward, like: list[torch.Tensor]) -> None:
        ones = [_ones_with_stride(t, self._strides.get(_memory_location(t))) for t in like]
        with naming_node(waiting.node, "measuring"):
            seconds, gradients = self.clock.backward_seconds(
                waiting.ends, waiting.starts, ones, waiting.totals, keeps_graph=waiting.then is not None
            )
        waiting.times.append(seconds)
        for start, gradient in zip(waiting.starts, gradients, strict=False):
            if gradient is not None and gradient.layout == torch.strided:
                self._strides.setdefault(_memory_location(start), gradient.stride())


@dataclass(slots=True)
class GradientSumTimes:
    clock: Clock
    _seconds: dict[TensorSignature, float] = field(default_factory=dict)

    def seconds(self, value: torch.Tensor) -> float:
        """Measures the sum of two gradients of `value`, once for equal signatures."""
        if value.layout != torch.strided:
            return 0.0
        like = TensorSignature.of(value)
        if like not in self._seconds:
            with torch.no_grad():
                total, gradient = torch.zeros_like(value), torch.zeros_like(value)
                samples = [self.clock.seconds(total.add_, gradient)[0] for _ in range(_SUM_SAMPLES + 1)]
            self._seconds[like] = median(samples[1:])  # the first is a warm-up
        return self._seconds[like]


def _memory_location(tensor: torch.Tensor) -> Hashable:
    """Returns a key for the memory of a tensor; a value and its detached copy have equal keys."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _ones_with_stride(like: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    if stride is None:
        return torch.ones_like(like)
    size = 1 + sum((n - 1) * s for n, s in zip(like.shape, stride, strict=True)) if like.numel() else 0
    return torch.ones(size, dtype=like.dtype, device=like.device).as_strided(like.shape, stride)


# -- Calls of nodes, prepared so that only the function runs while it is timed ---------------------------------------


@dataclass(frozen=True, slots=True)
class NodeCall:
    """The function that a working node calls, and its arguments: nodes and constants."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_method: bool

    def bound(self, values: Mapping[fx.Node, NodeValue]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        args, kwargs = fx.map_arg((self.args, self.kwargs), values.__getitem__)
        if self.is_method:
            return getattr(args[0], self.target), args[1:], kwargs
        return self.target, args, kwargs


def calls_on(traced: Traced, device: torch.device | None) -> dict[fx.Node, NodeCall]:
    """Returns the calls of all working nodes, with the devices in their arguments replaced by `device`, if any."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    calls = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op in CALL_OPS:
            if device is not None:
                set_node_device(copy, device)
            originals = {copies[n]: n for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((copy.args, copy.kwargs), originals.__getitem__)
            calls[node] = NodeCall(copy.target, args, kwargs, copy.op == "call_method")
    return calls


_TICKS = 30
_LEAST_WAIT = 1e-4  # seconds; both parts have separate clocks, which differ by less
_NOT_BUSY = 10.0  # ratio of time off the core to time on it: no machine is so busy in every sample
_SCHEDULED = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core and waiting for one, time slices


BackwardGradients = tuple[torch.Tensor | None, ...]


def _do_nothing() -> None:
    pass


@dataclass(slots=True)
class Clock:
    """Measures the seconds of calls.

    - Accelerators: events in the device's stream. The device is kept busy (`HeadStart`) while the host queues the node
      and both events, as in a step whose host runs ahead, so the time of a node covers its kernels, not their launches
      (see `planning.plans.host_time`).
    - The CPU with one thread: the processor time of this thread, which stops while another process has the core. Time
      in which the node waits (for a disk, a lock, a server) is added.
    - The CPU with several threads: wall-clock time.
    """

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
