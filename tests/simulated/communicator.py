"""A backend of `torch.distributed` for the simulated devices, which is as strict as NCCL.

    dist.init_process_group("cpu:gloo,sim:simccl")

A communicator has a stream of its own, which waits for the current one, and for which `Work.wait()` has the current
stream wait. What it reads and writes is an access of that stream, so that the vector clocks see who has not waited, and
who gives memory back too early. Bytes go by gloo, from a thread that takes one operation after the other: a send ends
when the other side is at the receive that is its turn, an all-reduce when all are at it. Where both sides send first,
neither ends, as with NCCL; and where a receive has another size than the send, or the all-reduces of two processes
differ in size or dtype, that is an error.

One thing is stricter: `wait()` also blocks the host (as NCCL does with TORCH_NCCL_BLOCKING_WAIT=1), since kernels of
simulated devices run at once, and need the bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fxpipe._torch.process_groups import ProcessGroupGloo
from fxpipe.utils import accelerator

NAME = "simccl"
LIMIT = timedelta(seconds=10)  # of one operation: longer, and both sides wait for each other
GARBAGE = 0xFF  # what memory holds in which something is still to arrive: NaN, as floats


def register() -> None:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["sim"])


def _create(description: Any, options: Any) -> Any:
    rank, size = description.group_rank, description.group_size
    if description.group_id.startswith("fxpipe"):
        return Communicator(description.store, rank, size)
    return ProcessGroupGloo(description.store, rank, size, description.timeout)  # torch's own groups, unused


class Operation:
    """A send, a receive or an all-reduce in the turn of a communicator."""

    def __init__(self, kind: str, content: torch.Tensor):
        self.kind, self.content = kind, content
        self.error = ""
        self.is_done = False


class Communicator:
    """Point-to-point transfers between two processes, and sums over any number."""

    all_here: ClassVar[list[Communicator]] = []  # in this process, for tests

    def __init__(self, store: Any, rank: int, size: int):
        self._group: Any = ProcessGroupGloo(store, rank, size, LIMIT)
        self._size, self._peer = size, 1 - rank  # which only two have
        self._stream: torch.Stream | None = None
        self._turn: deque[Operation] = deque()
        self._changed = threading.Condition()  # which tells the simulated host nothing: hosts of real ones hear nothing
        self.is_aborted = False
        self.operations = self.sums = 0
        threading.Thread(target=self._work, daemon=True).start()
        Communicator.all_here.append(self)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        return self._begun(Operation("send", self._read(tensor)), tensor)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        self._overwrite(tensor)
        return self._begun(Operation("recv", torch.empty(tensor.nbytes, dtype=torch.uint8)), tensor)

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        (tensor,) = tensors
        self.sums += 1
        content = self._read(tensor).view(tensor.dtype)
        self._overwrite(tensor)
        return self._begun(Operation("allreduce", content), tensor)

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the bytes that a tensor has when all is done that the current stream was given."""
        with accelerator.current_streams(self._behind_the_current_stream(tensor.device)):
            snapshot = tensor.clone()  # an access of this stream
        return torch.frombuffer(bytearray(ctypes.string_at(snapshot.data_ptr(), tensor.nbytes)), dtype=torch.uint8)

    def _overwrite(self, tensor: torch.Tensor) -> None:
        with accelerator.current_streams(self._behind_the_current_stream(tensor.device)):
            tensor.view(torch.uint8).fill_(GARBAGE)

    def abort(self) -> None:
        """Ends all operations: the devices are through with their memory."""
        if self._stream is not None:
            self._stream.synchronize()
        with self._changed:
            self.is_aborted = True
            self._changed.notify_all()

    # -- the stream --------------------------------------------------------------------------------------------------

    def _behind_the_current_stream(self, device: torch.device) -> torch.Stream:
        if self._stream is None:
            self._stream = accelerator.new_stream(device)
        self._stream.wait_event(accelerator.record_event(accelerator.current_stream(device)))
        return self._stream

    def _begun(self, operation: Operation, tensor: torch.Tensor) -> Work:
        assert self._stream is not None
        self.operations += 1
        with self._changed:
            if self.is_aborted:
                raise RuntimeError("the communicator was aborted")
            self._turn.append(operation)
            self._changed.notify_all()
        return Work(self, operation, tensor, accelerator.record_event(self._stream))

    # -- the bytes ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turn or self.is_aborted)
                if self.is_aborted:
                    self._group = None
                    return
                operation = self._turn[0]
            try:
                self._exchange(operation)
            except RuntimeError as error:
                operation.error = str(error)
            with self._changed:
                self._turn.popleft()
                operation.is_done = True
                self._changed.notify_all()

    def _exchange(self, operation: Operation) -> None:
        size, ready = torch.tensor([operation.content.numel()]), torch.zeros(1)
        group, peer = self._group, self._peer
        if operation.kind == "allreduce":
            self._sum(operation)
        elif operation.kind == "send":
            group.send([size], peer, 0).wait(LIMIT)
            group.recv([ready], peer, 1).wait(LIMIT)
            group.send([operation.content], peer, 2).wait(LIMIT)
        else:
            expected = int(size)
            group.recv([size], peer, 0).wait(LIMIT)
            if int(size) != expected:
                raise RuntimeError(f"{int(size)} bytes come where {expected} are expected")
            group.send([ready], peer, 1).wait(LIMIT)
            group.recv([operation.content], peer, 2).wait(LIMIT)

    def _sum(self, operation: Operation) -> None:
        content = operation.content
        own = torch.tensor([content.numel(), content.element_size(), content.is_floating_point()])
        if len({tuple(other.tolist()) for other in self._from_all(own)}) > 1:
            raise RuntimeError("all-reduces of different sizes or dtypes meet")
        first, *others = self._from_all(content)
        for other in others:
            first += other
        operation.content = first

    def _from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.empty_like(tensor) for _ in range(self._size)]
        self._group.allgather([results], [tensor]).wait(LIMIT)
        return results

    def finish(self, operation: Operation) -> None:
        with self._changed:
            self._changed.wait_for(lambda: operation.is_done or self.is_aborted)
        if not operation.is_done:
            raise RuntimeError("the communicator was aborted")
        if operation.error:
            raise RuntimeError(operation.error)


class Work:
    """As `torch.distributed.Work`."""

    def __init__(self, owner: Communicator, operation: Operation, tensor: torch.Tensor, end: torch.Event):
        self._owner, self._operation, self._end = owner, operation, end
        self._target, self._device = tensor.data_ptr(), tensor.device  # the memory is the caller's to keep

    def wait(self) -> bool:
        self._owner.finish(self._operation)
        content = self._operation.content
        if self._operation.kind != "send":
            ctypes.memmove(self._target, content.data_ptr(), content.nbytes)
        accelerator.current_stream(self._device).wait_event(self._end)
        return True
