"""Transforms of `torch.func`: is one at work, and calls of vmap taken over for a block.

Whether one is at work is required, and the same from torch 2.11 to 2.14. `apis.vmap_impl`, which every vmap passes
through, is optional: without it a model that uses vmap is refused at its first function in it, or kept whole there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxpipe._torch.versions import optional_name, required_names

with required_names():
    _peek_interpreter_stack: Any = torch._C._functorch.peek_interpreter_stack

PREDISPATCH_MODULE = "torch._functorch.predispatch"  # of functions that stand for transforms in graphs of export's


def is_in_functorch_transform() -> bool:
    """Returns True if this code runs inside a transform of `torch.func`."""
    return _peek_interpreter_stack() is not None


@contextlib.contextmanager
def intercept_vmap(call: Callable[..., Any]) -> Iterator[None]:
    """A block in which `call(vmap, function, *arguments, **kwargs)` runs wherever vmap is called, in all threads.

    `vmap` is what torch would have called: with the function, four settings of vmap, and the arguments of the function.
    """
    plain = optional_name("torch._functorch.apis", "vmap_impl")
    if plain is None:
        yield
        return
    apis: Any = sys.modules["torch._functorch.apis"]

    def vmap(function: Any, *settings_and_args: Any, **kwargs: Any) -> Any:
        return call(plain, function, *settings_and_args, **kwargs)

    apis.vmap_impl = vmap
    try:
        yield
    finally:
        apis.vmap_impl = plain
