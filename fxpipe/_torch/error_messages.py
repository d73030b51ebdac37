"""Errors of torch without a specific type, recognized by their messages.

Only this module depends on messages, as in torch 2.11 to 2.14. An error with another message is not recognized, and
reaches the caller unchanged.
"""

from __future__ import annotations

import re

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # by device type


def has_no_way_back(error: RuntimeError) -> bool:
    """Returns True if torch raises this because a function has no derivative, or forward has mutated values it needs.

    Planning assigns its backward no cost: the model may be for evaluation only.
    """
    texts = ("modified by an inplace operation", "derivative for aten::")
    return isinstance(error, NotImplementedError) or any(text in str(error) for text in texts)


def forbids_saved_tensor_hooks(error: RuntimeError) -> bool:
    """Returns True if a transform of `torch.func` raises this because hooks on saved tensors are active."""
    return "saved tensor hooks" in str(error)


def requested_bytes(error: BaseException) -> int | None:
    """Returns the bytes requested from the allocator that raised this; None if not in the message."""
    request = re.search(r"allocate (\d+) bytes", str(error))
    return None if request is None else int(request[1])


def allocator_error(error: BaseException | None) -> BaseException | None:
    """Returns the allocator's error in the chain of causes of an error; None if not found."""
    while error is not None:
        is_of_cpu = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)  # has no type
        if is_of_cpu or isinstance(error, MemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None
