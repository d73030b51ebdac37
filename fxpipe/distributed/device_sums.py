"""Sums over replicas in device memory, by the devices' backend: NCCL, XCCL, HCCL, …

Gradients are copied into buckets (`gradient_reduction`). Each full bucket is summed in place:

    compute   last B ──●
    sums               └──▶ copies into a bucket ──●               ●──▶ copies out of it ──▶ the host goes on
    backend                                        └──▶ all-reduce ┘

*Order.* A communicator matches operations only by order. This one has only buckets, in the same order on all replicas.

*Streams.* Copies into and out of buckets have a separate stream: on the compute stream, the rest of the backward would
wait for sums. This stream waits for the compute stream when a gradient is added, and for the sums after the row.

*Memory.* This stream uses the memory of gradients, and the compute stream uses the memory of sums (`record_stream`). A
bucket is kept until the host has waited for its sum. After a failure, the communicator is aborted before memory is
freed, since devices may still write to it.

*Failure.* The host waits only in `settle`, up to the timeout, and in the first operation of a communicator, which
connects the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxpipe._torch.process_groups import Store, abort_communicator, communicator
from fxpipe.distributed.connection import LONG_SECONDS, lost_connection
from fxpipe.distributed.failures import ConnectionLost
from fxpipe.utils import accelerator

WAITED_FOR = "the gradients of the other replicas"

_SHARE = 0.9  # fraction of the timeout: the rank whose device hangs reports it before others give up on it
_NEVER_REUSED: list[torch.Tensor] = []  # memory to which a device may still write, since abort failed


class DeviceSums:
    """One generation of sums over the replicas of a rank, each on a different device."""

    def __init__(self, backend: str, device: torch.device, store: Store, replica: int, replicas: int, timeout: float):
        self.backend, self.device = backend, device
        self._store, self._replica, self._replicas, self._timeout = store, replica, replicas, timeout
        self._communicator: Any = None
        self._stream = accelerator.new_stream(device)
        self._memory: list[torch.Tensor] = []  # buckets of this round

    def connect(self) -> None:
        """Creates the communicator if it does not exist. All replicas call it together."""
        if self._communicator is not None:
            return
        try:
            self._communicator = communicator(
                self.backend,
                self._store,
                self._replica,
                tuple(range(self._replicas)),
                max(self._timeout, LONG_SECONDS),
            )
            with self.on_stream():
                first = torch.zeros(1, device=self.device)
                self._communicator.allreduce([first]).wait()
        except RuntimeError as error:
            raise lost_connection(f"a {self.backend} communicator of all replicas", error) from None

    def on_stream(self) -> accelerator.current_streams:
        return accelerator.current_streams(self._stream)

    def take(self, tensor: torch.Tensor) -> None:
        """Makes the stream of the sums wait for a tensor from the current stream."""
        self._stream.wait_event(accelerator.record_event(accelerator.current_stream(self.device)))
        accelerator.keep_for_stream(tensor, self._stream)

    # -- one round ---------------------------------------------------------------------------------------------------

    def sum(self, memory: torch.Tensor) -> Any:
        """Begins to sum a bucket over replicas in place; `wait()` of the result makes the current stream wait."""
        self._memory.append(memory)
        return self._communicator.allreduce([memory])

    def settle(self, results: Iterable[torch.Tensor]) -> None:
        """Blocks the host until the results are complete. Raises `ConnectionLost` after the timeout."""
        event, seconds = accelerator.record_event(self._stream), _SHARE * self._timeout
        if not accelerator.wait_on_host(event, seconds):
            raise ConnectionLost(
                f"{WAITED_FOR} (timed out)", f"{self.backend} has not ended a sum within {seconds:g} s", True
            )
        self._memory.clear()
        stream = accelerator.current_stream(self.device)
        for result in results:
            accelerator.keep_for_stream(result, stream)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Aborts the communicator, then frees memory."""
        if self._communicator is not None and not abort_communicator(self._communicator):
            _NEVER_REUSED.extend(self._memory)
        self._communicator = None
        self._memory.clear()
