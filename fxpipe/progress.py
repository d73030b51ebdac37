"""A bar on stderr for a step that takes long, where someone is looking."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

DELAY = 2.0  # seconds before a bar appears: most steps are over by then


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], object]]:
    """Gives a function to call after each of `total` nodes. Nothing is shown where stderr is not a terminal.

    with progress("profiling", len(nodes)) as step:
        for node in nodes:
            ...
            step()
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield _nothing
        return
    from tqdm import tqdm  # here: it starts a thread and takes 50 ms to import

    with tqdm(total=total, desc=what, unit="node", delay=DELAY, leave=False) as bar:
        yield bar.update


def _nothing() -> None:
    pass
