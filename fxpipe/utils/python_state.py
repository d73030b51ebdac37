"""The Python values that functions depend on, and whether they have changed.

A function depends on its code, its defaults and its closure, on the object that it is bound to, and on the globals, the
classes and the modules that its code names. Values are followed into lists, tuples, dicts, sets, arrays, attributes of
objects (`__dict__` and slots), `functools.partial`, context variables and other functions, `MAX_DEPTH` levels deep.

Not followed: code and objects of the standard library, and of torch other than its modules; containers of more than
`MAX_ITEMS` items; attributes of classes and Python modules whose names are computed (`getattr(settings, name)`); values
beyond the `MAX_VALUES` nearest ones.
"""

from __future__ import annotations

import argparse
import dis
import functools
import operator
import os
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import own_children, tensor_stores
from fxpipe.utils.builtin_calls import original_code
from fxpipe.utils.python_objects import is_python_class, slots_of_class

MAX_DEPTH = 6
MAX_ITEMS = 10_000  # of a container that is looked into
MAX_VALUES = 2_000  # of one state, the nearest ones: a function that calls a library may reach all of it
_MISSING = object()
_NUMBERS, _LOGS = frozenset((int, float, complex)), frozenset((list, dict, set, deque))
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device))
_IMMUTABLE = (tuple, frozenset, MethodType, functools.partial, property, staticmethod, classmethod)
_CALLED = ("forward", "__call__")  # without being named
_MODULE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_HOLDERS = (SimpleNamespace, argparse.Namespace, type(os.environ))  # objects of the standard library to look into
_TORCH = torch.__path__[0]
_LIBRARY_DIRS = (sysconfig.get_path("stdlib"), _TORCH, __file__.removesuffix("utils/python_state.py"), "<frozen ")
_MODULES_OF_TORCH = (f"{_TORCH}/nn/modules/", f"{_TORCH}/backends/")

Place = tuple[Mapping[str, Any], str]  # a dict and a key in it
Parts = Callable[[Any], tuple[Any, ...]]


@dataclass(slots=True)
class PythonState:
    """Values that functions depend on as they were when this was made; `holds` compares them with what they are now.

    `PythonState(values=(function,))` is what a function depends on: all that its code names, and the code of the
    functions that it may call. If `facts` of two functions are equal, the functions do the same.
    """

    values: Iterable[Any] = ()
    places: Iterable[Place] = ()
    ran: Collection[tuple[CodeType, dict[str, Any]]] | None = None  # code that ran, with its globals; None: any may run
    reads_of: Callable[[Any], Collection[str] | None] = lambda value: None  # attributes read of an object; None: any
    skips_logs: bool = False  # lists of numbers and tensors, that functions may write to
    names: frozenset[str] = frozenset()  # of attributes that were read of objects, besides those that code names
    facts: list[Any] = field(init=False)
    _walk: _Walk = field(init=False)

    def __post_init__(self) -> None:
        self.take()

    def take(self) -> None:
        """Takes the values as they are now."""
        self._walk = self._new_walk()
        self.facts = self._walk.facts

    def holds(self) -> bool:
        """Returns whether all values are the same, or others that are as good."""
        if self._walk.is_same():
            return True
        if self._walk.is_other():
            return False
        walk = self._new_walk()
        if walk.facts == self.facts:
            self._walk = walk  # the objects to be compared from now on
        return self._walk is walk

    def structure(self) -> frozenset[Any]:
        """Returns the kinds of facts: of a number whether it is zero, of a container and a tensor the class."""
        kinds = {id(value): type(value) for value in self._walk._held if isinstance(value, torch.Tensor)}
        return frozenset(_kind_of_fact(kinds.get(fact, fact) if type(fact) is int else fact) for fact in self.facts)

    def _new_walk(self) -> _Walk:
        names = self.names.union(*(names_in(code) for code, _ in self.ran or ()))
        while (walk := _Walk(self, names)).names != names:
            names = walk.names
        return walk


