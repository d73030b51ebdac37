"""Hooks on modules: which are computation, and the code that calls them.

Hooks of torch itself (weight_norm), and hooks that collect hidden states in transformers, only compute: they are
recorded like lines of forward. All other hooks belong to the user and run in every step: on the model itself around the
whole pipeline, for the mini-batch, in the caller's thread; on an inner module for each micro-batch and each recompute,
in the thread of its stage, as a node of the graph, and while a graph is recorded, compared and measured. A module with
backward hooks, or with hooks that use its tensors, is opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from fxpipe._torch.module_internals import (
    forward_hooks_with_kwargs,
    forward_pre_hooks_with_kwargs,
    has_legacy_backward_hook,
    hook_stores,
    is_compiled_module,
    original_module,
)
from fxpipe.errors import StateError

_COMPUTATION_MODULES = ("torch.nn.utils", "transformers.utils.output_capturing")
COMPUTATION_ATTRIBUTES = frozenset({"_output_capturing_hooks_installed"})  # attributes that mark such hooks


def is_computation_hook(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(_COMPUTATION_MODULES)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns the uncompiled function of a module, without its hooks."""
    return original_module(module) if is_compiled_module(module) else module.forward


def _has_own_call(model: nn.Module) -> bool:
    """Returns whether the class of a model has a `__call__`. Raises `StateError` if the model then has user hooks."""
    is_own = type(model).__call__ is not nn.Module.__call__
    if is_own and (hooks := user_hooks_of(model)):
        raise StateError(
            f"the model has the hook {hooks[0]!r}, and its class a __call__ of its own, which is part of the pipeline: "
            "the hook would not see what it sees in the model; put it on a module inside"
        )
    return is_own


def user_hooks_of(model: nn.Module) -> list[Any]:
    return [hook for store in hook_stores(model) for hook in store.values() if not is_computation_hook(hook)]


def run_with_user_hooks(
    model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a model's user hooks around `run`, which runs the model for a mini-batch; `StateError` if it cannot."""
    _has_own_call(model)
    if has_legacy_backward_hook(model):
        raise StateError(
            "the model has a hook by register_backward_hook, which sees the gradients of its last function only; use "
            "register_full_backward_hook"
        )

    def call(hook: Any, arguments: tuple[Any, ...]) -> Any:
        return None if is_computation_hook(hook) else hook(model, *arguments)

    *_, pre_hooks, hooks = hook_stores(model)
    if not hooks and not pre_hooks:
        return run_with_hooks(model, run, call, args, kwargs)
    # torch's class handles backward hooks, as in `nn.Module.__call__`.
    watching = BackwardHook(model, list(hooks.values()), list(pre_hooks.values()))

    def watched(*args: Any, **kwargs: Any) -> Any:
        return run(*watching.setup_input_hook(args), **kwargs)

    return watching.setup_output_hook(run_with_hooks(model, watched, call, args, kwargs))


def run_with_hooks(
    module: nn.Module, forward: Any, call: Callable[[Any, Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs `forward` and the hooks around it as `nn.Module.__call__` does: `call(hook, arguments after the module)`."""
    for hook, with_kwargs in forward_pre_hooks_with_kwargs(module):
        replacement = call(hook, (args, kwargs) if with_kwargs else (args,))
        if replacement is not None and with_kwargs:
            args, kwargs = replacement
        elif replacement is not None:
            args = replacement if isinstance(replacement, tuple) else (replacement,)
    result = forward(*args, **kwargs)
    for hook, with_kwargs in forward_hooks_with_kwargs(module):
        replacement = call(hook, (args, kwargs, result) if with_kwargs else (args, result))
        result = result if replacement is None else replacement
    return result


def run_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> Any:
    """Calls a model, or `forward` instead of it, without the user's hooks on the model itself, as a pipeline does."""
    if forward is None and _has_own_call(model):
        return model(*args, **kwargs)

    def call(hook: Any, arguments: tuple[Any, ...]) -> Any:
        return hook(model, *arguments) if is_computation_hook(hook) else None

    return run_with_hooks(model, forward or forward_of(model), call, args, kwargs)
