"""Stores and process groups of `torch.distributed`: gloo, and communicators of accelerators.

The names are public and documented, but defined in a private module, where type checkers look for them. Required, with
torch 2.11 to 2.14, for pipes over processes, and imported only by them. Creating a backend from its name is private,
and optional: without it transfers between accelerators go through CPU memory.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch._C import _distributed_c10d
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import ProcessGroup as ProcessGroup
    from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo
    from torch._C._distributed_c10d import Store as Store

require_attributes(_distributed_c10d, "AllgatherOptions", "BroadcastOptions")

_OWN_BACKENDS = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}  # built into torch; others are registered
_DESCRIPTION = "_DistributedBackendOptions"  # argument of some registered backends


# gloo runs a collective in a thread of its group, and destroying the group waits for it. `Work.wait(timeout)` does not
# end that thread: without a timeout of the collective it runs until the group's timeout, or until the peer ends.


def broadcast(group: Any, tensor: torch.Tensor, source: int, timeout: timedelta) -> Any:
    """Starts a broadcast of `source`'s tensor to all ranks; it ends after `timeout` at the latest."""
    options = _distributed_c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = source, 0, timeout
    return group.broadcast([tensor], options)


def all_gather(group: Any, results: list[torch.Tensor], tensor: torch.Tensor, timeout: timedelta) -> Any:
    """Starts an all-gather of the tensors of all ranks into `results`; it ends after `timeout` at the latest."""
    options = _distributed_c10d.AllgatherOptions()
    options.timeout = timeout
    return group.allgather([results], [tensor], options)


def _maker(backend: str) -> Any:
    """Returns the class of a backend, or the plugin from `Backend.register_backend`; None if neither is usable."""
    if backend in _OWN_BACKENDS:
        return getattr(_distributed_c10d, _OWN_BACKENDS[backend], None)  # depends on the build of torch
    plugin = getattr(dist.Backend, "_plugins", {}).get(backend.upper())
    is_known = plugin is not None and (not plugin.extended_api or hasattr(_distributed_c10d, _DESCRIPTION))
    return plugin if is_known else None


def has_communicators(backend: str) -> bool:
    return _maker(backend) is not None


def communicator(backend: str, store: Store, rank: int, ranks: tuple[int, ...], seconds: float) -> Any:
    """Creates a communicator of a backend between the processes that call this with the same store.

    It has `send([tensor], peer, tag)` and `recv`, with the peer's index in `ranks`, and `allreduce([tensor])`, which
    sums; each returns a `Work`, whose `wait()` makes the current stream wait, not the host.

    Args:
        rank: the index of this process in `ranks`.
        seconds: the timeout after which the backend itself ends the process.
    """
    timeout, maker, name = timedelta(seconds=seconds), _maker(backend), f"fxpipe {ranks}"
    if backend in _OWN_BACKENDS:
        options = maker.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = timeout, list(ranks), name
        # Without NCCL's error handling: ranks report failures and abort instead.
        variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(variable)
        os.environ[variable] = "0"
        try:
            return maker(store, rank, len(ranks), options)
        finally:
            del os.environ[variable]
            if before is not None:
                os.environ[variable] = before
    if not maker.extended_api:
        return maker.creator_fn(store, rank, len(ranks), timeout)
    description = getattr(_distributed_c10d, _DESCRIPTION)()
    description.store, description.group_rank, description.group_size = store, rank, len(ranks)
    description.timeout, description.group_id, description.global_ranks_in_group = timeout, name, list(ranks)
    return maker.creator_fn(description, None)


def abort_communicator(channel: Any) -> bool:
    """Aborts a communicator and its operations, so that no device writes to their memory afterwards.

    Returns:
        True if it was aborted. If not, that memory must not be reused.
    """
    for name in ("abort", "shutdown"):
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(channel, name)()
            return True
    return False
