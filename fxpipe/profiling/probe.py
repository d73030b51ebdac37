"""Counts one node: its FLOPs and its temporary memory, forward and backward.

The node runs forward and backward on detached values under a dispatch mode, which counts the FLOPs of each operation,
and the bytes of new storages. On an accelerator the allocator's peak is used, which includes the workspaces of kernels;
this resets the peak that users read (`max_memory_allocated`).

    forward  ──▶  temporary: peak bytes, less the bytes that remain at the end (outputs, saved tensors)
    backward ──▶  temporary: peak bytes, less the gradients of its inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.dispatch_modes import TorchDispatchMode
from fxpipe._torch.error_messages import has_no_way_back
from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.storages import StorageNumbers, storages_of
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.profiling.flops import operation_flops
from fxpipe.profiling.node_kinds import as_leaf, distinct_tensors, map_tensors_in
from fxpipe.tracing.node_info import state_of
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import call_node
from fxpipe.utils import accelerator


@dataclass(frozen=True, slots=True)
class Probe:
    flops: int = 0
    backward_flops: int = 0
    temporary_bytes: int = 0
    backward_temporary_bytes: int = 0


def probe_node(node: fx.Node, written: Iterable[fx.Node], values: Mapping[fx.Node, Any]) -> Probe:
    """Runs a node forward and backward, on copies of the values that it writes to."""
    inputs = _detached_inputs({n: values[n] for n in node.all_input_nodes})
    written = tuple(written)
    tensors = [*tensors_in(list(inputs.values()))]
    device = next((t.device for t in tensors if accelerator.counts_memory(t.device)), None)
    if device is None or any(isinstance(t, FakeTensor) for t in tensors):
        return _probe_once(node, written, inputs, _CountingMode())
    _probe_once(node, written, inputs, _CountingMode())  # libraries allocate their workspaces at the first call
    return _probe_once(node, written, inputs, _AllocatorCountingMode(device))


def peak_bytes(call: Callable[[], tuple[torch.Tensor, list[torch.Tensor]]], known: Iterable[torch.Tensor]) -> int:
    """Counts the peak bytes of a loss and its backward, without tensors in `known`.

    `call` returns the loss, and the tensors that its gradient goes to.
    """
    counter = _CountingMode()
    with counter, torch.autograd.set_multithreading_enabled(False):
        counter.begin(known)
        loss, starts = call()
        gradients = torch.autograd.grad(loss, starts, allow_unused=True) if loss.requires_grad and starts else ()
    del gradients  # not earlier: they count
    return counter.most


def _probe_once(
    node: fx.Node, written: Iterable[fx.Node], inputs: Mapping[fx.Node, Any], counter: _CountingMode
) -> Probe:
    with torch.enable_grad():  # autograd forbids writes to a leaf, but not to its clone
        changed = {n: map_tensors_in(torch.clone, inputs[n]) for n in written}
    operands = {**inputs, **changed}
    starts = [t for t in tensors_in(list(inputs.values())) if t.requires_grad]
    with set_thread_state(state_of(node)), counter:
        counter.begin(tensors_in(list(operands.values())))
        value = call_node(node, operands.__getitem__)
        forward = counter.end()
    ends = distinct_tensors(t for t in tensors_in([value, list(changed.values())]) if t.grad_fn is not None)
    if not ends or not starts:
        return Probe(forward[0], 0, forward[1], 0)
    ones = [torch.ones_like(t) for t in ends]
    try:
        with counter, torch.autograd.set_multithreading_enabled(False):
            counter.begin((*tensors_in([value, ones, starts]),))
            gradients = torch.autograd.grad(ends, starts, ones, allow_unused=True)
            back = counter.end()
        del gradients  # not earlier: remaining tensors are not temporary
    except RuntimeError as error:
        if not has_no_way_back(error):
            raise
        back = 0, 0
    return Probe(forward[0], back[0], forward[1], back[1])


def _detached_inputs(values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Makes detached leaves on the same storages, one for each tensor."""
    own: dict[int, torch.Tensor] = {}

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in own:
            own[id(tensor)] = as_leaf(tensor)
        return own[id(tensor)]

    return {n: map_tensors_in(detach, value) for n, value in values.items()}


class _CountingMode(TorchDispatchMode):
    """Counts FLOPs, and bytes of new storages, between `begin` and `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(())

    def begin(self, known: Iterable[torch.Tensor]) -> None:
        self.arithmetic, self.most = 0, 0
        self.storages = StorageNumbers()
        self.known = {number for tensor in known for number in self.storages.numbers(tensor)}
        self.alive: dict[int, int] = {}  # number of a storage -> its bytes

    def end(self) -> tuple[int, int]:
        """Returns the FLOPs, and the peak bytes beyond the bytes that are alive now."""
        self._forget_gone()
        return self.arithmetic, self.most - sum(self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._forget_gone()
        result = func(*args, **kwargs)
        self.arithmetic += operation_flops(func, args, kwargs, result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                for storage in storages_of(tensor):
                    number = self.storages.number(storage)
                    if number not in self.known:
                        self.alive[number] = storage.nbytes()
        self.most = max(self.most, sum(self.alive.values()))
        return result

    def _forget_gone(self) -> None:
        for number in [n for n in self.alive if self.storages.is_gone(n)]:
            del self.alive[number]


class _AllocatorCountingMode(_CountingMode):
    """Counts peak bytes by the allocator of a device."""

    def __init__(self, device: torch.device):
        self.device = device
        super().__init__()

    def begin(self, known: Iterable[torch.Tensor]) -> None:
        super().begin(known)
        accelerator.reset_peak(self.device)
        self.start = accelerator.allocated_bytes(self.device)

    def end(self) -> tuple[int, int]:
        most = accelerator.peak_allocated_bytes(self.device) - self.start
        arithmetic, _ = super().end()
        unit = accelerator.allocation_unit(self.device)
        return arithmetic, max(0, most - sum(-(-n // unit) * unit for n in self.alive.values()))
