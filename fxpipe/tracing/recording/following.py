"""What a function mode does not see, followed while a model is recorded, in the recording thread only:

- calls of modules, for their paths; a module that is to be kept whole becomes one node there, and so does a hook on a
  module, which has to run in every step;
- `torch.vmap`, which becomes one node: under it torch functions are given batches that look like samples;
- `autograd.Function.apply`, which becomes one node that keeps its backward. `torch.utils.checkpoint` is called through,
  with its functions of that kind: recompute is the pipeline's own business;
- attributes of modules that forward reads (`dropout.p`): with others it is another graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch import apis
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.tracing.recording.hooks import is_computation, run_model, with_hooks
from fxpipe.tracing.recording.one_node import active, call_hook, call_transform
from fxpipe.tracing.recording.recorder import Recorder, Running
from fxpipe.tracing.recording.whole import call_whole
from fxpipe.tracing.snapshot import OWN_NAMES

_apis: Any = apis
PATCHING = threading.RLock()  # one recording at a time puts its patches in and takes them out


@contextlib.contextmanager
def followed(recorder: Recorder) -> Iterator[None]:
    """A block in which modules and autograd functions tell the recorder."""
    here = threading.get_ident()
    PATCHING.acquire()
    outer, active.recorder = active.recorder, recorder
    module_call = nn.Module.__call__
    function_apply = torch.autograd.Function.__dict__["apply"]

    def plain_apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # Bound as by `function.apply`; it is Python's classmethod up to torch 2.13, and one in C from 2.14 on.
        return function_apply.__get__(None, function)(*args, **kwargs)

    def is_elsewhere() -> bool:
        return threading.get_ident() != here or recorder.paused > 0

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_elsewhere():
            return module_call(module, *args, **kwargs)
        return _call(recorder, module, args, kwargs)

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction and threading.get_ident() == here and recorder.paused:
            raise recorder.refuse(
                "uses torch.utils.checkpoint(use_reentrant=True) in what is kept whole",
                "use checkpoint(..., use_reentrant=False), or none: the pipeline recomputes by itself",
                whole=False,
            )
        if is_elsewhere():
            return plain_apply(function, *args, **kwargs)
        if function is CheckpointFunction:
            return args[0](*args[2:])
        if function.__module__ == CheckpointFunction.__module__:  # keeps inputs for a recompute (torch 2.11; not 2.13)
            return recorder.run(plain_apply, (function, *args), kwargs)[0]
        node_args, node_kwargs = recorder.argument(args), recorder.argument(kwargs)
        result, random = recorder.run(plain_apply, (function, *args), kwargs)
        named = _named_function(function, plain_apply)
        node = recorder.add("call_function", named, node_args, node_kwargs)
        node.meta["random"] = random
        recorder.keep(result, node)
        return result

    def getattribute(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        # Of modules in plain lists `training` as well: `flags` does not know them.
        if (name not in OWN_NAMES or (name == "training" and id(module) not in recorder.paths)) and not is_elsewhere():
            own = object.__getattribute__(module, "__dict__")  # not what its class has: see `flags`
            if name in own:
                recorder.note_attribute(own, name)
        return value

    map_batch: Any = _apis.vmap_impl

    def vmap(function: Any, *settings_and_args: Any, **kwargs: Any) -> Any:
        settings, args = settings_and_args[:4], settings_and_args[4:]  # in_dims, out_dims, randomness, chunk_size
        if is_elsewhere() or torch._C._functorch.peek_interpreter_stack() is not None:
            return map_batch(function, *settings, *args, **kwargs)
        return call_transform(recorder, "vmap", functools.partial(map_batch, function, *settings), args, kwargs)

    _apis.vmap_impl = vmap
    nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]
    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]
        _apis.vmap_impl = map_batch
        active.recorder = outer
        PATCHING.release()


def _named_function(function: type[torch.autograd.Function], apply: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd.Function as a plain function with its name, for the code of the graph."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(function, *args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = function.__module__
    return call


def _call(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    path = recorder.paths.get(id(module), recorder.module)
    if path in recorder.whole and recorder.paths.get(id(module)):
        return call_whole(recorder, module, path, args, kwargs)
    recorder.note_dice()
    recorder.stack.append(Running.now(path, module))
    try:
        if module is recorder.model:
            return run_model(module, args, kwargs)
        _refuse_backward_hooks(recorder, module)

        def call_one(hook: Any, given: tuple[Any, ...]) -> Any:
            return hook(module, *given) if is_computation(hook) else call_hook(recorder, module, hook, given)

        return with_hooks(module, module.forward, call_one, args, kwargs)
    except BaseException:
        recorder.module_of_error = recorder.module_of_error or path
        raise
    finally:
        recorder.note_dice()
        recorder.stack.pop()


def _refuse_backward_hooks(recorder: Recorder, module: nn.Module) -> None:
    hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    if hooks:
        is_inner = module is not recorder.model
        raise recorder.refuse(
            f"has the backward hook {hooks[0]!r}",
            "remove it (hook.remove())" + ("" if is_inner else ", or put it on a module inside"),
            whole=is_inner,
        )
