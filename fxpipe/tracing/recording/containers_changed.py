"""Containers among the inputs that forward changes: a graph holds tensors, and the caller's dict would stay as it was.

aux["h"] = h
aux["log"].append(1)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.tracing.recording.argument_names import leaf_name
from fxpipe.tracing.recording.refusals import CannotRecord
from fxpipe.tracing.snapshot import undone
from fxpipe.tracing.source import UNKNOWN, is_users
from fxpipe.tracing.traced import Leaf, same_constant
from fxpipe.trees import flatten_with_paths, untouched


def changed_item(
    model: nn.Module, tree: Any, leaves: Sequence[Leaf], values: Sequence[Any], spec: pytree.TreeSpec
) -> str | None:
    """What forward has put into, taken out of, or replaced in a container among its inputs, as the user would write it.

    Args:
        tree: (args, kwargs) as they are after forward.
        leaves, values, spec: what they were made of.
    """
    paths, new_spec = flatten_with_paths(tree)
    now = {leaf_name(model, path): value for path, value in paths}
    old = {leaf.path: x if leaf.is_tensor else leaf.constant for leaf, x in zip(leaves, values, strict=True)}
    for name in (*now, *old):
        if name not in now or name not in old or not _is_same(old[name], now[name]):
            return name
    return None if new_spec == spec else "the structure"


def changed_container(name: str, line: str = UNKNOWN) -> CannotRecord:
    """The error to raise; no other way would make it right."""
    where = "" if line == UNKNOWN else f" at {line}"
    return CannotRecord(
        f"forward changes {name} in an object that it was given as an input{where}, and a graph cannot: the caller's "
        "object would stay as it was. Let forward return what it makes, or put it into a copy (dict(batch)); for what "
        "is kept from step to step give a tensor that forward writes to (state.copy_(h)), or use buffers; for a cache: "
        "leave it out, and forward makes one",
        final=True,
    )


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    return same_constant(left, right)


def line_of_change(model: nn.Module, leaves: Sequence[Leaf], values: Sequence[Any], spec: pytree.TreeSpec) -> str:
    """The user's line that changes a container among the inputs; unknown where no line of the user's does.

    Runs the model and looks after each line of the user's code, so that it takes a while.
    """
    tree = pytree.tree_unflatten(values, spec)
    lines: dict[FrameType, int] = {}
    result = UNKNOWN

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal result
        if result == UNKNOWN and frame in lines and changed_item(model, tree, leaves, values, spec):
            result = f"{frame.f_code.co_filename}:{lines[frame]}"
        lines[frame] = frame.f_lineno
        return look if result == UNKNOWN else None

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return look if result == UNKNOWN and is_users(frame.f_code.co_filename) else None

    args, kwargs = tree
    with undone(model), untouched(spec), _tracing(enter), contextlib.suppress(Exception):
        model(*args, **kwargs)
    return result


@contextlib.contextmanager
def _tracing(function: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(function)
    try:
        yield
    finally:
        sys.settrace(before)
