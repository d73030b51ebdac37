"""Transfers of device memory between ranks, and sums over replicas, by the devices' backend: NCCL, XCCL, HCCL, …

    rank a   compute   value ──●                        ●─▶ the value's memory is freed
             a → b             └──▶ send ═══════════════┘
    rank b   a → b                  recv ═══╗ (in memory of a separate stream)
             compute             ... F ...  ╚═●─▶ F of this value

A communicator matches sends and receives only by order, and a waiting operation blocks those after it. So each ordered
pair of ranks has one, and the receiver posts its receives in the order of the sender's row (`packets`). A send is kept
until the compute stream waits for its end. A receive uses memory of an idle stream: on the compute stream it would wait
for all queued work. The host waits only in `settle`, at the end of a row or a round. After a failure communicators are
aborted before memory is freed, since devices may still write to it. gloo transfers layouts and reports failed ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fxpipe._torch.process_groups import (
    PrefixStore,
    ProcessGroup,
    Store,
    abort_communicator,
    communicator,
    has_communicators,
)
from fxpipe.distributed.connection import LONG_SECONDS, PendingMessages, losing
from fxpipe.distributed.failures import ConnectionLost
from fxpipe.utils import accelerator

WAITED_FOR = "the gradients of the other replicas"
RankPair = tuple[int, int]  # from one rank to another

_SHARE = 0.9  # fraction of the timeout: the rank whose device hangs reports it before others give up on it
_NEVER_REUSED: list[torch.Tensor] = []  # memory to which a device may still write, since abort failed
_THROUGH_CPU = ("gloo", "mpi")  # backends that block the host on devices, or do not support them


def device_backend(group: ProcessGroup, device: torch.device) -> str | None:
    """Returns the backend of the user's process group for a device; None if transfers use CPU memory."""
    if device.type == "cpu":
        return None
    names = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # "cpu:gloo,cuda:nccl"
    backend = names.get(device.type)
    return None if backend is None or backend in _THROUGH_CPU or not has_communicators(backend) else backend


class DeviceCommunicators:
    """One generation of communicators of a rank's device."""

    def __init__(self, backend: str, device: torch.device, store: Store, timeout: float):
        self.backend, self.device, self._store, self._timeout = backend, device, store, timeout
        self._stream = accelerator.new_stream(device)

    def _connected(
        self, what: str, store: Store, rank: int, ranks: tuple[int, ...], operation: str, *arguments: Any
    ) -> Any:
        """Returns a communicator of these ranks, after its first operation."""
        with losing(f"a {self.backend} communicator {what}"):
            channel = communicator(self.backend, store, rank, ranks, max(self._timeout, LONG_SECONDS))
            getattr(channel, operation)(*arguments).wait()
        return channel

    def _wait_on_host(self, event: torch.Event, what: str, operation: str) -> None:
        """Blocks the host until an event. Raises `ConnectionLost` after the timeout."""
        seconds = _SHARE * self._timeout
        if not accelerator.wait_on_host(event, seconds):
            detail = f"{self.backend} has not ended a {operation} within {seconds:g} s"
            raise ConnectionLost(f"{what} (timed out)", detail, True)

    @staticmethod
    def _abort(channels: Iterable[Any], memory: Iterable[torch.Tensor]) -> None:
        """Aborts communicators; if that fails, `memory` is kept for ever."""
        if not all([abort_communicator(channel) for channel in channels]):  # a list, to abort all of them
            _NEVER_REUSED.extend(memory)


