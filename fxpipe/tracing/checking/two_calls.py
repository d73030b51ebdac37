"""Graph and model are compared as training calls them: outputs, gradients and what stays behind, over two calls.

An output can be right and the graph still be wrong. Export and symbolic tracing record what the forward of an
`autograd.Function` computes and forget its backward; what goes around torch's functions may do so in a recording. What
forward leaves in buffers and attributes is read by the next call, and what it leaves where nobody looks (an object, a
global) shows in the output of the next call and nowhere else. So on a few samples

    model   call ──▶ output, gradients, state ──▶ call on other samples ──▶ output, state
    graph   run  ──▶ output, gradients, state ──▶ run  on the same      ──▶ output, state

with the same random numbers, the backward from one random direction of the outputs. A parameter without a gradient is
another thing than one whose gradient is zero: an optimizer leaves the first alone, and decays the second.

Gradients are compared as soon as they are there and let go of: all of them would take as much memory as the model. Of
large ones only the sums along each dimension are kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.autograd import hooks_asleep
from fxpipe.errors import DecisionError, TraceError
from fxpipe.tracing.attributes import are_as_before
from fxpipe.tracing.checking.check import agree, is_same_graph, sample_that_holds, take
from fxpipe.tracing.checking.effects import run_drawing
from fxpipe.tracing.containers import storage_of
from fxpipe.tracing.evaluation import Values, evaluate, last_uses, leaf_copy, outputs_in, writable
from fxpipe.tracing.flags import flags
from fxpipe.tracing.recording.draws import Drawing, Draws
from fxpipe.tracing.recording.hooks import run_model
from fxpipe.tracing.snapshot import (
    dice,
    gradients_aside,
    held_in_containers,
    same_values,
    set_dice,
    set_tensor,
    slots_of,
    undone,
)
from fxpipe.tracing.traced import Traced, lookup
from fxpipe.trees import DiffersError, leaves_like

FEW = 2  # samples; a single one has shapes of its own
SMALL = 1 << 16  # numbers of a gradient that is kept as it is
FACTOR = 4 / 3  # by which gradients are scaled to see how they round; a power of two would change no bit


@dataclass(frozen=True, slots=True)
class _Gradient:
    """What is kept of a gradient."""

    scale: float  # its largest number
    sums: tuple[torch.Tensor, ...]  # along its first dimension, and along all others; a small one is kept as it is
    terms: int  # in the longest sum

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _Gradient:
        dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
        dtype = torch.promote_types(dense.dtype, torch.float32)
        scale = float(torch.linalg.vector_norm(dense, torch.inf, dtype=dtype)) if dense.numel() else 0.0
        if dense.numel() <= SMALL or dense.dim() < 2:
            return cls(scale, (dense.to(dtype, copy=True),), 1)
        rows = dense.flatten(1)
        return cls(scale, (rows.sum(0, dtype=dtype), rows.sum(1, dtype=dtype)), max(rows.shape))

    def differs(self, other: _Gradient, eps: float) -> bool:
        """By more than another order of summing may do, many times over; a wrong backward is further away."""
        tolerance = eps**0.5
        limit = tolerance * self.terms**0.5 * (self.scale if math.isfinite(self.scale) else 0.0)
        return not all(
            torch.allclose(own, its, rtol=tolerance, atol=limit, equal_nan=True)
            for own, its in zip(self.sums, other.sums, strict=True)
        )

    def distance(self, other: _Gradient, factor: float = 1.0) -> float:
        pairs = zip(self.sums, other.sums, strict=True)
        return max((float((own - its / factor).abs().max()) for own, its in pairs if own.numel()), default=0.0)


_Gradients = dict[str, _Gradient | None]


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call has made, and left behind."""

    outputs: list[Any]
    state: dict[str, torch.Tensor]  # by name: what the model holds that is no parameter
    gradients: _Gradients | None = None  # None: nobody has asked, or the model's own backward raises


@dataclass(frozen=True, slots=True)
class _Calls:
    first: _Call
    again: Sequence[Any] | None  # the samples of the second call; None: it would be another graph's
    second: _Call | None
    is_changed: bool  # has the first call left another state


