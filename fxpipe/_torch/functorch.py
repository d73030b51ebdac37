"""Transforms of `torch.func`: detection of an active transform, and interception of vmap.

Detection is required, and unchanged from torch 2.11 to 2.14. `apis.vmap_impl`, through which every vmap passes, is
optional: without it a model is refused at its first function inside vmap, or becomes opaque there.
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

PREDISPATCH_MODULE = "torch._functorch.predispatch"  # functions that represent transforms in graphs of export


def is_in_functorch_transform() -> bool:
    return _peek_interpreter_stack() is not None


@contextlib.contextmanager
def intercept_vmap(call: Callable[..., Any]) -> Iterator[None]:
    """A block in which each call of vmap, in all threads, runs `call(vmap, function, *arguments, **kwargs)`.

    `vmap` is torch's implementation. It takes the function, four settings of vmap, and the arguments of the function.
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
