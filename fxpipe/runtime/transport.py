"""Tensors between devices, and the streams on which a step runs.

A GPU runs the work of each stream in order. Fences order the workers that queue it; the streams themselves are ordered
by events:

    stage j on device a                                   stage k on device b
    compute a   ──F(j,i)──●──F(j,i+1)──▶                   compute b   ──F(k,i-1)──●──F(k,i)──▶
                     1    └───▶ copy a→b  ══v══▶ ●  ──────────────────────────────▶┘ 4
                                         2       3

1. An event marks what the maker has queued so far; the copy stream waits for it.
2. The copy runs on its own stream, one for each pair of devices and direction, next to both stages' computations.
3. An event marks its end.
4. The user's compute stream waits for that event, the host does not. Only a stage on the CPU must wait itself.

*Compute streams.* A device has one: the stream that was current there when the caller began the step. So a step comes
after all that the caller has queued and before all that it queues next, without an event. Stages on one GPU share it.

*Memory.* torch frees memory when the last reference goes, for work on the stream that it was allocated on, though other
streams may still use it. Two remedies:

- What is sent was allocated on the compute stream and is read by the copy. We hold a reference until the copy's event
  has passed, or until the compute stream waits for it. This is exact; `record_stream`, which torchgpipe uses, makes the
  allocator wait for all that the copy stream has been given until the reference goes.
- What arrives was allocated on the copy stream and is used by computations. Only autograd knows when the last one is
  done, so here `record_stream` is right.

Copies between CPU and GPU go through pinned memory, since others block the host. Pinned memory of the caller is read in
place, and `settle` waits until that is over: the caller may write to it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fxpipe._torch.operators import neg_view
from fxpipe.utils import accelerator

# A copy has to keep strides, too: with gaps or overlap, `contiguous` copies, `view` refuses and kernels differ, and
# recorded code must do the same on each device. `Tensor.to` makes such tensors dense. So here
#
# - a tensor that is dense in any order of its dimensions, or overlaps itself (`expand`, `unfold`), is copied as the
#   piece of storage that it covers;
# - a tensor with gaps (a slice of columns, a part of a `chunk`) is gathered, and spread out again after the copy;
# - that a tensor is to be read as conjugate or negative is noted, not computed.


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A plain tensor on its way."""

    memory: torch.Tensor  # of one dimension, dense
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_gathered: bool  # the memory holds the elements in order, without gaps
    is_conj: bool
    is_neg: bool

    def at(self, memory: torch.Tensor) -> PackedTensor:
        """Returns the same with its memory elsewhere."""
        return replace(self, memory=memory)

    def unpack(self) -> torch.Tensor:
        """The tensor, on the device where the memory is; on the current stream, where it is spread out."""
        if self.is_gathered:
            dense = self.memory.view(self.shape)
            tensor = torch.empty_strided(self.shape, self.stride, dtype=dense.dtype, device=dense.device).copy_(dense)
        else:
            start = self.memory.storage_offset()  # it may be a part of a larger piece
            tensor = self.memory.as_strided(self.shape, self.stride, start).detach()  # detached: no view for autograd
        if self.is_neg:
            tensor = neg_view(tensor)
        return tensor.conj() if self.is_conj else tensor


def is_packable(tensor: torch.Tensor) -> bool:
    """Returns whether it can be packed. Sparse, quantised and nested tensors, and subclasses, go by their own `to`."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
    )


def has_gaps(tensor: torch.Tensor) -> bool:
    """Returns whether it leaves out elements of the storage that it covers, and never uses one twice."""
    extent, overlaps = covered_extent(tensor.shape, tensor.stride())
    return extent > tensor.numel() and not overlaps


def pack(tensor: torch.Tensor) -> PackedTensor:
    """Takes a plain tensor apart; gathers, on the current stream, if it has gaps."""
    bare = tensor.detach()
    is_conj, is_neg = bare.is_conj(), bare.is_neg()
    bare = bare.conj() if is_conj else bare
    bare = neg_view(bare) if is_neg else bare
    is_gathered = has_gaps(bare)
    if is_gathered:
        memory = bare.contiguous().view(-1)
    else:
        extent, _ = covered_extent(bare.shape, bare.stride())
        memory = bare.as_strided((extent,), (1,), bare.storage_offset())
    return PackedTensor(memory, tuple(bare.shape), bare.stride(), is_gathered, is_conj, is_neg)


def covered_extent(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, bool]:
    """Counts the elements from the first to the last, both counted in, and tells whether two of them may be one."""
    if 0 in shape:
        return 0, False
    reach, overlaps = 0, False
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        overlaps |= step <= reach
        reach += (size - 1) * step
    return reach + 1, overlaps


T = TypeVar("T")
S = TypeVar("S")

_NO_STREAM: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A tensor on its way to another device."""

    content: PackedTensor | torch.Tensor  # a tensor that is not plain goes when its reader asks for it
    arrived: Any  # the event that marks the end of the copy; None where there is nothing to wait for


