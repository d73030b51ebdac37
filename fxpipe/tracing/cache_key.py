"""The key of a graph: the cheap properties of a step that decide which Python a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError
from fxpipe.tracing.model_state import Slot, slots_of
from fxpipe.utils.python_objects import NotKept


def inputs_key(spec: pytree.TreeSpec, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the structure of the inputs, the kind of each tensor without its sizes, and which are the same tensor."""
    kinds = tuple((x.dtype, x.dim(), x.requires_grad) if isinstance(x, torch.Tensor) else None for x in leaves)
    return spec, kinds, same_tensors(leaves)


def same_tensors(leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns for each leaf the first index of the same tensor; None if it is the first, or not a tensor."""
    first: dict[int, int] = {}
    places = (first.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i for i, leaf in enumerate(leaves))
    return tuple(None if place == i else place for i, place in enumerate(places))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Inputs, flags of all modules, and the thread state of the caller."""

    inputs: tuple[Any, ...]  # see `inputs_key`
    flags: tuple[Any, ...]
    state: ThreadState


# -- The tensors of a model that a graph reads -------------------------------------------------------------------------
#
# Values and objects may change: a graph finds tensors by name. Another shape or dtype needs another graph. If one
# tensor has two names, the graph reads it by one of them, so the names must stay tied.


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """A tensor as it was during tracing."""

    store: dict[str, Any]  # dict of its module
    key: str
    shape: torch.Size
    dtype: torch.dtype
    others: tuple[tuple[dict[str, Any], str], ...]  # other references to it

    def holds(self) -> bool:
        now = self.store.get(self.key)
        now = now.__wrapped__ if now.__class__ is NotKept else now  # while a loss function of a stream runs
        return (
            isinstance(now, torch.Tensor)
            and now.shape == self.shape
            and now.dtype == self.dtype
            and all(store.get(key) is now for store, key in self.others)
        )


def requires_grad_flags(model: nn.Module) -> tuple[bool, ...]:
    """Returns `requires_grad` of each parameter. Only a forward that reads it needs another graph for other flags."""
    return tuple(p.requires_grad for p in model.parameters())


_SWITCHES = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


def torch_switches() -> tuple[Any, ...]:
    """Returns the global settings of torch that forward may read."""
    return tuple([switch() for switch in _SWITCHES])


def tensor_guards_of(model: nn.Module, names: Iterable[str]) -> tuple[TensorGuard, ...]:
    wanted, slots, guards = set(names), slots_of(model), []
    places: dict[int, list[Slot]] = {}
    for slot, tensor in slots.items():
        places.setdefault(id(tensor), []).append(slot)
    for slot, tensor in slots.items():
        if slot.name in wanted:
            others = tuple((other.store(model), other.key) for other in places[id(tensor)] if other != slot)
            guards.append(TensorGuard(slot.store(model), slot.key, tensor.shape, tensor.dtype, others))
    return tuple(guards)


# -- training and evaluation mode: a graph, and a plan, belongs to one mode of all modules ---------------------------


def evaluating_modules(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the modules in evaluation mode; "" is the model."""
    return tuple(name for name, module in model.named_modules() if not module.training)


@contextlib.contextmanager
def in_mode(model: nn.Module, evaluating: Collection[str] | None) -> Iterator[None]:
    """A block in which exactly these modules are in evaluation mode; None: no change. `train()` is not called."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if evaluating is not None:
            for name, module in model.named_modules():
                module.training = name not in evaluating
        yield
    except Exception as error:
        is_other_mode = any(module.training != was for module, was in before)
        if is_other_mode and not isinstance(error, ArgumentError):  # which has its own remedy
            error.add_note(
                "fxpipe: forward ran in the mode (train or eval) that the plan was made in, which is not the model's "
                "mode now; call the pipe first in that mode, or give it example_args that forward takes in both"
            )
        raise
    finally:
        for module, was in before:
            module.training = was
