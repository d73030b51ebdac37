"""The state of `torch.compile`: whether it is loaded, when it compiles a backward, and for which sizes.

All hold from torch 2.11 to 2.14. When a backward is compiled, and for which sizes, is optional.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fxpipe._torch.versions import optional_name


def is_compiler_loaded() -> bool:
    """Returns True if there may be anything compiled in this process."""
    return "torch._dynamo" in sys.modules


def compile_backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """A block in which `torch.compile` compiles the backward of what it compiles, and not when that first runs.

    Optional: where this torch has no such setting, the backward is compiled when it first runs, which takes time then.
    """
    config = "torch._functorch.config"
    patch = optional_name(config, "patch")
    if patch is None or optional_name(config, "force_non_lazy_backward_lowering") is None:
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[Any] = patch(force_non_lazy_backward_lowering=True)
    return block


def mark_dynamic_dims(tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """Makes `torch.compile` take these dimensions for ones of any size from the beginning, as far as the code lets it.

    Optional: without it a dimension is so once it has come with a second size, which compiles once more.
    """
    mark = optional_name("torch._dynamo", "maybe_mark_dynamic")
    if mark is not None:
        mark(tensor, list(dims))