# Of the process: a stream has a pool of memory, which new streams for each step would have to fill again.
_copy_streams: dict[tuple[torch.device, torch.device], tuple[torch.Stream, ...]] = {}
_stream_lock = threading.Lock()


def copy_streams(source: torch.device, target: torch.device) -> tuple[torch.Stream, ...]:
    """Returns the streams for copies in this direction: of the source, and of the target if it is another."""
    with _stream_lock:
        if (source, target) not in _copy_streams:
            ends = dict.fromkeys(device for device in (source, target) if device.type != "cpu")
            _copy_streams[source, target] = tuple(map(accelerator.new_stream, ends))
        return _copy_streams[source, target]


class Transport:
    """The streams and copies of one step. Made in the caller's thread, used by the workers.

    `start_copy` starts a copy, `open` ends it, each in the worker of its stage. Where nothing has to be copied, both do
    nothing.
    """

    copies_on_one_device = False  # True: values between stages of one device are copied, too

    def __init__(self, devices: Iterable[torch.device]):
        distinct = dict.fromkeys(devices)
        self._compute = {d: accelerator.current_stream(d) for d in distinct if d.type != "cpu"}
        # Where stages and inputs are all on the CPU, `start_copy` and `open` need not be called.
        self.may_copy = self.copies_on_one_device or any(d.type != "cpu" for d in distinct)
        self._held: dict[tuple[torch.device, torch.device], deque[tuple[Any, torch.Tensor]]] = {}
        self._holding = threading.Lock()

    @classmethod
    def of(cls, devices: Iterable[torch.device], values: Iterable[Any]) -> Transport:
        """Makes a transport for stages on these devices, and what the caller gives, wherever that is."""
        return cls([*devices, *(x.device for x in values if isinstance(x, torch.Tensor))])

    # -- streams -----------------------------------------------------------------------------------------------------

    def _stream(self, device: torch.device) -> Any:
        """The compute stream; of a device unknown so far, which only the caller's thread asks for, its current one."""
        stream = self._compute.get(device)
        return accelerator.current_stream(device) if stream is None else stream

    def compute_stream(self, device: torch.device) -> Any:
        """Returns the compute stream of a device; None for the CPU."""
        return self._compute.get(device)

    def at(self, device: torch.device) -> AbstractContextManager[None]:
        """A block whose computations are those of the step on this device."""
        stream = self._compute.get(device)
        return _NO_STREAM if stream is None else accelerator.current_streams(stream)

    def on_step_streams(self, function: Callable[[S], T]) -> Callable[[S], T]:
        """`function`, the end of a step, as autograd or the caller is to call it: on the step's streams, and settled.

        The thread may have other current streams than the step, which was begun in another one. The step's wait for
        those, and those for the step's.
        """
        if not self._compute:
            return function

        def call(argument: S) -> T:
            others = [(s, accelerator.current_stream(d)) for d, s in self._compute.items()]
            others = [(compute, other) for compute, other in others if compute != other]
            for compute, other in others:
                compute.wait_event(accelerator.record_event(other))
            with accelerator.current_streams(*self._compute.values()):
                result = function(argument)
                self.settle()
            for compute, other in others:
                other.wait_event(accelerator.record_event(compute))
            return result

        return call

    # -- copies ------------------------------------------------------------------------------------------------------

    def start_copy(self, value: Any, target: torch.device) -> Any:
        """Starts to copy a tensor to a device where it is not yet; what else there is, is handed on as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        source = value.device
        if source == target and not self.copies_on_one_device:
            return value
        return self._send(value, source, target)

    def open(self, value: Any, target: torch.device) -> Any:
        """Returns what has been sent, for the reader's stage to use. What has not been sent comes now."""
        if not isinstance(value, PendingCopy):
            value = self.start_copy(value, target)
            if not isinstance(value, PendingCopy):
                return value
        if isinstance(value.content, torch.Tensor):
            return self._carried(value.content, target)
        if value.arrived is not None:
            if target.type == "cpu":
                accelerator.wait_on_host(value.arrived)
            else:
                self._stream(target).wait_event(value.arrived)
        return value.content.unpack()

    def bring(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        """A tensor on a device: itself, or a copy that this thread may use at once."""
        source = tensor.device
        if source == target:
            return tensor
        arrived: torch.Tensor = self.open(self._send(tensor, source, target), target)
        return arrived

    def _send(self, tensor: torch.Tensor, source: torch.device, target: torch.device) -> PendingCopy:
        if not is_packable(tensor):
            return PendingCopy(tensor, None)
        with self.at(source) if has_gaps(tensor) else _NO_STREAM:  # there it was made, and is gathered
            packed = pack(tensor)
        if source.type == target.type == "cpu":
            return PendingCopy(packed.at(packed.memory.clone()), None)
        memory, arrived = self._copied(packed.memory, source, target)
        return PendingCopy(packed.at(memory), arrived)

    def _copied(self, memory: torch.Tensor, source: torch.device, target: torch.device) -> tuple[torch.Tensor, Any]:
        streams = copy_streams(source, target)
        if source.type == "cpu":
            original, memory = memory, accelerator.pinned(memory)
            is_ours = original is not memory  # torch's allocator minds pinned memory that copies are still at
        else:
            streams[0].wait_event(accelerator.record_event(self._stream(source)))
            is_ours = False
        with accelerator.current_streams(*streams):
            copy = accelerator.copy_to(memory, target)
            # The stream of the target is told to wait for the copy, on whichever that runs.
            arrived = accelerator.record_event(streams[-1])
        if target.type != "cpu":
            accelerator.keep_for_stream(copy, self._stream(target))
        if not is_ours:
            self._hold(source, target, arrived, memory)
        return copy, arrived

    def _carried(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        """A copy of a tensor that is not plain, on both compute streams: torch has each wait for the other."""
        source = tensor.device
        if source == target:
            return tensor.clone()
        with accelerator.current_streams(*(self._stream(d) for d in (source, target) if d.type != "cpu")):
            return tensor.to(target)

    # -- references --------------------------------------------------------------------------------------------------

    def _hold(self, source: torch.device, target: torch.device, arrived: Any, memory: torch.Tensor) -> None:
        """Holds what a copy reads. What earlier copies have read goes, as they end in the order in which they began."""
        done = []
        with self._holding:
            held = self._held.setdefault((source, target), deque())
            held.append((arrived, memory))
            while held and held[0][0].query():
                done.append(held.popleft())
        del done  # not under the lock: whatever depends on a tensor may run now

    def settle(self) -> None:
        """Ends a part of a step, also of one that fails: all that was sent may be given back, or be written to."""
        for (source, target), held in self._held.items():
            if not held:
                continue
            last = accelerator.record_event(copy_streams(source, target)[-1])
            if source.type == "cpu":
                accelerator.wait_on_host(last)
            else:
                self._stream(source).wait_event(last)
            held.clear()


def on_all_streams(
    transport: Transport, devices: Sequence[torch.device], device: torch.device
) -> AbstractContextManager[ExitStack]:
    """A block on the step's streams of all devices, of which `device` is the current one.

    What an optimizer reads of another device (a learning rate that is a tensor, the scale of a `GradScaler`) torch
    copies on the current streams of both.
    """
    with ExitStack() as stack:
        for one in dict.fromkeys(devices):
            if one != device:
                stack.enter_context(transport.at(one))
        stack.enter_context(transport.at(device))
        return stack.pop_all()


def leaves_on_device(leaves: Iterable[Any], device: torch.device) -> list[Any]:
    """Brings what the caller gives to a device, for this thread to use at once."""
    leaves = list(leaves)
    transport = Transport.of((), leaves)
    brought = [transport.bring(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    transport.settle()
    return brought
