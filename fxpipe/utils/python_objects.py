"""Objects of Python classes: taking them apart, putting them together, walking their contents, and equality.

The parts of an object are its items, if its class is a container, and its attributes. It is put together without
`__init__` and `__post_init__`. Objects of classes made in C, other than the containers of Python, cannot be taken
apart, nor can modules, tensors, classes and plain values.
"""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe.errors import StateError

_BASES = (object, SimpleNamespace, dict, OrderedDict, defaultdict, list, tuple)  # with which `put_together` works
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_ATOMIC = (nn.Module, torch.Tensor, type, ModuleType, enum.Enum, str, bytes, int, float, complex, type(None))


@dataclass(frozen=True, slots=True)
class ObjectParts:
    """The structure of an object, without its children (items, then attributes)."""

    kind: type[Any]
    base: type[Any]  # the built-in base class: object or a container
    keys: tuple[Any, ...]
    names: tuple[str, ...]


def builtin_base_of(kind: type[Any]) -> type[Any] | None:
    """Returns the built-in base of a Python class; None if its objects cannot be taken apart."""
    if issubclass(kind, _ATOMIC):
        return None
    base: type[Any] = next(cls for cls in kind.__mro__ if not is_python_class(cls))
    if base not in _BASES or (base is kind and base is not SimpleNamespace):
        return None
    make: Any = base.__new__
    try:
        make(kind)
    except TypeError:  # made in C
        return None
    return base


def is_empty_object(value: Any) -> bool:
    return not _attributes(value) and not (isinstance(value, (dict, list, tuple)) and value)


def take_apart(value: Any, base: type[Any]) -> tuple[list[pytree.KeyEntry], list[Any], ObjectParts]:
    """Returns the keys of the children, the children, and the structure of an object with this `builtin_base_of`."""
    attributes = _attributes(value)
    names: list[pytree.KeyEntry] = []
    items: dict[Any, Any] = {}
    if issubclass(base, dict):
        items = dict(base.items(value))
        names += map(pytree.MappingKey, items)
    elif issubclass(base, (list, tuple)):
        items = dict(enumerate(base.__iter__(value)))
        names += map(pytree.SequenceKey, items)
    names += map(pytree.GetAttrKey, attributes)
    parts = ObjectParts(type(value), base, tuple(items), tuple(attributes))
    return names, [*items.values(), *attributes.values()], parts


def put_together(children: Any, parts: ObjectParts) -> Any:
    """Creates an object of this structure with these children."""
    children = list(children)
    items, values = children[: len(parts.keys)], children[len(parts.keys) :]
    make: Any = parts.base.__new__
    new = make(parts.kind, items) if parts.base is tuple else make(parts.kind)
    if parts.base is list:
        list.extend(new, items)
    elif issubclass(parts.base, dict):
        for key, item in zip(parts.keys, items, strict=True):
            parts.base.__setitem__(new, key, item)
    slots = slots_of_class(parts.kind)
    for name, value in zip(parts.names, values, strict=True):
        if name in slots:
            slots[name].__set__(new, value)  # works for frozen classes
        else:
            new.__dict__[name] = value
    return new


def is_python_class(kind: type[Any]) -> bool:
    """Returns True for a class made by a `class` statement, and for a few classes made in C."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def slots_of_class(kind: type[Any]) -> dict[str, MemberDescriptorType]:
    return {
        name: member
        for cls in reversed(kind.__mro__)
        if is_python_class(cls) or cls is defaultdict
        for name, member in vars(cls).items()
        if isinstance(member, MemberDescriptorType)
    }


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    for name, slot in slots_of_class(type(value)).items():
        try:
            attributes[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return attributes


def contains_any(value: Any, wanted: Callable[[Any], bool], in_functions: bool = True) -> bool:
    """Returns True if anything in a value, but not in modules, is `wanted`. `in_functions`: also look into closures."""
    return any(map(wanted, _walk(value, _contents if in_functions else _data_contents)))


def containers_in(value: Any) -> Iterator[Any]:
    """Yields the dicts, lists and sets in a value, including each `__dict__` of objects."""
    for item in _walk(value, _contents):
        if isinstance(item, _ATOMIC):
            continue
        if isinstance(item, (dict, list, set, deque)):
            yield item
        if type(attributes := getattr(item, "__dict__", None)) is dict:
            yield attributes


def held_objects(value: Any) -> Iterator[Any]:
    """Yields a value and all nested contents held as data, also of modules; each once."""
    return _walk(value, lambda item: iter(vars(item).values()) if isinstance(item, nn.Module) else _data_contents(item))


def captured_values(function: Any) -> Iterator[Any]:
    """Yields what the closure of a function holds, and closures and containers in it; no attributes of objects."""
    return _walk(function, _captured)


def _walk(value: Any, inside: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yields a value and its nested contents, each once."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            todo.extend(inside(item))


def _contents(value: Any) -> Iterator[Any]:
    """Yields the contents of a value, including closures of functions and bound objects."""
    if isinstance(value, (MethodType, BuiltinMethodType)):
        yield value.__self__
    yield from _captured(value)
    yield from _data_contents(value)


def _captured(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield value.__func__
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty
                continue


def _data_contents(value: Any) -> Iterator[Any]:
    if isinstance(value, _ATOMIC):
        return
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        yield from value
    yield from _attributes(value).values()


def equal_values(left: Any, right: Any) -> bool:
    """Returns True if two values have the same type and are equal, lists and tuples item by item; NaN equals NaN.

    >>> equal_values([1.0, float("nan")], [1.0, float("nan")]), equal_values(1, True), equal_values([1], [1.0])
    (True, False, False)
    """
    if left is right or ((left != left) is True and (right != right) is True):  # NaN
        return True
    if type(left) is not type(right) or getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    if isinstance(left, (float, complex)):
        return left == right and repr(left) == repr(right)  # 0.0 is not -0.0
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal_values, left, right))
    same: Any = left == right
    return bool(same.all() if hasattr(same, "all") else same)  # an array of numpy compares its items


class NotKept:
    """Takes the place of an attribute whose value does not belong to the call. Any use is an error, except to count on.

    Args:
        name: of the attribute.
        why: why it cannot be used.
        value: for the runtime, as `__wrapped__`.
        error: makes the error of a use, which the code that uses it may catch.
    """

    __slots__ = ("__wrapped__", "_error", "_name", "_why")

    def __init__(
        self,
        name: str,
        why: str = "a pipe does not keep it",
        value: Any = None,
        error: Callable[[str], Exception] = StateError,
    ) -> None:
        self._name, self._why, self.__wrapped__, self._error = name, why, value, error

    def __repr__(self) -> str:
        return f"<{self._name}: {self._why}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return NotKept, (self._name, self._why)

    def _refuse(self, *_: Any) -> Any:
        raise self._error(
            f"forward sets {self._name!r} in each call, and {self._why}: let forward return it, or call the plain model"
        )

    def _count(self, number: Any) -> NotKept:
        return self if isinstance(number, (int, float)) else self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol of Python
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, NotKept):
                value._refuse()

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __call__ = __eq__ = _refuse
    __int__ = __float__ = __index__ = __radd__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __divmod__ = __pow__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __round__ = __str__ = __format__ = _refuse
    __add__ = __sub__ = _count
    __hash__ = _refuse


def class_of_model(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the class of models of a class of pipes; None for `Pipeline`."""
    return getattr(kind, "_fxpipe_class_of_model", None)
