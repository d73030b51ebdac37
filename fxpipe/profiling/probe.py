"""Counts one node: its FLOPs, its temporary memory and its operations, forward and backward.

A dispatch mode counts the FLOPs of each operation, and the bytes of new storages. On an accelerator the peak of the
allocator is used, with the workspaces of kernels; this resets the peak that users read (`max_memory_allocated`).
Temporary are the peak bytes less the bytes that remain at the end (outputs, saved tensors, gradients of its inputs).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.error_messages import has_no_way_back
from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.modes import TorchDispatchMode
from fxpipe._torch.tensor_data import StorageNumbers, storages_of
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.profiling.flops import NodeOperations, OperationCounts, bytes_moved, compute_dtype, operation_flops
from fxpipe.profiling.node_kinds import as_leaf, distinct_tensors, map_tensors_in
from fxpipe.tracing.node_info import state_of
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import call_node
from fxpipe.utils import accelerator


@dataclass(frozen=True, slots=True)
class Probe:
    flops: int
    backward_flops: int
    temporary_bytes: int
    backward_temporary_bytes: int
    operations: NodeOperations


def probe_node(
    node: fx.Node, written: Collection[fx.Node], values: Mapping[fx.Node, Any], fixed: Collection[fx.Node]
) -> Probe:
    """Runs a node forward and backward, on copies of the values that it writes to.

    `fixed`: nodes that do not depend on the inputs of the model, so that their gradients are of parameters.
    """
    own: dict[Hashable, torch.Tensor] = {}  # leaves, one for each tensor; a fake one may stand for several values

    def detach(tensor: torch.Tensor, n: fx.Node) -> torch.Tensor:
        key = (id(tensor), n if isinstance(tensor, FakeTensor) else None)
        if key not in own:
            own[key] = detached_alone(tensor)
        return own[key]

    inputs = {n: map_tensors_in(partial(detach, n=n), values[n]) for n in node.all_input_nodes}
    tensors = [*tensors_in(list(inputs.values()))]
    device = next((t.device for t in tensors if accelerator.counts_memory(t.device)), None)
    probe = _probe_once(node, written, inputs, OperationCounter())
    ran = probe.operations
    if any(t.requires_grad for n in inputs if n in fixed for t in tensors_in(inputs[n])):
        # The first backward has freed its graph.
        again = _probe_once(node, written, inputs, OperationCounter(), {*inputs} - {*fixed})
        ran = replace(ran, to_inputs=again.operations.backward)
    if device is not None and not any(isinstance(t, FakeTensor) for t in tensors):
        # Libraries allocate their workspaces at the first call.
        probe = _probe_once(node, written, inputs, OperationCounter(device))
    return replace(probe, operations=ran)


def _probe_once(
    node: fx.Node,
    written: Collection[fx.Node],
    inputs: Mapping[fx.Node, Any],
    counter: OperationCounter,
    to: Collection[fx.Node] | None = None,
) -> Probe:
    """`to`: the inputs to which backward goes. None: all."""
    with torch.enable_grad():  # autograd forbids writes to a leaf, but not to its clone
        operands = {**inputs, **{n: map_tensors_in(torch.clone, inputs[n]) for n in written}}
    with set_thread_state(state_of(node)), counter:
        counter.begin(tensors_in(list(operands.values())))
        value = call_node(node, operands.__getitem__)
        flops, size, forward = counter.end()
    changed = [operands[n] for n in written]
    ends = distinct_tensors(t for t in tensors_in([value, changed]) if t.grad_fn is not None)
    reached = [own for n, own in inputs.items() if to is None or n in to]
    starts = distinct_tensors(t for t in tensors_in(reached) if t.requires_grad)
    without_backward = Probe(flops, 0, size, 0, NodeOperations(forward))
    if not ends or not starts:
        return without_backward
    ones = [torch.ones_like(t) for t in ends]
    try:
        with counter, torch.autograd.set_multithreading_enabled(False):
            counter.begin(tensors_in([value, ones, starts]))
            gradients = torch.autograd.grad(ends, starts, ones, allow_unused=True)
            backward_flops, backward_size, backward = counter.end()
        del gradients  # not earlier: remaining tensors are not temporary
    except RuntimeError as error:
        if not has_no_way_back(error):
            raise
        return without_backward
    return Probe(flops, backward_flops, size, backward_size, NodeOperations(forward, backward, backward))


def detached_alone(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a leaf of autograd on the same memory or, for a fake tensor, on separate memory."""
    if type(tensor) is not FakeTensor or tensor.layout != torch.strided or tensor.constant is not None:
        return as_leaf(tensor)
    own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return own.requires_grad_(tensor.requires_grad)


class OperationCounter(TorchDispatchMode):
    """Counts FLOPs and bytes of new storages, by the allocator of `device` if given, and records the operations."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self.begin(())

    def begin(self, known: Iterable[torch.Tensor]) -> None:
        self.arithmetic, self.most = 0, 0
        self.storages = StorageNumbers()
        self.known = {number for tensor in known for number in self.storages.numbers(tensor)}
        self.alive: dict[int, int] = {}  # number of a storage -> its bytes
        self.recorded: list[OperationCounts] = []
        if self.device is not None:
            accelerator.reset_peak(self.device)
            self.start = accelerator.allocated_bytes(self.device)

    def end(self) -> tuple[int, int, tuple[OperationCounts, ...]]:
        """Returns the FLOPs, the peak bytes beyond the bytes that are alive now, and the operations."""
        most, unit = self.most, 1
        if self.device is not None:
            most = accelerator.peak_allocated_bytes(self.device) - self.start
            unit = accelerator.allocation_unit(self.device)
        self._forget_gone()
        return self.arithmetic, max(0, most - sum(-(-n // unit) * unit for n in self.alive.values())), self.take()

    def take(self) -> tuple[OperationCounts, ...]:
        recorded, self.recorded = self.recorded, []
        return tuple(recorded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._forget_gone()
        result = func(*args, **kwargs)
        flops = operation_flops(func, args, kwargs, result)
        self.arithmetic += flops
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                for storage in storages_of(tensor):
                    number = self.storages.number(storage)
                    if number not in self.known:
                        self.alive[number] = storage.nbytes()
        self.most = max(self.most, sum(self.alive.values()))
        # A view launches nothing; fake tensors often ask for their device.
        if func is not torch.ops.prim.device.default:
            moved = bytes_moved(func, args, kwargs, result)
            if moved:
                self.recorded.append((compute_dtype(func, args) if flops else "", flops, moved))
        return result

    def _forget_gone(self) -> None:
        for number in [n for n in self.alive if self.storages.is_gone(n)]:
            del self.alive[number]
