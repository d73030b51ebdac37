"""Measures the seconds of every node of a graph, forward and backward.

The graph runs in rounds. In each round every value is detached from its node, so each node has a separate autograd
graph and can run backward alone, as one of a sequence (`backward_timing`):

        values, detached ──▶ node ──▶ its value ──▶ detached ──▶ next node
              ▲                           │
              └── autograd.grad (ones) ◀──┘

A tensor of the model is on the device only between its first and its last user. The first sample of a kind of nodes
warms up and is dropped. A kind has enough samples if they agree, or if the budget is spent. A node that writes to its
inputs gets copies while it is timed, and then runs again, without gradients, on the values.

Summing the gradients of a value with several users counts for all users but the last; summing a parameter's gradients
over micro-batches counts for the node that uses the parameter.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, TypeAlias

import torch
from torch import fx

from fxpipe._torch.thread_state import set_thread_state
from fxpipe.hardware import HARDWARE, Hardware, NodeWork
from fxpipe.profiling.backward_timing import BackwardQueue, Clock, PendingBackward
from fxpipe.profiling.flops import NO_OPERATIONS, NodeOperations
from fxpipe.profiling.formulas import planned_lengths, resize_inputs, size_point
from fxpipe.profiling.loss_cost import LossOf
from fxpipe.profiling.node_kinds import NodeValue, TensorSignature, distinct_tensors, kind_of_node, map_tensors_in
from fxpipe.profiling.profile_data import NodeCost
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.fake_tensors import fake_if_active
from fxpipe.tracing.interpreter import naming_node
from fxpipe.tracing.node_info import call_on_device, info, state_of
from fxpipe.tracing.tensors import bytes_in, storage_of, tensors_in
from fxpipe.tracing.traced import Traced, attribute_tensor, runs_python
from fxpipe.tracing.verify.effects import Effects
from fxpipe.utils import accelerator
from fxpipe.utils.polynomial import SizePoint
from fxpipe.utils.progress import progress

LONG_SECONDS = 0.005  # seconds of a node, one way, above which two samples are enough if they agree
# Above which noise and warm-up matter little, and one sample is enough: a plan needs no more than percents.
VERY_LONG_SECONDS = 0.05
# Tolerated error of the median of a kind's samples; one of these is enough.
MEDIAN_TOLERANCE = 0.02  # relative to the median
NEGLIGIBLE_SHARE = 0.005  # relative to the seconds of the graph, for all nodes of the kind together
UNIMPORTANT_SECONDS = 5e-6
MAX_SAMPLES = 15
KEPT_BYTES = 1 << 28  # limit of the values that stand for other values, and of sums of gradients
_TOTAL = object()  # marks these


@dataclass(frozen=True, slots=True)
class NodeTiming:
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float  # the part of backward that computes gradients of parameters
    bytes: int = 0  # the peak bytes of a loss
    ran: NodeOperations = NO_OPERATIONS  # the operations of a loss

    @classmethod
    def estimated(
        cls, work: NodeWork, hardware: Hardware, at: SizePoint, size: int = 0, ran: NodeOperations = NO_OPERATIONS
    ) -> NodeTiming:
        forward, backward, to_inputs = work.seconds(hardware, at.values)
        return cls(forward, backward, max(0.0, backward - to_inputs), size, ran)


@dataclass(slots=True)
class TimingSamples:
    """Seconds of one kind of node."""

    is_warm: bool  # keep the next sample
    needs_one: bool  # one sample is enough
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    gives_grad: tuple[bool, ...] = ()  # requires_grad by tensor of the value
    leaves_grad: tuple[bool, ...] = ()  # requires_grad afterwards by tensor that it writes to

    @property
    def forward_seconds(self) -> float:
        return median(self.forward)  # noise makes samples longer only

    @property
    def backward_seconds(self) -> float:
        return max(0.0, median(self.backward))

    def are_precise(self, negligible: float) -> bool:
        """Returns whether the medians are accurate enough, or to `negligible` seconds.

        The error of the median of n samples is about their interquartile range over the root of n.
        """
        for samples in (self.forward, self.backward):
            if len(samples) > 1:
                lower, middle, upper = quantiles(samples, n=4, method="inclusive")
                if (upper - lower) / len(samples) ** 0.5 > max(MEDIAN_TOLERANCE * middle, negligible):
                    return False
        return True


@dataclass(slots=True)
class TimingRounds:
    """The runs over the graph, and their samples."""

    traced: Traced
    effects: Effects
    leaves: Sequence[Any]
    clock: Clock
    repeats: int
    deadline: float
    step: Callable[[], object]  # called after each node
    device: torch.device | None = None  # device to run on; None: where model and inputs are
    keeps_outputs: bool = False  # for a loss
    known: Callable[[fx.Node], TimingSamples | None] = lambda node: None  # samples that need not be measured
    samples: dict[Hashable, TimingSamples] = field(default_factory=dict)
    kind: dict[fx.Node, Hashable] = field(default_factory=dict)  # the key of its samples
    values: dict[fx.Node, NodeValue] = field(default_factory=dict)  # alive in this round: leaves of autograd
    _written: set[int | None] = field(init=False)  # alias classes
    _exact: set[fx.Node] = field(default_factory=set)  # indices or masks are computed from these values
    _number: Counter[Hashable] = field(default_factory=Counter)  # number of nodes of a kind
    _back: BackwardQueue = field(init=False)
    _chosen: set[fx.Node] = field(default_factory=set)  # nodes to sample in this round
    _taken: Counter[fx.Node] = field(default_factory=Counter)  # number of samples
    _negligible: float = 0.0  # seconds, for all nodes of a kind
    _kept: dict[Hashable, torch.Tensor] = field(default_factory=dict)  # by kind: a value
    _room: int = KEPT_BYTES  # for more of these
    _of_model: dict[fx.Node, torch.Tensor] = field(default_factory=dict)  # inputs and tensors of the model, if held
    outputs: dict[fx.Node, NodeValue] = field(default_factory=dict)  # values of the model's output in the first round

    def __post_init__(self) -> None:
        self._back = BackwardQueue(self.clock, self.device)
        self._written = set().union(*self.effects.written_classes)
        # Python and sizes may depend on values, and a loss reads outputs.
        if self.keeps_outputs or any(runs_python(n) or info(n).is_data_dependent for n in self.traced.nodes):
            self._room = 0
        for node in reversed(self.effects.nodes):
            if node in self._exact or any(not one.dtype.is_floating_point for one in info(node).shapes):
                self._exact.update(node.all_input_nodes)

    def round(self) -> bool:
        """Runs another round if any node needs a sample; returns whether it did."""
        nodes = self.effects.nodes
        of_kind: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for node, kind in self.kind.items():
            of_kind[kind].append(node)
        self._chosen = set()  # of each kind those with the fewest samples
        for kind, its in of_kind.items():
            self._chosen.update(sorted(its, key=self._taken.__getitem__)[: self._missing(kind)])
        stop = max((p + 1 for p, n in enumerate(nodes) if n not in self.kind or n in self._chosen), default=0)
        needed = self._needed()
        try:
            for place, node in enumerate(nodes[:stop]):
                if node in needed:
                    with naming_node(node, "measuring"):
                        self._visit(node, place)
                self.effects.drop_unused(node, self.values)
                self.step()
            self._back.go()
            for n in self.traced.handed_out if self.keeps_outputs and not self.outputs else ():
                if isinstance(n, fx.Node):
                    self.outputs[n] = self.values[n] if n in self.values else self._held(n)
        finally:
            self.values.clear()
            self._back.clear()
        if stop:
            known = [samples for n in nodes if (samples := self.samples[self.kind[n]]).forward]
            self._negligible = NEGLIGIBLE_SHARE * sum(one.forward_seconds + one.backward_seconds for one in known)
        return stop > 0

    def measured(self, node: fx.Node, weight_share: float = 0.0) -> NodeTiming:
        """`weight_share`: of the node's backward, the part that computes gradients of parameters."""
        samples = self.samples[self.kind[node]]
        backward = samples.backward_seconds
        return NodeTiming(samples.forward_seconds, backward, backward * weight_share)

    def _missing(self, kind: Hashable) -> int:
        samples = self.samples[kind]
        count = len(samples.forward)
        if not count:
            return 1
        if count >= MAX_SAMPLES or samples.needs_one or time.perf_counter() >= self.deadline:
            return 0
        seconds = max(samples.forward_seconds, samples.backward_seconds)
        limit = 1 if seconds >= VERY_LONG_SECONDS else 2 if seconds >= LONG_SECONDS else MAX_SAMPLES
        repeats = min(self.repeats, limit)
        if count < repeats:
            return repeats - count
        negligible = max(self._negligible / self._number[kind], UNIMPORTANT_SECONDS)
        return 0 if samples.are_precise(negligible) else self.repeats

    def _needed(self) -> set[fx.Node]:
        """Returns the nodes to sample in this round, and those whose values these need."""
        nodes = self.effects.nodes
        if len(self.kind) < len(nodes) or self._written:
            return {*nodes}
        needed = {*self._chosen}
        for node in reversed(nodes):
            if node in needed and (node in self._chosen or node in self._exact or self.kind[node] not in self._kept):
                needed.update(node.all_input_nodes)
        return needed

    def _visit(self, node: fx.Node, place: int) -> None:
        for source in node.all_input_nodes:
            if source.op in ("placeholder", "get_attr") and source not in self.values:
                self.values[source] = self._held(source)
        written = [n for n in node.all_input_nodes if self.effects.alias[n] in self.effects.written_classes[place]]
        if written and self._back:
            self._keep_waiting(written)
        if node not in self.kind:
            _, *arguments = self._call(node)
            sums = tuple(self._is_summed(n, node) for n in node.all_input_nodes)
            kind = self.kind[node] = kind_of_node(self.traced, node, arguments, self.values, written), sums
            self._number[kind] += 1
            if kind not in self.samples:
                # A user's hook may have visible side effects: it runs no more often than necessary.
                is_seldom = info(node).is_hook
                known = self.known(node)
                self.samples[kind] = known or TimingSamples(is_seldom, is_seldom)
                self._chosen.update([] if known else [node])
        samples, result = self.samples[self.kind[node]], None
        if node in self._chosen and not (samples.forward and time.perf_counter() >= self.deadline):
            self._taken[node] += 1
            result = self._sample(node, written, samples)
        if result is None and not written and not self.keeps_outputs and all(n.op == "output" for n in node.users):
            return
        is_noise = node not in self._exact and self.effects.alias[node] not in self._written
        if result is None and is_noise and self.kind[node] in self._kept:
            result = (self._kept[self.kind[node]],)
        if result is None or written:
            function, args, kwargs = self._bound(node, self.values)
            # The Python of an opaque call runs as in training: it may register hooks on its results.
            without_graph = torch.no_grad() if written or info(node).opaque is None else contextlib.nullcontext()
            with set_thread_state(state_of(node)), without_graph:
                result = (function(*args, **kwargs),)
        (value,) = result
        grads = iter(samples.gives_grad)
        self.values[node] = map_tensors_in(lambda t: t.detach().requires_grad_(next(grads)), value)
        self._keep(node, self.values[node])
        self._spread_grad(written, samples.leaves_grad)

    def _keep(self, node: fx.Node, value: NodeValue) -> None:
        """Keeps a value for the nodes of the kind that are not timed, unless its numbers or its memory matter."""
        symbols = {symbol for shape in info(node).shapes for size in shape.shape for symbol in size.free_symbols}
        is_own = info(node).opaque is None and self.effects.alias[node] not in self._written
        is_noise = isinstance(value, torch.Tensor) and value.is_floating_point() and symbols <= {self.traced.batch}
        if is_own and is_noise and self.kind[node] not in self._kept and (size := bytes_in(value)) <= self._room:
            self._kept[self.kind[node]], self._room = value, self._room - size

    def _call(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if self.device is None:
            return node.target, node.args, node.kwargs
        return call_on_device(node, self.device)

    def _bound(
        self, node: fx.Node, values: Mapping[fx.Node, NodeValue]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns the function that a node calls on the device, and its arguments."""
        target, args, kwargs = self._call(node)
        if any(autocast.enabled for autocast in state_of(node).autocast):
            torch.clear_autocast_cache()  # a cached cast would take memory, and make the next run cheaper
        args, kwargs = fx.map_arg((args, kwargs), values.__getitem__)
        return (getattr(args[0], target), args[1:], kwargs) if node.op == "call_method" else (target, args, kwargs)

    def _keep_waiting(self, written: Sequence[fx.Node]) -> None:
        """Keeps values of pending backwards unchanged: replaces them by copies, or runs the backwards first."""
        classes = {self.effects.alias[n] for n in written}
        alive = [n for n in self.values if self.effects.alias[n] in classes]
        if len(alive) == len(classes):  # it has no views
            copies = {
                n: map_tensors_in(lambda t: t.detach().clone().requires_grad_(t.requires_grad), self.values[n])
                for n in alive
            }
            before, after = [self.values[n] for n in alive], list(copies.values())
            if list(map(TensorSignature.of, tensors_in(before))) == list(map(TensorSignature.of, tensors_in(after))):
                self.values.update(copies)
                return
        self._back.go()

    def _held(self, node: fx.Node) -> torch.Tensor:
        """Returns an input or a tensor of the model, on the device; a copy if a node will write to it."""
        if node in self._of_model:
            return self._of_model[node]
        is_input = node.op == "placeholder"
        tensor = (
            self.leaves[self.traced.place_of(node)] if is_input else fake_if_active(attribute_tensor(self.traced, node))
        )
        needs_grad = tensor.requires_grad and (is_input or isinstance(tensor, torch.nn.Parameter))
        held = tensor.detach()
        if self.device is not None and tensor.device != self.device:
            held = held.to(self.device)
        # An inference tensor cannot be saved for backward; its copy can.
        elif self.effects.alias[node] in self._written or tensor.is_inference():
            held = held.clone()
        else:
            self._of_model[node] = held
        return held.requires_grad_(needs_grad)

    def _spread_grad(self, written: Sequence[fx.Node], leaves_grad: Sequence[bool]) -> None:
        """Marks tensors as requiring grad after a write of a differentiable value, with their views."""
        tensors = [t for n in written for t in tensors_in(self.values[n])]
        storages = {storage_of(t) for t, grad in zip(tensors, leaves_grad, strict=True) if grad and not t.requires_grad}
        if not storages:
            return
        for tensor in tensors_in(list(self.values.values())):
            if storage_of(tensor) in storages and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.requires_grad_()

    def _sample(self, node: fx.Node, written: Sequence[fx.Node], samples: TimingSamples) -> tuple[NodeValue]:
        """Times a node's forward and queues its backward. Returns its value in a tuple, since it may be None."""
        starts = {id(t): (n, t) for n in node.all_input_nodes for t in tensors_in(self.values[n]) if t.requires_grad}
        values = self.values
        if written:
            with torch.enable_grad():  # autograd forbids writes to a leaf, but not to its clone
                values = {**values, **{n: map_tensors_in(torch.clone, values[n]) for n in written}}
        function, args, kwargs = self._bound(node, values)
        with set_thread_state(state_of(node)):
            seconds, value = self.clock.seconds(function, *args, **kwargs)
        changed = [t for n in written for t in tensors_in(values[n])]
        samples.gives_grad = tuple(t.requires_grad for t in tensors_in(value))
        samples.leaves_grad = tuple(t.requires_grad for t in changed)
        ends = distinct_tensors(t for t in (*tensors_in(value), *changed) if t.grad_fn is not None)
        is_kept, samples.is_warm = samples.is_warm or seconds > VERY_LONG_SECONDS, True
        if is_kept:
            samples.forward.append(seconds)
        sums = {n for n, _ in starts.values() if n.op == "get_attr" or (n not in written and self._is_summed(n, node))}
        totals = [self._total_like(t) if n in sums else None for n, t in starts.values()]
        for n, t in starts.values():
            if n.op == "get_attr" and n not in self._of_model and attribute_tensor(self.traced, n).device != t.device:
                self._back.parameter_bytes += 2 * bytes_in(t)  # with its gradient sum
        times = samples.backward if is_kept else []
        self._back.wait(PendingBackward(node, ends, [t for _, t in starts.values()], totals, times))
        return (value,)

    def _total_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor to add gradients to. On the CPU all of a kind share it, if there is room."""
        kind = _TOTAL, tensor.layout, TensorSignature.of(tensor)
        if kind in self._kept:
            return self._kept[kind]
        total = tensor.detach().clone()
        if tensor.device.type == "cpu" and (size := bytes_in(total)) <= self._room:
            self._kept[kind], self._room = total, self._room - size
        return total

    def _is_summed(self, source: fx.Node, node: fx.Node) -> bool:
        """Returns whether an argument of a node also gets a gradient from a later user."""
        effects = self.effects
        users = [u for u in source.users if effects.place.get(u, -1) > effects.place[node]]
        return effects.last[source] == len(effects.nodes) or any(map(effects.requires_grad.get, users))


def dependents_of(traced: Traced, sources: Iterable[fx.Node]) -> set[fx.Node]:
    dependents = {*sources}
    for node in traced.graph.nodes:
        if any(n in dependents for n in node.all_input_nodes):
            dependents.add(node)
    return dependents


# -- Rounds at several micro-batch sizes alternate, so that a slower machine affects all sizes equally ----------------


Timings: TypeAlias = dict[SizePoint, dict[fx.Node, NodeTiming]]  # by size; the loss is under the output node


def measure(
    traced: Traced,
    effects: Effects,
    leaves: Sequence[Any],
    costs: Mapping[fx.Node, NodeCost],
    device: torch.device,
    micro_batch: int,
    others: Iterable[int] = (),
    *,
    lengths: Iterable[Lengths] = (),
    repeats: int = 5,
    budget: float = 10.0,
    loss: LossOf | None = None,
) -> Timings:
    """Measures every working node on the first samples of flattened inputs. The model is not changed.

    Args:
        costs: the counts of the nodes: the share of gradients of parameters in backward follows from operations.
        device: device to run on; parameters and inputs on other devices are copied one by one.
        micro_batch: number of samples to run.
        others: further numbers of samples, the best first. The first at which the graph runs is measured as well.
        lengths: alternative dynamic sizes for the micro-batch, likewise.
        repeats: samples for each kind of node after the warm-up; more if they disagree.
        budget: seconds after which one sample for each kind is enough.
        loss: the loss of the outputs.
    """
    with (
        torch.inference_mode(False),
        accelerator.current_device(device),
        progress("profiling", None) as step,
        warnings.catch_warnings(),
    ):
        # Tensors are copied to a GPU one by one, so the weights of an RNN are not contiguous there.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        clock, deadline = Clock.on(device), time.perf_counter() + budget
        own = planned_lengths(traced, leaves)
        here = size_point(micro_batch, own)

        def rounds_of(size: int, lengths: Lengths, known: Callable[[fx.Node], TimingSamples | None]) -> TimingRounds:
            sample = resize_inputs(traced, leaves, size, lengths)
            keeps_outputs = loss is not None and lengths == own  # there is no target for other sizes
            return TimingRounds(traced, effects, sample, clock, repeats, deadline, step, device, keeps_outputs, known)

        first = rounds_of(micro_batch, own, lambda node: None)
        rounds = {here: first}
        first.round()

        def scaled(point: SizePoint, node: fx.Node) -> TimingSamples | None:
            """Estimates very long nodes at another size: the operations say how much longer they take there."""
            samples, work = first.samples[first.kind[node]], costs[node].work
            if work is None or not samples.forward or max(samples.forward + samples.backward) < VERY_LONG_SECONDS:
                return None
            at, before = (NodeTiming.estimated(work, HARDWARE["cpu"], one) for one in (point, here))
            ahead, back = (
                [median(times) * there / (then or 1.0)]
                for times, there, then in (
                    (samples.forward, at.forward_seconds, before.forward_seconds),
                    (samples.backward, at.backward_seconds, before.backward_seconds),
                )
            )
            return TimingSamples(True, True, ahead, back, samples.gives_grad, samples.leaves_grad)

        for elsewhere in (((size, own) for size in others), ((micro_batch, other) for other in lengths)):
            for size, other_lengths in elsewhere:
                other = rounds_of(size, other_lengths, functools.partial(scaled, size_point(size, other_lengths)))
                try:
                    other.round()
                except Exception:  # e.g. too few samples for batch norm, too many for the device
                    continue
                rounds[size_point(size, other_lengths)] = other
                break
        # A list, so that all take their turn in each round.
        while any([r.round() for r in rounds.values()]):
            pass
        outputs = {p: r.outputs for p, r in rounds.items() if p.others == here.others}
        of_loss = {}
        if loss is not None:
            for point, values in outputs.items():
                if (call := loss(values, point.b)) is not None:
                    of_loss[point] = NodeTiming(*call.seconds(clock, repeats), 0.0, *call.probe())
    works = {node: cost.work for node, cost in costs.items() if cost.work is not None}
    likes = {node: NodeTiming.estimated(work, HARDWARE["cpu"], here) for node, work in works.items()}
    shares = {node: like.weight_seconds / (like.backward_seconds or 1.0) for node, like in likes.items()}
    timings = {point: {n: one.measured(n, shares.get(n, 0.0)) for n in effects.nodes} for point, one in rounds.items()}
    for point, of_outputs in of_loss.items():
        timings[point][traced.graph.output_node()] = of_outputs
    return timings
