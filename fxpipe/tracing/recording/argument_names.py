"""How forward calls its inputs, and the user the leaves in them: `x`, `xs[1]`, `batch['ids']`."""

from __future__ import annotations

import inspect

from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.tracing.recording.hooks import made_from


def argument_name(model: nn.Module, path: tuple[pytree.KeyEntry, ...]) -> str:
    """The argument of forward that holds a leaf of (args, kwargs)."""
    first = path[1]
    if not isinstance(first, pytree.SequenceKey):
        return str(first.key)  # type: ignore[attr-defined]
    place, parameters = first.idx, list(inspect.signature(made_from(model).forward).parameters.values())
    for number, parameter in enumerate(parameters[: place + 1]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{place - number}]"
    return parameters[place].name if place < len(parameters) else f"args[{place}]"


def leaf_name(model: nn.Module, path: tuple[pytree.KeyEntry, ...]) -> str:
    """A leaf of (args, kwargs) as the user would write it."""
    return argument_name(model, path) + "".join(map(str, path[2:]))