class _Walk:
    """All values that are reached from the roots of a state, breadth first.

    A step compares flat lists: the identity of the value under each key, and of the parts of each container. `facts`
    describe the same so that containers and functions with equal parts have equal facts.
    """

    def __init__(self, state: PythonState, names: frozenset[str]):
        self._state, self.names, self.facts = state, names, list[Any]()
        self._codes = None if state.ran is None else {code for code, _ in state.ran}
        self._stores, self._keys, self._values = list[Mapping[str, Any]](), list[str](), list[Any]()
        self._containers = list[tuple[Parts, Any, tuple[Any, ...]]]()
        self._seen, self._placed, self._held = dict[int, int](), set[tuple[int, str]](), list[Any]()
        self._todo = deque[tuple[Any, int]]()
        for store, key in state.places:
            self._add_named(store, (key,), 0)
        self._todo.extend((value, 0) for value in state.values)
        for code, values in state.ran or ():
            self._add_globals(code, values)
        while self._todo and len(self.facts) < MAX_VALUES:
            self._visit(*self._todo.popleft())

    def is_same(self) -> bool:
        """Returns whether all objects are the same. Asked in every step, of some hundred objects."""
        try:
            are_same = all(map(operator.is_, map(operator.getitem, self._stores, self._keys), self._values))
        except KeyError:
            return False
        return are_same and all(
            len(now := parts(source)) == len(before) and all(map(operator.is_, now, before))
            for parts, source, before in self._containers
        )

    def is_other(self) -> bool:
        """Returns whether a value differs for certain. From now on equal numbers and texts are those compared."""
        for i, (store, key, value) in enumerate(zip(self._stores, self._keys, self._values, strict=True)):
            now = store.get(key, _MISSING)
            if now is value:
                continue
            is_plain = type(now) in _PLAIN
            if type(now) is not type(value) or not (is_plain or _parts_of(now)):
                return True
            if is_plain and _plain_fact(now) != _plain_fact(value):
                return True
            self._values[i] = now if is_plain else value
        return False

    # -- the walk ----------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or isinstance(value, CodeType):
            self.facts.append(_plain_fact(value))
            return
        if id(value) in self._seen:
            self.facts.append(self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        if self._state.skips_logs and _is_log(value):
            self._add_fact(_is_log, value)
            return
        parts = _parts_of(value) if depth < MAX_DEPTH else None
        if isinstance(value, FunctionType):
            if self._follows(value):
                self._add_globals(original_code(value.__code__), value.__globals__)
                depth -= 1  # functions may call each other however deep
            else:
                parts = None
        if parts is None:
            self.facts.append(id(value))
        else:
            self._add_parts(parts, value, depth)
        if depth < MAX_DEPTH:
            self._add_attributes(value, depth)

    def _follows(self, function: FunctionType) -> bool:
        code = original_code(function.__code__)
        return is_followed_file(code.co_filename) if self._codes is None else code in self._codes

    def _add_parts(self, parts: Parts, value: Any, depth: int) -> None:
        items = parts(value)
        self.facts.append((type(value), len(items)))
        if not isinstance(value, _IMMUTABLE):
            self._containers.append((parts, value, items))
        items = tuple(sorted(items, key=repr)) if isinstance(value, (set, frozenset)) else items
        self._todo.extend((item, depth + 1) for item in items)

    def _add_fact(self, question: Callable[[Any], Any], value: Any) -> None:
        """Adds an answer that is another object each time."""
        answer = question(value)
        self.facts.append(answer)
        self._containers.append((lambda value: (question(value) == answer,), value, (True,)))

    def _add_named(self, store: Mapping[str, Any], names: Iterable[str], depth: int) -> None:
        for name in names:
            if (id(store), name) not in self._placed and name in store:
                self._placed.add((id(store), name))
                self._stores.append(store)
                self._keys.append(name)
                self._values.append(store[name])
                self.facts.append(name)
                self._todo.append((store[name], depth))

    def _add_globals(self, code: CodeType, values: dict[str, Any]) -> None:
        if self._codes is None:
            self.names |= names_in(code)
        self._add_named(values, named_globals(code), 0)

    def _add_attributes(self, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, ModuleType):
            if value in (torch, os) or is_followed_file(getattr(value, "__file__", None) or "<frozen "):
                self._add_named(vars(value), sorted(self.names & vars(value).keys()), depth)
        elif isinstance(value, type):
            for cls in value.__mro__:
                self._add_class(cls, depth)
        elif _is_array(value):
            self._add_fact(_array_key, value)
        elif isinstance(value, nn.Module):
            if self._codes is None:  # else all reads of modules are known
                children = own_children(value)
                followed = self.names.union(_CALLED, children if isinstance(value, _MODULE_CONTAINERS) else ())
                for store in (*tensor_stores(value), children):
                    self._add_named(store, sorted(followed & store.keys()), depth)
                self._todo.append((kind, depth))
        elif isinstance(value, _HOLDERS) or _is_followed_class(kind):
            attributes = getattr(value, "__dict__", {})
            names = self._state.reads_of(value) if self._codes is not None else self.names
            self._add_fact(len, attributes)
            self._add_named(
                attributes, [*attributes] if names is None else sorted(attributes.keys() & names), depth + 1
            )
            if slots := slots_of_class(kind):
                self._add_parts(functools.partial(_slot_values, [*slots.values()]), value, depth)
            self._todo.append((kind, depth))

    def _add_class(self, cls: type, depth: int) -> None:
        if not _is_followed_class(cls):
            return
        store = vars(cls)
        self._add_fact(len, store)
        names = self.names.union(_CALLED)
        if self._codes is not None:
            functions = ((name, _function_in(member)) for name, member in store.items())
            names |= {name for name, function in functions if function is not None and self._follows(function)}
        self._add_named(store, sorted(store.keys() & names), depth)


# -- What values are made of -----------------------------------------------------------------------------------------


def _plain_fact(value: Any) -> Any:
    if isinstance(value, CodeType):
        return original_code(value)
    return type(value), repr(value) if isinstance(value, (float, complex)) else value  # NaN, -0.0


def _kind_of_fact(fact: Any) -> Any:
    if type(fact) is int:
        return None if fact < 1 << 20 else fact  # a number of objects, or an identity
    if type(fact) is not tuple or not isinstance(fact[0], type):
        return fact
    return (fact[0], fact[1] in (0, "0.0", "-0.0")) if fact[0] in _NUMBERS else fact[0] if fact[0] in _LOGS else fact


def _is_log(value: Any) -> bool:
    ends = (value[0], value[-1]) if type(value) in (list, deque) and value else ()
    return bool(ends) and all(type(end) in _NUMBERS or isinstance(end, torch.Tensor) for end in ends)


def _parts_of(value: Any) -> Parts | None:
    """Returns the function that lists the parts of a value like this one; None if it has no parts."""
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return parts if not hasattr(value, "__len__") or len(value) <= MAX_ITEMS else None
    return None


def parts_of_function(function: Any) -> tuple[Any, ...]:
    """Returns the parts of a function, its code, defaults and closure say; another object alone."""
    parts = _parts_of(function)
    return (function,) if parts is None else parts(function)


def _parts_of_function(function: FunctionType) -> tuple[Any, ...]:
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return (function.__code__, *values, *map(_cell_contents, function.__closure__ or ()))


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _slot_values(slots: Sequence[Any], value: Any) -> tuple[Any, ...]:
    def read(slot: Any) -> Any:
        try:
            return slot.__get__(value)
        except AttributeError:  # not set
            return _MISSING

    return tuple(map(read, slots))


_PARTS: dict[Any, Parts] = {
    FunctionType: _parts_of_function,
    MethodType: lambda method: (method.__self__, method.__func__),
    functools.partial: lambda partial: (partial.func, *partial.args, *partial.keywords, *partial.keywords.values()),
    (list, tuple, deque, set, frozenset): tuple,
    dict: lambda items: (*dict.keys(items), *dict.values(items)),
    property: lambda member: (member.fget,),
    (staticmethod, classmethod): lambda member: (member.__func__,),
    type(functools.lru_cache(id)): lambda function: (function.__wrapped__,),
    weakref.ref: lambda reference: (reference(),),
    ContextVar: lambda variable: (variable.get(None),),
}


def _function_in(member: Any) -> FunctionType | None:
    """Returns the function of a member of a class: of a method or a property."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return function if isinstance(function, FunctionType) else None


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= MAX_ITEMS


def _array_key(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


# -- What code names, and which is followed --------------------------------------------------------------------------


@functools.cache
def is_followed_file(file: str) -> bool:
    """Returns whether code of a file is followed: the user's code, libraries, and the modules of torch."""
    is_library = file.startswith(_LIBRARY_DIRS) and "site-packages" not in file.removeprefix(_TORCH)
    return not is_library or (file.startswith(_MODULES_OF_TORCH) and not file.endswith("/modules/module.py"))


def _is_followed_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""  # none: a session's
    is_library = kind.__module__ in sys.stdlib_module_names or not is_followed_file(file)
    return is_python_class(kind) and not is_library and not issubclass(kind, torch.Tensor)


@functools.cache
def named_globals(code: CodeType) -> tuple[str, ...]:
    """Returns the names of globals that code reads, also in functions and comprehensions inside it."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (named_globals(const) for const in code.co_consts if isinstance(const, CodeType))
    return tuple(sorted(own.union(*inner)))


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Returns all names in code, and its texts that may be names (`getattr(x, "scale")`)."""
    texts = (const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
    inner = (names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset((*code.co_names, *texts)).union(*inner)
