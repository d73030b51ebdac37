"""The context of distributed autograd, which backward over RPC needs. Optional, with torch 2.11 to 2.14.

Outside of one, what RPC returns has no graph, or that of a stage on this process alone. Where torch does not say
whether a thread is in one, a pipe over RPC looks at its outputs. Imported by that alone.
"""

from __future__ import annotations

from fxpipe._torch.versions import optional_name

_current_context = optional_name("torch.distributed.autograd", "_current_context")


def is_in_distributed_context() -> bool | None:
    """Returns whether this thread is in a context of distributed autograd; None where torch does not say."""
    if _current_context is None:
        return None
    try:
        _current_context()
    except RuntimeError:  # there is none
        return False
    return True
