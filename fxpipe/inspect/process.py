"""How the process of the command shall run: it is short, looks at one model, and somebody waits for it."""

from __future__ import annotations

import gc
import os


def set_up() -> None:
    """To be called before torch is loaded, whose OpenMP reads the environment then."""
    # Threads that wait for each other spin for milliseconds; beside other work on the same cores they keep it, and each
    # other, from going on, and all takes twice as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # some microseconds
    # Nearly all objects are of imported modules, and stay: to look at them again and again takes a second.
    gc.set_threshold(50_000, 50, 100)


def finish() -> None:
    """To be called at the end: the system takes all at once, and to look for garbage in it takes another second."""
    gc.freeze()
