"""Random numbers of Python's and numpy's that a model draws from generators of its own.

Like those of the global generators they would be the same ones in every step, if drawn while a graph is made. But who
holds such a generator cannot be given a seed for a micro-batch and its recomputation, as the global ones are where a
module is kept whole; so a forward that draws from one is refused.

Looked at are generators in attributes of modules, in globals of the files that their classes come from, and in lists,
tuples and dicts there. One that forward makes anew, or that an object of another kind hides, is not seen.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from fxpipe.tracing.recording.refusals import CannotRecord

_DEEPEST = 3  # containers in containers
_MOST_ITEMS = 1000  # of a container that is looked into
_LIBRARIES = ("torch.", "builtins")


class OwnDice:
    """The generators that a model holds, and where they stood."""

    def __init__(self, model: nn.Module):
        self._before = [(name, dice, _state(dice)) for name, dice in _held(model)]

    def rolled(self) -> list[str]:
        """Names of those that have been drawn from since."""
        return [name for name, dice, before in self._before if _bits(_state(dice)) != _bits(before)]

    def restore(self) -> None:
        """All stand again where they stood."""
        for _, dice, before in self._before:
            _set_state(dice, before)

    def refuse_rolled(self) -> None:
        """Raises `CannotRecord` if one has been drawn from."""
        if rolled := self.rolled():
            raise CannotRecord(
                f"forward draws from {rolled[0]!r}, a random generator of Python's or numpy's of its own, which would "
                "give the same numbers in every step; draw with torch (torch.rand, torch.randint) instead",
                final=True,
            )


@contextlib.contextmanager
def standing_still(model: nn.Module) -> Iterator[None]:
    """A block after which they stand where they stood."""
    dice = OwnDice(model)
    try:
        yield
    finally:
        dice.restore()


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen = set[int]()
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _inside(f"{path}.{name}" if path else name, value, seen)
    for home in dict.fromkeys(kind.__module__ for module in model.modules() for kind in type(module).__mro__):
        if not home.startswith(_LIBRARIES) and home in sys.modules:
            for name, value in list(vars(sys.modules[home]).items()):
                yield from _inside(f"{home}.{name}", value, seen)


def _inside(name: str, value: Any, seen: set[int], depth: int = _DEEPEST) -> Iterator[tuple[str, Any]]:
    if _is_dice(value) and id(value) not in seen:
        seen.add(id(value))
        yield name, value
    elif depth and isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _inside(f"{name}[{key!r}]", item, seen, depth - 1)


def _is_dice(value: Any) -> bool:
    """Is it a generator, not a global one, whose state can be seen?"""
    if isinstance(value, random.Random):
        return value is not random._inst and not isinstance(value, random.SystemRandom)
    if "numpy" not in sys.modules:
        return False
    library = sys.modules["numpy"].random
    if isinstance(value, library.RandomState):
        return value is not library.mtrand._rand
    return isinstance(value, library.Generator)


def _state(dice: Any) -> Any:
    if isinstance(dice, random.Random):
        return dice.getstate()
    return dice.get_state(legacy=False) if hasattr(dice, "get_state") else dice.bit_generator.state


def _set_state(dice: Any, state: Any) -> None:
    if isinstance(dice, random.Random):
        dice.setstate(state)
    elif hasattr(dice, "set_state"):
        dice.set_state(state)
    else:
        dice.bit_generator.state = state


def _bits(state: Any) -> Any:
    """A state as something that can be compared: numpy's are dicts with arrays."""
    if isinstance(state, dict):
        return {key: _bits(item) for key, item in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
