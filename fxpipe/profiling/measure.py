"""Seconds of every node, forward and backward apart, measured node by node on real values.

The graph is run in rounds. In each round every value is made as in the real run but cut off from what made it, so that
the autograd graph of a node is its own and can go back alone; and it is freed after its last user, so that no more is
held than in a run without gradients.

        values, detached ──▶ node ──▶ its value ──▶ detached ──▶ next node
              ▲                           │
              └── autograd.grad (ones) ◀──┘   timed apart; each sample has a fresh forward

Nodes of one *kind* (function, constants, thread state; shapes, strides, dtypes and requires_grad of their inputs) share
their samples and so have the same seconds: noise must not decide where a model of equal blocks is cut. The first sample
of a kind warms up and is dropped, the median of the others counts. A kind has enough after `repeats`, or once the
budget is spent and it has one; its nodes then only make their values. So twelve equal blocks are measured in little
more than one round, and the samples of a node without equals lie apart in time: a short disturbance misses most.

What a node writes to it gets as a copy while it is timed; then it runs once more, without gradients, on the values
themselves. The model is only read.

To call autograd takes longer than to go back through a small node, and a real backward calls it once for all of them.
So the time to go back through a single view is measured first and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.progress import progress
from fxpipe.thread_state import applied
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.recording.fake import usable
from fxpipe.tracing.sizing.alike import same_function
from fxpipe.tracing.traced import Traced, call, lookup

Value = Any  # of a node: a tensor, a number, or a nest of them


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of one node."""

    forward_seconds: float
    backward_seconds: float
    bytes: int  # of all tensors that it returned


@dataclass(frozen=True, slots=True)
class _Like:
    """What of a tensor decides how long a node works on it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int | str, ...]  # or the layout of a sparse one
    device: torch.device
    requires_grad: bool


@dataclass(slots=True)
class Clock:
    """Tells how long things take."""

    now: Callable[[], float]  # seconds; read when the device has done what it was given
    overhead: float = 0.0  # seconds that a call of autograd takes by itself

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        def now() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        clock = cls(now)
        one = torch.zeros((), device=device, requires_grad=True)
        with torch.enable_grad():
            found = [clock.backward_seconds([one.view(1)], [one]) for _ in range(20)]
        clock.overhead = median(found)
        return clock

    def backward_seconds(self, ends: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> float:
        """How long it takes to go back from `ends` to `starts`."""
        if not ends or not starts:
            return 0.0
        ones = [torch.ones_like(t) for t in ends]
        start = self.now()
        try:
            torch.autograd.grad(ends, starts, ones, allow_unused=True)
        except NotImplementedError:
            return 0.0  # a function without a derivative: no training step goes back through it
        return max(0.0, self.now() - start - self.overhead)


@dataclass(slots=True)
class _Samples:
    """Seconds of one kind of node."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    is_warm: bool = False
    gives_grad: tuple[bool, ...] = ()  # by tensor of its value: does it require grad
    leaves_grad: tuple[bool, ...] = ()  # by tensor that it writes to: does it require grad afterwards

    def add(self, forward: float, backward: float) -> None:
        if self.is_warm:
            self.forward.append(forward)
            self.backward.append(backward)
        self.is_warm = True


def measure(
    traced: Traced,
    effects: Effects,
    leaves: Sequence[Any],
    device: torch.device,
    *,
    repeats: int = 5,
    budget: float = 10.0,
) -> dict[fx.Node, Measured]:
    """Measures every working node on flattened inputs. The model and all random states stay as they are.

    Args:
        repeats: samples for each kind of node, besides the one that warms up.
        budget: seconds after which one sample for each kind is enough.
    """
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    most = len(effects.nodes) * (repeats + 1)
    with torch.random.fork_rng(devices), torch.inference_mode(False), progress("profiling", most) as step:
        clock = Clock.on(device)
        rounds = Rounds(traced, effects, leaves, clock, repeats, time.perf_counter() + budget, step)
        rounds.run()
    return {node: rounds.measured(node) for node in effects.nodes}


