"""Transfers of device memory between ranks, by the devices' backend: NCCL, XCCL, HCCL, …

gloo transfers the layouts of packets (`packets`) and reports failed ranks. Tensors move between devices:

    rank a   compute   value ──●                        ●─▶ the value's memory is freed
             a → b             └──▶ send ═══════════════┘
    rank b   a → b                  recv ═══╗ (in memory of a separate stream)
             compute             ... F ...  ╚═●─▶ F of this value

*Order.* A communicator matches sends and receives only by order, and a waiting operation blocks those after it. So each
ordered pair of ranks has one, and the receiver posts its receives in the order of the sender's row (`packet_link`).
Packets with an unknown layout use gloo.

*Streams and memory.* A send follows the work already queued on its compute stream, and is kept until the compute stream
waits for its end. A receive uses memory of an idle stream, since on the compute stream it would wait for all queued
work; `record_stream` keeps it for later computations. After a failure, communicators are aborted before memory is
freed, since devices may still write to it.

*Failure.* The host waits only in `settle`, at the end of a row, up to the timeout. A step is committed after all ranks
have passed it.
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
from fxpipe.distributed.connection import LONG_SECONDS, lost_connection
from fxpipe.distributed.failures import ConnectionLost
from fxpipe.utils import accelerator

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


class DeviceTransfers:
    """One generation of communicators between the devices of the ranks of a pipe."""

    def __init__(self, backend: str, device: torch.device, store: Store, rank: int, timeout: float):
        self.backend, self._device, self._rank, self._timeout = backend, device, rank, timeout
        self._store = store
        self._communicators: dict[RankPair, Any] = {}
        self._sends: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}
        self._receives: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._arrivals = accelerator.new_stream(device)  # idle; owns the memory of received messages
        self._last_arrival: torch.Event | None = None

    def connect(self, pairs: Iterable[RankPair]) -> None:
        """Creates the missing communicators of these pairs; all ranks pass the same pairs.

        Both sides of a pair wait for each other, so all ranks use one order. Pairs with an even lower rank are first,
        so that a long pipe connects pairs in parallel.
        """
        new = {pair for pair in pairs if pair not in self._communicators}
        for source, target in sorted(new, key=lambda pair: (min(pair) % 2, *pair)):
            self._communicators[source, target] = (
                self._connected(source, target) if self._rank in (source, target) else None
            )

    def _connected(self, source: int, target: int) -> Any:
        is_source = self._rank == source
        what = f"a {self.backend} communicator from rank {source} to rank {target}"
        try:
            channel = communicator(
                self.backend,
                PrefixStore(f"{source}-{target}", self._store),
                0 if is_source else 1,
                (source, target),
                max(self._timeout, LONG_SECONDS),
            )
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            (channel.send([first], 1, 0) if is_source else channel.recv([first], 0, 0)).wait()
        except RuntimeError as error:
            raise lost_connection(what, error) from None
        return channel

    # -- from one rank to another ------------------------------------------------------------------------------------

    def send(self, key: Hashable, peer: int, memory: torch.Tensor) -> None:
        """Begins to send bytes; `finish_sends(key)` frees them."""
        channel = self._communicators[self._rank, peer]
        try:
            self._sends.setdefault(key, []).append((channel.send([memory], 1, 0), memory))
        except RuntimeError as error:
            raise lost_connection(f"rank {peer} to take a message", error) from None

    def finish_sends(self, key: Hashable, what: str) -> None:
        """Makes the current stream wait for the sends under this key, and frees their memory."""
        for work, memory in self._sends.pop(key, ()):
            _wait(work, what)
            del memory

    def expect(self, key: Hashable, peer: int, size: int) -> None:
        """Begins to receive `size` bytes."""
        channel = self._communicators[peer, self._rank]
        try:
            with accelerator.current_streams(self._arrivals):
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._receives[key] = channel.recv([memory], 0, 0), memory
        except RuntimeError as error:
            raise lost_connection(f"a message of rank {peer}", error) from None

    def receive(self, key: Hashable, what: str) -> torch.Tensor:
        """Returns the expected bytes, for use on the current stream."""
        work, memory = self._receives.pop(key)
        _wait(work, what)
        stream = accelerator.current_stream(self._device)
        accelerator.keep_for_stream(memory, stream)
        self._last_arrival = accelerator.record_event(stream)
        return memory

    # -- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finishes all sends, and blocks the host until received messages are complete.

        Raises `ConnectionLost` after the timeout.
        """
        for key in [*self._sends]:
            self.finish_sends(key, "its messages to be taken")
        event, self._last_arrival = self._last_arrival, None
        seconds = _SHARE * self._timeout
        if event is not None and not accelerator.wait_on_host(event, seconds):
            raise ConnectionLost(
                "values and gradients on their way between devices (timed out)",
                f"{self.backend} has not ended a transfer within {seconds:g} s",
                True,
            )

    def close(self) -> None:
        """Aborts the communicators, then frees memory."""
        channels = [channel for channel in self._communicators.values() if channel is not None]
        if not all([abort_communicator(channel) for channel in channels]):  # a list, to abort all of them
            _NEVER_REUSED.extend(
                memory for _, memory in itertools.chain(*self._sends.values(), self._receives.values())
            )
        self._communicators.clear()
        self._sends.clear()
        self._receives.clear()
        self._last_arrival = None


def _wait(work: Any, what: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise lost_connection(what, error) from None
