"""The question whether code runs inside `forward` of a `DistributedDataParallel`.

Optional, with torch 2.11 to 2.14: torch keeps the module whose forward runs for its compiler. Without that a step that
takes gradients there, before the reducer expects any, is not seen.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from fxpipe._torch.versions import optional_name

_is_kept = optional_name("torch.nn.parallel", "DistributedDataParallel._inside_ddp_forward") is not None


def is_in_data_parallel_forward() -> bool:
    """Returns whether forward of a `DistributedDataParallel` runs; False where torch does not say."""
    return _is_kept and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
