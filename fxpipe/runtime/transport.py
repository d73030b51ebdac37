"""Transfers of tensors between devices, and the streams on which a step runs.

A GPU runs the work of each stream in order. Fences order the workers that queue it; events order the streams:

    stage j on device a                                   stage k on device b
    compute a   ──F(j,i)──●──F(j,i+1)──▶                   compute b   ──F(k,i-1)──●──F(k,i)──▶
                         1    └───▶ copy a→b  ══v══▶ ●  ──────────────────────────────▶┘ 4
                                             2       3

1. An event marks the work that the maker has queued so far; the copy stream waits for it.
2. The copy runs on its own stream, one for each pair of devices and direction, in parallel with both stages.
3. An event marks its end.
4. The user's compute stream waits for that event; the host does not, unless the stage is on the CPU.

*Compute streams.* Each device has one: the stream that was current there when the caller began the step, so that the
step runs after all work that the caller has queued and before later work.

*Memory.* The allocator frees memory with the last reference, for the stream of its allocation, though others may use
it. So we hold a reference to a sent tensor until the copy's event has passed, or the compute stream waits for it.
(`record_stream` makes the allocator wait for all work on the copy stream.) An arrived tensor was allocated on the copy
stream, and only autograd knows its last user: `record_stream`. Copies between CPU and GPU use pinned memory, since
others block the host. Pinned memory of the caller is read in place: `settle` waits for the copies to end.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe._torch.operators import neg_view
from fxpipe.utils import accelerator

# A copy has to keep strides, as recorded code must do the same on each device; `Tensor.to` makes tensors dense. Here a
# tensor that is dense in some order of its dimensions, or overlaps itself (`expand`, `unfold`), is copied as the range
# of storage that it covers; a tensor with gaps (a slice of columns, a part of a `chunk`) is gathered, and spread again
# after the copy; conjugate and negative bits are copied, not resolved.


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """The form of a plain tensor in the memory in which it is transferred: 1-dim and dense."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_gathered: bool  # the memory has the elements in order, without gaps
    is_conj: bool
    is_neg: bool

    def unpack(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor on the device of the memory; spread on the current stream, if it was gathered."""
        if self.is_gathered:
            dense = memory.view(self.shape)
            tensor = torch.empty_strided(self.shape, self.stride, dtype=dense.dtype, device=dense.device).copy_(dense)
        else:
            start = memory.storage_offset()  # it may be a part of a larger storage
            tensor = memory.as_strided(self.shape, self.stride, start).detach()  # not a view for autograd
        if self.is_neg:
            tensor = neg_view(tensor)
        return tensor.conj() if self.is_conj else tensor


def is_packable(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be packed. Sparse, quantized and nested tensors, and subclasses, use `Tensor.to`."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
    )


def has_gaps(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor skips elements of the range of storage that it covers, and uses none twice."""
    extent, overlaps = covered_extent(tensor.shape, tensor.stride())
    return extent > tensor.numel() and not overlaps


def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, MemoryForm]:
    """Returns the memory of a plain tensor, gathered on the current stream if it has gaps."""
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
    return memory, MemoryForm(tuple(bare.shape), tuple(bare.stride()), is_gathered, is_conj, is_neg)


def covered_extent(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, bool]:
    """Returns the number of elements from the first to the last, and whether two of them may be the same."""
    if 0 in shape:
        return 0, False
    reach, overlaps = 0, False
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        overlaps |= step <= reach
        reach += (size - 1) * step
    return reach + 1, overlaps


