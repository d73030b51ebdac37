"""The Python that forward runs and reads while it is recorded, and what forward changes besides tensors.

A profile function sees which code runs; a class of objects that forward can reach shows for the while of the recording
which attributes of its objects are read. What is not seen so is taken as a whole (`utils.python_state`).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import all_modules
from fxpipe.utils.builtin_calls import original_code
from fxpipe.utils.equality import equal_values
from fxpipe.utils.python_state import (
    HOLDERS,
    MAX_DEPTH,
    MAX_ITEMS,
    PLAIN_TYPES,
    PythonState,
    is_followed_class,
    is_followed_file,
    is_followed_module,
    named_globals,
    names_in,
)

_OWN = "__getattribute__"


class PythonReads:
    """The code and the values of Python that one recording has read."""

    def __init__(self, model: nn.Module):
        self.places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}  # attributes of modules
        self._codes: dict[int, CodeType] = {}  # by id: those seen, whether followed or not
        self._ran: list[tuple[CodeType, dict[str, Any]]] = []
        self._reached: dict[int, tuple[Any, set[str]]] = {}  # by id: objects, and which of their attributes were read
        self._before: dict[int, tuple[str, Any, Any]] = {}  # by id: containers by name, and copies of them
        self._globals: list[
            tuple[str, dict[str, Any], Any]
        ] = []  # those that forward sets: the values, or the dict itself
        self._classes: dict[type, Any] = {}  # those patched, and their own `__getattribute__`
        self.outer_names: dict[str, str] = {}  # variables of functions around others, which these set: line
        self._kinds = {type(module) for module in all_modules(model)}
        self._is_elsewhere: Callable[[], bool] = lambda: True
        for kind in self._kinds:
            self._reach(kind, kind.__name__, MAX_DEPTH)

    def add_attribute(self, owner: dict[str, Any], name: str, path: str = "") -> None:
        """Adds an attribute of a module, whose `__dict__` is `owner`."""
        key = (id(owner), name)
        if key not in self.places and not isinstance(owner[name], torch.Tensor):
            self.places[key] = owner, name
            self._reach(owner[name], f"{path}.{name}" if path else name, MAX_DEPTH)

    @contextlib.contextmanager
    def follow(self, is_elsewhere: Callable[[], bool]) -> Iterator[None]:
        """A block in which it is seen what this thread runs and reads, but where it `is_elsewhere`."""
        self._is_elsewhere = is_elsewhere
        is_profiled = sys.getprofile() is not None
        watch: Any = sys.settrace if is_profiled else sys.setprofile  # a profiler of the user's cannot be put back
        outer: Any = sys.gettrace() if is_profiled else None

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "call" and id(frame.f_code) not in self._codes and not is_elsewhere():
                self._add_code(frame)
            return outer and outer(frame, event, argument)

        watch(enter)
        try:
            yield
        finally:
            watch(outer)
            self._is_elsewhere = lambda: True
            for kind, own in reversed(self._classes.items()):
                type.__delattr__(kind, _OWN) if own is None else type.__setattr__(kind, _OWN, own)

    def state(self) -> PythonState:
        """Returns what forward has read, as it is now."""
        reached = self._reached  # not `self`, which holds copies

        def reads_of(value: Any) -> Collection[str] | None:
            _, names = reached.get(id(value), (None, {"__dict__"}))
            return None if "__dict__" in names else names

        names = frozenset[str]().union(*(names for _, names in reached.values()))
        return PythonState(self._kinds, [*self.places.values()], self._ran, reads_of, names=names)

    def changes(self) -> list[str]:
        """Returns names of what forward has changed of Python's, other than attributes of modules."""
        changed = [name for name, container, copy in self._before.values() if not _is_same(container, copy)]
        return changed + [
            f"the global {n!r}" for n, d, value in self._globals if not _is_same_value(d.get(n, d), value)
        ]

    def restore(self) -> None:
        """Puts back what was changed, as far as it is known."""
        for _, container, copy in self._before.values():
            if _is_same(container, copy):
                continue
            if isinstance(container, type):
                for attribute in vars(container).keys() - copy.keys():
                    delattr(container, attribute)
                for attribute, value in copy.items():
                    if vars(container)[attribute] is not value:
                        setattr(container, attribute, value)
            else:
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(copy)
        for name, store, value in self._globals:
            store[name] = value
            if value is store:
                del store[name]

    # -- what is reached ---------------------------------------------------------------------------------------------

    def _add_code(self, frame: FrameType) -> None:
        code, values = original_code(frame.f_code), frame.f_globals
        self._codes[id(frame.f_code)] = frame.f_code
        if not is_followed_file(code.co_filename):
            return
        # A function that forward makes closes over variables of forward.
        is_inner = bool(code.co_freevars) and any(code in one.co_consts for one, _ in self._ran)
        self._ran.append((code, values))
        for name in named_globals(code):
            value = values.get(name)
            self._reach(value, f"the global {name!r}", MAX_DEPTH)
            if isinstance(value, ModuleType) and is_followed_module(value):
                for attribute in names_in(code) & vars(value).keys():
                    self._reach(vars(value)[attribute], f"{name}.{attribute}", MAX_DEPTH)
        for name in _stored_names(code, "STORE_GLOBAL"):
            self._globals.append((name, values, values.get(name, values)))
        if not is_inner:
            for name in code.co_freevars:
                self._reach(frame.f_locals.get(name), f"{name!r}, around {code.co_name}", MAX_DEPTH)
            for name, line in _stored_names(code, "STORE_DEREF").items():
                if name in code.co_freevars:
                    self.outer_names[f"{name!r}, around {code.co_name}"] = f"{code.co_filename}:{line}"

    def _reach(self, value: Any, name: str, depth: int) -> None:
        """Takes a copy of a value that forward may change, and follows what is read of it."""
        if id(value) in self._before or id(value) in self._reached:
            return
        kind = type(value)
        if isinstance(value, (list, dict, set, deque)) and len(value) <= MAX_ITEMS and depth:
            self._before[id(value)] = name, value, _copy(value)
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._reach(item, f"{name}[{key!r}]", depth - 1)
        elif isinstance(value, tuple) and depth:
            for key, item in enumerate(value):
                self._reach(item, f"{name}[{key!r}]", depth - 1)
        elif isinstance(value, MethodType):
            self._reach(value.__self__, name, depth)
        elif isinstance(value, functools.partial) and depth:
            self._reach((value.func, value.args, value.keywords), name, depth - 1)
        elif isinstance(value, type) and is_followed_class(value):
            self._before[id(value)] = name, value, _copy(value)
        elif isinstance(value, FunctionType):
            self._reach(vars(value), name, depth)
        if isinstance(value, HOLDERS) or (is_followed_class(kind) and not isinstance(value, (nn.Module, type))):
            attributes = getattr(value, "__dict__", None)
            if attributes is not None:
                self._before[id(attributes)] = name, attributes, _copy(attributes)
            if is_followed_class(kind) and self._patch(kind):
                self._reached[id(value)] = value, set()

    def _patch(self, kind: type) -> bool:
        """Makes a class show the reads of its objects; returns whether it does."""
        if kind in self._classes:
            return True
        plain: Any = kind.__getattribute__
        own = vars(kind).get(_OWN)

        def getattribute(value: Any, name: str) -> Any:
            is_read = id(value) in self._reached and not self._is_elsewhere()
            if is_read:
                self._reached[id(value)][1].add(name)
            result = plain(value, name)
            if is_read:
                self._reach(result, f"{name!r} of a {kind.__name__}", MAX_DEPTH)
            return result

        set_attribute: Any = type.__setattr__
        try:
            set_attribute(kind, _OWN, getattribute)
        except TypeError:  # made in C
            return False
        self._classes[kind] = own
        return True


@functools.lru_cache(maxsize=4096)
def _stored_names(code: CodeType, instruction: str) -> dict[str, int]:
    """Returns the names that code sets by an instruction, and the lines."""
    names, line = dict[str, int](), code.co_firstlineno
    for one in dis.get_instructions(code):
        line = one.starts_line or line
        if one.opname == instruction:
            names.setdefault(one.argval, line)
    return names


def _copy(container: Any) -> Any:
    if isinstance(container, type):
        return {name: value for name, value in vars(container).items() if name != _OWN}
    kind = next((kind for kind in (dict, set) if isinstance(container, kind)), list)
    return kind(container)


def _is_same(container: Any, copy: Any) -> bool:
    now = _copy(container)
    if isinstance(now, set) or len(now) != len(copy):
        return bool(now == copy)
    if isinstance(now, dict) and list(now) != list(copy):
        return False
    pairs = zip(now.values(), copy.values(), strict=True) if isinstance(now, dict) else zip(now, copy, strict=True)
    return all(_is_same_value(a, b) for a, b in pairs)


def _is_same_value(now: Any, before: Any) -> bool:
    return now is before or (type(now) in PLAIN_TYPES and equal_values(now, before))
