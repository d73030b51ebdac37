"""The zoo: public models in tiny configurations with random weights, and own models, one for each difficulty.

`KINDS` are models of the kinds that are hard to cut; they are no part of `ZOO`.
"""

import fnmatch
from collections.abc import Iterable

from zoo.control import CONTROL
from zoo.entry import Entry
from zoo.hugging_face import HUGGING_FACE
from zoo.imaging import IMAGING
from zoo.kinds import KINDS
from zoo.memory import MEMORY
from zoo.state import STATE
from zoo.structure import STRUCTURE

OWN = (*CONTROL, *STRUCTURE, *MEMORY, *STATE)
ZOO = (*OWN, *HUGGING_FACE, *IMAGING)
BY_NAME = {entry.name: entry for entry in (*ZOO, *KINDS)}


def select(patterns: Iterable[str]) -> list[Entry]:
    """The entries whose name or package is, or matches, one of `patterns`, as `bert`, `gpt*` or `monai`."""
    wanted = list(patterns)
    found = [e for e in ZOO if any(fnmatch.fnmatch(text, p) for p in wanted for text in (e.name, e.family))]
    if not found:
        raise SystemExit(f"no model is called {' or '.join(wanted)}; there are: {' '.join(BY_NAME)}")
    return found
