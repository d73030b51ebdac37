"""Tensors that torch requires on the CPU, such as the lengths of a packed sequence.

Stages move received tensors to their device. The first run of an opaque call finds arguments for such functions:

- an argument that reaches the function without being combined with other tensors stays on the CPU: no host sync;
- any other argument, or any while a model on a device is traced, is copied to the CPU, which waits for the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpipe._torch.functions import opname
from fxpipe.tracing.tensors import tensors_in
from fxpipe.utils.accelerator import accelerator_type

# By function: index and name of the argument that must be on the CPU if it is a tensor.
_HOST_PARAMETERS: Mapping[str, tuple[int, str]] = {
    "_pack_padded_sequence": (1, "lengths"),
    "_pad_packed_sequence": (1, "batch_sizes"),
    "tensor_split": (1, "tensor_indices_or_sections"),
}


def _host_argument(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the tensor that a function requires on the CPU; None if there is none."""
    parameter = _HOST_PARAMETERS.get(opname(function))
    if parameter is None:
        return None
    place, name = parameter
    value = args[place] if place < len(args) else kwargs.get(name)
    return value if isinstance(value, torch.Tensor) else None


class HostArguments:
    def __init__(self) -> None:
        self.places: frozenset[int] = frozenset()  # indices of arguments that stay on the CPU
        self._converts = False  # True if other tensors reach such a function

    @contextlib.contextmanager
    def finding(self, leaves: Sequence[Any]) -> Iterator[None]:
        """A block that runs the call on these leaves of its arguments and finds its host arguments."""
        finder = _Finder(leaves)
        with finder:
            yield
        self.places = frozenset(finder.reached - finder.mixed)
        self._converts = finder.has_other or not finder.reached <= self.places

    def on_host(self, leaves: Sequence[Any]) -> list[Any]:
        return [_to_host(leaf) if place in self.places else leaf for place, leaf in enumerate(leaves)]

    def converting(self, leaves: Sequence[Any]) -> AbstractContextManager[Any]:
        if self._converts and any(map(_is_on_device, leaves)):
            return HostArgumentConversion()
        return contextlib.nullcontext()


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


def _to_host(value: Any) -> Any:
    return value.cpu() if _is_on_device(value) else value


class _Finder(TorchFunctionMode):
    """Follows the arguments of a call to functions that require them on the CPU."""

    def __init__(self, leaves: Sequence[Any]):
        super().__init__()
        # By id: the tensor, and the indices of the arguments that it was computed from. Freed tensors are ignored.
        self._places: dict[int, tuple[frozenset[int], weakref.ref[torch.Tensor]]] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point():  # the functions take integers
                self._note(leaf, self._places_of(leaf) | {place})
        self.reached: set[int] = set()  # indices whose tensors reach such a function
        self.mixed: set[int] = set()  # indices whose tensors are combined with others
        self.has_other = False  # True if a tensor not computed from arguments reaches such a function

    def _note(self, tensor: torch.Tensor, places: frozenset[int]) -> None:
        self._places[id(tensor)] = places, weakref.ref(tensor)

    def _places_of(self, tensor: torch.Tensor) -> frozenset[int]:
        places, reference = self._places.get(id(tensor), (frozenset[int](), None))
        return places if reference is not None and reference() is tensor else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        host = _host_argument(func, args, kwargs)
        if host is not None:
            places = self._places_of(host)
            self.reached |= places
            self.has_other |= not places
        if _asks_for_device(func, args, kwargs):
            # Forward chose the device. If the tensor is already there, `to` returns it: a view tells the two apart.
            return result.view_as(result) if self._places_of(result) and result.layout is torch.strided else result
        sources = {self._places_of(t) for t in tensors_in((args, kwargs)) if t is not host}
        together = frozenset[int]().union(*sources)
        if len(sources) > 1 or len(together) > 1:
            self.mixed |= together
        for tensor in tensors_in(result) if together else ():
            self._note(tensor, together)
        return result


def _asks_for_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a function moves a tensor; `to(dtype)` does not."""
    if opname(function) != "to":
        return opname(function) in ("cpu", accelerator_type())
    asked = (value for value in (*args[1:], *kwargs.values()) if not isinstance(value, bool))
    return any(isinstance(value, (torch.device, str, int, torch.Tensor)) for value in asked)


class HostArgumentConversion(TorchFunctionMode):
    """A block in which functions get the arguments that they require on the CPU from there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        host = _host_argument(func, args, kwargs)
        if host is not None and _is_on_device(host):
            there = host.cpu()
            args = tuple(there if value is host else value for value in args)
            kwargs = {key: there if value is host else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