def check_two_calls(traced: Traced, leaves: Sequence[Any], chunks: int = 1) -> None:
    """Compares gradients and state on the fewest samples that the graph holds for and the model runs on.

    Raises:
        TraceError: something differs; names it.
    """
    batch = traced.batch_of(leaves)
    parts = min(chunks, batch)
    sizes = {min(FEW, batch), batch // parts, -(-batch // parts)} | ({batch} if traced.recorded_on is None else set())
    seed = torch.default_generator.initial_seed() % 2**31
    for size in sorted(sizes, key=lambda size: (size < FEW, size)):
        if not is_same_graph(traced, size) or not all(read.holds(size) for read in traced.mini_batch_reads):
            continue
        sample = sample_that_holds(traced, leaves, size, batch, seed)
        if sample is None:
            continue
        start = size if size < batch else min(1, batch - 1)
        try:
            want = _of_model(traced, sample, take(traced, leaves, start, start + size), seed)
        except TraceError:
            raise
        except Exception:
            continue  # the model will say so itself when it meets such a batch
        _compare(traced, want, sample, seed)
        return


def _compare(traced: Traced, want: _Calls, sample: Sequence[Any], seed: int) -> None:
    with undone(traced.model), gradients_aside(traced.model):
        held = held_in_containers(traced.model)
        have = _call_graph(traced, sample, seed, held, is_trained=want.first.gradients is not None)
        _refuse_other_gradients(traced, want.first, have, sample, seed)
        _refuse_other_state(traced, want.first.state, have.state, "")
        if want.second is None or want.again is None:
            return
        if want.is_changed:
            try:
                have = _call_graph(traced, want.again, seed, held, is_trained=False)
            except DecisionError:
                return  # and so will such a micro-batch be
    remedy = "keep what forward remembers from call to call in buffers (register_buffer)"
    for place, (w, h) in enumerate(zip(want.second.outputs, have.outputs, strict=True)):
        if not agree(w, h, _tolerance(w)):
            raise TraceError(
                f"output {place} of the second of two calls in a row is not the model's in the traced graph; {remedy}"
            )
    _refuse_other_state(traced, want.second.state, have.state, " in the second of two calls in a row")


def _refuse_other_gradients(traced: Traced, want: _Call, have: _Call, sample: Sequence[Any], seed: int) -> None:
    if want.gradients is None or have.gradients is None:
        return
    eps = {name: torch.finfo(leaf.dtype).eps for name, leaf in _leaves(traced, sample, sample).items()}
    again: _Gradients | None = None
    for name, gradient in want.gradients.items():
        other = have.gradients[name]
        if gradient is None or other is None:
            if gradient is other:
                continue
        elif not gradient.differs(other, eps[name]):
            continue
        else:
            # What cancels out is nothing but rounding, and rounds in another way where torch takes another kernel.
            # It does so too in the model itself, from outputs' gradients that are a third larger.
            again = again or _scaled_gradients(traced, sample, seed)
            same = again[name]
            if same is not None and gradient.distance(other) <= 100 * gradient.distance(same, FACTOR):
                continue
        raise TraceError(f"the gradient of {name!r} by {_maker(traced)} is not the model's{_lost(traced)}")


def _maker(traced: Traced) -> str:
    return "the traced graph" if traced.tracer == "record" else f"the graph that {traced.tracer!r} made"


def _lost(traced: Traced) -> str:
    if traced.tracer == "record":
        return (
            ": forward does to gradients what no function of torch shows; keep the module around it whole "
            "(leaf_modules=[name or class])"
        )
    return (
        ": forward may use an autograd.Function with a backward of its own, hooks on tensors, or switch gradients off, "
        "which such a graph loses; leave it to recording (tracer='record')"
    )


def _refuse_other_state(
    traced: Traced, want: Mapping[str, torch.Tensor], have: Mapping[str, torch.Tensor], when: str
) -> None:
    for name, tensor in want.items():
        if name not in have or not agree(tensor, have[name], _tolerance(tensor)):
            leave = "" if traced.tracer == "record" else ", or leave it to recording (tracer='record')"
            raise TraceError(
                f"forward changes {name!r}, and {_maker(traced)} does not do the same{when}; keep what forward changes "
                f"in a buffer (register_buffer){leave}"
            )


def _tolerance(value: Any) -> float | None:
    is_rounded = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return torch.finfo(value.dtype).eps ** 0.5 if is_rounded else None


# -- the model -------------------------------------------------------------------------------------------------------


def _of_model(traced: Traced, sample: Sequence[Any], other: Sequence[Any], seed: int) -> _Calls:
    """Two calls in a row. A model that the first has left as it was is called again with the same samples."""
    with undone(traced.model) as snapshot, gradients_aside(traced.model):
        held = held_in_containers(traced.model)
        before = _state(traced, held)
        first = _call_model(traced, sample, seed, held, is_trained=traced.state.grad)
        is_changed = _differ(before, first.state)
        again = next((s for s in (other, sample) if _is_its_graph(traced, s)), None) if is_changed else sample
        second = None if again is None else _call_model(traced, again, seed, held)
    snapshot.refuse_changes()
    return _Calls(first, again, second, is_changed)


def _differ(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() != right.keys() or not all(same_values(left[name], right[name]) for name in left)


def _is_its_graph(traced: Traced, sample: Sequence[Any]) -> bool:
    """Would forward, with the model as it is, do on these samples what the graph does?"""
    return (
        flags(traced.model) == traced.flags
        and are_as_before(traced.attributes)
        and all(kept.is_as_before() for kept in traced.attributes_read)
        and (traced.guards is None or traced.guards.hold(traced, sample, traced.seed))
    )


def _call_model(
    traced: Traced,
    sample: Sequence[Any],
    seed: int,
    held: Mapping[str, torch.Tensor],
    is_trained: bool = False,
    factor: float = 1.0,
) -> _Call:
    inputs = list(map(leaf_copy, sample))
    args, kwargs = pytree.tree_unflatten(map(writable, inputs), traced.in_spec)
    with _seeded(seed), Drawing(Draws(traced.seed), traced.lots):
        result = run_model(traced.model, args, kwargs)
    try:
        outputs = leaves_like(result, traced.out_spec)
    except DiffersError as error:
        raise TraceError(
            f"the model's output has another structure than when it was recorded: {error}; return the same structure "
            "in every call"
        ) from error
    gradients = None
    if is_trained:
        try:
            gradients = _gradients(outputs, _leaves(traced, inputs, sample), factor)
        except Exception as error:
            if traced.tracer != "record":
                raise TraceError(
                    f"the gradients of the graph that {traced.tracer!r} made cannot be compared with the model's, "
                    f"since backward raises {type(error).__name__}: {error}; trace it in a block of torch.no_grad() "
                    "if it is not to be trained, or leave it to recording (tracer='record')"
                ) from error
    own = {storage_of(t) for t in (*slots_of(traced.model).values(), *held.values())}
    return _Call([_bare(x, own) for x in outputs], _state(traced, held), gradients)


def _scaled_gradients(traced: Traced, sample: Sequence[Any], seed: int) -> _Gradients:
    with undone(traced.model), gradients_aside(traced.model):
        found = _call_model(traced, sample, seed, {}, is_trained=True, factor=FACTOR).gradients
    assert found is not None
    return found


def _bare(value: Any, own: set[int]) -> Any:
    """A tensor without what it was made of; a copy, where its memory is the model's, which the next call may change."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if storage_of(value) in own else value.detach()


def _state(traced: Traced, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the model holds by name and is no parameter, and what is in these tensors in lists, tuples and dicts.

    Not what requires grad and no graph reads: it is made anew by each forward, as weight_norm does.
    """
    read = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    kept = {
        slot.name: tensor
        for slot, tensor in slots_of(traced.model).items()
        if slot.kind != "parameter" and not (tensor.requires_grad and slot.name not in read)
    }
    return {name: tensor.detach().clone() for name, tensor in (kept | dict(held)).items()}


# -- the graph -------------------------------------------------------------------------------------------------------


def _call_graph(
    traced: Traced, sample: Sequence[Any], seed: int, held: Mapping[str, torch.Tensor], is_trained: bool
) -> _Call:
    """Runs the graph, and writes into the model what a step would."""
    inputs = list(map(leaf_copy, sample))
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor of the model, what stands for it
    draws = Draws(traced.seed)

    def given(node: fx.Node) -> Any:
        return writable(inputs[traced.place_of(node)])

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = lookup(traced, node)
        if id(tensor) not in copies:
            copy = tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach().clone()
            copies[id(tensor)] = tensor, copy
        return copies[id(tensor)][1]

    values: Values = {}
    nodes = [*traced.graph.nodes]
    last = last_uses(nodes, [n for n in (*traced.outputs, *traced.assigned.values()) if isinstance(n, fx.Node)])
    with _seeded(seed):
        for node in evaluate(nodes, values, given, attribute, lambda n, known: run_drawing(n, known, draws)):
            for used in last.get(node, ()):
                del values[used]
    outputs = outputs_in(traced, values)
    gradients = None
    if is_trained:
        leaves = _leaves(traced, inputs, sample)
        stand_ins = {n: copies[id(leaf)][1] if id(leaf) in copies else leaf for n, leaf in leaves.items()}
        try:
            gradients = _gradients(outputs, stand_ins)
        except Exception as error:
            raise TraceError(
                f"backward through {_maker(traced)} raises, and through the model it does not: "
                f"{type(error).__name__}: {error}{_lost(traced)}"
            ) from error
    with torch.no_grad():
        for tensor, copy in copies.values():
            if not tensor.requires_grad and not same_values(tensor, copy):
                tensor.copy_(copy)
        for name, node in traced.assigned.items():
            set_tensor(traced.model, name, values[node].detach())
    return _Call([x.detach() if isinstance(x, torch.Tensor) else x for x in outputs], _state(traced, held), gradients)


# -- gradients -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A call that draws the numbers that every other one draws."""
    before = dice()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_dice(before)


def _leaves(traced: Traced, inputs: Sequence[Any], sample: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Where gradients end: tensors of the model and inputs, by name.

    `sample`: the inputs before forward. One that it has written a computed value to requires grad, and ends nothing.
    """
    found = {slot.name: t for slot, t in slots_of(traced.model).items() if t.requires_grad and t.is_leaf}
    first = dict(reversed([(id(tensor), name) for name, tensor in reversed(found.items())]))
    leaves = {name: tensor for name, tensor in found.items() if first[id(tensor)] == name}
    for leaf, value, before in zip(traced.leaves, inputs, sample, strict=True):
        if isinstance(before, torch.Tensor) and before.requires_grad:
            leaves[f"input {leaf.path}"] = value
    return leaves


def _backward_now() -> int:
    """Which run of backward calls a hook; always the same where torch does not tell."""
    tell = getattr(torch._C, "_current_graph_task_id", None)
    return int(tell()) if tell else 0


def _gradients(outputs: Sequence[Any], leaves: Mapping[str, torch.Tensor], factor: float = 1.0) -> _Gradients:
    """By name, for one direction of the outputs, `factor` times as long."""
    found: _Gradients = dict.fromkeys(leaves)
    ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not ends or not leaves:
        return found
    generator = torch.Generator().manual_seed(0)
    directions = [
        (factor * torch.randn(o.shape, generator=generator, dtype=torch.float64)).to(o.device, o.dtype) for o in ends
    ]

    outer: list[int] = []  # an autograd.Function may run backward in its own: those are no gradients of the outputs

    def begin(_: torch.Tensor) -> None:
        if not outer:
            outer.append(_backward_now())

    def hook(name: str) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def note(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None or _backward_now() not in outer:
                return None
            found[name] = _Gradient.of(gradient)
            return gradient.new_zeros(()).expand(gradient.shape) if gradient.layout == torch.strided else None

        return note

    with hooks_asleep([*leaves.values(), *(end for end in ends if end.is_leaf)]):
        for end in ends:
            end.register_hook(begin)
        for name, leaf in leaves.items():
            leaf.register_hook(hook(name))
        torch.autograd.grad(ends, list(leaves.values()), directions, allow_unused=True)
    return found
