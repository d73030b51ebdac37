"""Transfers between the ranks of a pipe, on a separate gloo group.

After a failure a group cannot be reused: later receives would match messages in flight. So a group lives for one
*generation*, up to the first failure, and the next one has another name in the store (`torch.distributed.new_group`
would reuse names). A message is one tensor of bytes with a unique tag, so order does not matter. A pending `Work` keeps
its group alive, so only the tables of the connection hold it: the traceback of an exception keeps no socket open.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import pickle
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import Any

import torch

from fxpipe._torch.process_groups import ProcessGroupGloo, Store, all_gather, broadcast
from fxpipe.distributed.failures import ConnectionLost

COLLECTIVE_BYTES = 1024  # size of the first message of a collective; a longer object takes a second message
LONG_SECONDS = 7200.0  # timeout while a rank plans or records a graph


class PendingMessages:
    """Messages on their way: the operation and the memory of each, by key."""

    def __init__(self, *timeout: timedelta):
        self._sends: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}
        self._receives: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._limit = timeout  # of each operation

    def _wait(self, work: Any, what: str) -> None:
        try:
            with losing(what):
                work.wait(*self._limit)
        finally:
            del work

    def _arrived(self, key: Hashable, what: str) -> torch.Tensor:
        self._wait(self._receives[key][0], what)
        return self._receives.pop(key)[1]

    def finish_sends(self, key: Hashable, what: str) -> None:
        """Waits for the sends under this key, and frees their memory."""
        while self._sends.get(key):
            self._wait(self._sends[key][-1][0], what)
            self._sends[key].pop()
        self._sends.pop(key, None)

    def finish_all_sends(self) -> None:
        for key in [*self._sends]:
            self.finish_sends(key, "its messages to be taken")

    def close(self) -> None:
        self._sends.clear()
        self._receives.clear()


class Connection(PendingMessages):
    """One generation of connections between all ranks of a pipe."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        self._timeout = timedelta(seconds=timeout)
        super().__init__(self._timeout)
        self.rank, self.size = rank, size
        longest = timedelta(seconds=max(timeout, LONG_SECONDS))
        self._group: Any = ProcessGroupGloo(store, rank, size, longest) if size > 1 else None

    def close(self) -> None:
        """Closes the connections: ranks that wait for this rank fail."""
        super().close()
        self._group = None

    def send(self, key: Hashable, peer: int, tag: int, memory: torch.Tensor) -> None:
        """Begins to send bytes; `finish_sends(key)` waits until they are sent, and `memory` stays alive until then."""
        with losing(f"rank {peer} to take a message"):
            self._sends.setdefault(key, []).append((self._group.send([memory], peer, tag), memory))

    def expect(self, peer: int, tag: int, size: int) -> None:
        """Begins to receive `size` bytes; `receive` waits for them."""
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        with losing(f"a message of rank {peer}"):
            self._receives[tag] = (self._group.recv([memory], peer, tag), memory)

    def receive(self, peer: int, tag: int, what: str) -> torch.Tensor:
        """Returns the expected bytes. `what`: the message, as text for errors."""
        return self._arrived(tag, f"{what} of rank {peer}")

    def _collective(self, begin: Callable[[Any, timedelta], Any], what: str, is_long: bool) -> None:
        timeout = timedelta(seconds=LONG_SECONDS) if is_long else self._timeout
        with losing(what):
            begin(self._group, timeout).wait(timeout)

    def broadcast(self, value: Any, source: int, what: str, *, is_long: bool = False) -> Any:
        """Returns the object of `source` on all ranks. `is_long`: `source` may be planning meanwhile."""
        if self.size == 1:
            return value
        head, rest = _framed(pickled(value) if self.rank == source else b"")
        self._collective(lambda group, timeout: broadcast(group, head, source, timeout), what, is_long)
        if self.rank != source:
            rest = torch.empty(_rest_bytes(head), dtype=torch.uint8)
        if rest.numel():
            self._collective(lambda group, timeout: broadcast(group, rest, source, timeout), what, is_long)
        return value if self.rank == source else _object_of(head, rest)

    def broadcast_tensor(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Fills a tensor on all ranks with the values on `source`."""
        if self.size == 1:
            return
        same = tensor.detach().to("cpu", copy=True).contiguous()
        self._collective(lambda group, timeout: broadcast(group, same, source, timeout), what, True)
        if self.rank != source:
            tensor.copy_(same)

    def all_gather(self, value: Any, what: str, *, is_long: bool = False) -> list[Any]:
        """Returns the objects of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        head, rest = _framed(pickled(value))
        heads = [torch.empty_like(head) for _ in range(self.size)]
        self._collective(lambda group, timeout: all_gather(group, heads, head, timeout), what, is_long)
        longest = max(map(_rest_bytes, heads))
        rests = [torch.empty(longest, dtype=torch.uint8) for _ in heads]
        if longest:
            own = torch.nn.functional.pad(rest, (0, longest - rest.numel()))
            self._collective(lambda group, timeout: all_gather(group, rests, own, timeout), what, is_long)
        return [*map(_object_of, heads, rests)]


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        is_on_device = isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta")
        return obj.detach().to("cpu").__reduce_ex__(pickle.HIGHEST_PROTOCOL) if is_on_device else NotImplemented


def pickled(value: Any) -> bytes:
    """Pickles an object for another rank. Device tensors move to the CPU: their device there may be another rank's."""
    content = io.BytesIO()
    _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()


_PREFIX = 8  # bytes; the length of what follows


def content_of(memory: torch.Tensor) -> bytes:
    """Returns the bytes of a contiguous uint8 tensor in CPU memory."""
    return ctypes.string_at(memory.data_ptr(), memory.numel())


def _framed(content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two messages of an object; the second one is empty if the first one has room for all."""
    content = (len(content).to_bytes(_PREFIX, "little") + content).ljust(COLLECTIVE_BYTES)
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return memory[:COLLECTIVE_BYTES], memory[COLLECTIVE_BYTES:]


def _rest_bytes(head: torch.Tensor) -> int:
    return max(0, _PREFIX + int.from_bytes(content_of(head[:_PREFIX]), "little") - COLLECTIVE_BYTES)


def _object_of(head: torch.Tensor, rest: torch.Tensor) -> Any:
    return pickle.loads(content_of(torch.cat([head[_PREFIX:], rest])))  # bytes that follow the object are not read


def lost_connection(what: str, error: RuntimeError) -> ConnectionLost:
    """Converts an error of torch in a transfer. `what`: the awaited message, as text for errors."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    lower = text.lower()
    is_timeout = "timed out" in lower or "timeout" in lower
    return ConnectionLost(f"{what} (timed out)" if is_timeout else what, text, is_timeout)


@contextlib.contextmanager
def losing(what: str) -> Iterator[None]:
    """A block whose errors of torch are a lost connection. `what`: the awaited message, as text for errors."""
    try:
        yield
    except RuntimeError as error:
        raise lost_connection(what, error) from None
