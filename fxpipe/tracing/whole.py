"""Modules that are kept whole, and hooks: Python that runs in every step, each call of it one node of the graph.

A module is kept whole where its Python must run each time: it reads values that only the stages know, draws Python's
random numbers, uses `torch.func`. A stage is a pure function all the same: the parameters and buffers of such a module
are arguments of its node, and stand in their places in a replica while it runs. The replica is a deep copy that shares
all tensors, so that methods bound in `__init__` and modules in plain lists belong to it as well. That it uses nothing
else is verified: the autograd graph of its first run must end in what it was given.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.autograd import leaves_under
from fxpipe.errors import StateError
from fxpipe.tracing.containers import hidden_tensors, tensors_in
from fxpipe.tracing.recorder import PLAIN, Recorder, Running
from fxpipe.tracing.sizes import Size
from fxpipe.tracing.snapshot import OWN_NAMES, Slot, dice, held_in_containers, same_dice, slots_of


class _Active(threading.local):
    recorder: Recorder | None = None


F = TypeVar("F", bound=Callable[..., Any])
active = _Active()  # which recorder records in this thread

Run = Callable[[Sequence[torch.Tensor], tuple[Any, ...], dict[str, Any]], Any]


def call_whole(recorder: Recorder, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module as one node."""
    slots = slots_of(module)
    recorder.note_dice()
    recorder.stack.append(Running.now(path, module))
    try:
        for inner in module.modules():
            for key, value in inner.__dict__.items():
                if key not in OWN_NAMES and type(value) in PLAIN:
                    recorder.attributes_read[inner, key] = value
        with recorder.pause():
            run = _replicated(recorder.model, module, tuple(slots))
        before = dice()
        result, node = _call(recorder, run, type(module).__name__, list(slots.values()), args, kwargs)
    finally:
        recorder.stack.pop()
    rolled = not same_dice(before, dice())
    node.meta.update(whole=path, why=recorder.whole[path], dice=rolled, random=node.meta["random"] or rolled)
    recorder.skip_dice()
    return result


