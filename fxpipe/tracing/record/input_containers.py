"""Detects changes to containers among the inputs: a graph holds only tensors and would not change the caller's dict.

aux["h"] = h
aux["log"].append(1)
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import original_module
from fxpipe._torch.saved_tensor_hooks import NoSavedTensors
from fxpipe.tracing.fake_tensors import in_fake_mode
from fxpipe.tracing.model_state import preserve_state
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.source_lines import UNKNOWN_LINE, is_user_file
from fxpipe.tracing.traced import InputLeaf
from fxpipe.utils.python_objects import equal_values
from fxpipe.utils.python_state import is_followed_file
from fxpipe.utils.pytree import CACHE_ADVICE, flatten_with_paths, preserve_objects

# -- names of inputs in forward, and of their leaves for the user: `x`, `xs[1]`, `batch['ids']` ----------------------


def argument_name(model: nn.Module, path: tuple[pytree.KeyEntry, ...]) -> str:
    """Returns the argument of forward that holds a leaf of (args, kwargs)."""
    first = path[1]
    if not isinstance(first, pytree.SequenceKey):
        return str(first.key)  # type: ignore[attr-defined]
    place, parameters = first.idx, list(inspect.signature(original_module(model).forward).parameters.values())
    for number, parameter in enumerate(parameters[: place + 1]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{place - number}]"
    return parameters[place].name if place < len(parameters) else f"args[{place}]"


def changed_input_item(
    model: nn.Module, tree: Any, leaves: Sequence[InputLeaf], values: Sequence[Any], spec: pytree.TreeSpec
) -> str | None:
    """Returns the item, as the user writes it, that forward added, removed or replaced in `tree`: (args, kwargs)."""
    paths, new_spec = flatten_with_paths(tree)
    now = {argument_name(model, path) + "".join(map(str, path[2:])): value for path, value in paths}
    old = {leaf.path: x if leaf.is_tensor else leaf.constant for leaf, x in zip(leaves, values, strict=True)}
    for name in (*now, *old):
        if name not in now or name not in old or not _is_same_leaf(old[name], now[name]):
            return name
    return None if new_spec == spec else "the structure"


def changed_container_error(name: str, line: str = UNKNOWN_LINE) -> CannotRecord:
    where = "" if line == UNKNOWN_LINE else f" at {line}"
    return CannotRecord(
        f"forward changes {name} in an object that it was given as an input{where}, and a graph cannot: the caller's "
        "object would stay as it was. Let forward return what it makes, or put it into a copy (dict(batch)); for what "
        "is kept from step to step give a tensor that forward writes to (state.copy_(h)), or use buffers; for a cache: "
        f"{CACHE_ADVICE}",
        is_final=True,
    )


def _is_same_leaf(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    return equal_values(left, right)


def line_of_change(model: nn.Module, tree: Any, spec: pytree.TreeSpec, has_changed: Callable[[], object]) -> str:
    """Runs the model and returns the user's line that makes `has_changed` true; unknown if there is none. Slow."""
    lines: dict[FrameType, int] = {}
    result = UNKNOWN_LINE

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal result
        if result == UNKNOWN_LINE and frame in lines and has_changed():
            result = f"{frame.f_code.co_filename}:{lines[frame]}"
        if event == "return":
            lines.pop(frame, None)  # it holds activations
        else:
            lines[frame] = frame.f_lineno
        return look if result == UNKNOWN_LINE else None

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        return look if result == UNKNOWN_LINE and is_user_file(file) and is_followed_file(file) else None

    args, kwargs = tree
    with (
        preserve_state(model),
        preserve_objects(spec),
        in_fake_mode(),
        NoSavedTensors(),
        contextlib.ExitStack() as stack,
        contextlib.suppress(Exception),
    ):
        stack.callback(sys.settrace, sys.gettrace())
        sys.settrace(enter)
        model(*args, **kwargs)
    return result
