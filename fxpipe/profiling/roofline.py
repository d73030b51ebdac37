"""Estimates the seconds of nodes on hardware that is not available.

An operation takes as long as its arithmetic, its memory traffic or its launch, whichever is longest (Williams,
Waterman and Patterson, Roofline: an insightful visual performance model, CACM 52(4), 2009; the launch is a third roof).
Arithmetic is counted by `torch.utils.flop_counter`, at the rate of the compute dtype, with autocast and TF32; traffic
is each tensor read or written, once. `Hardware` gives the achievable share of its peaks. Caches, and kernels that other
devices would choose, are not modelled.

The graph runs once for each size on fake tensors (`tracing.fake_tensors`), and each kind of node (equal calls with
equal gradients, `tracing.shapes.node_cache`) once more, forward and backward, while its operations are recorded. A
model that needs values runs on values if it has any.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.dispatch_modes import TorchDispatchMode
from fxpipe._torch.error_messages import has_no_way_back
from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.operators import schema_of
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.hardware import Hardware
from fxpipe.profiling.flops import NodeOperations, OperationCounts, operation_flops
from fxpipe.profiling.loss_cost import ExampleLoss, LossCall
from fxpipe.profiling.node_kinds import NodeValue, distinct_tensors, map_tensors_in
from fxpipe.profiling.node_timing import NodeTiming
from fxpipe.profiling.other_sizes import planned_lengths, resize_inputs
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.fake_tensors import fake_if_active, in_fake_mode, is_faked, with_fake_tensors
from fxpipe.tracing.interpreter import naming_node, run_node_without_grad
from fxpipe.tracing.model_state import preserve_rng
from fxpipe.tracing.node_info import state_of
from fxpipe.tracing.shapes.node_cache import ChangedInPlaceError, NodeCache
from fxpipe.tracing.tensors import bytes_in, storage_of, tensors_in
from fxpipe.tracing.traced import Traced, attribute_tensor, call_node
from fxpipe.tracing.verify.effects import Effects
from fxpipe.utils.progress import ProgressStep, progress

# These read no more of their first argument than the size of their result.
_GATHERS = frozenset("embedding gather index index_select take".split())
_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())


def estimate(
    traced: Traced,
    effects: Effects,
    leaves: Sequence[Any],
    samples: int,
    hardware: Hardware,
    loss: ExampleLoss | None = None,
    lengths: Lengths | None = None,
) -> dict[fx.Node, NodeTiming]:
    """Estimates every working node for this number of samples, on inputs like the flattened ones.

    The estimate of `loss` is under the output node. `lengths`: the dynamic sizes. Default: the sizes of the inputs.
    """
    if not is_faked():
        with contextlib.suppress(Exception), with_fake_tensors(traced.model, leaves, always=True) as fakes:
            resized = _resize_inputs(traced, fakes, samples, lengths)
            return _estimate_nodes(traced, effects, resized, samples, hardware, loss)
    return _estimate_nodes(traced, effects, _resize_inputs(traced, leaves, samples, lengths), samples, hardware, loss)


def _resize_inputs(traced: Traced, leaves: Sequence[Any], size: int, lengths: Lengths | None) -> list[Any]:
    """Resizes inputs to these numbers of samples and dynamic sizes, repeating samples."""
    with torch.no_grad():
        resized = resize_inputs(traced, leaves, size, planned_lengths(traced, leaves) if lengths is None else lengths)
        return [
            new.requires_grad_(old.requires_grad) if isinstance(old, torch.Tensor) else new
            for old, new in zip(leaves, resized, strict=True)
        ]


# -- a walk over the graph ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KindEstimate:
    """The estimate of one kind of node, and which of its results require grad."""

    estimate: NodeTiming
    gives_grad: tuple[bool, ...]  # requires_grad by tensor of the value
    leaves_grad: bool  # tensors that it writes to require grad afterwards


def _estimate_nodes(
    traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int, hardware: Hardware, loss: ExampleLoss | None
) -> dict[fx.Node, NodeTiming]:
    of_outputs = None if loss is None else functools.partial(loss.of, samples=samples)
    with (
        preserve_rng(),
        in_fake_mode(),
        torch.inference_mode(False),
        progress("estimating", len(effects.nodes)) as step,
    ):
        if is_faked():
            with contextlib.suppress(ChangedInPlaceError):
                return _EstimateRun(traced, effects, leaves, hardware, step, of_outputs, NodeCache()).run()
        return _EstimateRun(traced, effects, leaves, hardware, step, of_outputs, None).run()


@dataclass(slots=True)
class _EstimateRun:
    traced: Traced
    effects: Effects
    leaves: Sequence[Any]
    hardware: Hardware
    step: ProgressStep
    loss: Callable[[Mapping[fx.Node, Any]], LossCall] | None  # made from the values of the outputs
    cache: NodeCache | None  # None: each node is a separate kind
    values: dict[fx.Node, NodeValue] = field(default_factory=dict)  # without gradients
    grads: dict[fx.Node, tuple[bool, ...]] = field(default_factory=dict)  # requires_grad by tensor of a value
    fixed: set[fx.Node] = field(default_factory=set)  # independent of inputs: their gradients are of parameters
    known: dict[Hashable, _KindEstimate] = field(default_factory=dict)
    classes: dict[int | None, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))  # alias classes so far

    def run(self) -> dict[fx.Node, NodeTiming]:
        self._hold()
        timings = {}
        for place, node in enumerate(self.effects.nodes):
            with naming_node(node, "estimating"):
                timings[node] = self._visit(node, place)
            if self.cache is None:  # else there are few values, identified by id
                self.effects.drop_unused(node, self.values)
            self.step()
        if self.loss is not None:
            leaves = (*self.traced.outputs, *self.traced.pieces)
            outputs = {n: _detached_like(self.values[n], self.grads[n]) for n in leaves if n in self.values}
            timings[self.traced.graph.output_node()] = self._loss_timing(self.loss(outputs))
        return timings

    def _loss_timing(self, call: LossCall) -> NodeTiming:
        with Roofline(self.hardware) as clock:
            loss, starts = call()
            forward = clock.take()
            backward = clock.back([loss], starts) if loss.requires_grad else ()
        return self._measured(NodeOperations(forward, backward, backward), call.peak_bytes())

    def _hold(self) -> None:
        """Stores inputs and the model's tensors; copies if a node will write to them."""
        written = set().union(*self.effects.written_classes)
        places = {node: place for place, node in self.traced.placeholders.items()}
        for node in self.traced.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            tensor = (
                self.leaves[places[node]] if node in places else fake_if_active(attribute_tensor(self.traced, node))
            )
            self.grads[node] = (tensor.requires_grad and (node in places or isinstance(tensor, torch.nn.Parameter)),)
            if node not in places:
                self.fixed.add(node)
            is_copied = self.effects.alias[node] in written or tensor.is_inference()
            self.values[node] = tensor.detach().clone() if is_copied else tensor
            self.classes[self.effects.alias[node]].append(node)

    def _visit(self, node: fx.Node, place: int) -> NodeTiming:
        inputs = node.all_input_nodes
        written = [self.effects.alias[n] in self.effects.written_classes[place] for n in inputs]
        roles = [(self.grads[n], n in self.fixed, is_written) for n, is_written in zip(inputs, written, strict=True)]
        key = self.cache.key(node, self.values) if self.cache is not None else None
        kind = node if key is None else (key, tuple(roles))
        before = None if kind in self.known else self._own(node)
        value = self._value(node, key)
        if before is not None:
            changed = [n for n, is_written in zip(inputs, written, strict=True) if is_written]
            self.known[kind] = self._cost(node, before, changed)
        cost = self.known[kind]
        self.values[node], self.grads[node] = value, cost.gives_grad
        self.classes[self.effects.alias[node]].append(node)
        if all(n in self.fixed for n in inputs):
            self.fixed.add(node)
        if cost.leaves_grad:
            self._spread_grad(self.effects.written_classes[place])
        return cost.estimate

    def _value(self, node: fx.Node, key: Hashable | None) -> NodeValue:
        value = self.cache.known(key) if self.cache is not None else None
        if value is None:
            value = map_tensors_in(torch.Tensor.detach, run_node_without_grad(node, self.values))
            if self.cache is not None:
                self.cache.keep(node, key, value, self.values)
        return value

    def _spread_grad(self, classes: set[int]) -> None:
        """Marks tensors as requiring grad after a write of a differentiable value, with their views."""
        for node in (n for alias in classes for n in self.classes[alias] if n in self.values):
            self.grads[node] = tuple(t.is_floating_point() or t.is_complex() for t in _tensors_of(self.values[node]))

    # -- one kind ------------------------------------------------------------------------------------------------------

    def _own(self, node: fx.Node) -> dict[fx.Node, NodeValue]:
        """Returns the inputs of a node as new leaves of autograd."""
        return {n: _detached_like(self.values[n], self.grads[n]) for n in node.all_input_nodes}

    def _cost(self, node: fx.Node, own: dict[fx.Node, NodeValue], written: Sequence[fx.Node]) -> _KindEstimate:
        operands = dict(own)
        with torch.enable_grad():  # autograd forbids writes to a leaf, but not to its clone
            operands.update((n, map_tensors_in(torch.clone, own[n])) for n in written)
        with Roofline(self.hardware) as clock:
            with set_thread_state(state_of(node)):
                value = call_node(node, operands.__getitem__)
            forward = clock.take()
            changed = [t for n in written for t in _tensors_of(operands[n])]
            ends = distinct_tensors(t for t in (*tensors_in(value), *changed) if t.grad_fn is not None)
            starts = {n: [t for t in _tensors_of(v) if t.requires_grad] for n, v in own.items()}
            backward = clock.back(ends, distinct_tensors(t for ts in starts.values() for t in ts))
            others = distinct_tensors(t for n, ts in starts.items() if n not in self.fixed for t in ts)
            to_inputs: tuple[OperationCounts, ...] = ()
            if len(others) == sum(map(len, starts.values())):
                to_inputs = backward
            elif others:
                to_inputs = clock.back(ends, others)
        size = bytes_in(value)
        gives_grad = tuple(t.requires_grad for t in _tensors_of(value))
        ran = NodeOperations(forward, backward, to_inputs)
        return _KindEstimate(self._measured(ran, size), gives_grad, any(t.requires_grad for t in changed))

    def _measured(self, ran: NodeOperations, size: int) -> NodeTiming:
        forward, backward, to_inputs = map(self._seconds, (ran.forward, ran.backward, ran.to_inputs))
        return NodeTiming(forward, backward, max(0.0, backward - to_inputs), size, ran)

    def _seconds(self, operations: Sequence[OperationCounts]) -> float:
        return math.fsum(self.hardware.seconds(flops, dtype, moved) for dtype, flops, moved in operations)


