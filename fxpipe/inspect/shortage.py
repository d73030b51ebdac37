"""Models that the memory of this machine cannot hold: told from other failures, and answered with what goes instead."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from fxpipe.errors import ArgumentError
from fxpipe.inspect.request import Request
from fxpipe.units import human_bytes

# What torch's allocators say; theirs are plain RuntimeErrors on the CPU.
WORDS = ("can't allocate memory", "not enough memory", "out of memory")


@contextlib.contextmanager
def explained(request: Request) -> Iterator[None]:
    """A block in which a model is made and looked at.

    Raises:
        ArgumentError: memory ran out where weights and inputs have values; names what does without.
    """
    try:
        yield
    except Exception as error:
        cause = None if request.on_meta else _shortage(error)
        if cause is None:
            raise
        asked = re.search(r"allocate (\d+) bytes", str(cause))
        at_once = f", where {human_bytes(int(asked[1]))} were asked for at once" if asked else ""
        raise ArgumentError(
            f"{request.subject}: the memory here does not hold the model and its inputs{at_once}; give --meta to plan "
            "it without values, and --hardware for the devices that are to hold it"
        ) from error


def _shortage(error: BaseException | None) -> BaseException | None:
    """What an allocator raised, if that is what lies behind an error."""
    while error is not None:
        told = str(error)
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in told for word in WORDS)):
            return error
        error = error.__cause__ or error.__context__
    return None
