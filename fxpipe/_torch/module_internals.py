"""The dicts of an `nn.Module`'s `__dict__` in which it keeps its tensors, children and hooks.

All of it is required, and has been the same from torch 2.11 to 2.14. `nn.Module` itself documents the calls that fill
these dicts, but none that tells what is in them as fast as a step needs, or in the order in which hooks run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.module_tracker import ModuleTracker

from fxpipe._torch.versions import require_attributes

MODULE_DICT_KEYS = frozenset(nn.Module().__dict__)  # what every module keeps in its `__dict__`
STORE_NAMES = ("_parameters", "_buffers", "_modules")  # its tensors and its children
HOOK_STORE_NAMES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOK_STORE_NAMES = (  # of hooks on all modules, in the module of nn.Module
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
COMPILED_CALL = "_compiled_call_impl"  # in its `__dict__`: what runs in place of it where `module.compile()` was called
CALL_NAMES = (  # attributes that belong to a call of the module itself
    *HOOK_STORE_NAMES,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    COMPILED_CALL,
)
GUARDS_MODULE = "_guards_fn"  # the end of the name of a module that export puts its checks into

require_attributes(
    nn.Module(),
    *STORE_NAMES,
    *CALL_NAMES,
)
require_attributes(torch_module, *GLOBAL_HOOK_STORE_NAMES)
_GLOBAL_HOOK_STORES = [getattr(torch_module, name) for name in GLOBAL_HOOK_STORE_NAMES]


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that stand in the module itself."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that stand in the module itself."""
    return module._modules


def tensor_stores(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts that a module may hold tensors in: parameters, buffers, plain attributes."""
    return module._parameters, module._buffers, module.__dict__


def reset_method_of(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the method with which a module initializes its parameters: torch's attention has it as a private one."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def with_metadata(entries: dict[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns entries of a `state_dict()` with its metadata, the versions of the modules that have made it."""
    result: OrderedDict[str, Any] = OrderedDict(entries)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:  # `load_state_dict` looks for it there
        result._metadata = metadata  # type: ignore[attr-defined]
    return result


def new_call_state() -> dict[str, Any]:
    """Returns what a new module has of `CALL_NAMES`: no hooks, and nothing compiled."""
    module = nn.Module()
    return {name: getattr(module, name) for name in CALL_NAMES}


def hook_stores(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks on a module by torch's numbers: forward pre-hooks, forward, backward pre-hooks, backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def forward_hooks_with_kwargs(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    """The forward hooks of a module: each with whether it takes keyword arguments."""
    for key, hook in list(module._forward_hooks.items()):
        yield hook, key in module._forward_hooks_with_kwargs


def forward_pre_hooks_with_kwargs(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    """The forward pre-hooks of a module: each with whether it takes and returns keyword arguments."""
    for key, hook in list(module._forward_pre_hooks.items()):
        yield hook, key in module._forward_pre_hooks_with_kwargs


def has_legacy_backward_hook(module: nn.Module) -> bool:
    """Returns True if the module has hooks by `register_backward_hook`."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def is_compiled_module(module: nn.Module) -> bool:
    """Returns True if the module is what `torch.compile` has made of another module."""
    return type(module).__module__ == "torch._dynamo.eval_frame"


def original_module(module: nn.Module) -> nn.Module:
    """A module; of a compiled one the module that it was made from."""
    return module._modules["_orig_mod"] or module if is_compiled_module(module) else module


# -- Flags and hooks, read in every step -----------------------------------------------------------------------------


def global_hooks() -> list[tuple[int, Any]]:
    """Returns the hooks on all modules with torch's numbers, but not of the tracker that names modules to profilers."""
    hooks = [item for store in _GLOBAL_HOOK_STORES if store for item in store.items()]
    return [item for item in hooks if type(getattr(item[1], "__self__", None)) is not ModuleTracker] if hooks else hooks


def module_flags(model: nn.Module) -> tuple[Any, ...]:
    """Returns the flags of each module of a model: its identity, its `training` flag, its hooks (by torch's numbers).

    And its attributes, parameters and buffers: forward may ask for them, and one set later hides that of the class.
    """
    flags: list[Any] = [number for number, _ in global_hooks()]
    for m in all_modules(model):
        # Most modules have few tensors of their own, and no hooks.
        parameters = _tensor_names(m._parameters) if m._parameters else ()
        buffers = _tensor_names(m._buffers) if m._buffers else ()
        flags.append((id(m), m.training, type(m), hash(tuple(m.__dict__)), parameters, buffers))
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            flags += (*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks, *m._backward_pre_hooks)
    return tuple(flags)


def _tensor_names(store: dict[str, Any]) -> tuple[str, ...]:
    return tuple([name for name, tensor in store.items() if tensor is not None])


def all_modules(model: nn.Module) -> Sequence[nn.Module]:
    """All modules of a model, each once.

    `model.modules()` takes thrice as long, since it hands each module through all that are above it. Where a class says
    by itself which modules it has, that is asked.
    """
    modules, seen = [model], {model}
    for module in modules:
        if module._modules:
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    modules.append(child)
    kinds: set[type[nn.Module]] = set(map(type, modules))
    usual = nn.Module.modules, nn.Module.named_modules
    return modules if all((kind.modules, kind.named_modules) == usual for kind in kinds) else list(model.modules())
