"""Pytrees of the user: flattening and unflattening of inputs, outputs and targets.

Nodes are torch's pytree nodes (tuples, lists, dicts, named tuples, registered classes), and

- dataclasses,
- in inputs, mappings that are not dicts (`UserDict`, such as batches of tokenizers; `MappingProxyType`),
- in outputs, objects of Python classes that hold tensors of the recording: a cache, a distribution,
- in inputs, objects of Python classes without tensors, such as a configuration: their parts are leaves, so that changes
  are noticed, and forward gets the object itself.

Specs have node types of fxpipe for these, with which torch's `tree_unflatten` restores the user's types. As with lists,
an object that occurs twice is restored as two objects.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fxpipe._torch import torch_pytree as pytree
from fxpipe.errors import ArgumentError
from fxpipe.utils import python_objects
from fxpipe.utils.python_objects import ObjectParts, contains_any
from fxpipe.utils.units import with_article

_DICTS = (dict, OrderedDict, defaultdict)
_LEAF = pytree.tree_structure(0)


class StructureError(ValueError):
    """A tree does not have the expected structure."""


class _Object:
    """The node type of an object that is not a pytree of torch."""


class _LookedAtObject:
    """The node type of an object that is only looked at."""


class _Mapping:
    """The node type of a mapping that is not a dict."""


class _Size(tuple[int, ...]):
    """The node type of a `torch.Size`, which torch would turn into a tuple."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LookedAtParts:
    """The context of an object that is only looked at."""

    parts: ObjectParts
    value: Any

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _LookedAtParts) and self.parts == other.parts
        return same and (self.value is other.value or (self.value == other.value) is True)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class _MappingParts:
    """The structure of a mapping. Only plain attributes: lists of texts belong to one batch."""

    kind: type[Any]
    keys: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...]


def _is_wrapped_mapping(value: Any) -> bool:
    return isinstance(value, (UserDict, MappingProxyType))


def _take_mapping_apart(value: Any) -> tuple[list[pytree.KeyEntry], list[Any], _MappingParts]:
    items = dict(value.data if isinstance(value, UserDict) else value)
    attributes = tuple(
        (name, x) for name, x in getattr(value, "__dict__", {}).items() if isinstance(x, (str, int, float, type(None)))
    )
    return [*map(pytree.MappingKey, items)], [*items.values()], _MappingParts(type(value), tuple(items), attributes)


def _put_mapping_together(values: Any, parts: _MappingParts) -> Any:
    items = dict(zip(parts.keys, values, strict=True))
    if parts.kind is MappingProxyType:
        return MappingProxyType(items)
    make: Any = parts.kind.__new__
    new = make(parts.kind)
    new.__dict__.update(parts.attributes, data=items)
    return new


def _refuse_flatten(value: Any) -> Any:
    raise AssertionError("nodes of this type stand in specs only")


pytree.register_pytree_node(_Object, _refuse_flatten, python_objects.put_together)
pytree.register_pytree_node(_Mapping, _refuse_flatten, _put_mapping_together)
pytree.register_pytree_node(_Size, lambda size: (list(size), None), lambda sizes, _: torch.Size(sizes))
pytree.register_pytree_node(_LookedAtObject, _refuse_flatten, lambda _, seen: seen.value)


LeafPaths = list[tuple[tuple[pytree.KeyEntry, ...], Any]]  # (path, leaf)
KindOf = Callable[[Any], type[Any] | None]  # the node type of an object that is not a pytree of torch


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _holds_tensors(value: Any) -> bool:
    """Returns True if a value holds tensors, except in functions, whose tensors the recorder observes."""
    return contains_any(value, lambda item: isinstance(item, torch.Tensor), in_functions=False)


CACHE_ADVICE = "leave it out, and forward makes one; model.generate(..., use_cache=False) goes without"


