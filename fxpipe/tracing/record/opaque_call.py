"""Opaque calls: Python that runs in every step, each call as one node of the graph.

They are functions marked as leaves, hooks, functions transformed by `torch.func`, and opaque modules. (`cut`, the
other mark that users put into forward, is here too.)
The node is a function of the tensors in its arguments, in any structure. The first run verifies this: its autograd
graph must end in the arguments, and it must not touch other tensors of forward or of the model.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, MethodType, NoneType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import leaves_below, version_of
from fxpipe._torch.functions import PLAIN_TYPES
from fxpipe._torch.module_internals import MODULE_DICT_KEYS, hook_stores, is_compiled_module, original_module
from fxpipe.errors import ArgumentError, StateError
from fxpipe.tracing.model_state import (
    HostArgumentConversion,
    Slot,
    container_tensors,
    equal_tensors,
    is_fixed,
    preserve_rng,
    slots_of,
    without_gradients,
)
from fxpipe.tracing.node_info import OpaqueCall, RandomDraws, info, opaque_call_of, update_info
from fxpipe.tracing.record.module_hooks import COMPUTATION_ATTRIBUTES, is_computation_hook
from fxpipe.tracing.record.recorded_sizes import RECORDED
from fxpipe.tracing.record.recorder import Recorder, RunningModule
from fxpipe.tracing.record.unrecordable import OPAQUE_REMEDY, CannotRecord
from fxpipe.tracing.tensors import hidden_tensors, storage_of, tensors_in
from fxpipe.utils.locks import call_in_forked_child
from fxpipe.utils.python_objects import NotKept, equal_values
from fxpipe.utils.pytree import StructureError, flatten_dataclasses, leaves_by_structure, map_tensor_leaves

F = TypeVar("F", bound=Callable[..., Any])
# (tensors that the node gets in addition to the arguments, arguments, keyword arguments) -> result
OpaqueRun = Callable[[Sequence[torch.Tensor], tuple[Any, ...], dict[str, Any]], Any]


class _Active(threading.local):
    recorder: Recorder | None = None


active = _Active()


class OpaqueStateError(Exception):
    """Raised if an opaque call kept something for its next run or for others."""

    def __init__(self, what: str, remedy: str = "keep what forward changes in a buffer (register_buffer)"):
        super().__init__(what)
        self.remedy = remedy


# Takes the place of lists and tuples inside the result of a module kept whole: those without a use may have any length.
UNREAD_SEQUENCE = NotKept("sequence")


def call_hook(recorder: Recorder, module: nn.Module, hook: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls a hook of a module as one node. A hook that uses tensors of the module needs an opaque module."""
    name = getattr(hook, "__name__", type(hook).__name__)
    label = f"hook_{name}" if name.isidentifier() else "hook"
    stores = [store for key, store in module.__dict__.items() if key.endswith("_hooks") and isinstance(store, dict)]
    before = [(store, dict(store)) for store in stores]
    try:
        result, node = call_function(recorder, functools.partial(hook, module), label, arguments, {}, in_module=True)
    finally:
        for store, items in before:  # the hook may have removed itself, which a step has to do
            store.clear()
            store.update(items)
    update_info(node, opaque=replace(opaque_call_of(node), is_hook=True))
    return result


def call_function(
    recorder: Recorder,
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_module: bool = False,
    lifts: bool = False,
) -> tuple[Any, fx.Node]:
    """Calls a function as one node; see `call_opaque`."""
    recorder.sizes.read_captured(function)
    return call_opaque(recorder, lambda _, a, k: function(*a, **k), name, [], args, kwargs, in_module, lifts=lifts)


