"""Opaque calls: Python that runs in every step, each call as one node of the graph.

They are functions marked as leaves, hooks, functions transformed by `torch.func`, and opaque modules (`leaf_module`).
The node is a function of the tensors in its arguments, in any structure. The first run verifies this: its autograd
graph must end in the arguments, and it must not touch other tensors of forward or of the model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import leaves_below, version_of
from fxpipe.errors import StateError
from fxpipe.tracing.model_state import equal_tensors, is_fixed, preserve_rng, slots_of, without_gradients
from fxpipe.tracing.node_info import OpaqueCall, RandomDraws, info, opaque_call_of, update_info
from fxpipe.tracing.record.host_arguments import HostArgumentConversion
from fxpipe.tracing.record.recorded_sizes import RECORDED
from fxpipe.tracing.record.recorder import Recorder
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.tensors import hidden_tensors, storage_of, tensors_in
from fxpipe.utils.pytree import StructureError, flatten_dataclasses, leaves_by_structure

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


def call_hook(recorder: Recorder, module: nn.Module, hook: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls a hook of a module as one node. A hook that uses tensors of the module needs an opaque module."""
    name = getattr(hook, "__name__", type(hook).__name__)
    label = f"hook_{name}" if name.isidentifier() else "hook"
    hooks = [store for key, store in module.__dict__.items() if key.endswith("_hooks")]
    before = [dict(store) for store in hooks]
    try:
        result, node = call_function(recorder, functools.partial(hook, module), label, arguments, {}, in_module=True)
    finally:
        for store, items in zip(hooks, before, strict=True):  # the hook may have removed itself, which a step has to do
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
) -> tuple[Any, fx.Node]:
    """Calls a function as one node; see `call_opaque`."""
    recorder.sizes.read_captured(function)

    def run(_: Sequence[torch.Tensor], a: tuple[Any, ...], k: dict[str, Any]) -> Any:
        return function(*a, **k)

    return call_opaque(recorder, run, name, [], args, kwargs, in_module)


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


def call_opaque(
    recorder: Recorder,
    run: OpaqueRun,
    name: str,
    tensors: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_module: bool = False,
    final: bool = True,
    hookable: bool = True,
) -> tuple[Any, fx.Node]:
    """Runs an opaque call and adds a node `name(tensors, leaves of the arguments)`, which returns the result's leaves.

    Args:
        in_module: the call can use outside tensors if the module around it is kept opaque.
        final: the user requested the node, so a refusal ends the search.
        hookable: the call may put hooks on tensors that nothing else has used so far.
    """

    def refuse(what: str, remedy: str) -> CannotRecord:
        error = recorder.refuse(f"runs {name}, kept whole, which {what}", remedy, whole=in_module)
        error.is_final = final and not in_module
        return error

    leaves, spec = flatten_dataclasses((args, kwargs), lambda x: isinstance(x, (torch.Tensor, *RECORDED)))
    has_objects = pytree.tree_structure((args, kwargs)) != spec  # which the node reconstructs
    nodes: list[Any] = []
    fixed: dict[int, Any] = {}  # arguments that are not in the graph
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (torch.Tensor, *RECORDED)):
            nodes.append(recorder.node_argument(leaf))
            continue
        if type(leaf) in (int, float):  # may depend on the batch size
            nodes.append(leaf)
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
                results, results_spec = flatten_dataclasses(run(module_tensors, a, k), _is_tensor)
        except OpaqueStateError as error:
            if not first:
                raise
            raise StateError(
                f"{name}, kept whole, {error}, which it did not when it was traced; keep it in a buffer "
                "(register_buffer)"
            ) from None
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
        others = _tensors_not_given(recorder.model, [*own, *(x for x in plain if isinstance(x, torch.Tensor))])
        buffers = [(t, t.detach().clone()) for t in tensors if not is_fixed(t)]
    recorder.random.note_python()
    shared = [x for x, node in zip(plain, nodes, strict=True) if isinstance(x, torch.Tensor) and _is_used(node)]
    unhookable = [*own, *shared] if hookable else None
    try:
        outputs, random, opaque = recorder.run_opaque(whole, (own, plain), {}, unhookable)
    except OpaqueStateError as error:
        raise refuse(str(error), error.remedy) from error
    rolled = recorder.random.skip_python()
    with recorder.pause():
        own_gradients = opaque.has_applied and _puts_gradients(recorder.model, outputs, [*own, *ends])
        external = _external_tensors(outputs, [*own, *ends])
        if external and not any(recorder.name_of(t) for t in external):
            with recorder.random.ignore_draws():
                copies = list(map(_parameter_copy, tensors)), _cut_graph(list(map(_clone, leaves)))[0]
                again = recorder.run(whole, copies, {})[0]
            recorder.random.skip_python()
            external = [t for t in external if id(t) in {id(other) for other in _external_tensors(again, [])}]
        changed = [t for t, mine in zip(tensors, own, strict=True) if is_fixed(t) and _is_written(t, mine)]
        changed_buffers = [t for t, old in buffers if not equal_tensors(t, old)]
        written = [key for key, tensor, version in others if version_of(tensor) != version]
        has_run_backward = any(t.grad is not None for t in (*own, *ends))
        moved = list(map(storage_of, own)) != storages
    if outside := opaque.known_tensors or external:
        raise refuse(
            f"uses {_tensor_names(recorder, outside)} from outside (a closure, a patched method)",
            "use tensors of the module itself (self.weight), or give them as arguments",
        )
    if changed:
        raise refuse(*recorder.refusal_of_write(changed[0], recorder.name_of(changed[0]))[:2])
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


