"""Functions that rewriting puts into stage code: the state of the thread, and what watches over opaque calls.

The ends of a portal are in `portals`, functions of random nodes in `rng`, those of split backward in
`weight_gradients`.
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
    """Wraps an opaque call that did not write to these of its arguments while it was traced: now it may not either.

    Another stage, another micro-batch or the caller may hold them, and none of them would know.
    """

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
    """Wraps a hook on a module, which may keep the tensors of a micro-batch: no loss made of them goes back here."""

    @functools.wraps(function)
    def call(tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> T:
        refuse_other_backwards(values)
        return function(tensors, values)

    return call


def set_grad(enabled: bool) -> None:
    """Enters or leaves a `no_grad`, `enable_grad` or `inference_mode` block of the model."""
    torch.set_grad_enabled(enabled)


def set_autocast(device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    """Sets autocast as a block of the model does; without the cache of casts, which belongs to the process."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache and not enabled)
    if not enabled:
        torch.clear_autocast_cache()
