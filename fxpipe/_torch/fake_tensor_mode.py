"""Fake tensors: their classes, errors and logger.

Required, and unchanged from torch 2.11 to 2.14. `unset_fake_temporarily` switches the mode off for a block.
`SymNode._expr` is optional.
"""

from __future__ import annotations

from typing import Any

from fxpipe._torch.versions import required_names

with required_names():
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily


# Errors for missing values; the last one comes from operators without a rule for fake tensors.
NEEDS_VALUES_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
LOGGER = "torch._subclasses.fake_tensor"  # logs, with a stack, operations that fake tensors do not support


def first_expression(size: Any) -> Any:
    """Returns the expression of a symbolic size before symbols were found to be equal, if torch has it."""
    try:
        return size.node._expr
    except AttributeError:
        return size.node.expr
