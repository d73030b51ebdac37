"""Settings of `torch.compile`: whether it is loaded, when it compiles a backward, and dynamic dimensions.

Unchanged from torch 2.11 to 2.14. The time of compiling a backward and dynamic dimensions are optional.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fxpipe._torch.versions import optional_name


def is_compiler_loaded() -> bool:
    """Returns True if this process may have compiled code."""
    return "torch._dynamo" in sys.modules


def compile_backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """A block in which `torch.compile` compiles the backward with the forward, if torch has this setting."""
    config = "torch._functorch.config"
    patch = optional_name(config, "patch")
    if patch is None or optional_name(config, "force_non_lazy_backward_lowering") is None:
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[Any] = patch(force_non_lazy_backward_lowering=True)
    return block


def mark_dynamic_dims(tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """Makes `torch.compile` treat these dimensions as dynamic before a second size occurs, if torch supports it."""
    mark = optional_name("torch._dynamo", "maybe_mark_dynamic")
    if mark is not None:
        mark(tensor, list(dims))
