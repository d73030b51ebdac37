"""The Python values that functions depend on, and detection of their changes.

A function depends on its code, defaults and closure, on the object that it is bound to, and on the globals, classes and
modules that its code names. Values are followed into lists, tuples, dicts, sets, arrays, attributes of objects
(`__dict__` and slots), `functools.partial`, context variables and other functions, `MAX_DEPTH` levels deep.

Not followed: code and objects of the standard library, and of torch except its modules; containers with more than
`MAX_ITEMS` items; attributes of classes and Python modules with computed names (`getattr(settings, name)`); values
beyond the `MAX_VALUES` nearest values.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import own_children, tensor_stores
from fxpipe.utils.python_objects import is_python_class, slots_of_class

MAX_DEPTH = 6
MAX_ITEMS = 10_000  # items of a container whose items are followed
MAX_VALUES = 2_000  # values of one state: a function that calls a library may reach the full library
_MISSING = object()
_NUMBERS, _LOGS = frozenset((int, float, complex)), frozenset((list, dict, set, deque))
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device))
_IMMUTABLE = (tuple, frozenset, MethodType, functools.partial, property, staticmethod, classmethod)
_MODULE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CALLED = ("forward", "__call__")  # called although code does not name them
_HOLDERS = (SimpleNamespace, argparse.Namespace, type(os.environ))  # followed objects of the standard library
_TORCH = torch.__path__[0]
_NUMPY = os.path.join(os.path.dirname(_TORCH), "numpy", "")
_STDLIB = sysconfig.get_path("stdlib")
_LIBRARIES = (_TORCH, _NUMPY, __file__.removesuffix("utils/python_state.py"), "<frozen ")
_OF_TORCH = tuple(f"{_TORCH}/{name}" for name in ("nn/modules/", "nn/functional", "nn/__init__", "backends/"))
_FOLLOWED = (*_OF_TORCH, os.__file__, "<frozen os>")  # followed files of libraries

Place = tuple[Mapping[str, Any], str]  # a dict and a key in it
Parts = Callable[[Any], tuple[Any, ...]]


@dataclass(slots=True)
class PythonState:
    """A snapshot of the values that functions depend on; `holds` compares it with the current values.

    `PythonState(values=(function,))` covers all that the code of a function names, and the code of functions that it
    may call. If `facts` of two functions are equal, the functions are equivalent.
    """

    values: Collection[Any] = ()
    places: Collection[Place] = ()
    ran: Collection[tuple[CodeType, dict[str, Any]]] | None = None  # code that ran, with its globals; None: any may run
    reads_of: Callable[[Any], Collection[str] | None] = lambda value: None  # attributes read of an object; None: any
    skips_logs: bool = False  # ignore lists of numbers and tensors, which functions may write to
    names: frozenset[str] = frozenset()  # attributes that were read, in addition to names in code
    facts: list[Any] = field(init=False)
    _walk: _Walk = field(init=False)

    def __post_init__(self) -> None:
        self.take()

    def take(self) -> None:
        """Replaces the snapshot by the current values."""
        self._walk = self._new_walk()
        self.facts = self._walk.facts

    def is_same(self) -> bool:
        """Returns True if all objects are identical."""
        return self._walk.is_same()

    def holds(self) -> bool:
        """Returns True if all values are identical or equivalent."""
        return self._walk.is_same() or self.changed() is None

    def changed(self) -> str | None:
        """Returns the name of the first changed value. If all are equivalent, updates the snapshot and returns None."""
        walk = self._new_walk()
        if walk.facts == self.facts:
            self._walk = walk  # compare with these objects from now on
            return None
        longer = max(self._walk, walk, key=lambda one: len(one.facts))
        pairs = zip(longer.names_of_facts, self.facts, walk.facts, strict=False)
        return next((name for name, before, now in pairs if before != now), longer.names_of_facts[-1])

    @property
    def names_read(self) -> frozenset[str]:
        """The names of attributes in the code that is covered."""
        return self._walk.names

    def facts_of(self, name: str) -> tuple[Any, ...]:
        pairs = zip(self._walk.names_of_facts, self.facts, strict=True)
        return tuple(fact for one, fact in pairs if one == name)

    def line_of(self, name: str) -> str:
        """Returns " at " and the first line with this name in code that ran; empty if not found."""
        last = name.rpartition(".")[2]
        for code in (code for code, _ in self.ran or () if last in (*code.co_names, *code.co_freevars)):
            line = code.co_firstlineno
            for one in dis.get_instructions(code):
                line = one.starts_line or line
                if one.argval == last:
                    return f" at {code.co_filename}:{line}"
        return ""

    def structure(self) -> frozenset[Any]:
        """Returns the facts reduced to types: whether a number is zero, the class of a list, dict, set or tensor."""
        kinds = {id(value): type(value) for value in self._walk.held if isinstance(value, torch.Tensor)}
        return frozenset(_kind_of_fact(kinds.get(fact, fact) if type(fact) is int else fact) for fact in self.facts)

    def _new_walk(self) -> _Walk:
        names = self.names.union(*(names_in(code) for code, _ in self.ran or ()))
        while (walk := _Walk(self, names)).names != names:
            names = walk.names
        return walk


class _Walk:
    """All values that are reachable from the roots of a state, breadth first.

    A step compares identities: of the value under each key, and of the parts of each container. `facts` describe the
    values such that containers and functions with equal parts have equal facts.
    """

    def __init__(self, state: PythonState, names: frozenset[str]):
        self._state, self.names = state, names
        self._codes = None if state.ran is None else {code for code, _ in state.ran}
        self.facts, self.names_of_facts = list[Any](), list[str]()
        self._checks = list[tuple[Any, str, Any]]()  # (owner, comparison, value)
        self._is_same: Callable[[], bool] | None = None
        self._seen, self._added, self.held = dict[int, int](), set[tuple[int, Any]](), list[Any]()
        self._members = dict[int, Mapping[str, Any]]()  # by id of a class or module: keeps one mapping object
        self._todo = deque[tuple[Any, str, int]]()
        for store, key in state.places:
            self._add_items(store, (key,), "", 0)
        for code, values in state.ran or ():
            self._add_globals(code, values)
        self._todo.extend((value, getattr(value, "__name__", type(value).__name__), 0) for value in state.values)
        while self._todo and (self._codes is not None or len(self.facts) < MAX_VALUES):
            self._visit(*self._todo.popleft())

    def is_same(self) -> bool:
        """Returns True if all objects are identical. Runs in every step, for some hundred objects."""
        if self._is_same is None:  # all checks as one expression, in half the time of a loop
            objects = {id(one): one for owner, _, value in self._checks for one in (owner, value)}
            names = {key: f"x{i}" for i, key in enumerate(objects)}
            pairs = ((names[id(owner)], how, names[id(value)]) for owner, how, value in self._checks)
            terms = (f"len({x}) == {y}" if how == "len" else f"{x}{how} {y}" for x, how, y in pairs)
            function: Any = eval(f"lambda {', '.join(names.values())}: {' and '.join(terms) or True}")
            function.__defaults__ = tuple(objects.values())
            self._is_same = function
        try:
            return self._is_same()
        except (KeyError, AttributeError, ValueError):
            return False

    def _note(self, fact: Any, name: str) -> None:
        self.facts.append(fact)
        self.names_of_facts.append(name)

    def _add_read(self, owner: Any, how: str, value: Any, name: str, depth: int) -> None:
        self._checks.append((owner, f"{how} is", value))
        self._note(name, name)
        self._todo.append((value, name, depth))

    def _add_items(self, store: Mapping[str, Any], keys: Iterable[str], prefix: str, depth: int) -> None:
        for key in keys:
            if (id(store), key) not in self._added and key in store:
                self._added.add((id(store), key))
                self._add_read(store, f"[{key!r}]", store[key], prefix + key, depth)

    def _add_globals(self, code: CodeType, values: dict[str, Any]) -> None:
        if self._codes is None:
            self.names |= names_in(code)
        self._add_items(values, named_globals(code), "", 0)
        for name in named_globals(code):
            self._add_named(values.get(name), name, code)
        for name in names_in(code) & sys.modules.keys():
            self._add_named(sys.modules[name], name, code)

    def _add_named(self, holder: Any, name: str, code: CodeType) -> None:
        """Adds the attributes of a class, a Python module or a function that code names."""
        if isinstance(holder, FunctionType):
            self._add_items(vars(holder), sorted(names_in(code) & vars(holder).keys()), f"{name}.", 0)
        if not isinstance(holder, (type, ModuleType)) or (id(holder), code) in self._added:
            return
        self._added.add((id(holder), code))
        for one in holder.__mro__ if isinstance(holder, type) else (holder,):
            if is_followed_class(one) if isinstance(one, type) else is_followed_module(one):
                store = self._members.setdefault(id(one), vars(one))
                keys = sorted(names_in(code) & store.keys())
                self._add_items(store, keys, f"{name}.", 0)
                for key in keys:
                    self._add_named(store[key], key, code)

    def _visit(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, CodeType):
            self._note(value, name)
            return
        if type(value) in _PLAIN:
            self._note((type(value), repr(value) if isinstance(value, (float, complex)) else value), name)  # NaN, -0.0
            return
        if id(value) in self._seen:
            self._note(self._seen[id(value)], name)
            return
        self._seen[id(value)] = len(self._seen)
        self.held.append(value)
        if self._state.skips_logs and _is_log(value):
            self._note(True, name)
            self._checks.append((functools.partial(_is_log, value), "() is", True))
            return
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= MAX_ITEMS:
            self._note(key := _array_key(value), name)
            self._checks.append((functools.partial(_array_key, value), "() ==", key))
            return
        parts = parts_of(value) if depth < MAX_DEPTH else None
        if isinstance(value, FunctionType) and self._follows(value):
            self._add_function(value, name, depth)
        elif parts is None:
            self._note(id(value), name)
        else:
            items = parts(value)
            self._note((type(value), len(items)), name)
            if not isinstance(value, _IMMUTABLE):
                self._checks.extend(_checks_of_parts(value, parts))
            items = tuple(sorted(items, key=repr)) if isinstance(value, (set, frozenset)) else items
            self._todo.extend((item, name, depth + 1) for item in items)
        if depth < MAX_DEPTH:
            self._add_attributes(value, name, depth)

    def _follows(self, function: FunctionType) -> bool:
        code = function.__code__
        return is_followed_file(code.co_filename) if self._codes is None else code in self._codes

    def _add_function(self, function: FunctionType, name: str, depth: int) -> None:
        """Adds the parts of a function at the same depth, since calls may be nested deeply."""
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            if (value := getattr(function, part)) is not None:
                self._add_read(function, f".{part}", value, name, depth)
        for cell, variable in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            with contextlib.suppress(ValueError):  # empty
                self._add_read(cell, ".cell_contents", cell.cell_contents, variable, depth)
        self._add_globals(function.__code__, function.__globals__)

    def _add_attributes(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        if isinstance(value, type):
            if any(value is one for one in self._state.values):
                self._add_class(value, name, depth)
        elif isinstance(value, nn.Module):
            if self._codes is None:  # otherwise the recording knows all reads of modules
                children = own_children(value)
                followed = self.names.union(_CALLED, children if isinstance(value, _MODULE_CONTAINERS) else ())
                for store in (*tensor_stores(value), children):
                    self._add_items(store, sorted(followed & store.keys()), f"{name}.", depth)
                self._add_class(kind, name, depth)
        elif is_followed_object(value):
            attributes = getattr(value, "__dict__", {})
            names = self.names if self._codes is None else self._state.reads_of(value)
            self._checks.append((attributes, "len", len(attributes)))
            read = [*attributes] if names is None else sorted(attributes.keys() & names)
            self._add_items(attributes, read, f"{name}.", depth + 1)
            for slot in slots_of_class(kind):
                if (names is None or slot in names) and hasattr(value, slot):
                    self._add_read(value, f".{slot}", getattr(value, slot), f"{name}.{slot}", depth + 1)
            self._add_class(kind, name, depth)

    def _add_class(self, kind: type, name: str, depth: int) -> None:
        """Adds the members of a class that its objects read: methods that ran, and other members that code names."""
        if (id(kind), "") in self._added:
            return
        self._added.add((id(kind), ""))
        stores = [self._members.setdefault(id(cls), vars(cls)) for cls in kind.__mro__ if is_followed_class(cls)]
        members = {key for store in stores for key, member in store.items() if self._is_read(key, member)}
        for store in stores:
            self._checks.append((store, "len", len(store)))
            self._add_items(store, sorted(store.keys() & members), f"{name}.", depth)

    def _is_read(self, name: str, member: Any) -> bool:
        """Returns True if code reads, or may read, a member of a class from its objects."""
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if not isinstance(function, FunctionType):
            return name in self.names and not name.startswith("__")
        return name in self.names.union(_CALLED) if self._codes is None else self._follows(function)


def _kind_of_fact(fact: Any) -> Any:
    if type(fact) is int:
        return None if fact < 1 << 20 else fact  # an index among the values, or an id
    if type(fact) is not tuple or not isinstance(fact[0], type):
        return fact
    return (fact[0], fact[1] in (0, "0.0", "-0.0")) if fact[0] in _NUMBERS else fact[0] if fact[0] in _LOGS else fact


def _is_log(value: Any) -> bool:
    ends = (value[0], value[-1]) if type(value) in (list, deque) and value else ()
    return bool(ends) and all(type(end) in _NUMBERS or isinstance(end, torch.Tensor) for end in ends)


def parts_of_function(function: Any) -> tuple[Any, ...]:
    """Returns the parts of a function (code, defaults, closure) or a container; another object as a 1-tuple."""
    if isinstance(function, FunctionType):
        values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return (function.__code__, *values, *map(_cell_contents, function.__closure__ or ()))
    parts = parts_of(function)
    return (function,) if parts is None else parts(function)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def parts_of(value: Any) -> Parts | None:
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


def _checks_of_parts(value: Any, parts: Parts) -> Iterator[tuple[Any, str, Any]]:
    """Yields identity checks of a container's parts; by `==`, which is faster, for strings and identity equality."""
    if hasattr(value, "__len__") and not len(value):
        yield value, "len", 0
        return
    views: Any = (dict.keys(value), dict.values(value)) if isinstance(value, dict) else (value,)
    for view in views:
        now = functools.partial(tuple if hasattr(view, "__len__") else parts, view)
        before = now()
        if all(type(item) is str or getattr(type(item), "__eq__", None) is object.__eq__ for item in before):
            yield now, "() ==", before
        else:
            yield functools.partial(_are_same, now, before), "() is", True


