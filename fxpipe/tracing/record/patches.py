"""Patches for effects that a function mode does not intercept, active in the recording thread only:

- calls of modules, to record their paths; opaque modules and hooks on modules become one node each;
- `torch.vmap`, which becomes one node: inside it, torch functions see batches as samples;
- applications of an `autograd.Function`, as one node each; functions of `torch.utils.checkpoint` are bypassed;
- attributes of modules that forward reads (`dropout.p`), and the Python that runs (`python_reads`);
- `torch.autograd.Variable(x)`, which detaches;
- the bytes of storages, which depend on sizes of tensors;
- `len`, which returns a size; C code would get a plain number;
- `torch.Tensor(...)`, which calls `torch.tensor` or `torch.empty`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd_functions import (
    Apply,
    FunctionClass,
    has_context,
    intercept_apply,
    intercept_vmap,
    is_in_functorch_transform,
)
from fxpipe._torch.functions import takes_only_arrays
from fxpipe._torch.module_internals import MODULE_DICT_KEYS, hook_stores
from fxpipe._torch.thread_state import ThreadState
from fxpipe.tracing.forward_rng import python_draws
from fxpipe.tracing.node_info import RandomDraws, update_info
from fxpipe.tracing.record.gradients import differentiate
from fxpipe.tracing.record.graph_break import call_with_graph_break
from fxpipe.tracing.record.module_hooks import forward_of, is_computation_hook, run_model, run_with_hooks
from fxpipe.tracing.record.opaque_call import active, call_function, call_hook, call_leaf_module, whole_methods
from fxpipe.tracing.record.packing import PackingRecorder
from fxpipe.tracing.record.recorded_sizes import MEMORY, unwrap_sizes
from fxpipe.tracing.record.recorder import Recorder, RunningModule
from fxpipe.tracing.tensors import tensors_in
from fxpipe.utils.locks import ForkSafeLock
from fxpipe.utils.python_objects import NotKept

PATCH_TURN = ForkSafeLock()
_plain_length = builtins.len


def _length(value: Any) -> int:
    """`len` in a thread that records. Modules imported meanwhile may keep it: it refers to no recording."""
    recorder = active.recorder if isinstance(value, torch.Tensor) else None
    if recorder is not None and not recorder.paused and value.shape:
        return value.shape[0]  # type: ignore[no-any-return]
    return _plain_length(value)


@contextlib.contextmanager
def patch_for_recording(recorder: Recorder) -> Iterator[None]:
    """A block in which modules and autograd functions report to the recorder."""
    here = threading.get_ident()
    PATCH_TURN.acquire()
    outer, active.recorder = active.recorder, recorder
    recorder.replacements[torch.autograd.grad] = functools.partial(differentiate, recorder)
    module_call, module_setattr, make_tensor = nn.Module.__call__, nn.Module.__setattr__, torch.Tensor.__new__

    def is_elsewhere() -> bool:
        return threading.get_ident() != here or recorder.paused > 0

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_elsewhere():
            return module_call(module, *args, **kwargs)
        return _call_module(recorder, module, args, kwargs)

    def apply(plain: Apply, function: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is CheckpointFunction and threading.get_ident() == here and recorder.paused:
            raise recorder.refuse(
                "uses torch.utils.checkpoint(use_reentrant=True) in what is kept whole",
                "use checkpoint(..., use_reentrant=False), or none: the pipeline recomputes by itself",
                whole=False,
            )
        if is_elsewhere():
            if recorder.opaque is not None and threading.get_ident() == here:
                recorder.opaque.has_applied = True
            return plain(function, *args, **kwargs)
        if function is CheckpointFunction:
            return args[0](*args[2:])
        if function.__module__ == CheckpointFunction.__module__:  # keeps inputs for a recompute (torch 2.11; not 2.13)
            return recorder.run(plain, (function, *args), kwargs)[0]
        node_args, node_kwargs = recorder.node_argument(args), recorder.node_argument(kwargs)
        recorder.sizes.read_captured(function.forward, function.backward)
        values = unwrap_sizes((args, kwargs))
        result, random, _ = recorder.run_opaque(plain, (function, *values[0]), values[1])
        _add_application(recorder, plain, function, node_args, node_kwargs, result, random)
        return result

    def new_tensor(kind: type[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if kind is torch.Tensor and not (kwargs or is_elsewhere()):
            if len(args) == 1 and (type(args[0]) in (list, tuple) or takes_only_arrays(args, {})):
                return torch.tensor(args[0], dtype=torch.get_default_dtype())
            if all(isinstance(size, (int, tuple)) for size in args):
                return torch.empty(*args or (0,))
        return make_tensor(kind, *args, **kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        is_plain = name not in MODULE_DICT_KEYS and not isinstance(value, (nn.Module, nn.Parameter))
        if is_plain and threading.get_ident() == here:
            recorder.python_reads.is_read_first(module.__dict__, name, is_read=False)
        module_setattr(module, name, value)

    def getattribute(module: nn.Module, name: str) -> Any:
        # Also `training` of modules in plain lists, which `GraphKey` does not include.
        is_own = name not in MODULE_DICT_KEYS or (name == "training" and id(module) not in recorder.paths)
        is_asked = is_own and threading.get_ident() == here
        if is_asked:
            own = object.__getattribute__(module, "__dict__")  # class attributes: see `GraphKey`
            is_asked = recorder.python_reads.is_read_first(own, name, is_in_node=recorder.paused > 0)
        value = object.__getattribute__(module, name)
        if is_own and recorder.options.counters and threading.get_ident() == here:
            path = recorder.paths.get(id(module))
            if (full_name := f"{path}.{name}" if path else name) in recorder.options.counters:
                is_number = type(value) in (int, float)
                return NotKept(full_name, error=recorder.refuse_use) if is_number else value
        if is_asked and not recorder.paused and name in own:
            recorder.python_reads.add_attribute(own, name)
        return value

    def vmap(map_batch: Any, function: Any, *settings_and_args: Any, **kwargs: Any) -> Any:
        settings, args = settings_and_args[:4], settings_and_args[4:]  # in_dims, out_dims, randomness, chunk_size
        if is_elsewhere() or is_in_functorch_transform():
            return map_batch(function, *settings, *args, **kwargs)
        mapped = functools.partial(map_batch, function, *settings)
        return call_function(recorder, mapped, "vmap", args, kwargs, in_module=True, lifts=True)[0]

    def told_of(bytes_of: Callable[[torch.UntypedStorage], int]) -> Callable[[torch.UntypedStorage], int]:
        def method(storage: torch.UntypedStorage) -> int:
            sizes = recorder.sizes
            if not is_elsewhere() and id(storage) in sizes.storages:  # a storage that forward took from a tensor
                sizes.ask(*MEMORY)
                sizes.read_layout(sizes.storages[id(storage)][1], lambda t: t.untyped_storage().nbytes(), "storage")
            return bytes_of(storage)

        return method

    def noting_draws(set_state: Callable[..., None]) -> Callable[..., None]:
        def method(*args: Any, **kwargs: Any) -> None:  # the end of forward would not show what was drawn before
            if not is_elsewhere():
                recorder.random.note_python()
            set_state(*args, **kwargs)

        return method

    plain_variable = torch.autograd.Variable.__new__

    def variable(kind: Any, data: Any = (), requires_grad: bool = False, **options: Any) -> Any:
        if is_elsewhere() or not isinstance(data, torch.Tensor):
            return plain_variable(kind, data, requires_grad, **options)
        return data.detach().requires_grad_() if requires_grad else data.detach()

    plain_from_numpy = torch.from_numpy  # no function mode sees it

    def from_numpy(array: Any) -> torch.Tensor:
        tensor = plain_from_numpy(array)
        if not is_elsewhere():
            recorder.names.add(tensor)
        return tensor

    generators = [(random, "setstate"), *((m.random, "set_state") for m in [sys.modules.get("numpy")] if m is not None)]
    storage: Any = torch.UntypedStorage
    packing = PackingRecorder(recorder, is_elsewhere)
    draws = (
        python_draws(recorder.model, is_elsewhere, lambda number: number) if recorder.options.draws_for_python else []
    )
    patches: list[tuple[Any, str, Any]] = [
        *draws,
        *whole_methods(recorder),
        *((owner, name, noting_draws(getattr(owner, name))) for owner, name in generators),
        (builtins, "len", _length),
        (torch.Tensor, "__new__", staticmethod(new_tensor)),
        (torch, "from_numpy", from_numpy),
        *((storage, name, told_of(getattr(storage, name))) for name in ("nbytes", "__len__", "data_ptr")),
        (torch.autograd.Variable, "__new__", variable),
        (nn.Module, "__getattribute__", getattribute),
        (nn.Module, "__setattr__", set_attribute),
        (nn.Module, "__call__", call),
        *((kind, "forward", packing.forward(kind.forward)) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    ]
    try:
        with (
            replaced(patches),
            packing.replace_functions(),
            intercept_vmap(vmap),
            intercept_apply(apply, _HiddenApplications(recorder, lambda: not is_elsewhere())),
            recorder.python_reads.follow(is_elsewhere),
        ):
            yield
    finally:
        active.recorder = outer
        PATCH_TURN.release()


@contextlib.contextmanager
def replaced(patches: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """A block in which attributes (owner, name) have these values. Blocks can be nested."""
    own = [vars(owner).get(name) for owner, name, _ in patches]  # None: inherited
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), before in zip(patches, own, strict=True):
            if before is not None:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)


class _HiddenApplications:
    """Records an application that bypasses `apply`, from inside: when C++ calls forward."""

    def __init__(self, recorder: Recorder, is_watching: Callable[[], bool]):
        self._recorder, self.is_watching = recorder, is_watching

    # An alias of `Function.apply` needs it (unit/_torch/test_autograd_functions.py).
    def forward(
        self, function: FunctionClass, forward: Callable[..., Any], state: ThreadState, args: Any, kwargs: Any
    ) -> Any:
        recorder = self._recorder
        context, operands = (args[:1], args[1:]) if has_context(function) else ((), args)
        node_args, node_kwargs = recorder.node_argument(operands), recorder.node_argument(kwargs)
        result, random = recorder.run(forward, args, kwargs)
        # C++ would return an input that forward returns as another, unknown object, unless forward writes to it.
        # Before a context exists, that is unknown.
        kept = {id(t) for ctx in context for t in ctx.dirty_tensors or ()}
        returned = {id(t) for t in tensors_in((operands, kwargs)) if context} - kept
        with recorder.pause():
            result = pytree.tree_map_only(torch.Tensor, lambda t: t.view_as(t) if id(t) in returned else t, result)
        node = _add_application(recorder, _apply, function, node_args, node_kwargs, result, random)
        update_info(node, state=state)
        for tensor in tensors_in(result):  # C++ will set its grad_fn
            recorder.registry.expect_backward(tensor, function.__name__)
        return result

    def setup_context(self, setup: Callable[..., Any], args: Any) -> Any:
        with self._recorder.pause():
            return setup(*args)


def _apply(function: FunctionClass, *args: Any, **kwargs: Any) -> Any:  # one object: nodes are compared by it
    return function.apply(*args, **kwargs)


def _add_application(
    recorder: Recorder, apply: Apply, function: FunctionClass, args: Any, kwargs: Any, result: Any, random: bool
) -> fx.Node:
    """Adds a node for an `autograd.Function`: a plain function with its name, as the graph's code needs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(function, *args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = function.__module__
    node = recorder.add("call_function", call, args, kwargs)
    if random:
        update_info(node, rng=RandomDraws())
    recorder.keep(result, node)
    return node