def _is_used(node: fx.Node) -> bool:
    """Returns whether a value was used before, perhaps in an earlier stage, where gradients of later uses add up."""
    uses = (n for n in node.users if info(n).recorded_size is None)
    return any(n.users or info(n).opaque is None for n in uses)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_changed(arguments: Any, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> bool:
    try:
        return any(now is not leaf for now, leaf in zip(leaves_by_structure(arguments, spec), leaves, strict=True))
    except StructureError:
        return True


def _parameter_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an autograd leaf with the tensor's value: a clone for a parameter, which must not be written to."""
    value = tensor.detach()
    return (value.clone() if is_fixed(tensor) else value).requires_grad_(tensor.requires_grad)


def _is_written(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    """Returns whether an opaque call has written to its copy of a parameter; `.data` of it has no version."""
    return bool(version_of(copy)) or not (parameter.requires_grad or equal_tensors(parameter, copy))


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


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
    """Returns whether a leaf of the output equals the recording's; `before` is `torch.Tensor` for any tensor.

    Objects without `__eq__` only need the same type.
    """
    if isinstance(now, torch.Tensor):
        return before is torch.Tensor
    if type(now) is not type(before):
        return False
    if getattr(type(now), "__eq__", None) is object.__eq__:
        return True
    same: Any = now == before
    return bool(same.all()) if hasattr(same, "all") else bool(same) or now is before or (now != now) is True


def _tensors_not_given(model: nn.Module, arguments: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor, int]]:
    own = {storage_of(t) for t in arguments}
    tensors = ((slot.name, tensor) for slot, tensor in slots_of(model).items() if not tensor.is_inference())
    return [(name, tensor, version_of(tensor)) for name, tensor in tensors if storage_of(tensor) not in own]


def _external_tensors(results: Sequence[Any], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that require grad and were used without being passed."""
    known = {id(t) for t in arguments}
    used = [x for t in tensors_in(tuple(results)) for x in ((t,) if t.is_leaf and t.requires_grad else leaves_below(t))]
    return [x for x in used if id(x) not in known]


def _puts_gradients(model: nn.Module, results: Sequence[Any], ends: Sequence[torch.Tensor]) -> bool:
    """Returns whether the backward of the call puts gradients into leaves, where a stage does not find them.

    The backward of an autograd.Function may run backward itself, as in reversible networks.
    """
    roots = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in ends if t.requires_grad]
    if not roots or not leaves:
        return False
    parameters = list(model.parameters())
    with preserve_rng(), without_gradients(model), contextlib.suppress(Exception):  # a step raises it again
        torch.autograd.grad(roots, leaves, list(map(torch.ones_like, roots)), retain_graph=True, allow_unused=True)
        return any(t.grad is not None for t in (*parameters, *ends))
    return False


def _tensor_names(recorder: Recorder, tensors: Sequence[torch.Tensor]) -> str:
    def name(tensor: torch.Tensor) -> str:
        if recorder.knows(tensor):
            return "a tensor that forward has made"
        own = recorder.name_of(tensor)
        return repr(own) if own is not None else "a tensor of its own"

    return ", ".join(sorted(set(map(name, tensors))))