def _are_same(parts: Callable[[], tuple[Any, ...]], before: tuple[Any, ...]) -> bool:
    return len(now := parts()) == len(before) and all(map(operator.is_, now, before))


def _array_key(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


@functools.cache
def is_followed_file(file: str) -> bool:
    """Returns True if code of a file is followed: the user's, third-party packages, and modules of torch."""
    is_library = file.startswith(_LIBRARIES) or (file.startswith(_STDLIB) and "site-packages" not in file)
    return not is_library or (file.startswith(_FOLLOWED) and not file.endswith("/modules/module.py"))


def is_followed_module(module: ModuleType) -> bool:
    return module is torch or is_followed_file(getattr(module, "__file__", None) or "<frozen ")


def is_followed_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""  # empty in an interactive session
    is_library = kind.__module__ in sys.stdlib_module_names or not is_followed_file(file)
    return is_python_class(kind) and not is_library and not issubclass(kind, (torch.Tensor, enum.Enum))


def is_followed_object(value: Any) -> bool:
    return isinstance(value, _HOLDERS) or is_followed_class(type(value))


@functools.lru_cache(maxsize=4096)
def named_globals(code: CodeType) -> tuple[str, ...]:
    """Returns the names of globals that code reads or sets, also in nested functions and comprehensions."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS}
    inner = (named_globals(const) for const in code.co_consts if isinstance(const, CodeType))
    return tuple(sorted(own.union(*inner)))


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Returns all names in code, and strings that may be names (`getattr(x, "scale")`)."""
    texts = (const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
    inner = (names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset((*code.co_names, *texts)).union(*inner)