def _call_module(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _run_module(recorder, module, args, kwargs)
    path, caller = recorder.paths.get(id(module), recorder.module), recorder.module
    recorder.ended_modules.append(path)
    if recorder.stack and path != caller:
        recorder.calls[caller] += 1
        if caller in recorder.listeners:
            recorder.listeners[caller](path, result)
    return result


def _run_module(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    path = recorder.paths.get(id(module), recorder.module)
    if path in recorder.whole and recorder.paths.get(id(module)):
        return call_leaf_module(recorder, module, path, args, kwargs)
    locates_draws = recorder.options.locates_draws
    if locates_draws:
        recorder.random.note_python()
    recorder.stack.append(RunningModule(path, module))
    try:
        forward = forward_of(module)
        if path in recorder.graph_breaks and recorder.paths.get(id(module)) == path:
            forward = functools.partial(call_with_graph_break, recorder, module, path)
        if module is recorder.model:
            return run_model(module, args, kwargs, forward)
        *_, pre_hooks, backward_hooks = hook_stores(module)
        if hooks := [*backward_hooks.values(), *pre_hooks.values()]:
            raise recorder.refuse(f"has the backward hook {hooks[0]!r}", "remove it (hook.remove())")

        def call_one(hook: Any, arguments: tuple[Any, ...]) -> Any:
            is_of_model = recorder.options.records_hooks and id(getattr(hook, "__self__", None)) in recorder.paths
            if is_computation_hook(hook) or is_of_model:
                return hook(module, *arguments)
            recorder.has_hooks = True
            return call_hook(recorder, module, hook, arguments)

        return run_with_hooks(module, forward, call_one, args, kwargs)
    except BaseException as error:
        recorder.note_error(path, error)
        raise
    finally:
        if locates_draws or module is recorder.model:
            recorder.random.note_python()
        recorder.stack.pop()


# Many libraries read a mask and take a faster path if it hides nothing, but not while compiling. In this block, both
# questions are answered yes in this thread: with `is_compiling` alone, some libraries call higher-order operators.


@contextlib.contextmanager
def compile_mode() -> Iterator[None]:
    here = threading.get_ident()

    def answer(original: Callable[[], bool]) -> bool:
        return threading.get_ident() == here or original()

    questions = {name: getattr(torch.compiler, name) for name in ("is_compiling", "is_exporting")}
    with replaced([(torch.compiler, name, functools.partial(answer, q)) for name, q in questions.items()]):
        yield
