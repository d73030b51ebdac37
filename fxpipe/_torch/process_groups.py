"""The parts of process groups of `torch.distributed`: stores, and the gloo backend.

Their names are public and documented, but torch hands them on from a private module, where type checkers look for them.
Required, with torch 2.11 to 2.14, where a pipe runs over processes, and imported only there.
"""

from __future__ import annotations

from fxpipe._torch.versions import required_names

with required_names():
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

__all__ = ["PrefixStore", "ProcessGroupGloo", "Store"]
