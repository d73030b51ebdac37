"""The key of a graph: all that is told of a step at a glance, and decides which Python a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError
from fxpipe.tracing.model_state import slots_of

# -- The key of a graph ----------------------------------------------------------------------------------------------


class TensorKind(NamedTuple):
    """A tensor among the inputs, besides its sizes."""

    dtype: torch.dtype
    dims: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class InputsKey:
    """The structure of inputs, and what their leaves are; None: no tensor."""

    spec: pytree.TreeSpec
    kinds: tuple[TensorKind | None, ...]
    same_as: tuple[int | None, ...]

    @classmethod
    def of(cls, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> InputsKey:
        kinds = tuple(_kind_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        return cls(spec, kinds, same_tensors(leaves))


def same_tensors(leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns by place of a leaf the first place of the same tensor; None if it is the first, or no tensor."""
    first: dict[int, int] = {}
    places = (first.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i for i, leaf in enumerate(leaves))
    return tuple(None if place == i else place for i, place in enumerate(places))


def _kind_of(tensor: torch.Tensor) -> TensorKind:
    return TensorKind(tensor.dtype, tensor.dim(), tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Inputs, flags of all modules, and the state of the caller."""

    inputs: InputsKey
    flags: tuple[Any, ...]
    state: ThreadState


# -- The tensors of a model that a graph reads: their shapes, dtypes and ties must stay for the graph to hold --------
#
# Values may change, and so may the objects: a graph finds them by name. Another shape or dtype is another graph. And
# where one tensor stood under two names, the graph reads it by one of them: these must stay one.


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """A tensor as it was when the model was traced."""

    store: dict[str, Any]  # of its module
    key: str
    shape: torch.Size
    dtype: torch.dtype
    others: tuple[tuple[dict[str, Any], str], ...]  # where it stood as well

    def holds(self) -> bool:
        now = self.store.get(self.key)
        return (
            isinstance(now, torch.Tensor)
            and now.shape == self.shape
            and now.dtype == self.dtype
            and all(store.get(key) is now for store, key in self.others)
        )


def tensors_match(attributes: Sequence[TensorGuard]) -> bool:
    """Returns whether they hold, and are still different tensors; a tie made later is another model."""
    apart = len({id(a.store.get(a.key)) for a in attributes}) == len(attributes)
    return apart and all(attribute.holds() for attribute in attributes)


def requires_grad_flags(model: nn.Module) -> tuple[bool, ...]:
    """Returns `requires_grad` of each parameter: another graph for a forward that reads it, no matter for any other."""
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
    """Returns the settings of torch for the whole process that forward may ask for."""
    return tuple([switch() for switch in _SWITCHES])


def tensor_guards_of(model: nn.Module, names: Iterable[str]) -> tuple[TensorGuard, ...]:
    """Returns a guard for each of these names that the model holds."""
    wanted = set(names)
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    slots = slots_of(model)
    for slot, tensor in slots.items():
        places.setdefault(id(tensor), []).append((slot.store(model), slot.key))
    return tuple(
        TensorGuard(
            slot.store(model),
            slot.key,
            tensor.shape,
            tensor.dtype,
            tuple((s, k) for s, k in places[id(tensor)] if s is not slot.store(model) or k != slot.key),
        )
        for slot, tensor in slots.items()
        if slot.name in wanted
    )


# -- Modules in training and in evaluation mode: a graph is that of one such mode, and so is a plan ------------------


def evaluating_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that are in evaluation mode; "" is the model."""
    return tuple(name for name, module in model.named_modules() if not module.training)


@contextlib.contextmanager
def in_mode(model: nn.Module, evaluating: Collection[str] | None) -> Iterator[None]:
    """A block in which just these modules are in evaluation mode; None: those that are.

    The flags alone are set: `train()` may be a module's own, and do more, or less.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        if evaluating is not None:
            for name, module in model.named_modules():
                module.training = name not in evaluating
        yield
    except Exception as error:
        is_ours = isinstance(error, ArgumentError)  # says what to do by itself
        if not is_ours and any(module.training != was for module, was in before):
            error.add_note(
                "fxpipe: forward ran in the mode (train or eval) that the plan was made in, which is not the model's "
                "mode now; call the pipe first in that mode, or give it example_args that forward takes in both"
            )
        raise
    finally:
        for module, was in before:
            module.training = was
