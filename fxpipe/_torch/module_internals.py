"""The dicts in which an `nn.Module` stores its tensors, children and hooks.

Required, and unchanged from torch 2.11 to 2.14. The public methods of `nn.Module` fill these dicts, but do not read
them fast enough for each step, nor in the order in which hooks run. Optional: `DistributedDataParallel` stores the
module whose forward runs, for torch's compiler. Without it, a step that computes gradients there, before the reducer
expects them, is not detected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.module_tracker import ModuleTracker

from fxpipe._torch.versions import optional_name, require_attributes

MODULE_DICT_KEYS = frozenset(nn.Module().__dict__)  # attributes of every module
STORE_NAMES = ("_parameters", "_buffers", "_modules")  # its tensors and its children
HOOK_STORE_NAMES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOK_STORE_NAMES = (  # hooks on all modules, in `torch.nn.modules.module`
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
COMPILED_CALL = "_compiled_call_impl"  # runs instead of the module after `module.compile()`
CALL_NAMES = (  # attributes that belong to a call of the module itself
    *HOOK_STORE_NAMES,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    COMPILED_CALL,
)

require_attributes(nn.Module(), *STORE_NAMES, *CALL_NAMES)
require_attributes(torch_module, *GLOBAL_HOOK_STORE_NAMES)
_knows_ddp_forward = optional_name("torch.nn.parallel", "DistributedDataParallel._inside_ddp_forward") is not None
_GLOBAL_HOOK_STORES = [getattr(torch_module, name) for name in GLOBAL_HOOK_STORE_NAMES]


def own_buffers(module: nn.Module) -> dict[str, Any]:
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def tensor_stores(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the dicts in which a module may hold tensors: parameters, buffers, plain attributes."""
    return module._parameters, module._buffers, module.__dict__


def reset_method_of(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the method that initializes a module's parameters, which is private in torch's attention."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def with_metadata(entries: dict[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns entries of a `state_dict()` with its metadata, the versions of its modules."""
    result: OrderedDict[str, Any] = OrderedDict(entries)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:  # `load_state_dict` looks for it there
        result._metadata = metadata  # type: ignore[attr-defined]
    return result


def new_call_state() -> dict[str, Any]:
    """Returns the attributes `CALL_NAMES` of a new module: no hooks, and not compiled."""
    module = nn.Module()
    return {name: getattr(module, name) for name in CALL_NAMES}


def hook_stores(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Returns the hooks on a module by id: forward pre-hooks, forward, backward pre-hooks, backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def forward_hooks_with_kwargs(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Yields the forward hooks of a module, each with True if it takes keyword arguments."""
    for key, hook in list(module._forward_hooks.items()):
        yield hook, key in module._forward_hooks_with_kwargs


def forward_pre_hooks_with_kwargs(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Yields the forward pre-hooks of a module, each with True if it takes and returns keyword arguments."""
    for key, hook in list(module._forward_pre_hooks.items()):
        yield hook, key in module._forward_pre_hooks_with_kwargs


def has_legacy_backward_hook(module: nn.Module) -> bool:
    """Returns True if the module has hooks by `register_backward_hook`."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def is_compiled_module(module: nn.Module) -> bool:
    return type(module).__module__ == "torch._dynamo.eval_frame"


def original_module(module: nn.Module) -> nn.Module:
    """Returns the module; for a compiled module the module that it was made from."""
    return module._modules["_orig_mod"] or module if is_compiled_module(module) else module


def is_in_data_parallel_forward() -> bool:
    """Returns True if forward of a `DistributedDataParallel` runs; False if unknown."""
    return _knows_ddp_forward and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


# -- Flags and hooks, read in every step -----------------------------------------------------------------------------


def global_hooks() -> list[tuple[int, Any]]:
    """Returns the hooks on all modules with their ids, except the hooks of `ModuleTracker`."""
    hooks = [item for store in _GLOBAL_HOOK_STORES if store for item in store.items()]
    return [item for item in hooks if type(getattr(item[1], "__self__", None)) is not ModuleTracker] if hooks else hooks


def module_flags(model: nn.Module) -> tuple[Any, ...]:
    """Returns the flags of each module of a model: id, `training`, class, names of attributes and tensors, hook ids."""
    flags: list[Any] = [number for number, _ in global_hooks()]
    for m in all_modules(model):
        parameters = _tensor_names(m._parameters) if m._parameters else ()
        buffers = _tensor_names(m._buffers) if m._buffers else ()
        flags.append((id(m), m.training, type(m), hash(tuple(m.__dict__)), parameters, buffers))
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            flags += (*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks, *m._backward_pre_hooks)
    return tuple(flags)


def _tensor_names(store: dict[str, Any]) -> tuple[str, ...]:
    return tuple([name for name, tensor in store.items() if tensor is not None])


def all_modules(model: nn.Module) -> Sequence[nn.Module]:
    """Returns all modules of a model, each once.

    `model.modules()` takes three times as long, since nested generators yield each module. It is called only if a class
    overrides `modules` or `named_modules`.
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
