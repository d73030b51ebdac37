"""The Python values that functions depend on, and whether they have changed.

A function depends on its code, its defaults and its closure, on the object that it is bound to, and on the globals, the
classes and the modules that its code names. Values are followed into lists, tuples, dicts, sets, arrays, attributes of
objects (`__dict__` and slots), `functools.partial`, context variables and other functions, `MAX_DEPTH` levels deep.

Not followed: code and objects of the standard library, and of torch other than its modules; containers of more than
`MAX_ITEMS` items; attributes of classes and Python modules whose names are computed (`getattr(settings, name)`).
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import enum
import functools
import operator
import os
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
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
_MISSING = object()
_NUMBERS, _LOGS = frozenset((int, float, complex)), frozenset((list, dict, set, deque))
PLAIN_TYPES = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device)
)
_IMMUTABLE = (tuple, frozenset, MethodType, functools.partial, property, staticmethod, classmethod)
_MODULE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CALLED = ("forward", "__call__")  # without being named
HOLDERS = (SimpleNamespace, argparse.Namespace, type(os.environ))  # objects of the standard library to look into
_TORCH = torch.__path__[0]
_NUMPY = os.path.join(os.path.dirname(_TORCH), "numpy", "")
_STDLIB = sysconfig.get_path("stdlib")
_LIBRARIES = (_TORCH, _NUMPY, __file__.removesuffix("utils/python_state.py"), "<frozen ")
_OF_TORCH = tuple(f"{_TORCH}/{name}" for name in ("nn/modules/", "nn/functional", "nn/__init__", "backends/"))
_FOLLOWED = (*_OF_TORCH, os.__file__, "<frozen os>")  # of libraries

Place = tuple[Mapping[str, Any], str]  # a dict and a key in it
Parts = Callable[[Any], tuple[Any, ...]]


@dataclass(slots=True)
class PythonState:
    """Values that functions depend on as they were when this was made; `holds` compares them with what they are now.

    `PythonState(values=(function,))` is what a function depends on: all that its code names, and the code of the
    functions that it may call. If `facts` of two functions are equal, the functions do the same.
    """

    values: Collection[Any] = ()
    places: Collection[Place] = ()
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
        kinds = {id(value): type(value) for value in self._walk.held if isinstance(value, torch.Tensor)}
        return frozenset(_kind_of_fact(kinds.get(fact, fact) if type(fact) is int else fact) for fact in self.facts)

    def _new_walk(self) -> _Walk:
        names = self.names.union(*(names_in(code) for code, _ in self.ran or ()))
        while (walk := _Walk(self, names)).names != names:
            names = walk.names
        return walk


@dataclass(slots=True)
class _Read:
    """A value by its key in a dict or its name in an object."""

    read: Callable[[Any, str], Any]  # operator.getitem or getattr
    owner: Any
    name: str
    value: Any

    def now(self) -> Any:
        return self.read(self.owner, self.name)

    def text(self, owner: str) -> str:
        return f"{owner}.{self.name}" if self.read is getattr else f"{owner}[{self.name!r}]"


class _Walk:
    """All values that are reached from the roots of a state, breadth first.

    A step compares flat lists: the identity of the value under each key, and of the parts of each container. `facts`
    describe the same so that containers and functions with equal parts have equal facts.
    """

    def __init__(self, state: PythonState, names: frozenset[str]):
        self._state, self.names, self.facts = state, names, list[Any]()
        self._codes = None if state.ran is None else {code for code, _ in state.ran}
        self._reads = list[_Read]()
        self._check: FunctionType | None = None
        self._sized, self._lengths = list[Any](), list[int]()
        self._containers = list[tuple[Callable[[Any, Any], bool], Any, Any]]()
        self._seen, self._added, self.held = dict[int, int](), set[tuple[int, str]](), list[Any]()
        self._stores = dict[int, Mapping[str, Any]]()
        self._named = set[tuple[int, CodeType]]()
        self._todo = deque[tuple[Any, int]]()
        for store, key in state.places:
            self._add_items(store, (key,), 0)
        for code, values in state.ran or ():
            self._add_globals(code, values)
        self._todo.extend((value, 0) for value in state.values)
        while self._todo:
            self._visit(*self._todo.popleft())

    def is_same(self) -> bool:
        """Returns whether all objects are the same. Asked in every step, of some hundred objects."""
        try:
            self._check = self._check or self._compiled_check()
            return self._check() and all(same(source, before) for same, source, before in self._containers)
        except (KeyError, AttributeError, ValueError):
            return False

    def _compiled_check(self) -> FunctionType:
        """Returns a function that compares all values by identity: three times as fast as a loop."""
        owners: dict[int, Any] = {id(owner): owner for owner in (*(read.owner for read in self._reads), *self._sized)}
        numbers = {key: number for number, key in enumerate(owners)}
        reads = (f"{read.text(f'o{numbers[id(read.owner)]}')} is v{i}" for i, read in enumerate(self._reads))
        sizes = (f"len(o{numbers[id(one)]}) == {size}" for one, size in zip(self._sized, self._lengths, strict=True))
        parameters = [*(f"o{i}" for i in range(len(owners))), *(f"v{i}" for i in range(len(self._reads)))]
        source = f"lambda {', '.join(parameters)}: {' and '.join((*reads, *sizes)) or 'True'}"
        check: FunctionType = eval(source, {"len": len})
        check.__defaults__ = (*owners.values(), *(read.value for read in self._reads))
        return check

    def is_other(self) -> bool:
        """Returns whether a value differs for certain. From now on equal numbers and texts are those compared."""
        for read in self._reads:
            try:
                now = read.now()
            except (KeyError, AttributeError, ValueError):
                return True
            if now is read.value or isinstance(now, CodeType):
                continue
            is_plain = type(now) in PLAIN_TYPES
            if type(now) is not type(read.value) or not (is_plain or _parts_of(now) or _is_array(now)):
                return True
            if is_plain and _plain_fact(now) != _plain_fact(read.value):
                return True
            if is_plain:
                read.value = now
        if self._check is not None:
            owners = (self._check.__defaults__ or ())[: -len(self._reads) or None]
            self._check.__defaults__ = (*owners, *(read.value for read in self._reads))
        return False

    # -- the walk ----------------------------------------------------------------------------------------------------

    def _add_read(self, read: Any, owner: Any, name: str, value: Any, depth: int) -> None:
        self._reads.append(_Read(read, owner, name, value))
        self.facts.append(name)
        self._todo.append((value, depth))

    def _add_length(self, container: Sized) -> None:
        self._sized.append(container)
        self._lengths.append(len(container))

    def _add_items(self, store: Mapping[str, Any], names: Iterable[str], depth: int) -> None:
        for name in names:
            if (id(store), name) not in self._added and name in store:
                self._added.add((id(store), name))
                self._add_read(operator.getitem, store, name, store[name], depth)

    def _add_globals(self, code: CodeType, values: dict[str, Any]) -> None:
        if self._codes is None:
            self.names |= names_in(code)
        self._add_items(values, named_globals(code), 0)
        for holder in (*map(values.get, named_globals(code)), *map(sys.modules.get, names_in(code))):
            self._add_named(holder, code)

    def _add_named(self, holder: Any, code: CodeType) -> None:
        """Adds the attributes of a class, a Python module or a function that code names."""
        if isinstance(holder, FunctionType):
            self._add_items(vars(holder), sorted(names_in(code) & vars(holder).keys()), 0)
        if not isinstance(holder, (type, ModuleType)) or (id(holder), code) in self._named:
            return
        self._named.add((id(holder), code))
        for one in holder.__mro__ if isinstance(holder, type) else (holder,):
            if is_followed_class(one) if isinstance(one, type) else is_followed_module(one):
                store = self._members(one)
                names = sorted(names_in(code) & store.keys())
                self._add_items(store, names, 0)
                for name in names:
                    self._add_named(store[name], code)

    def _members(self, owner: Any) -> Mapping[str, Any]:
        """Returns the dict of a class or a module, for each the same object."""
        return self._stores.setdefault(id(owner), vars(owner))

    def _visit(self, value: Any, depth: int) -> None:
        if type(value) in PLAIN_TYPES or isinstance(value, CodeType):
            self.facts.append(_plain_fact(value))
            return
        if id(value) in self._seen:
            self.facts.append(self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self.held.append(value)
        if self._state.skips_logs and _is_log(value):
            self.facts.append(True)
            self._containers.append((lambda value, _: _is_log(value), value, None))
            return
        if _is_array(value):
            self.facts.append(key := _array_key(value))
            self._containers.append((lambda array, key: bool(_array_key(array) == key), value, key))
            return
        parts = _parts_of(value) if depth < MAX_DEPTH else None
        if isinstance(value, FunctionType) and self._follows(value):
            self._add_function(value, depth)
        elif parts is None:
            self.facts.append(id(value))
        else:
            items = parts(value)
            self.facts.append((type(value), len(items)))
            if not items and isinstance(value, Sized):
                self._add_length(value)
            elif not isinstance(value, _IMMUTABLE):
                same, before = _comparison(value, parts)
                self._containers.append((same, value, before))
            items = tuple(sorted(items, key=repr)) if isinstance(value, (set, frozenset)) else items
            self._todo.extend((item, depth + 1) for item in items)
        if depth < MAX_DEPTH:
            self._add_attributes(value, depth)

    def _follows(self, function: FunctionType) -> bool:
        code = original_code(function.__code__)
        return is_followed_file(code.co_filename) if self._codes is None else code in self._codes

    def _add_function(self, function: FunctionType, depth: int) -> None:
        """Adds the parts of a function, at its own depth: functions may call each other however deep."""
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                self._add_read(getattr, function, name, value, depth)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                self._add_read(getattr, cell, "cell_contents", cell.cell_contents, depth)
        self._add_globals(original_code(function.__code__), function.__globals__)

    def _add_attributes(self, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, type):
            if any(value is one for one in self._state.values):
                self._add_class(value, depth)
        elif isinstance(value, nn.Module):
            if self._codes is None:  # else all reads of modules are known
                children = own_children(value)
                followed = self.names.union(_CALLED, children if isinstance(value, _MODULE_CONTAINERS) else ())
                for store in (*tensor_stores(value), children):
                    self._add_items(store, sorted(followed & store.keys()), depth)
                self._add_class(kind, depth)
        elif isinstance(value, HOLDERS) or is_followed_class(kind):
            attributes = getattr(value, "__dict__", {})
            names = self.names if self._codes is None else self._state.reads_of(value)
            self._add_length(attributes)
            read = [*attributes] if names is None else sorted(attributes.keys() & names)
            self._add_items(attributes, read, depth + 1)
            for name in slots_of_class(kind):
                if (names is None or name in names) and hasattr(value, name):
                    self._add_read(getattr, value, name, getattr(value, name), depth + 1)
            self._add_class(kind, depth)

    def _add_class(self, kind: type, depth: int) -> None:
        """Adds what objects of a class have of it: methods that ran, and what is named and is not a method."""
        if (id(kind), "") in self._added:
            return
        self._added.add((id(kind), ""))
        stores = [self._members(cls) for cls in kind.__mro__ if is_followed_class(cls)]
        members = [(name, _function_in(member)) for store in stores for name, member in store.items()]
        names = {name for name, function in members if function is None and name in self.names}
        if self._codes is None:
            names |= {name for name, function in members if function is not None and name in self.names.union(_CALLED)}
        else:
            names |= {name for name, function in members if function is not None and self._follows(function)}
        for store in stores:
            self._add_length(store)
            self._add_items(store, sorted(store.keys() & names), depth)


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


def parts_of_function(function: Any) -> tuple[Any, ...]:
    """Returns the parts of a function, its code, defaults and closure say; another object alone."""
    if isinstance(function, FunctionType):
        values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return (function.__code__, *values, *map(_cell_contents, function.__closure__ or ()))
    parts = _parts_of(function)
    return (function,) if parts is None else parts(function)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _parts_of(value: Any) -> Parts | None:
    """Returns the function that lists the parts of a value like this one; None if it has no parts."""
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return parts if not hasattr(value, "__len__") or len(value) <= MAX_ITEMS else None
    return None


_PARTS: dict[Any, Parts] = {
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


def _comparison(value: Any, parts: Parts) -> tuple[Callable[[Any, Any], bool], Any]:
    """Returns a function that compares a container with what it holds now, and that."""
    if isinstance(value, dict):
        return _same_dict, ([*value], [*value.values()])
    if isinstance(value, set):
        return operator.eq, set(value)

    def same(value: Any, before: tuple[Any, ...]) -> bool:
        return len(now := parts(value)) == len(before) and all(map(operator.is_, now, before))

    return same, parts(value)


def _same_dict(items: dict[Any, Any], before: tuple[list[Any], list[Any]]) -> bool:
    return [*items] == before[0] and all(map(operator.is_, items.values(), before[1]))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= MAX_ITEMS


def _array_key(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


# -- What code names, and which is followed --------------------------------------------------------------------------


@functools.cache
def is_followed_file(file: str) -> bool:
    """Returns whether code of a file is followed: the user's code, libraries, and the modules of torch."""
    is_library = file.startswith(_LIBRARIES) or (file.startswith(_STDLIB) and "site-packages" not in file)
    return not is_library or (file.startswith(_FOLLOWED) and not file.endswith("/modules/module.py"))


def is_followed_module(module: ModuleType) -> bool:
    """Returns whether attributes of a Python module are followed."""
    return module is torch or is_followed_file(getattr(module, "__file__", None) or "<frozen ")


def is_followed_class(kind: type) -> bool:
    """Returns whether attributes of a class and of its objects are followed."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""  # none: a session's
    is_library = kind.__module__ in sys.stdlib_module_names or not is_followed_file(file)
    return is_python_class(kind) and not is_library and not issubclass(kind, (torch.Tensor, enum.Enum))


@functools.lru_cache(maxsize=4096)
def named_globals(code: CodeType) -> tuple[str, ...]:
    """Returns the names of globals that code reads, also in functions and comprehensions inside it."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (named_globals(const) for const in code.co_consts if isinstance(const, CodeType))
    return tuple(sorted(own.union(*inner)))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Returns all names in code, and its texts that may be names (`getattr(x, "scale")`)."""
    texts = (const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
    inner = (names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset((*code.co_names, *texts)).union(*inner)
