"""The parts of process groups of `torch.distributed`: stores, the gloo backend, and the backends of accelerators.

Their names are public and documented, but torch defines them in a private module, where type checkers look for them.
Required, with torch 2.11 to 2.14, if a pipe runs over processes, and imported only there. How a backend is made from
its name is private, and optional: without it values between accelerators go through the memory of the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch._C import _distributed_c10d
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

require_attributes(_distributed_c10d, "AllgatherOptions", "BroadcastOptions")

_OWN_BACKENDS = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}  # that torch brings; others are registered
_DESCRIPTION = "_DistributedBackendOptions"  # that some of those are made of

__all__ = [
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "Store",
    "abort_communicator",
    "all_gather",
    "broadcast",
    "communicator",
    "has_communicators",
]


# gloo runs a collective in a thread of its group, for which the end of the group waits. `Work.wait(timeout)` does not
# end that thread: without a timeout of its own it stays until that of the group has passed, or the peer is gone.


def broadcast(group: Any, tensor: torch.Tensor, source: int, timeout: timedelta) -> Any:
    """Begins to fill a tensor on all ranks with what `source` has in it; that ends after `timeout` at the latest."""
    options = _distributed_c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = source, 0, timeout
    return group.broadcast([tensor], options)


def all_gather(group: Any, results: list[torch.Tensor], tensor: torch.Tensor, timeout: timedelta) -> Any:
    """Begins to fill `results` with the tensors of all ranks; that ends after `timeout` at the latest."""
    options = _distributed_c10d.AllgatherOptions()
    options.timeout = timeout
    return group.allgather([results], [tensor], options)


# -- Communicators of accelerators -------------------------------------------------------------------------------------


def _maker(backend: str) -> Any:
    """Returns the class of a backend, or how one is made that was registered by `Backend.register_backend`, or None."""
    if backend in _OWN_BACKENDS:
        return getattr(_distributed_c10d, _OWN_BACKENDS[backend], None)  # where torch was built with it
    plugin = getattr(dist.Backend, "_plugins", {}).get(backend.upper())
    is_known = plugin is not None and (not plugin.extended_api or hasattr(_distributed_c10d, _DESCRIPTION))
    return plugin if is_known else None


def has_communicators(backend: str) -> bool:
    """Tells whether `communicator` can make one of this backend."""
    return _maker(backend) is not None


def communicator(backend: str, store: Store, rank: int, ranks: tuple[int, ...], seconds: float) -> Any:
    """Makes a communicator of a backend between the processes that call this with the same store.

    It has `send([tensor], peer, tag)` and `recv`, with the peer's place in `ranks`, and `allreduce([tensor])`, which
    sums; each returns a `Work`, whose `wait()` makes the current stream wait, not the host.

    Args:
        rank: the place of this process in `ranks`.
        seconds: after which the backend itself ends the process.
    """
    timeout, maker, name = timedelta(seconds=seconds), _maker(backend), f"fxpipe {ranks}"
    if backend in _OWN_BACKENDS:
        options = maker.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = timeout, list(ranks), name
        with _failures_left_to_us():
            return maker(store, rank, len(ranks), options)
    if not maker.extended_api:
        return maker.creator_fn(store, rank, len(ranks), timeout)
    description = getattr(_distributed_c10d, _DESCRIPTION)()
    description.store, description.group_rank, description.group_size = store, rank, len(ranks)
    description.timeout, description.group_id, description.global_ranks_in_group = timeout, name, list(ranks)
    return maker.creator_fn(description, None)


@contextlib.contextmanager
def _failures_left_to_us() -> Iterator[None]:
    """A block in which a communicator is made that does not end its process when a peer is gone.

    A failure is told by the ranks to each other, and the communicator is aborted. NCCL's watchdog would else be first.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def abort_communicator(channel: Any) -> bool:
    """Ends a communicator, and what it is at: afterwards no device writes to memory that it was given.

    Returns:
        Whether it could be ended. If not, that memory must not be used for anything else.
    """
    for name in ("abort", "shutdown"):
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(channel, name)()
            return True
    return False
