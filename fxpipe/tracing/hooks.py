"""Hooks on modules: which are computation, and what calls them.

Those of torch itself (weight_norm) and those by which transformers collects hidden states only compute: they are
recorded as if they stood in forward. All others are the user's and run in every step: on a module inside, for each
micro-batch, as a node of the graph; on the model itself, for the mini-batch, around the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_COMPUTATION = ("torch.nn.utils", "transformers.utils.output_capturing")
SET_BY_COMPUTATION = frozenset({"_output_capturing_hooks_installed"})  # attributes by which such hooks are known

CallHook = Callable[[Any, tuple[Any, ...]], Any]  # (hook, its arguments after the module) -> what it returns


def is_computation(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(_COMPUTATION)


def hooks_of(model: nn.Module) -> list[Any]:
    """The user's hooks on the model itself."""
    stores = (model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)
    return [hook for store in stores for hook in store.values() if not is_computation(hook)]


def with_hooks(
    module: nn.Module,
    forward: Callable[..., Any],
    call: CallHook,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What `nn.Module.__call__` does around `forward`, with `call` for each hook."""
    given: tuple[Any, ...]
    for key, hook in list(module._forward_pre_hooks.items()):
        with_kwargs = key in module._forward_pre_hooks_with_kwargs
        given = (args, kwargs) if with_kwargs else (args,)
        found = call(hook, given)
        if found is not None and with_kwargs:
            args, kwargs = found
        elif found is not None:
            args = found if isinstance(found, tuple) else (found,)
    result = forward(*args, **kwargs)
    for key, hook in list(module._forward_hooks.items()):
        given = (args, kwargs, result) if key in module._forward_hooks_with_kwargs else (args, result)
        found = call(hook, given)
        result = result if found is None else found
    return result


def run_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a model as a pipe does inside: without the user's hooks on the model itself."""

    def call(hook: Any, given: tuple[Any, ...]) -> Any:
        return hook(model, *given) if is_computation(hook) else None

    return with_hooks(model, model.forward, call, args, kwargs)
