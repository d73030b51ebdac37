"""Fake tensors: their classes and errors, and what torch logs about them.

All of it is required, and has been the same from torch 2.11 to 2.14. `unset_fake_temporarily` switches the mode off for
a block.
"""

from __future__ import annotations

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
    "unset_fake_temporarily",
]

LOGGER = "torch._subclasses.fake_tensor"  # which logs, with a stack, what fake tensors cannot do