_NO_STREAM: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A tensor on the way to another device."""

    memory: torch.Tensor
    form: MemoryForm | None  # None for a tensor that is not plain, which its reader copies
    arrived: Any  # event at the end of the copy; None if there is none to wait for


# Per process: streams have memory pools, which new streams in each step would have to fill again.
_copy_streams: dict[tuple[torch.device, torch.device], tuple[torch.Stream, ...]] = {}
_stream_lock = threading.Lock()


def copy_streams(source: torch.device, target: torch.device) -> tuple[torch.Stream, ...]:
    """Returns the copy streams of this direction: of the source, and of the target if it is another GPU."""
    with _stream_lock:
        if (source, target) not in _copy_streams:
            ends = dict.fromkeys(device for device in (source, target) if device.type != "cpu")
            _copy_streams[source, target] = tuple(map(accelerator.new_stream, ends))
        return _copy_streams[source, target]


class Transport:
    """The streams and copies of one step. Created in the caller's thread, used by the workers."""

    # The maker's worker calls `start_copy`, the user's worker calls `open`. Without a copy, both do nothing.

    copies_on_one_device = False  # True: also copy values between stages of one device

    def __init__(self, devices: Iterable[torch.device], values: Iterable[Any] = ()):
        """`devices`: of the stages. `values`: of the caller, on any device."""
        distinct = dict.fromkeys((*devices, *(x.device for x in values if isinstance(x, torch.Tensor))))
        self._compute = {d: accelerator.current_stream(d) for d in distinct if d.type != "cpu"}
        # If stages and inputs are all on the CPU, `start_copy` and `open` need not be called.
        self.may_copy = self.copies_on_one_device or any(d.type != "cpu" for d in distinct)
        self._held: dict[tuple[torch.device, torch.device], deque[tuple[Any, torch.Tensor]]] = {}
        self._holding = threading.Lock()

    def _stream(self, device: torch.device) -> Any:
        """Returns the compute stream; for a new device, in the caller's thread, the current stream."""
        stream = self._compute.get(device)
        return accelerator.current_stream(device) if stream is None else stream

    def compute_stream(self, device: torch.device) -> Any:
        """Returns the compute stream of a device; None for the CPU."""
        return self._compute.get(device)

    def at(self, device: torch.device) -> AbstractContextManager[None]:
        """A block whose computations run on the step's stream of this device."""
        stream = self._compute.get(device)
        return _NO_STREAM if stream is None else accelerator.current_streams(stream)

    def at_all(self, device: torch.device) -> AbstractContextManager[None]:
        """A block on the step's streams of all devices, of which `device` is the current one."""
        # torch copies what an optimizer reads of other devices (learning rate, scale) on the current streams of both.
        streams = [self._compute[one] for one in sorted(self._compute, key=device.__eq__)]
        return accelerator.current_streams(*streams) if streams else _NO_STREAM

    @contextmanager
    def on_step_streams(self) -> Iterator[None]:
        """A block for the end of a step, on the step's streams, with `settle`."""
        # The thread may have other current streams: another may have begun the step. Both wait for each other.
        if not self._compute:
            yield
            return
        others = [(s, accelerator.current_stream(d)) for d, s in self._compute.items()]
        others = [(compute, other) for compute, other in others if compute != other]
        for compute, other in others:
            compute.wait_event(accelerator.record_event(other))
        with accelerator.current_streams(*self._compute.values()):
            yield
            self.settle()
        for compute, other in others:
            other.wait_event(accelerator.record_event(compute))

    def start_copy(self, value: Any, target: torch.device) -> Any:
        """Starts to copy a tensor to another device; returns other values unchanged."""
        if isinstance(value, torch.Tensor) and (value.device != target or self.copies_on_one_device):
            return self._send(value, target)
        return value

    def open(self, value: Any, target: torch.device) -> Any:
        """Returns a sent value, ready for the reader's stage. A value that was not sent is copied now."""
        if not isinstance(value, PendingCopy):
            value = self.start_copy(value, target)
            if not isinstance(value, PendingCopy):
                return value
        if value.form is None:  # not plain: copied on both compute streams, which torch synchronizes
            source = value.memory.device
            if source == target:
                return value.memory.clone()
            with accelerator.current_streams(*(self._stream(d) for d in (source, target) if d.type != "cpu")):
                return value.memory.to(target)
        if value.arrived is not None and target.type == "cpu":
            accelerator.wait_on_host(value.arrived)
        elif value.arrived is not None:
            self._stream(target).wait_event(value.arrived)
        return value.form.unpack(value.memory)

    def bring(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        """Returns a tensor on a device: itself, or a copy that this thread may use immediately."""
        if tensor.device == target:
            return tensor
        arrived: torch.Tensor = self.open(self._send(tensor, target), target)
        return arrived

    def _send(self, tensor: torch.Tensor, target: torch.device) -> PendingCopy:
        source = tensor.device
        if not is_packable(tensor):
            return PendingCopy(tensor, None, None)
        with self.at(source) if has_gaps(tensor) else _NO_STREAM:  # gathered where it was computed
            memory, form = pack(tensor)
        if source.type == target.type == "cpu":
            return PendingCopy(memory.clone(), form, None)
        memory, arrived = self._copied(memory, source, target)
        return PendingCopy(memory, form, arrived)

    def _copied(self, memory: torch.Tensor, source: torch.device, target: torch.device) -> tuple[torch.Tensor, Any]:
        streams = copy_streams(source, target)
        if source.type == "cpu":
            original, memory = memory, accelerator.pinned(memory)
            is_ours = original is not memory  # the allocator keeps pinned memory of copies that still run
        else:
            streams[0].wait_event(accelerator.record_event(self._stream(source)))
            is_ours = False
        with accelerator.current_streams(*streams):
            copy = accelerator.copy_to(memory, target)
            # The target's stream waits for the copy, on whichever stream that runs.
            arrived = accelerator.record_event(streams[-1])
        if target.type != "cpu":
            accelerator.keep_for_stream(copy, self._stream(target))
        if not is_ours:
            self._hold(source, target, arrived, memory)
        return copy, arrived

    def _hold(self, source: torch.device, target: torch.device, arrived: Any, memory: torch.Tensor) -> None:
        """Holds the memory that a copy reads, and drops the memory of earlier copies, which end in order."""
        done = []
        with self._holding:
            held = self._held.setdefault((source, target), deque())
            held.append((arrived, memory))
            while held and held[0][0].query():
                done.append(held.popleft())
        del done  # not under the lock: finalizers may run now

    def settle(self) -> None:
        """Ends a part of a step, even a failed one: afterwards sent tensors may be freed or written to."""
        for (source, target), held in self._held.items():
            if not held:
                continue
            last = accelerator.record_event(copy_streams(source, target)[-1])
            if source.type == "cpu":
                accelerator.wait_on_host(last)
            else:
                self._stream(source).wait_event(last)
            held.clear()


def leaves_on_device(leaves: Iterable[Any], device: torch.device) -> list[Any]:
    """Moves tensors of the caller to a device, for immediate use in this thread."""
    leaves = list(leaves)
    transport = Transport((), leaves)
    brought = [transport.bring(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    transport.settle()
    return brought
