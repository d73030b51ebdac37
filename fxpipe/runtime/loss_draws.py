"""Random numbers in loss_fn: noise, dropout, sampled negatives.

They come from torch's own generators, as in a plain loop over micro-batches. A stage whose kernels take no other
generator borrows one of these for a moment, and puts it back to where it was: what loss_fn drew meanwhile would be
drawn again. So loss_fn has them to itself while it runs.

Such a loss cannot be compared with that of the whole mini-batch, which draws other numbers. Nobody says that it draws;
but it differs from itself when it is taken twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fxpipe.rewriting.random_nodes import lock_of

_CPU = torch.device("cpu")


def generators_held(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A block in which nobody borrows the generators of the CPU and of `device`."""
    return lock_of(_CPU) if device == _CPU else _both_held(device)


@contextlib.contextmanager
def _both_held(device: torch.device) -> Iterator[None]:
    with lock_of(_CPU), lock_of(device):  # in this order, as everybody takes them
        yield


def generators_put_back(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A block after which the same generators stand where they stood."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_kind(device))


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def are_equal(some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    """Bit for bit, NaN being NaN."""
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )
