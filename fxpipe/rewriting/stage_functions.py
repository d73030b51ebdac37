"""Functions that rewriting inserts into stage code: the state of the thread, and checks of opaque calls.

See also `portals`, `rng` and `weight_gradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fxpipe._torch.autograd import refuse_other_backwards, version_of
from fxpipe.errors import StateError

T = TypeVar("T")


def with_write_check(function: Callable[..., T], places: Sequence[int], name: str) -> Callable[..., T]:
    """Wraps an opaque call: it must not write to arguments that it did not write to in the trace; others use them."""

    @functools.wraps(function)
    def call(tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> T:
        read = [x for place in places if isinstance(x := values[place], torch.Tensor) and not x.is_inference()]
        versions = [version_of(tensor) for tensor in read]
        result = function(tensors, values)
        if any(version_of(tensor) != version for tensor, version in zip(read, versions, strict=True)):
            raise StateError(
                f"{name}, kept whole, writes to an input of it, which it did not when it was traced; let it write to a "
                "copy (x = x.clone())"
            )
        return result

    return call


def with_backward_check(function: Callable[..., T]) -> Callable[..., T]:
    """Wraps a hook on a module, which may keep tensors of a micro-batch: a loss of them cannot run backward here."""

    @functools.wraps(function)
    def call(tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> T:
        refuse_other_backwards(values)
        return function(tensors, values)

    return call


def set_grad(enabled: bool) -> None:
    """Enters or leaves a `no_grad`, `enable_grad` or `inference_mode` block of the model."""
    torch.set_grad_enabled(enabled)


def set_autocast(device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    """Sets autocast like a block of the model, without the cast cache, which belongs to the process."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache and not enabled)
    if not enabled:
        torch.clear_autocast_cache()
