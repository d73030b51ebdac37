"""The parts of process groups of `torch.distributed`: stores, and the gloo backend.

Their names are public and documented, but torch hands them on from a private module, where type checkers look for them.
Private is how a backend becomes a process group that torch does not know by name: `DistributedDataParallel` wants one,
and `torch.distributed.new_group` uses names again. Required, with torch 2.11 to 2.14, where a pipe runs over processes,
and imported only there.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

require_attributes(ProcessGroup, "_register_backend", "_set_default_backend")

__all__ = ["PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Store", "gloo_group"]


def gloo_group(store: Store, rank: int, size: int, timeout: float) -> ProcessGroup:
    """Makes a gloo group of all that call this with the same store. It ends when nobody refers to it any more."""
    group = ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group
