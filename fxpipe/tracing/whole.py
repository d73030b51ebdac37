"""Modules that are kept whole, and hooks: Python that runs in every step, each call of it one node of the graph.

A module is kept whole where its Python must run each time: it reads values that only the stages know, draws Python's
random numbers, uses `torch.func`. A stage is a pure function all the same: the parameters and buffers of such a module
are arguments of its node, and stand in their places in a replica while it runs. The replica is a deep copy, so that
methods bound in `__init__` and modules in plain lists belong to it as well; but it shares whatever holds no module
(tensors, configurations, locks, the user's hooks), as it is when it runs. That it uses nothing else is verified: the
autograd graph of its first run must end in what it was given, and nothing else of the model may have changed.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.autograd import leaves_under
from fxpipe.errors import StateError
from fxpipe.tracing.containers import hidden_tensors, tensors_in
from fxpipe.tracing.recorder import PLAIN, Recorder, Running, storage_of
from fxpipe.tracing.refusals import CannotRecord
from fxpipe.tracing.sizes import Size
from fxpipe.tracing.snapshot import OWN_NAMES, Slot, dice, held_in_containers, same_dice, slots_of


class _Active(threading.local):
    recorder: Recorder | None = None


ASKED = "asked for by leaf_modules"  # the reason for which the user keeps a module whole
F = TypeVar("F", bound=Callable[..., Any])
active = _Active()  # which recorder records in this thread

Run = Callable[[Sequence[torch.Tensor], tuple[Any, ...], dict[str, Any]], Any]


def call_whole(recorder: Recorder, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module as one node."""
    asked = recorder.whole[path] == ASKED
    slots = {slot: tensor for slot, tensor in slots_of(module).items() if not _is_made_anew(slot, tensor)}
    recorder.stack.append(Running.now(path, module))
    try:
        for inner in module.modules():
            for key, value in inner.__dict__.items():
                if key not in OWN_NAMES and (value is None or type(value) in PLAIN):
                    recorder.note_attribute(inner.__dict__, key)
        with recorder.pause():
            run = _replicated(recorder.model, module, tuple(slots))
        result, node = _call(recorder, run, type(module).__name__, list(slots.values()), args, kwargs, final=asked)
    finally:
        recorder.stack.pop()
    node.meta.update(whole=path, why=recorder.whole[path])
    return result