def _detached_like(value: NodeValue, grads: Sequence[bool]) -> NodeValue:
    """Returns a detached copy of a value; fake tensors get separate memory, since one may represent several."""
    needs_grad = iter(grads)

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is FakeTensor and tensor.layout == torch.strided and tensor.constant is None:
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return tensor.detach().requires_grad_(next(needs_grad, False))

    return map_tensors_in(alone, value)


# -- one operation -----------------------------------------------------------------------------------------------------


class Roofline(TorchDispatchMode):
    """A mode that records each operation and sums their estimated `seconds`."""

    def __init__(self, hardware: Hardware):
        super().__init__()
        self.hardware = hardware
        self.seconds = 0.0
        self._noted: list[OperationCounts] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # a query, which fake tensors often make
            return result
        moved = bytes_moved(func, args, kwargs, result)
        if moved:  # else it is a view, which launches nothing
            arithmetic = operation_flops(func, args, kwargs, result)
            dtype = _compute_dtype(func, args) if arithmetic else ""
            self.seconds += self.hardware.seconds(arithmetic, dtype, moved)
            self._noted.append((dtype, arithmetic, moved))
        return result

    def take(self) -> tuple[OperationCounts, ...]:
        """Returns the operations since the last call."""
        noted, self._noted = self._noted, []
        return tuple(noted)

    def back(self, ends: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> tuple[OperationCounts, ...]:
        """Runs backward from `ends` to `starts`, and returns its operations."""
        if not ends or not starts:
            return ()
        ones = [torch.ones_like(t) for t in ends]
        self.take()
        try:
            torch.autograd.grad(ends, starts, ones, allow_unused=True, retain_graph=True)
        except RuntimeError as error:
            if not has_no_way_back(error):
                raise
            self.take()
        return self.take()


def _compute_dtype(func: Any, args: tuple[Any, ...]) -> str:
    """Returns the compute dtype of an operation, by its name; TF32 if torch would use it for float32 on a GPU."""
    dtype = next((t.dtype for t in _tensors_of(args) if t.is_floating_point() or t.is_complex()), torch.float32)
    if dtype is torch.float32:
        is_convolution = "conv" in func.overloadpacket.__name__
        backends: Any = torch.backends
        setting = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        return "tfloat32" if setting.fp32_precision == "tf32" else "float32"
    return str(dtype).removeprefix("torch.")


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views."""
    name = func.overloadpacket.__name__
    if name in _ALLOCATIONS:
        return 0
    read = {storage_of(t): t for t in _tensors_of((args, kwargs))}
    results = [t for t in _tensors_of(result) if storage_of(t) not in read]
    written = list(_written_arguments(func, args, kwargs))
    if not results and not written:
        return 0  # a view
    sizes = {storage: _tensor_bytes(t) for storage, t in read.items()}
    if name in _GATHERS:
        sizes[storage_of(args[0])] = sum(map(_tensor_bytes, results))
    return sum(sizes.values()) + sum(map(_tensor_bytes, (*results, *written)))


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
            yield from _tensors_of(value)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes in memory: an expanded tensor has only one copy of its values."""
    number = tensor.numel() * tensor.element_size()
    return min(number, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else number
