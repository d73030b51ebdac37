"""What a forked child sets right. It has only the thread that has forked, and locks as the others held them."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(function: Callable[[], object]) -> None:
    """Has every forked child call it, before anything else runs there; not where there are no forks (Windows)."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
