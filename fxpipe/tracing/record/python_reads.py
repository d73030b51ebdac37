"""The Python that forward runs and reads during a recording.

A profile function observes which code runs. Patched classes of the objects that forward can reach observe which
attributes are used. Objects that cannot be observed count as fully read (`utils.python_state`).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import all_modules
from fxpipe.utils import python_state

_PATCHED = ("__getattribute__", "__setattr__")
_OWN_FILES = __file__.removesuffix("tracing/record/python_reads.py")


class PythonReads:
    def __init__(self, model: nn.Module):
        self._model = model
        self._places: dict[tuple[int, str], python_state.Place] = {}
        # By id of a module's dict and name: whether the first use of an attribute was a read.
        self._first_uses: dict[tuple[int, str], bool] = {}
        self._ran: dict[int, tuple[CodeType, dict[str, Any]]] = {}  # by id: codes with their globals
        # By id: objects with their used attributes; None if uses cannot be observed.
        self._reached: dict[int, tuple[Any, set[str] | None]] = {}
        self._classes: dict[type, dict[str, Any]] = {}  # patched classes with their original methods
        self._is_elsewhere: Callable[[], bool] = lambda: True
        self.watch: Callable[[bool], None] = lambda is_on: None  # starts and stops it: a profiler slows all Python

    def add_attribute(self, owner: dict[str, Any], name: str) -> None:
        key = (id(owner), name)
        if key not in self._places and not isinstance(owner[name], torch.Tensor):
            self._places[key] = owner, name
            self._reach(owner[name])

    def is_read_first(self, owner: dict[str, Any], name: str, is_read: bool = True, is_in_node: bool = False) -> bool:
        """Returns whether forward has read an attribute, or tried to, before it has set it. This use may be the first.

        `is_in_node`: this use is in Python that runs as a node, without what recorded code sets.
        """
        key = (id(owner), name)
        if is_in_node:
            self._first_uses[key] = True
        return self._first_uses.setdefault(key, is_read)

    @contextlib.contextmanager
    def follow(self, is_elsewhere: Callable[[], bool]) -> Iterator[None]:
        """A block that observes what this thread runs and reads, without what the garbage collector calls."""
        thread, collects = threading.get_ident(), False

        def begin(phase: str, _: dict[str, int]) -> None:  # runs as the first callback
            nonlocal collects
            collects |= phase == "start" and threading.get_ident() == thread

        def end(phase: str, _: dict[str, int]) -> None:  # runs as the last callback
            nonlocal collects
            collects &= phase == "start" or threading.get_ident() != thread

        self._is_elsewhere = lambda: collects or is_elsewhere()
        is_profiled = sys.getprofile() is not None
        replace: Any = sys.settrace if is_profiled else sys.setprofile  # a user's profiler could not be restored
        outer: Any = sys.gettrace() if is_profiled else None

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "call" and id(frame.f_code) not in self._ran and not self._is_elsewhere():
                self._add_code(frame)
            return outer and outer(frame, event, argument)

        gc.callbacks.insert(0, begin)
        gc.callbacks.append(end)
        self.watch = lambda is_on: replace(enter if is_on else outer)
        self.watch(True)
        try:
            yield
        finally:
            self.watch(False)
            self.watch = lambda is_on: None
            gc.callbacks.remove(begin)
            gc.callbacks.remove(end)
            self._is_elsewhere = lambda: True
            for kind, own in self._classes.items():
                for name in _PATCHED:
                    type.__setattr__(kind, name, own[name]) if name in own else type.__delattr__(kind, name)

    def state(self) -> python_state.PythonState:
        """Returns everything that forward has read, with its current values."""
        reached = self._reached

        def reads_of(value: Any) -> Collection[str] | None:
            _, names = reached.get(id(value), (None, None))
            return None if names is None or "__dict__" in names else names

        names = frozenset[str]().union(*(names for _, names in reached.values() if names))
        kinds = {type(module) for module in all_modules(self._model)}
        ran = [(code, values) for code, values in self._ran.values() if python_state.is_followed_file(code.co_filename)]
        return python_state.PythonState(kinds, [*self._places.values()], ran, reads_of, names=names)

    def _add_code(self, frame: FrameType) -> None:
        code, values = frame.f_code, frame.f_globals
        self._ran[id(code)] = code, values
        if not python_state.is_followed_file(code.co_filename):
            return
        for value in map(values.get, python_state.named_globals(code)):
            self._reach(value)
            if isinstance(value, ModuleType) and python_state.is_followed_module(value):
                for attribute in python_state.names_in(code) & vars(value).keys():
                    self._reach(vars(value)[attribute])
        for name in code.co_freevars:
            self._reach(frame.f_locals.get(name))

    def _reach(self, value: Any, depth: int = python_state.MAX_DEPTH) -> None:
        """Patches the classes of a value and of its contents, to observe which attributes are used."""
        if id(value) in self._reached or not depth:
            return
        parts = python_state.parts_of(value)
        if python_state.is_followed_object(value) and not isinstance(value, (nn.Module, type)):
            self._reached[id(value)] = value, set() if self._patch(type(value)) else None
        elif parts is not None:
            self._reached[id(value)] = value, None
        for part in () if parts is None else parts(value):
            self._reach(part, depth - 1)

    def _patch(self, kind: type) -> bool:
        """Patches a class to observe uses of its objects; returns whether that is possible."""
        if kind in self._classes or not python_state.is_followed_class(kind):
            return kind in self._classes
        plain: Any = kind.__getattribute__
        plain_set: Any = kind.__setattr__

        def note(value: Any, name: str) -> bool:
            _, names = self._reached.get(id(value), (None, None))
            is_own = sys._getframe(2).f_code.co_filename.startswith(_OWN_FILES)
            if names is None or is_own or self._is_elsewhere():
                return False
            names.add(name)
            return True

        def getattribute(value: Any, name: str) -> Any:
            is_noted, result = note(value, name), plain(value, name)
            if is_noted:
                self._reach(result)
            return result

        def set_attribute(value: Any, name: str, new: Any) -> None:
            note(value, name)
            plain_set(value, name, new)

        own = {name: vars(kind)[name] for name in _PATCHED if name in vars(kind)}
        try:
            type.__setattr__(kind, "__getattribute__", getattribute)
            type.__setattr__(kind, "__setattr__", set_attribute)
        except TypeError:  # a C class
            return False
        self._classes[kind] = own
        return True