class DeviceTransfers(DeviceCommunicators, PendingMessages):
    """The communicators between the ranks of a pipe. Their stream is idle, and owns the memory of received messages."""

    def __init__(self, backend: str, device: torch.device, store: Store, rank: int, timeout: float):
        super().__init__(backend, device, store, timeout)
        PendingMessages.__init__(self)  # an operation makes the stream wait, not the host
        self._rank = rank
        self._communicators: dict[RankPair, Any] = {}
        self._last_arrival: torch.Event | None = None

    def connect(self, pairs: Iterable[RankPair]) -> None:
        """Creates the missing communicators of these pairs; all ranks pass the same pairs, and use one order."""
        # Both sides of a pair wait for each other. Pairs with an even lower rank are first: long pipes in parallel.
        new = {pair for pair in pairs if self._rank in pair and pair not in self._communicators}
        for source, target in sorted(new, key=lambda pair: (min(pair) % 2, *pair)):
            what, store = f"from rank {source} to rank {target}", PrefixStore(f"{source}-{target}", self._store)
            first = torch.zeros(1, dtype=torch.uint8, device=self.device)
            place = (source, target).index(self._rank)
            operation = ("recv", [first], 0, 0) if place else ("send", [first], 1, 0)
            channel = self._connected(what, store, place, (source, target), *operation)
            self._communicators[source, target] = channel

    def send(self, key: Hashable, peer: int, memory: torch.Tensor) -> None:
        """Begins to send bytes; `finish_sends(key)` frees them."""
        channel = self._communicators[self._rank, peer]
        with losing(f"rank {peer} to take a message"):
            self._sends.setdefault(key, []).append((channel.send([memory], 1, 0), memory))

    def expect(self, key: Hashable, peer: int, size: int) -> None:
        """Begins to receive `size` bytes."""
        channel = self._communicators[peer, self._rank]
        with losing(f"a message of rank {peer}"), accelerator.current_streams(self._stream):
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._receives[key] = channel.recv([memory], 0, 0), memory

    def receive(self, key: Hashable, what: str) -> torch.Tensor:
        """Returns the expected bytes, for use on the current stream."""
        memory = self._arrived(key, what)
        stream = accelerator.current_stream(self.device)
        accelerator.keep_for_stream(memory, stream)
        self._last_arrival = accelerator.record_event(stream)
        return memory

    def settle(self) -> None:
        """Finishes all sends, and blocks the host until received messages are complete."""
        self.finish_all_sends()
        event, self._last_arrival = self._last_arrival, None
        if event is not None:
            self._wait_on_host(event, "values and gradients on their way between devices", "transfer")

    def close(self) -> None:
        """Aborts the communicators, then frees memory."""
        channels = self._communicators.values()
        self._abort(channels, (memory for _, memory in itertools.chain(*self._sends.values(), self._receives.values())))
        self._communicators.clear()
        super().close()
        self._last_arrival = None


class DeviceSums(DeviceCommunicators):
    """Sums over the replicas of a rank: gradients are copied into buckets, and each full bucket is summed in place.

        compute   last B ──●
        sums               └──▶ copies into a bucket ──●               ●──▶ copies out of it ──▶ the host goes on
        backend                                        └──▶ all-reduce ┘

    Copies have a separate stream: on the compute stream, the rest of the backward would wait for sums. A bucket is kept
    until the host has waited for its sum, in `settle`.
    """

    def __init__(self, backend: str, device: torch.device, store: Store, replica: int, replicas: int, timeout: float):
        super().__init__(backend, device, store, timeout)
        self._replica, self._replicas = replica, replicas
        self._communicator: Any = None
        self._memory: list[torch.Tensor] = []  # buckets of this round

    def connect(self) -> None:
        """Creates the communicator, on all replicas together."""
        if self._communicator is None:
            with self.on_stream():
                first, ranks = torch.zeros(1, device=self.device), tuple(range(self._replicas))
                self._communicator = self._connected(
                    "of all replicas", self._store, self._replica, ranks, "allreduce", [first]
                )

    def on_stream(self) -> accelerator.current_streams:
        return accelerator.current_streams(self._stream)

    def take(self, tensor: torch.Tensor) -> None:
        """Makes the stream of the sums wait for a tensor from the current stream."""
        self._stream.wait_event(accelerator.record_event(accelerator.current_stream(self.device)))
        accelerator.keep_for_stream(tensor, self._stream)

    def allreduce(self, buckets: list[torch.Tensor]) -> Any:
        """Begins to sum buckets over replicas in place; `wait()` of the result makes the current stream wait."""
        self._memory += buckets
        return self._communicator.allreduce(buckets)

    def settle(self, results: Iterable[torch.Tensor]) -> None:
        """Blocks the host until the results are complete."""
        self._wait_on_host(accelerator.record_event(self._stream), WAITED_FOR, "sum")
        self._memory.clear()
        stream = accelerator.current_stream(self.device)
        for result in results:
            accelerator.keep_for_stream(result, stream)

    def close(self) -> None:
        """Aborts the communicator, then frees memory."""
        self._abort([] if self._communicator is None else [self._communicator], self._memory)
        self._communicator = None
        self._memory.clear()