def leaf(function: F) -> F:
    """Marks a function that a graph calls as one node, without recording its inside.

        @fxpipe.leaf
        def route(tokens, scores): ...      # reads values, calls a library: anything

    The function takes and returns tensors, also in tuples, lists and dicts; the structure of its result must always be
    the same. It runs for each micro-batch, on the stage's device and with gradients.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = active.recorder
        if recorder is None or recorder.paused:
            return function(*args, **kwargs)
        return call_function(recorder, function, getattr(function, "__name__", "leaf"), args, kwargs)[0]

    return call  # type: ignore[return-value]


def cut() -> None:
    """Marks a position in `forward` at which a stage ends and the next one begins.

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                if k and k % 8 == 0:
                    fxpipe.cut()
                x = layer(x)
            return x

    Only planning uses marks; they do not change how the model runs. If there are fewer marks than cuts, the solver
    chooses the others.

    Raises:
        ArgumentError: the mark is inside an opaque node (an opaque module, a hook, a `fxpipe.leaf`).
    """
    recorder = active.recorder
    if recorder is None:
        return
    if recorder.paused:
        where = f"module {recorder.module!r}" if recorder.module else "the model"
        raise ArgumentError(
            f"fxpipe.cut() stands in a part of {where} that runs as one node, where no stage can end; move it out"
        )
    recorder.marks.append(recorder.source)


def call_opaque(
    recorder: Recorder,
    run: OpaqueRun,
    name: str,
    tensors: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_module: bool = False,  # the call can use outside tensors if the module around it is kept opaque
    final: bool = True,  # the user requested the node, so a refusal ends the search
    lifts: bool = False,  # tensors in closures become arguments
) -> tuple[Any, fx.Node]:
    """Runs an opaque call and adds a node `name(tensors, leaves of arguments)`, which returns the result's leaves."""

    def refuse(what: str, remedy: str) -> CannotRecord:
        error = recorder.refuse(f"runs {name}, kept whole, which {what}", remedy, whole=in_module)
        error.is_final = final and not in_module
        return error

    leaves, spec = flatten_dataclasses((args, kwargs), lambda x: isinstance(x, (torch.Tensor, *RECORDED)))
    has_objects = pytree.tree_structure((args, kwargs)) != spec  # which the node reconstructs
    nodes: list[Any] = []
    fixed: dict[int, Any] = {}  # arguments that are not in the graph
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (torch.Tensor, *RECORDED)) or type(leaf) in (int, float):  # may depend on the batch size
            nodes.append(recorder.node_argument(leaf))
            continue
        if any(recorder.knows(t) for t in hidden_tensors(leaf)):
            raise refuse(
                f"is given a {type(leaf).__module__}.{type(leaf).__qualname__} that holds tensors",
                "give it tensors in tuples, lists, dicts or dataclasses",
            )
        nodes.append(None)
        fixed[place] = leaf
    node_args = (tuple(map(recorder.node_of, tensors)), tuple(nodes))
    first: list[Any] = []
    host = HostArgumentConversion()

    def whole(module_tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        filled = [fixed.get(place, value) for place, value in enumerate(values)]
        a, k = pytree.tree_unflatten(filled, spec)
        try:
            with host if not first else HostArgumentConversion() if host.has_found else contextlib.nullcontext():
                results, results_spec = flatten_dataclasses(run(module_tensors, a, k), torch.is_tensor)
        except OpaqueStateError as error:
            if not first:
                raise
            raise StateError(f"{name}, kept whole, {error}, unlike when it was traced; {error.remedy}") from None
        if not first:
            if has_objects and _is_changed((a, k), spec, filled):
                raise OpaqueStateError("changes an object that it is given", "make a new one, and return it")
            first.extend((results_spec, [torch.Tensor if isinstance(x, torch.Tensor) else x for x in results]))
        elif results_spec != first[0] or not all(map(_is_as_before, results, first[1])):
            raise StateError(
                f"{name} gives another kind of output than when it was traced; let it give tensors of the same "
                "structure every time"
            )
        return tuple(results)

    whole.__name__ = whole.__qualname__ = name
    whole.__module__ = __name__
    # Run on values cut from the autograd graph before the call, so that its graph ends in its arguments.
    with recorder.pause():
        own = list(map(_parameter_copy, tensors))
        plain, ends = _cut_graph(leaves)
        storages = list(map(storage_of, own))
        arguments = {storage_of(t) for t in (*own, *plain) if isinstance(t, torch.Tensor)}
        rest = [(s.name, t) for s, t in slots_of(recorder.model).items() if not t.is_inference()]
        others = [(key, t, version_of(t)) for key, t in rest if storage_of(t) not in arguments]
        buffers = [(t, t.detach().clone()) for t in tensors if not is_fixed(t)]
    recorder.random.note_python()
    shared = [x for x, node in zip(plain, nodes, strict=True) if isinstance(x, torch.Tensor) and _is_used(node)]
    try:
        outputs, random, opaque = recorder.run_opaque(whole, (own, plain), {}, [*own, *shared])
    except OpaqueStateError as error:
        raise refuse(str(error), error.remedy) from error
    rolled = recorder.random.note_python(in_node=True)
    with recorder.pause():
        own_gradients = opaque.has_applied and _puts_gradients(recorder.model, outputs, [*own, *ends])
        external = _external_tensors(outputs, [*own, *ends])
        if external and not any(recorder.names.own(t) for t in external):
            with recorder.random.ignore_draws():
                copies = (
                    list(map(_parameter_copy, tensors)),
                    _cut_graph([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves])[0],
                )
                again = recorder.run(whole, copies, {})[0]
            recorder.random.note_python(in_node=True)
            external = [t for t in external if id(t) in {id(other) for other in _external_tensors(again, [])}]
        held = [(t, mine) for t, mine in zip(tensors, own, strict=True) if is_fixed(t)]  # `.data` has no version

        def is_changed(tensor: torch.Tensor, before: torch.Tensor) -> bool:  # a write may leave the value as it was
            return storage_of(tensor) in opaque.written or not (tensor.requires_grad or equal_tensors(tensor, before))

        changed = [t for t, c in held if version_of(c) or is_changed(c, t)]
        changed_buffers = [t for t, old in buffers if is_changed(t, old)]
        written = [key for key, tensor, version in others if version_of(tensor) != version]
        has_run_backward = any(t.grad is not None for t in (*own, *ends))
        moved = list(map(storage_of, own)) != storages
    if outside := opaque.known_tensors or external:
        if lifts and not (random or rolled) and all(recorder.knows(t) or recorder.names.own(t) for t in outside):
            lifted = [*dict.fromkeys(outside)]
            lifting = _with_lifted(recorder.model, run, lifted)
            return call_opaque(recorder, lifting, name, tensors, (lifted, args, kwargs), {}, in_module)
        created = {"a tensor that forward has made" for t in outside if recorder.knows(t)}
        own_names = [recorder.names.own(t) for t in outside if not recorder.knows(t)]
        names = created.union("a tensor of its own" if one is None else repr(one) for one in own_names)
        raise refuse(
            f"uses {', '.join(sorted(names))} from outside (a closure, a patched method)",
            "use tensors of the module itself (self.weight), or give them as arguments",
        )
    if changed:
        raise refuse(*recorder.refusal_of_write(changed[0], recorder.names.own(changed[0]))[:2])
    if written:
        raise refuse(f"writes to {written[0]!r} outside of it", "keep what it changes in a buffer (register_buffer)")
    if own_gradients:
        raise recorder.refuse(
            f"runs {name}, kept whole, with an autograd.Function whose backward runs backward and fills `.grad` itself",
            "let it be given the parameters and return their gradients (torch.autograd.grad in place of backward), or "
            "call the modules in it as usual: the pipeline recomputes by itself (checkpoint=)",
            whole=False,
        )
    if has_run_backward:
        raise recorder.refuse(f"runs {name}, kept whole, which runs backward", "do so outside forward", whole=False)
    if moved:
        raise refuse("sets the data of a tensor", "write to it (copy_)")
    if any(any(True for _ in hidden_tensors(x)) for x in outputs if not isinstance(x, torch.Tensor)):
        raise refuse(
            "returns an object that holds tensors and is unknown to torch",
            f"return tuples, lists, dicts or dataclasses, or register it ({pytree.REGISTRATION})",
        )
    node = recorder.add("call_function", whole, node_args)
    update_info(
        node,
        opaque=OpaqueCall(fixed, spec, seeds_generator=opaque.has_drawn and not random),
        rng=RandomDraws(from_python=rolled) if random or rolled else None,
        written_storages=info(node).written_storages.union(map(recorder.registry.storages.name, changed_buffers)),
    )
    recorder.keep(outputs, node)
    return pytree.tree_unflatten(outputs, first[0]), node


class _Lifted(TorchFunctionMode):
    """Gives functions other tensors in place of those that a closure holds."""

    def __init__(self, held: Sequence[torch.Tensor], values: Sequence[torch.Tensor]):
        super().__init__()
        self._values = {id(tensor): value for tensor, value in zip(held, values, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensor_leaves(lambda tensor: self._values.get(id(tensor), tensor), (args, kwargs or {}))
        return func(*args, **kwargs)


def _with_lifted(model: nn.Module, run: OpaqueRun, held: Sequence[torch.Tensor]) -> OpaqueRun:
    """Returns `run` with values for tensors that its closures hold, as the first argument: they differ in each call."""
    slots = {id(tensor): slot for slot, tensor in slots_of(model).items()}
    places = [(tensor, slots.get(id(tensor))) for tensor in held]  # closures read the tensors that the model has now

    def lifted(tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, args, kwargs = args
        with _Lifted([t if slot is None else slot.store(model)[slot.key] for t, slot in places], values):
            return run(tensors, args, kwargs)

    return lifted


def _is_used(node: fx.Node) -> bool:
    """Returns whether a value was used before, perhaps in an earlier stage, where gradients of later uses add up."""
    uses = (n for n in node.users if info(n).recorded_size is None)
    return any(n.users or info(n).opaque is None for n in uses)


def _is_changed(arguments: Any, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> bool:
    try:
        return any(now is not leaf for now, leaf in zip(leaves_by_structure(arguments, spec), leaves, strict=True))
    except StructureError:
        return True


def _parameter_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an autograd leaf with the tensor's value: a clone for a parameter, which must not be written to."""
    value = tensor.detach()
    return (value.clone() if is_fixed(tensor) else value).requires_grad_(tensor.requires_grad)


class _GraphCut(torch.autograd.Function):
    """Makes a tensor the child of the leaf `end`, in place, so that it can be written to like a module's output."""

    @staticmethod
    def forward(ctx: Any, end: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(0), gradient  # a backward inside the call sets `end.grad`


def _cut_graph(leaves: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Returns the values, sharing memory, without their autograd graphs; and the leaves at which new graphs end."""
    values: list[Any] = []
    ends: list[torch.Tensor] = []
    for value in leaves:
        if isinstance(value, RECORDED):
            values.append(value.value)
        elif not isinstance(value, torch.Tensor):
            values.append(value)
        elif value.grad_fn is None:
            values.append(value.detach().requires_grad_(value.requires_grad))
            ends.append(values[-1])
        else:
            ends.append(torch.empty(0, requires_grad=True))
            # Functions return tensors of a subclass as views; torch forbids their use after a write to their memory.
            same = value.detach() if type(value) is torch.Tensor else value.data
            with torch.enable_grad():
                values.append(_GraphCut.apply(ends[-1], same))
    return values, ends


def _is_as_before(now: Any, before: Any) -> bool:
    """Returns whether a leaf of the output equals the recording's; `before` is `torch.Tensor` for any tensor."""
    if isinstance(now, torch.Tensor):
        return before is torch.Tensor
    if isinstance(now, NotKept) or getattr(type(now), "__eq__", None) is object.__eq__:
        return type(now) is type(before)
    same: Any = type(now) is type(before) and now == before
    return bool(same.all()) if hasattr(same, "all") else bool(same) or equal_values(now, before)  # NaN


def _external_tensors(results: Sequence[Any], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that require grad and were used without being passed."""
    known = {id(t) for t in arguments}
    used = [x for t in tensors_in(tuple(results)) for x in ((t,) if t.is_leaf and t.requires_grad else leaves_below(t))]
    return [x for x in used if id(x) not in known]


def _puts_gradients(model: nn.Module, results: Sequence[Any], ends: Sequence[torch.Tensor]) -> bool:
    """Returns whether a backward puts gradients into leaves itself, as in reversible networks: no stage finds them."""
    roots = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in ends if t.requires_grad]
    if not roots or not leaves:
        return False
    with preserve_rng(), without_gradients(model), contextlib.suppress(Exception):  # a step raises it again
        torch.autograd.grad(roots, leaves, list(map(torch.ones_like, roots)), retain_graph=True, allow_unused=True)
        return any(t.grad is not None for t in (*model.parameters(), *ends))
    return False


# The Python of an opaque module must run each time: it reads values that only the stages have, draws Python's random
# numbers, or uses `torch.func`. Its parameters and buffers are arguments of the node; a replica holds them during a
# call: a deep copy, including methods bound in `__init__` and modules in plain lists, that shares all other objects.

_locks_lock = threading.Lock()
# A module that is called in two stages runs in one at a time: it may have no replica, and shares what it keeps.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
call_in_forked_child(_locks.clear)
LEAF_MODULE_REASON = "asked for by leaf_modules"


def call_leaf_module(
    recorder: Recorder, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    recorder.stack.append(RunningModule(path, module))
    try:
        for inner in module.modules():
            _note_attributes(recorder, inner)
        result, repeat = _call_whole(recorder, module, why := recorder.whole[path], args, kwargs)
    finally:
        recorder.stack.pop()
    is_tried = recorder.options.reads_sequences and why != LEAF_MODULE_REASON
    if is_tried and _has_numbers_of_values(recorder, result, repeat):
        raise recorder.refuse(
            f"uses numbers that module {path!r}, kept whole, makes of the values of tensors",
            "let it return tensors" + (OPAQUE_REMEDY if not recorder.module else ""),
        )
    return result


def _call_whole(
    recorder: Recorder,
    module: nn.Module,
    why: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str = "forward",
) -> tuple[Any, Callable[[], Any]]:
    """Calls a module, or another method, which uses no modules inside, as one node.

    Returns the result, and a function that calls it without a node, on other values of floating point arguments.
    """
    is_method = method != "forward"
    slots = {s: t for s, t in slots_of(module).items() if not (_is_made_anew(s, t) or (is_method and s.path))}
    inside = [name for name, _ in module.named_children() if is_method]

    def call(replica: nn.Module, a: tuple[Any, ...], k: dict[str, Any]) -> Any:
        return getattr(replica, method)(*a, **k) if is_method else replica(*a, **k)

    with recorder.pause():
        run = replica_of(recorder.model, module, tuple(slots), call, inside)

    def without_sequences(*arguments: Any) -> Any:
        result = run(*arguments)

        def is_sequence(value: Any) -> bool:
            return value is not result and type(value) in (list, tuple)

        return pytree.tree_map(lambda x: UNREAD_SEQUENCE if is_sequence(x) else x, result, is_leaf=is_sequence)

    function = run if recorder.options.reads_sequences else without_sequences
    name, tensors = type(module).__name__ + (f"_{method}" if is_method else ""), list(slots.values())
    result, node = call_opaque(recorder, function, name, tensors, args, kwargs, final=why == LEAF_MODULE_REASON)
    recorder.hides_sequences |= any(leaf is UNREAD_SEQUENCE for leaf in pytree.tree_leaves(result))
    path = recorder.paths[id(module)]
    update_info(node, opaque=replace(opaque_call_of(node), module=path, method=method, why=why))

    def repeat() -> Any:
        others = map_tensor_leaves(lambda t: torch.randn_like(t) if t.is_floating_point() else t, (args, kwargs))
        return run([t.detach().clone() for t in tensors], *others)

    return result, repeat


def _has_numbers_of_values(recorder: Recorder, result: Any, repeat: Callable[[], Any]) -> bool:
    """Returns whether other values give other numbers in the result of a module kept whole."""
    numbers = [leaf for leaf in pytree.tree_leaves(result) if type(leaf) in (int, float)]
    with recorder.pause(), preserve_rng(), torch.no_grad(), contextlib.suppress(Exception):  # other values may fail
        for _ in range(3 if numbers else 0):
            if [leaf for leaf in pytree.tree_leaves(repeat()) if type(leaf) in (int, float)] != numbers:
                return True
    return False


# If a module that is most of the model has to be kept whole, the cause may be one of its methods (as in SpecAugment).
# So first those methods that use no modules inside are kept whole.


def methods_to_keep(module: nn.Module, path: str, line: str = "") -> list[str]:
    """Returns the paths of methods that forward calls and that use no modules inside; `line`: those that contain it."""
    kind, inside = type(module), {name for name, _ in module.named_children()}
    names = _attributes_of_self(kind.forward) - {*vars(nn.Module), *vars(module)}
    whole = [name for name in names if _method(kind, name) and inside.isdisjoint(_attributes_used(kind, name))]
    whole = [name for name in whole if not line or _has_line(_method(kind, name), line)]
    return [f"{path}.{name}".removeprefix(".") for name in sorted(whole)]


def _method(kind: type[nn.Module], name: str) -> FunctionType | None:
    method = inspect.getattr_static(kind, name, None)
    return method if isinstance(method, FunctionType) else None


def _has_line(method: Callable[..., Any] | None, line: str) -> bool:
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    lines = {f"{code.co_filename}:{number}" for *_, number in code.co_lines()} if code is not None else ()
    return line in lines


def _attributes_used(kind: type[nn.Module], name: str) -> set[str]:
    """Returns the attributes of `self` that a method uses, or one that it calls."""
    seen, todo = {name}, [name]
    while todo:
        if (method := _method(kind, todo.pop())) is not None:
            new = _attributes_of_self(method) - seen
            seen |= new
            todo += new
    return seen


def _attributes_of_self(method: Callable[..., Any]) -> set[str]:
    code = getattr(inspect.unwrap(method), "__code__", None)
    steps, names = itertools.pairwise(dis.get_instructions(code) if code is not None else ()), set[str]()
    for one, after in steps:
        loaded = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # some steps load two variables
        if one.opname.startswith("LOAD_FAST") and loaded[-1] == "self" and after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.add(after.argval)
    return names


def whole_methods(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Returns replacements of the methods that are kept whole: (class, name, function)."""
    modules = dict(recorder.model.named_modules(remove_duplicate=False))
    places = [(type(modules[path]), name) for whole in recorder.whole for path, _, name in (whole.rpartition("."),)]
    methods = [(kind, name, _method(kind, name)) for kind, name in places]
    return [(kind, name, _whole_method(recorder, m, name)) for kind, name, m in methods if m is not None]


def _whole_method(recorder: Recorder, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = f"{recorder.paths.get(id(module))}.{name}".removeprefix(".")
        if active.recorder is not recorder or recorder.paused or own not in recorder.whole:
            return method(module, *args, **kwargs)
        _note_attributes(recorder, module)
        try:
            result, _ = _call_whole(recorder, module, recorder.whole[own], args, kwargs, name)
            if not all(isinstance(leaf, (torch.Tensor, NoneType)) for leaf in pytree.tree_leaves(result)):
                raise TypeError("it returns other values than tensors")  # these would have to stay the same
        except CannotRecord:
            raise
        except Exception as error:  # perhaps it uses modules inside, after all
            problem = f"runs {own!r}, kept whole, which raises {error!r}"
            raise recorder.refuse(problem, "keep the module whole") from error
        return result

    return call


def _note_attributes(recorder: Recorder, module: nn.Module) -> None:
    """Records attributes that the replica copies: numbers, and objects that hold modules. It shares all others."""
    for key, value in module.__dict__.items():
        if key in MODULE_DICT_KEYS:
            continue
        modules = list(_modules_in(value))
        if value is None or type(value) in PLAIN_TYPES or modules:
            recorder.python_reads.add_attribute(module.__dict__, key)
        hidden = {id(m): m for outer in modules for m in outer.modules() if id(m) not in recorder.paths}
        for inner in hidden.values():
            for name, kept in inner.__dict__.items():
                if name == "training" or (name not in MODULE_DICT_KEYS and (kept is None or type(kept) in PLAIN_TYPES)):
                    recorder.python_reads.add_attribute(inner.__dict__, name)


def replica_of(
    model: nn.Module,
    module: nn.Module,
    slots: tuple[Slot, ...],
    forward: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
    without: Sequence[str] = (),  # paths of inner modules whose tensors have no values unless passed
) -> OpaqueRun:
    """Returns a function that runs `forward` of a replica of `module` on the tensors passed for its slots."""
    tensors = [*slots_of(model).values(), *container_tensors(model).values()]
    memo: dict[int, Any] = {id(t): t for t in tensors}
    shared: list[tuple[str, str]] = []
    for path, inner in module.named_modules():
        for key, value in inner.__dict__.items():
            is_plain = key not in MODULE_DICT_KEYS and not isinstance(value, torch.Tensor)
            if key.endswith("_hooks"):  # calls the user's hooks, not copies
                memo[id(value)] = value
            elif is_plain and not any(True for _ in _modules_in(value)):
                memo[id(value)] = value
                shared.append((path, key))
    try:
        replica = copy.deepcopy(module, memo)
        for slot, tensor in slots_of(replica).items():  # a use without a value is an error, not a lost gradient
            if slot not in slots and is_in_modules(slot, without):
                slot.store(replica)[slot.key] = torch.empty_like(tensor, device="meta")
    except Exception:  # the module cannot be copied, so it runs itself
        if without:
            raise
        replica = module
    for inner in filter(is_compiled_module, replica.modules() if replica is not module else ()):
        inner.__dict__["forward"] = original_module(inner)  # stages do not compile
    anew = {(slot.path, slot.key) for slot, tensor in slots_of(module).items() if _is_made_anew(slot, tensor)}
    pairs = [(replica.get_submodule(path), module.get_submodule(path), key) for path, key in shared]
    torchs = {path for path, m in module.named_modules() if type(m).__module__.startswith("torch.nn.")}  # an LSTM sorts

    def run(values: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _locks_lock:
            lock = _locks.setdefault(module, threading.Lock())
        with lock:
            for mine, theirs, key in pairs:
                if key in theirs.__dict__:
                    mine.__dict__[key] = theirs.__dict__[key]
            stores = [slot.store(replica) for slot in slots]
            before = [(path, inner, dict(inner.__dict__)) for path, inner in replica.named_modules()]
            hooks = [(store, {*store}) for inner in replica.modules() for store in hook_stores(inner)]
            kept = [store[slot.key] for slot, store in zip(slots, stores, strict=True)]
            try:
                memory = [tensor.detach() for tensor in values]  # if forward sets `.data`
                for slot, store, tensor in zip(slots, stores, values, strict=True):
                    store[slot.key] = tensor
                result = forward(replica, args, kwargs)
                for slot, store, tensor, own in zip(slots, stores, values, memory, strict=True):
                    _copy_buffer(slot, store.get(slot.key), tensor, own)
            finally:
                for slot, store, tensor in zip(slots, stores, kept, strict=True):
                    store[slot.key] = tensor
                changed = [
                    key
                    for path, inner, attributes in before
                    for key in _restore_attributes(inner, attributes)
                    if (path, key) not in anew and path not in torchs and key not in COMPUTATION_ATTRIBUTES
                ]
                for hook_store, before_run in hooks:  # which the next run puts on again, since it lacks their mark
                    for number in hook_store.keys() - before_run:
                        if is_computation_hook(hook_store[number]):
                            del hook_store[number]
            if changed:
                raise OpaqueStateError(f"sets its attribute {changed[0]!r}")
            return result

    return run


def is_in_modules(slot: Slot, paths: Collection[str]) -> bool:
    return any(slot.path == path or slot.path.startswith(f"{path}.") for path in paths)


def _is_made_anew(slot: Slot, tensor: torch.Tensor) -> bool:
    """Returns whether each forward computes the tensor before its use, as in pruning, and ignores its value."""
    return slot.kind == "attribute" and tensor.requires_grad


def _copy_buffer(slot: Slot, after: Any, tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Copies a buffer that forward has set, or whose `.data` it has set, to the memory that the tensor had before."""
    is_same = tensor.requires_grad or tensor.layout != torch.strided or storage_of(tensor) == storage_of(memory)
    if after is tensor and is_same:
        return
    if after is not tensor and (slot.kind != "buffer" or not isinstance(after, torch.Tensor)):
        raise OpaqueStateError(f"sets its {slot.kind} {slot.name!r}")
    if after.shape != memory.shape or after.dtype != memory.dtype:
        raise OpaqueStateError(f"sets its {slot.kind} {slot.name!r} to one of another shape or dtype")
    with torch.no_grad():
        memory.copy_(after)
    if not is_same:
        tensor.data = memory


def _restore_attributes(module: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    """Restores the attributes of a module; yields the names of those that were changed."""
    now = module.__dict__
    if now.keys() == before.keys() and all(now[key] is value for key, value in before.items()):
        return
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key, module), now.get(key, module)
        if old is not new and not (type(old) in PLAIN_TYPES and type(new) is type(old) and old == new):
            yield key
    now.clear()
    now.update(before)


def _modules_in(value: Any, depth: int = 4) -> Iterator[nn.Module]:
    """Yields the modules in any object. Skips closures of functions, which copies share."""
    if isinstance(value, nn.Module):
        yield value
        return
    if not depth or isinstance(value, (type, torch.Tensor, *PLAIN_TYPES)):
        return
    inside: list[Any] = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside += value
    elif isinstance(value, MethodType):
        inside.append(value.__self__)
    elif isinstance(value, functools.partial):
        inside += [value.func, *value.args, *value.keywords.values()]
    for item in inside:
        yield from _modules_in(item, depth - 1)