def call_hook(recorder: Recorder, module: nn.Module, hook: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Calls a hook of a module as one node."""

    def run(_: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hook(module, *args)

    name = getattr(hook, "__name__", type(hook).__name__)
    result, node = _call(recorder, run, f"hook_{name}" if name.isidentifier() else "hook", [], given, {})
    node.meta["hook"] = True
    return result


def leaf(function: F) -> F:
    """Marks a function that a graph shall call as it is, as one node, instead of what it does.

        @fxpipe.leaf
        def route(tokens, scores): ...      # reads values, calls a library: anything

    It is given tensors (in tuples, lists and dicts, too) and gives such back, of the same structure every time. It runs
    for each micro-batch, on the stage's device and with gradients.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = active.recorder
        if recorder is None or recorder.paused:
            return function(*args, **kwargs)

        def run(_: Sequence[torch.Tensor], a: tuple[Any, ...], k: dict[str, Any]) -> Any:
            return function(*a, **k)

        return _call(recorder, run, function.__name__, [], args, kwargs)[0]

    return call  # type: ignore[return-value]


def _call(
    recorder: Recorder,
    run: Run,
    name: str,
    tensors: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs something and leaves a node `name(tensors, leaves of the arguments)`, which makes the result's leaves."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    nodes: list[Any] = []
    fixed: dict[int, Any] = {}  # arguments that are no matter of a graph
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (torch.Tensor, Size)):
            nodes.append(recorder.argument(leaf))
            continue
        if type(leaf) in (int, float):  # may hang on the batch size
            nodes.append(leaf)
            continue
        if any(recorder.knows(t) for t in hidden_tensors(leaf)):
            raise recorder.refuse(
                f"gives {name} a {type(leaf).__module__}.{type(leaf).__qualname__} that holds tensors",
                "give it tensors in tuples, lists or dicts",
                whole=False,
            )
        nodes.append(None)
        fixed[place] = leaf
    node_args = (tuple(map(recorder.node_of, tensors)), tuple(nodes))
    # On values cut from what was before them, so that the graph of what runs ends in what it was given.
    with recorder.pause():
        own, plain = list(map(_cut, tensors)), list(map(_cut, leaves))
        storages = [t.untyped_storage()._cdata for t in own]
    first: list[Any] = []

    def whole(given: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        filled = [fixed.get(place, value) for place, value in enumerate(values)]
        a, k = pytree.tree_unflatten(filled, spec)
        made, made_spec = pytree.tree_flatten(run(given, a, k))
        if not first:
            first.extend((made_spec, [None if isinstance(x, torch.Tensor) else x for x in made]))
        elif made_spec != first[0] or not all(map(_is_as_before, made, first[1])):
            raise StateError(
                f"{name} gives another kind of output than when it was traced; let it give tensors of the same "
                "structure every time"
            )
        return tuple(made)

    whole.__name__ = whole.__qualname__ = name
    whole.__module__ = __name__
    made, random = recorder.run(whole, (own, plain), {})
    with recorder.pause():
        strangers = _strangers(made, [*own, *(x for x in plain if isinstance(x, torch.Tensor))])
        moved = [t.untyped_storage()._cdata for t in own] != storages
    if strangers:
        raise recorder.refuse(
            f"runs {name}, kept whole, which uses {_names(recorder.model, strangers)} from outside (a closure, a "
            "patched method)",
            "use tensors of the module itself (self.weight), or give them as arguments",
            whole=False,
        )
    if moved:
        raise recorder.refuse(f"sets the data of a tensor of {name}", "write to it (copy_)", whole=False)
    node = recorder.add("call_function", whole, node_args)
    node.meta["random"] = random
    recorder.keep(made, node)
    return pytree.tree_unflatten(made, first[0]), node


def _cut(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return int.__int__(value) if isinstance(value, Size) else value


def _is_as_before(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return before is None
    return bool(now is before or type(now) not in PLAIN or now == before)


def _strangers(made: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What requires grad and was used to make something, but was not given."""
    known = {id(t) for t in given}
    return [x for t in tensors_in(tuple(made)) for x in leaves_under(t) if id(x) not in known]


def _names(model: nn.Module, tensors: Sequence[torch.Tensor]) -> str:
    known = {id(p): name for name, p in model.named_parameters()}
    return ", ".join(sorted({known.get(id(t), "a tensor of its own") for t in tensors}))


def _replicated(model: nn.Module, module: nn.Module, slots: tuple[Slot, ...]) -> Run:
    """Runs a replica of `module` on tensors given for its slots."""
    tensors = [*slots_of(model).values(), *held_in_containers(model).values()]
    memo: dict[int, Any] = {id(t): t for t in tensors}
    for inner in module.modules():  # the user's hooks are called, not copies of them
        memo |= {id(hooks): hooks for key, hooks in inner.__dict__.items() if key.endswith("_hooks")}
    try:
        replica = copy.deepcopy(module, memo)
    except Exception:  # something in it cannot be copied: the module itself runs
        replica = module
    lock = threading.Lock()  # a module that is called in two stages runs in one of them at a time

    def run(given: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with lock:
            stores = [slot.store(replica) for slot in slots]
            before = [store[slot.key] for slot, store in zip(slots, stores, strict=True)]
            try:
                for slot, store, tensor in zip(slots, stores, given, strict=True):
                    store[slot.key] = tensor
                result = replica(*args, **kwargs)
                for slot, store, tensor in zip(slots, stores, given, strict=True):
                    after = store.get(slot.key)
                    if slot.kind == "buffer" and isinstance(after, torch.Tensor) and after is not tensor:
                        with torch.no_grad():
                            tensor.copy_(after)  # a buffer that forward sets is a buffer that it changes
                return result
            finally:
                for slot, store, tensor in zip(slots, stores, before, strict=True):
                    store[slot.key] = tensor

    return run
