"""What only the model's own run shows, and a graph made in another way does not do: looked for while the model runs.

The recorder sees all of it where it records the model itself. Export and symbolic tracing see the model run on fake
tensors or proxies, and give a graph that is right for one step: a number that Python drew is a constant in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fxpipe.tracing.recording.refusals import draws_in_python
from fxpipe.tracing.snapshot import dice, same_dice


@contextlib.contextmanager
def witnessed() -> Iterator[None]:
    """A block in which the model runs.

    Raises:
        CannotRecord: it did what no graph carries. Another way would not make it right.
    """
    before = dice()
    yield
    if not same_dice(before, dice()):
        raise draws_in_python()