def call_hook(recorder: Recorder, module: nn.Module, hook: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Calls a hook of a module as one node. One that uses tensors of the module needs the module whole."""

    def run(_: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hook(module, *args)

    name = getattr(hook, "__name__", type(hook).__name__)
    hooks = [store for key, store in module.__dict__.items() if key.endswith("_hooks")]
    before = [dict(store) for store in hooks]
    try:
        label = f"hook_{name}" if name.isidentifier() else "hook"
        result, node = _call(recorder, run, label, [], given, {}, in_module=True)
    finally:
        for store, items in zip(hooks, before, strict=True):  # it may have taken itself off: that is for a step to do
            store.clear()
            store.update(items)
    node.meta["hook"] = True
    return result


def call_transform(recorder: Recorder, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls what `torch.func` has made of a function as one node."""

    def run(_: Sequence[torch.Tensor], a: tuple[Any, ...], k: dict[str, Any]) -> Any:
        return function(*a, **k)

    return _call(recorder, run, name, [], args, kwargs, in_module=True)[0]


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

        return _call(recorder, run, getattr(function, "__name__", "leaf"), [], args, kwargs)[0]

    return call  # type: ignore[return-value]


def _call(
    recorder: Recorder,
    run: Run,
    name: str,
    tensors: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_module: bool = False,
    final: bool = True,
) -> tuple[Any, fx.Node]:
    """Runs something and leaves a node `name(tensors, leaves of the arguments)`, which makes the result's leaves.

    Args:
        in_module: what it uses from outside it may be given where the module that calls it is kept whole.
        final: it is one node because the user wants it so, and what is refused ends the search.
    """

    def refuse(what: str, remedy: str) -> CannotRecord:
        error = recorder.refuse(f"runs {name}, kept whole, which {what}", remedy, whole=in_module)
        error.final = final and not in_module
        return error

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
            raise refuse(
                f"is given a {type(leaf).__module__}.{type(leaf).__qualname__} that holds tensors",
                "give it tensors in tuples, lists or dicts",
            )
        nodes.append(None)
        fixed[place] = leaf
    node_args = (tuple(map(recorder.node_of, tensors)), tuple(nodes))
    first: list[Any] = []

    def whole(given: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        filled = [fixed.get(place, value) for place, value in enumerate(values)]
        a, k = pytree.tree_unflatten(filled, spec)
        try:
            made, made_spec = pytree.tree_flatten(run(given, a, k))
        except _Kept as error:
            if not first:
                raise
            raise StateError(
                f"{name}, kept whole, {error}, which it did not when it was traced; keep it in a buffer "
                "(register_buffer)"
            ) from None
        if not first:
            first.extend((made_spec, [torch.Tensor if isinstance(x, torch.Tensor) else x for x in made]))
        elif made_spec != first[0] or not all(map(_is_as_before, made, first[1])):
            raise StateError(
                f"{name} gives another kind of output than when it was traced; let it give tensors of the same "
                "structure every time"
            )
        return tuple(made)

    whole.__name__ = whole.__qualname__ = name
    whole.__module__ = __name__
    # On values cut from what was before them, so that the graph of what runs ends in what it was given.
    with recorder.pause():
        own = list(map(_own, tensors))
        plain, ends = _cut(leaves)
        storages = [t.untyped_storage()._cdata for t in own]
        others = _others(recorder.model, [*own, *(x for x in plain if isinstance(x, torch.Tensor))])
    recorder.note_dice()
    before = dice()
    recorder.outside.clear()
    try:
        made, random = recorder.run(whole, (own, plain), {})
    except _Kept as error:
        raise refuse(str(error), "keep what forward changes in a buffer (register_buffer)") from error
    outside = list(recorder.outside)
    rolled = not same_dice(before, dice())
    recorder.skip_dice()
    with recorder.pause():
        strangers = _strangers(made, [*own, *ends])
        if strangers and not any(recorder.name_of(t) for t in strangers):  # made inside, or kept somewhere?
            drawn = len(recorder.lots)
            again = recorder.run(whole, (list(map(_own, tensors)), _cut(list(map(_clone, leaves)))[0]), {})[0]
            strangers = [t for t in strangers if id(t) in {id(other) for other in _strangers(again, [])}]
            del recorder.lots[drawn:]
            recorder.skip_dice()
        changed = [t for t, mine in zip(tensors, own, strict=True) if isinstance(t, nn.Parameter) and mine._version]
        written = [key for key, tensor, version in others if tensor._version != version]
        has_run_backward = any(t.grad is not None for t in (*own, *ends))
        moved = [t.untyped_storage()._cdata for t in own] != storages
    if outside:
        raise refuse(
            f"uses {_names(recorder, outside)} from outside (a closure, a patched method)",
            "use tensors of the module itself (self.weight), or give them as arguments",
        )
    if strangers:
        raise refuse(
            f"uses {_names(recorder, strangers)} from outside (a closure, a patched method)",
            "use tensors of the module itself (self.weight), or give them as arguments",
        )
    if changed:
        raise refuse(
            f"writes to the parameter {recorder.name_of(changed[0])!r}",
            "keep what forward changes in a buffer (register_buffer), or change the parameter outside forward",
        )
    if written:
        raise refuse(f"writes to {written[0]!r} outside of it", "keep what it changes in a buffer (register_buffer)")
    if has_run_backward:
        raise refuse("runs backward", "do so outside forward")
    if moved:
        raise refuse("sets the data of a tensor", "write to it (copy_)")
    if any(any(True for _ in hidden_tensors(x)) for x in made if not isinstance(x, torch.Tensor)):
        raise refuse(
            "returns an object that holds tensors and is unknown to torch",
            "return tuples, lists or dicts, or register it (torch.utils._pytree.register_pytree_node)",
        )
    node = recorder.add("call_function", whole, node_args)
    node.meta.update(random=random or rolled, dice=rolled, opaque=True)
    recorder.keep(made, node)
    return pytree.tree_unflatten(made, first[0]), node


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The end of a graph with the value of a parameter or a buffer. A parameter must not be written to: a copy is."""
    value = tensor.detach()
    return (value.clone() if isinstance(tensor, nn.Parameter) else value).requires_grad_(tensor.requires_grad)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Cut(torch.autograd.Function):
    """Makes a tensor the child of `end`, a leaf, in place: it may be written to, as what a module makes may."""

    @staticmethod
    def forward(ctx: Any, end: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def _cut(leaves: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """The same values in the same memory, without what made them; and where their graphs end."""
    values: list[Any] = []
    ends: list[torch.Tensor] = []
    for value in leaves:
        if isinstance(value, Size):
            values.append(int.__int__(value))
        elif not isinstance(value, torch.Tensor):
            values.append(value)
        elif value.grad_fn is None:
            values.append(value.detach().requires_grad_(value.requires_grad))
            ends.append(values[-1])
        else:
            ends.append(torch.empty(0, requires_grad=True))
            with torch.enable_grad():
                values.append(_Cut.apply(ends[-1], value.detach()))
    return values, ends


def _is_as_before(now: Any, before: Any) -> bool:
    """Is this leaf of the output the one of the recording? Objects that cannot be compared are new every time.

    `before` is `torch.Tensor` for any tensor.
    """
    if isinstance(now, torch.Tensor):
        return before is torch.Tensor
    if type(now) is not type(before):
        return False
    if getattr(type(now), "__eq__", None) is object.__eq__:
        return True
    same: Any = now == before
    return bool(same.all()) if hasattr(same, "all") else bool(same) or now is before or (now != now) is True


def _others(model: nn.Module, given: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor, int]]:
    """The tensors of a model that are not given, by name, and their versions."""
    own = {storage_of(t) for t in given}
    found = ((slot.name, tensor) for slot, tensor in slots_of(model).items() if not tensor.is_inference())
    return [(name, tensor, tensor._version) for name, tensor in found if storage_of(tensor) not in own]


def _strangers(made: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What requires grad and was used to make something, but was not given."""
    known = {id(t) for t in given}
    used = [x for t in tensors_in(tuple(made)) for x in ((t,) if t.is_leaf and t.requires_grad else leaves_under(t))]
    return [x for x in used if id(x) not in known]


def _names(recorder: Recorder, tensors: Sequence[torch.Tensor]) -> str:
    def name(tensor: torch.Tensor) -> str:
        if recorder.knows(tensor):
            return "a tensor that forward has made"
        found = recorder.name_of(tensor)
        return repr(found) if found is not None else "a tensor of its own"

    return ", ".join(sorted(set(map(name, tensors))))


class _Kept(Exception):
    """A module kept whole has kept something for its next run."""


def _replicated(model: nn.Module, module: nn.Module, slots: tuple[Slot, ...]) -> Run:
    """Runs a replica of `module` on tensors given for its slots."""
    tensors = [*slots_of(model).values(), *held_in_containers(model).values()]
    memo: dict[int, Any] = {id(t): t for t in tensors}
    shared: list[tuple[str, str]] = []  # path of a module, name of an attribute
    for path, inner in module.named_modules():
        for key, value in inner.__dict__.items():
            if key.endswith("_hooks"):  # the user's hooks are called, not copies of them
                memo[id(value)] = value
            elif key not in OWN_NAMES and not isinstance(value, torch.Tensor) and not _holds_modules(value):
                memo[id(value)] = value
                shared.append((path, key))
    try:
        replica = copy.deepcopy(module, memo)
    except Exception:  # something in it cannot be copied: the module itself runs
        replica = module
    anew = {(slot.path, slot.key) for slot, tensor in slots_of(module).items() if _is_made_anew(slot, tensor)}
    pairs = [(replica.get_submodule(path), module.get_submodule(path), key) for path, key in shared]
    torchs = {path for path, m in module.named_modules() if type(m).__module__.startswith("torch.nn.")}  # an LSTM sorts
    lock = threading.Lock()  # a module that is called in two stages runs in one of them at a time

    def run(given: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with lock:
            for mine, theirs, key in pairs:
                if key in theirs.__dict__:
                    mine.__dict__[key] = theirs.__dict__[key]
            stores = [slot.store(replica) for slot in slots]
            before = [(path, inner, dict(inner.__dict__)) for path, inner in replica.named_modules()]
            kept = [store[slot.key] for slot, store in zip(slots, stores, strict=True)]
            try:
                for slot, store, tensor in zip(slots, stores, given, strict=True):
                    store[slot.key] = tensor
                result = replica(*args, **kwargs)
                for slot, store, tensor in zip(slots, stores, given, strict=True):
                    _hand_over(slot, store.get(slot.key), tensor)
            finally:
                for slot, store, tensor in zip(slots, stores, kept, strict=True):
                    store[slot.key] = tensor
                keys = [(path, key) for path, inner, found in before for key in _restored(inner, found)]
                changed = [key for path, key in keys if (path, key) not in anew and path not in torchs]
            if changed:
                raise _Kept(f"sets its attribute {changed[0]!r}")
            return result

    return run


def _is_made_anew(slot: Slot, tensor: torch.Tensor) -> bool:
    """Is it made by each forward before it is used, as pruning does? Nobody sees what is put there."""
    return slot.kind == "attribute" and tensor.requires_grad


def _hand_over(slot: Slot, after: Any, tensor: torch.Tensor) -> None:
    """A buffer that forward sets is a buffer that it changes."""
    if after is tensor:
        return
    if slot.kind != "buffer" or not isinstance(after, torch.Tensor):
        raise _Kept(f"sets its {slot.kind} {slot.name!r}")
    if after.shape != tensor.shape or after.dtype != tensor.dtype:
        raise _Kept(f"sets its buffer {slot.name!r} to one of another shape or dtype")
    with torch.no_grad():
        tensor.copy_(after)


def _restored(module: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    """Puts the attributes of a module back; gives the names of those that were set to something else."""
    now = module.__dict__
    if now.keys() == before.keys() and all(now[key] is value for key, value in before.items()):
        return
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key, module), now.get(key, module)
        if old is not new and not (type(old) in PLAIN and type(new) is type(old) and old == new):
            yield key
    now.clear()
    now.update(before)


def _holds_modules(value: Any, depth: int = 4) -> bool:
    """Is there a module in an object of any kind? A function's closure is not asked: copies of it share that."""
    if isinstance(value, nn.Module):
        return True
    if not depth or isinstance(value, (type, torch.Tensor, *PLAIN)):
        return False
    inside: list[Any] = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside += value
    elif isinstance(value, MethodType):
        inside.append(value.__self__)
    elif isinstance(value, functools.partial):
        inside += [value.func, *value.args, *value.keywords.values()]
    return any(_holds_modules(item, depth - 1) for item in inside)
