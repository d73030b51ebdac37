"""Fake tensors: their classes and errors, and what torch logs about them.

All of it is required, and has been the same from torch 2.11 to 2.14. `unset_fake_temporarily` switches the mode off for
a block. `SymNode._expr` is optional.
"""

from __future__ import annotations

from typing import Any

from fxpipe._torch.versions import required_names

with required_names():
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
        unset_fake_temporarily,
    )

__all__ = [
    "LOGGER",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "first_expression",
    "unset_fake_temporarily",
]

LOGGER = "torch._subclasses.fake_tensor"  # which logs, with a stack, what fake tensors cannot do


def first_expression(size: Any) -> Any:
    """Returns what a symbolic size was made as: it stays the same when symbols turn out to be equal.

    Without `SymNode._expr` it is the expression of now.
    """
    try:
        return size.node._expr
    except AttributeError:
        return size.node.expr
