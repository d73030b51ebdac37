"""Containers among the inputs that forward changes: a graph holds tensors, and the caller's dict would stay as it was.

aux["h"] = h
aux["log"].append(1)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
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
from fxpipe.trees import flatten_with_paths


def refuse_changed_containers(
    model: nn.Module,
    tree: tuple[tuple[Any, ...], dict[str, Any]],
    leaves: Sequence[Leaf],
    values: Sequence[Any],
    spec: pytree.TreeSpec,
    find_line: Callable[[], str] = lambda: UNKNOWN,
) -> None:
    """Raises where forward has put something into, taken out of, or replaced in a container among its inputs.

    Args:
        tree: (args, kwargs) as they are after forward.
        leaves, values, spec: what they were made of.
        find_line: called to find the line that does it.

    Raises:
        CannotRecord: final; names the item and the line.
    """
    path = _changed(tree, leaves, values, spec)
    if path is None:
        return
    line = find_line()
    where = "" if line == UNKNOWN else f" at {line}"
    raise CannotRecord(
        f"forward changes {leaf_name(model, path)} in an object that it was given as an input{where}, and a graph "
        "cannot: the caller's object would stay as it was. Let forward return what it makes, or put it into a copy "
        "(dict(batch)); for what is kept from step to step give a tensor that forward writes to (state.copy_(h)), or "
        "use buffers; for a cache: leave it out, and forward makes one",
        final=True,
    )


def _changed(
    tree: Any, leaves: Sequence[Leaf], values: Sequence[Any], spec: pytree.TreeSpec
) -> tuple[pytree.KeyEntry, ...] | None:
    """The path of the first item that is another one."""
    old = [value if leaf.is_tensor else leaf.constant for leaf, value in zip(leaves, values, strict=True)]
    now, new_spec = flatten_with_paths(tree)
    if new_spec == spec and all(_is_same(*pair) for pair in zip(old, (value for _, value in now), strict=True)):
        return None
    items = dict(now)
    before = dict(zip((path for path, _ in flatten_with_paths(pytree.tree_unflatten(old, spec))[0]), old, strict=True))
    for path in (*items, *before):
        if path not in items or path not in before or not _is_same(before[path], items[path]):
            return path
    return None


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
        if result == UNKNOWN and frame in lines and _changed(tree, leaves, values, spec) is not None:
            result = f"{frame.f_code.co_filename}:{lines[frame]}"
        lines[frame] = frame.f_lineno
        return look if result == UNKNOWN else None

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return look if result == UNKNOWN and is_users(frame.f_code.co_filename) else None

    args, kwargs = tree
    with undone(model), _tracing(enter), contextlib.suppress(Exception):
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
