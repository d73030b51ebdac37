"""Errors of torch that have no type of their own, told by what they say.

Nowhere else does fxpipe go by the text of an exception. Each function says what it recognises; the texts are those of
torch 2.11 to 2.14. One that torch words in another way is not recognised, and reaches the caller as it is.
"""

from __future__ import annotations

import re

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # by kind of device


def has_no_way_back(error: RuntimeError) -> bool:
    """Returns True if torch raises this since no training step goes back through a function at all.

    It has no derivative, or forward has written to what its backward needs. Planning, which goes back through every
    node, takes such a backward to cost nothing: the model may be there for evaluation only.
    """
    texts = ("modified by an inplace operation", "derivative for aten::")
    return isinstance(error, NotImplementedError) or any(text in str(error) for text in texts)


def forbids_saved_tensor_hooks(error: RuntimeError) -> bool:
    """Returns True if a transform of `torch.func` raises this since hooks on saved tensors are active."""
    return "saved tensor hooks" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an allocator raises this: the one of the CPU has no type for it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    )


def requested_bytes(error: BaseException) -> int | None:
    """Returns how many bytes an allocator was asked for when it raised this; None where it does not say."""
    request = re.search(r"allocate (\d+) bytes", str(error))
    return None if request is None else int(request[1])


def allocator_error(error: BaseException | None) -> BaseException | None:
    """Finds the error that an allocator raised in the chain of causes of an error; None if there is none."""
    while error is not None:
        if is_out_of_memory(error):
            return error
        error = error.__cause__ or error.__context__
    return None
