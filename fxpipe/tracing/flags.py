"""What decides which Python a model runs, asked in every step: other flags are another graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def flags(model: nn.Module) -> tuple[Any, ...]:
    """Of each module of a model: which it is, its `training` flag, its hooks (by torch's numbers).

    And which attributes, parameters and buffers it has: forward may ask, and one set later hides that of the class.
    """
    found: list[Any] = []
    for m in modules_of(model):
        # Most modules have few tensors of their own, and no hooks.
        parameters = _given(m._parameters) if m._parameters else ()
        buffers = _given(m._buffers) if m._buffers else ()
        found.append((id(m), m.training, type(m), hash(tuple(m.__dict__)), parameters, buffers))
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            found += (*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks, *m._backward_pre_hooks)
    return tuple(found)


def _given(store: dict[str, Any]) -> tuple[str, ...]:
    return tuple([name for name, tensor in store.items() if tensor is not None])


def modules_of(model: nn.Module) -> Sequence[nn.Module]:
    """All modules of a model, each once.

    `model.modules()` takes thrice as long, since it hands each module through all that are above it. Where a class says
    by itself which modules it has, that is asked.
    """
    found, seen = [model], {model}
    for module in found:
        if module._modules:
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    found.append(child)
    kinds: set[type[nn.Module]] = set(map(type, found))
    usual = nn.Module.modules, nn.Module.named_modules
    return found if all((kind.modules, kind.named_modules) == usual for kind in kinds) else list(model.modules())
