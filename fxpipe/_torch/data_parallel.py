"""Detection of code inside `forward` of a `DistributedDataParallel`.

Optional, from torch 2.11 to 2.14: torch stores the module whose forward runs, for its compiler. Without it, a step that
computes gradients there, before the reducer expects them, is not detected.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from fxpipe._torch.versions import optional_name

_is_kept = optional_name("torch.nn.parallel", "DistributedDataParallel._inside_ddp_forward") is not None


def is_in_data_parallel_forward() -> bool:
    """Returns True if forward of a `DistributedDataParallel` runs; False if unknown."""
    return _is_kept and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