def is_plain_layout(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor that can be cut along a dimension: neither nested nor sparse."""
    return tensor.layout == torch.strided and not tensor.is_nested


def refuse_uncuttable(what: str, leaf: Any) -> None:
    """Raises ArgumentError if a leaf cannot be cut into micro-batches: it hides tensors, or has another layout."""
    if not isinstance(leaf, torch.Tensor):
        if _holds_tensors(leaf):
            raise ArgumentError(
                f"{what} is {with_article(leaf)} that holds tensors and is unknown to torch; pass tensors in tuples, "
                f"lists, dicts or dataclasses, or register it ({pytree.REGISTRATION})"
                + (f"; a cache: {CACHE_ADVICE}" if type(leaf).__name__.endswith("Cache") else "")
            )
    elif leaf.is_nested:
        raise ArgumentError(
            f"{what} is a nested tensor, which cannot be cut into micro-batches; pad it (to_padded_tensor), and give "
            "lengths or a mask"
        )
    elif leaf.layout != torch.strided:
        raise ArgumentError(f"{what} has the layout {leaf.layout}; only strided tensors can be cut: to_dense()")


def has_own_attributes(value: Any) -> bool:
    """Returns True for a plain tensor with attributes set by the user; torch's begin with an underscore."""
    attributes = value.__dict__.items() if type(value) is torch.Tensor else ()
    return any(not (name.startswith("_") or callable(own)) for name, own in attributes)


def refuse_own_attributes(what: str, leaf: Any) -> None:
    """Raises ArgumentError if attributes were set on a tensor, since its micro-batches do not have them."""
    if has_own_attributes(leaf):
        raise ArgumentError(
            f"{what} is a tensor with the attributes {sorted(leaf.__dict__)}, which its micro-batches would not have; "
            "pass them as arguments of their own (model(x, scale=3)), or delete them before the call"
        )


def _kind_of_input(value: Any) -> type[Any] | None:
    if _is_dataclass(value):
        return _Object
    if not _holds_tensors(value):
        return None if python_objects.is_empty_object(value) else _LookedAtObject
    if _is_wrapped_mapping(value):
        return _Mapping
    return _Object if isinstance(value, Mapping) else None


def flatten_with_paths(tree: Any, kind_of: KindOf = _kind_of_input) -> tuple[LeafPaths, pytree.TreeSpec]:
    """Returns the leaves of inputs or targets with their paths, and the structure.

    Raises `ArgumentError` if an object in the tree contains itself.
    """
    leaves: LeafPaths = []
    return leaves, _flatten(tree, kind_of, (), (), leaves)


def flatten(tree: Any, kind_of: KindOf = _kind_of_input) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the leaves of inputs or targets, and the structure; see `flatten_with_paths`."""
    leaves, spec = flatten_with_paths(tree, kind_of)
    return [leaf for _, leaf in leaves], spec


def flatten_output(tree: Any, is_recorded: Callable[[Any], bool]) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the leaves of an output and its structure. Objects that contain nothing `is_recorded` are leaves."""
    return flatten(tree, lambda value: _Object if contains_any(value, is_recorded) else None)


def flatten_dataclasses(tree: Any, is_recorded: Callable[[Any], bool]) -> tuple[list[Any], pytree.TreeSpec]:
    """As `flatten_output`, for the arguments and results of one node: takes apart dataclasses, but no other objects."""
    return flatten(tree, lambda value: _Object if _is_dataclass(value) and contains_any(value, is_recorded) else None)


def map_tensor_leaves(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Replaces each tensor in the tree by `function(tensor)`, called once for each tensor object."""
    leaves, spec = flatten(tree)
    results = {id(x): function(x) for x in leaves if isinstance(x, torch.Tensor)}
    return pytree.tree_unflatten([results.get(id(x), x) for x in leaves], spec)


def _flatten(
    value: Any, kind_of: KindOf, path: tuple[pytree.KeyEntry, ...], around: tuple[int, ...], leaves: LeafPaths
) -> pytree.TreeSpec:
    """Adds the leaves of `value` to `leaves`. `kind_of` returns node types of objects that are not torch's pytrees."""
    kind = pytree.node_type(value)
    if kind is torch.Size:
        kind = _Size
    known = pytree.SUPPORTED_NODES.get(kind)
    keys: Sequence[pytree.KeyEntry]
    context: Any
    if known is not None:
        flat, context = known.flatten_fn(value)
        children = list(flat)
        if known.flatten_with_keys_fn is not None:
            keys = [key for key, _ in known.flatten_with_keys_fn(value)[0]]
        elif isinstance(context, (list, tuple)) and len(context) == len(children):
            keys = [pytree.MappingKey(key) for key in context]
        else:
            keys = [pytree.SequenceKey(place) for place in range(len(children))]
    elif _is_wrapped_mapping(value) and kind_of(value) is _Mapping:
        kind, (keys, children, context) = _Mapping, _take_mapping_apart(value)
    elif (base := python_objects.builtin_base_of(type(value))) is not None and (kind := kind_of(value)) is not None:
        keys, children, context = python_objects.take_apart(value, base)
        if kind is _LookedAtObject:
            context = _LookedAtParts(context, value)
    else:
        leaves.append((path, value))
        return _LEAF
    if id(value) in around:
        if kind is _LookedAtObject:
            leaves.append((path, value))
            return _LEAF
        raise ArgumentError(
            f"{with_article(value)} holds itself (at {''.join(map(str, path))}), and cannot be taken apart; take "
            "the reference out"
        )
    around = (*around, id(value))
    specs = [_flatten(child, kind_of, (*path, key), around, leaves) for key, child in zip(keys, children, strict=True)]
    return pytree.TreeSpec(kind, context, specs)


def redefined_class(spec: pytree.TreeSpec, other: pytree.TreeSpec) -> str | None:
    """Returns the name of a class that was redefined between two otherwise equal trees."""
    kinds = [_class_of(spec), _class_of(other)]
    if kinds[0] is not kinds[1] and kinds[0].__qualname__ == kinds[1].__qualname__:
        return str(kinds[0].__name__)
    names = (redefined_class(a, b) for a, b in zip(spec.children(), other.children(), strict=False))
    return next((name for name in names if name is not None), None)


def _class_of(spec: pytree.TreeSpec) -> Any:
    """Returns the class of the root objects of this structure."""
    if spec.is_leaf():
        return torch.Tensor
    return spec.context.kind if spec.type in (_Object, _Mapping) else spec.context if _is_named(spec) else spec.type


def leaves_by_structure(tree: Any, spec: pytree.TreeSpec) -> list[Any]:
    """Returns the leaves of a tree of a known structure. Raises `StructureError` if it has another one."""
    if spec.is_leaf():
        return [tree]
    children = _children_like(tree, spec)
    return [
        leaf for child, part in zip(children, spec.children(), strict=True) for leaf in leaves_by_structure(child, part)
    ]


def _children_like(tree: Any, spec: pytree.TreeSpec) -> list[Any]:
    """Returns the children of a node with the root of `spec`."""
    wanted = _class_of(spec)
    # A recorded shape is a tuple of a separate class.
    is_plain_tuple = not _is_named(spec) and spec.type is not _Object and issubclass(spec.type, tuple)
    are_plain_tuples = isinstance(tree, tuple) and is_plain_tuple
    context: Any
    if spec.type in _DICTS and type(tree) in _DICTS:  # in any order, as in torch
        names = list(spec.context[1] if spec.type is defaultdict else spec.context)
        if set(tree) == set(names):
            return [tree[name] for name in names]
    elif type(tree) is wanted or are_plain_tuples:
        if spec.type is _Object:
            _, children, context = python_objects.take_apart(tree, spec.context.base)
        elif spec.type is _Mapping:
            _, children, context = _take_mapping_apart(tree)
        else:
            flat, context = pytree.SUPPORTED_NODES[spec.type].flatten_fn(tree)
            children = list(flat)
        comparable = isinstance(context, (list, tuple, ObjectParts, _MappingParts))
        if len(children) == spec.num_children and (not comparable or context == spec.context):
            return children
    raise StructureError(
        f"{with_article(tree)} of other parts stands where a {wanted.__name__} of {spec.num_children} was"
        if type(tree) is wanted
        else f"{with_article(tree)} stands where a {wanted.__name__} was"
    )


def _is_named(spec: pytree.TreeSpec) -> bool:
    return not isinstance(spec.type, type)  # torch's type of named tuples is the function `namedtuple`


UNNAMED = object()  # the entry of fields that `prefix` does not name


def broadcast_prefix(prefix: Any, spec: pytree.TreeSpec) -> list[Any]:
    """Returns the entry of `prefix` for each leaf of a structure; a leaf of `prefix` applies to all leaves below it.

    A dict selects fields of a dataclass, named tuple or mapping by name; other fields get `UNNAMED`. Raises
    `StructureError` if `prefix` has another structure.
    """
    is_node = pytree.node_type(prefix) in pytree.SUPPORTED_NODES
    is_node |= _is_dataclass(prefix) or (spec.type is _Object and type(prefix) is spec.context.kind)
    if not is_node:
        return [prefix] * spec.num_leaves
    if spec.is_leaf():
        raise StructureError(f"{with_article(prefix)} stands where a single value was")
    names = _fields_of(spec)
    if type(prefix) is dict and names is not None:
        # Fields that the output may have in other calls, such as the loss of transformers.
        is_dataclass = spec.type not in (_Object, *_DICTS) and dataclasses.is_dataclass(spec.type)
        known = {*names, *(spec.type.__dataclass_fields__ if is_dataclass else ())}
        if unknown := [name for name in prefix if name not in known]:
            raise StructureError(f"it has no {', '.join(map(repr, unknown))}, but {', '.join(map(repr, names))}")
        children = [prefix.get(name, UNNAMED) for name in names]
    else:
        children = _children_like(prefix, spec)
    return [
        entry for child, part in zip(children, spec.children(), strict=True) for entry in broadcast_prefix(child, part)
    ]


def _fields_of(spec: pytree.TreeSpec) -> list[Any] | None:
    """Returns the names of the children of a mapping, dataclass or named tuple; None if they have no names."""
    if spec.type is _Object:
        parts = spec.context
        return [*parts.keys, *parts.names] if not issubclass(parts.base, (list, tuple)) else None
    if _is_named(spec):
        return list(spec.context._fields)
    if spec.type in _DICTS:
        return list(spec.context[1] if spec.type is defaultdict else spec.context)
    is_mapping = issubclass(spec.type, Mapping) and isinstance(spec.context, (list, tuple))
    return list(spec.context) if is_mapping and len(spec.context) == spec.num_children else None


@contextlib.contextmanager
def preserve_objects(spec: pytree.TreeSpec) -> Iterator[None]:
    """A block that restores the containers in looked-at objects of inputs of this structure at its end."""
    before = [
        (inside, copy.copy(inside)) for value in _looked_at_in(spec) for inside in python_objects.containers_in(value)
    ]
    try:
        yield
    finally:
        for inside, items in before:
            now, then = ([*one, *one.values()] if isinstance(one, dict) else [*one] for one in (inside, items))
            if list(map(id, now)) != list(map(id, then)):
                inside.clear()
                (inside.update if isinstance(inside, (dict, set)) else inside.extend)(items)


def _looked_at_in(spec: pytree.TreeSpec) -> Iterator[Any]:
    if spec.type is _LookedAtObject:
        yield spec.context.value
    for child in spec.children():
        yield from _looked_at_in(child)