@dataclass(slots=True)
class Rounds:
    """The runs over the graph, and what they found."""

    traced: Traced
    effects: Effects
    leaves: Sequence[Any]
    clock: Clock
    repeats: int
    deadline: float
    step: Callable[[], object]
    warms_up: bool = True  # is the first sample of a kind unlike the others
    samples: dict[Hashable, _Samples] = field(default_factory=dict)
    kind: dict[fx.Node, Hashable] = field(default_factory=dict)  # the key of its samples
    bytes: dict[fx.Node, int] = field(default_factory=dict)
    values: dict[fx.Node, Value] = field(default_factory=dict)  # alive in this round: tensors are leaves of autograd

    def run(self) -> None:
        stop = len(self.effects.nodes)
        while stop:
            self._round(stop)
            stop = max((p + 1 for p, n in enumerate(self.effects.nodes) if self._is_wanted(self.kind[n])), default=0)
        self.values.clear()

    def measured(self, node: fx.Node) -> Measured:
        samples = self.samples[self.kind[node]]
        return Measured(median(samples.forward), median(samples.backward), self.bytes[node])

    def _is_wanted(self, kind: Hashable) -> bool:
        """Does this kind of node need another sample?"""
        found = len(self.samples[kind].forward)
        return found == 0 or (found < self.repeats and time.perf_counter() < self.deadline)

    # -- one round -----------------------------------------------------------------------------------------------------

    def _round(self, stop: int) -> None:
        """Runs the nodes at places 0 to `stop` - 1."""
        self.values.clear()
        self.values.update(self._held())
        for place, node in enumerate(self.effects.nodes[:stop]):
            try:
                self._visit(node, place)
            except Exception as error:
                error.add_note(f"fxpipe: while measuring {node.name} ({node.meta['source']})")
                raise
            for used in (*node.all_input_nodes, node):
                if self.effects.last[used] <= place:
                    self.values.pop(used, None)
            self.step()

    def _held(self) -> Iterator[tuple[fx.Node, Value]]:
        """Inputs and the model's tensors: copies of what a node will write to."""
        written = set().union(*self.effects.writes)
        places = {node: place for place, node in self.traced.placeholders.items()}
        for node in self.traced.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            tensor = self.leaves[places[node]] if node in places else usable(lookup(self.traced, node))
            needs_grad = tensor.requires_grad and (node in places or isinstance(tensor, torch.nn.Parameter))
            # An inference tensor cannot be saved for backward; its copy can.
            is_copied = self.effects.alias[node] in written or tensor.is_inference()
            held = tensor.detach().clone() if is_copied else tensor.detach()
            yield node, held.requires_grad_(needs_grad)

    def _visit(self, node: fx.Node, place: int) -> None:
        """Makes the value of a node, and takes a sample where one is wanted."""
        kind = self.kind.setdefault(node, _kind_of(node, self.values))
        samples = self.samples.setdefault(kind, _Samples(is_warm=not self.warms_up))
        written = [n for n in node.all_input_nodes if self.effects.alias[n] in self.effects.writes[place]]
        made = self._sample(node, written, samples) if self._is_wanted(kind) else None
        if made is None or written:
            with applied(node.meta["state"]), torch.no_grad():
                made = (call(node, self.values.__getitem__),)
        (value,) = made
        self.bytes.setdefault(node, sum(t.numel() * t.element_size() for t in tensors_in(value)))
        grads = iter(samples.gives_grad)
        self.values[node] = _mapped(lambda t: t.detach().requires_grad_(next(grads)), value)
        self._spread_grad(written, samples.leaves_grad)

    def _spread_grad(self, written: Sequence[fx.Node], leaves_grad: Sequence[bool]) -> None:
        """What a node has written something differentiable to requires grad from now on, and so do its views."""
        tensors = [t for n in written for t in tensors_in(self.values[n])]
        storages = {_storage(t) for t, grad in zip(tensors, leaves_grad, strict=True) if grad and not t.requires_grad}
        if not storages:
            return
        for tensor in tensors_in(list(self.values.values())):
            if _storage(tensor) in storages and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.requires_grad_()

    # -- one sample ----------------------------------------------------------------------------------------------------

    def _sample(self, node: fx.Node, written: Sequence[fx.Node], samples: _Samples) -> tuple[Value]:
        """Times a node. Returns its value, in a tuple since None is one too."""
        inputs = {n: self.values[n] for n in node.all_input_nodes}
        with torch.enable_grad():  # autograd lets nobody write to a leaf, but to its clone
            inputs.update((n, _mapped(torch.clone, self.values[n])) for n in written)
        state = node.meta["state"]
        if any(autocast.enabled for autocast in state.autocast):
            torch.clear_autocast_cache()  # a cast that it keeps would cost nothing the next time
        with applied(state):
            start = self.clock.now()
            value = call(node, inputs.__getitem__)
            forward = self.clock.now() - start
        changed = [t for n in written for t in tensors_in(inputs[n])]
        samples.gives_grad = tuple(t.requires_grad for t in tensors_in(value))
        samples.leaves_grad = tuple(t.requires_grad for t in changed)
        ends = _distinct(t for t in (*tensors_in(value), *changed) if t.grad_fn is not None)
        starts = _distinct(t for n in node.all_input_nodes for t in tensors_in(self.values[n]) if t.requires_grad)
        samples.add(forward, self.clock.backward_seconds(ends, starts))
        return (value,)


def _kind_of(node: fx.Node, values: dict[fx.Node, Value]) -> Hashable:
    """Nodes of the same kind take the same time."""
    args = fx.map_arg((node.args, node.kwargs), lambda n: _mapped(_like, values[n]))
    return node.op, same_function(node.target), repr(args), node.meta["state"]


def _like(tensor: torch.Tensor) -> _Like:
    stride = tensor.stride() if tensor.layout == torch.strided else (str(tensor.layout),)
    return _Like(tensor.dtype, tuple(tensor.shape), stride, tensor.device, tensor.requires_grad)


def _mapped(function: Callable[[torch.Tensor], Any], value: Value) -> Value:
    return pytree.tree_map_only(torch.Tensor, function, value)


def _distinct(tensors: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
