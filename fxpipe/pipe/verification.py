"""`fxpipe.verify`: compares a pipe with the plain model on a batch of yours.

    report = fxpipe.verify(pipe, tokens, target=target, loss_fn=F.cross_entropy)
    print(report)
    assert report

The plain model runs twice, the second time with each parameter, also of the loss, each floating point input and the
gradients of module outputs moved by one unit of rounding. The change of its results shows the effect of rounding for
this model and these values. A pipe sums in another order: it may differ by that much, but not by more.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import leaves_below
from fxpipe._torch.error_messages import allocator_error
from fxpipe._torch.tensor_data import replace_data
from fxpipe.errors import ArgumentTypeError, StateError
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.pipeline_module import Pipeline, unwrap
from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.runtime.engine import scatter_target
from fxpipe.runtime.losses import check_reduction, checked_loss, refuse_inputs_by_name
from fxpipe.runtime.step_inputs import scatter
from fxpipe.tracing.forward_rng import DrawStream, is_draw_of_numbers, python_draws
from fxpipe.tracing.model_state import (
    model_on,
    preserve_state,
    python_rng_state,
    same_python_rng_state,
    seeded_python_rng,
    without_gradients,
)
from fxpipe.tracing.node_info import info, named_arguments
from fxpipe.tracing.record.patches import replaced
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import NORM_FUNCTIONS
from fxpipe.utils import accelerator
from fxpipe.utils.accelerator import draw_seed, mix_seed
from fxpipe.utils.batch_split import rows_of_inputs, samples_per_micro_batch
from fxpipe.utils.pytree import flatten, map_tensor_leaves
from fxpipe.utils.text_table import shorten_name, text_table
from fxpipe.utils.units import count_text, with_article

ROUNDINGS = 32  # allowed multiple of the effect of one unit of rounding in weights, inputs and gradients
MOVES = 6  # different roundings if one does not explain a difference: its effects on a single number may cancel out
MAX_SHOWN = 10


class Name(NamedTuple):
    """The name of a value in a step: an output, the loss, a gradient, a buffer or an input."""

    kind: str
    name: str


Values = dict[Name, Any]
# By path of a module and name of its method: the calls of other modules after which it is one random node.
OpaqueMethods = Mapping[tuple[str, str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference between a tensor in the pipe's step and in the plain model's step."""

    kind: str  # "output", "loss", "gradient", "buffer", "input"
    name: str
    size: float  # the largest absolute difference; inf if shapes or types differ, or values that have no distance
    allowed: float  # the largest difference that rounding explains
    where: str = ""  # the index of the largest difference, or the difference in words

    @property
    def is_rounding(self) -> bool:
        return self.size <= self.allowed

    def excess(self) -> float:
        return self.size / (self.allowed or 1e-300)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `fxpipe.verify`: true if all differences are rounding. `print` shows a table."""

    differences: tuple[Difference, ...]
    reference: str  # description of the step that the pipe was compared with

    def __bool__(self) -> bool:
        return all(difference.is_rounding for difference in self.differences)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that rounding does not explain, in descending order."""
        wrong = [difference for difference in self.differences if not difference.is_rounding]
        return tuple(sorted(wrong, key=Difference.excess, reverse=True))

    def __str__(self) -> str:
        kinds = dict.fromkeys(difference.kind for difference in self.differences)
        rows = []
        for kind in kinds:
            of_kind = [d for d in self.differences if d.kind == kind]
            worst = max(of_kind, key=Difference.excess)
            where = f"{shorten_name(worst.name)}{worst.where}" if worst.size else ""
            rows.append([kind, str(len(of_kind)), f"{worst.size:.1e}", f"{worst.allowed:.1e}", where])
        differs = "differs" if len(self.wrong) == 1 else "differ"
        verdict = "equal within rounding" if self else f"{count_text(len(self.wrong), 'tensor')} {differs}"
        texts = [
            f"the pipe and {self.reference}: {verdict}",
            text_table(rows, ["", "compared", "largest difference", "allowed", "where"], ["", "where"]),
        ]
        if self.wrong:
            cells = [
                [d.kind, shorten_name(d.name), f"{d.size:.1e}", f"{d.allowed:.1e}", d.where]
                for d in self.wrong[:MAX_SHOWN]
            ]
            texts.append(text_table(cells, ["", "name", "difference", "allowed", "where"], ["", "name", "where"]))
            if len(self.wrong) > MAX_SHOWN:
                texts.append(f"and {len(self.wrong) - MAX_SHOWN} more: report.wrong has them all")
        return "\n\n".join(texts)


def verify(
    pipe: Any,
    *args: Any,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    reduction: str = "mean",
    **kwargs: Any,
) -> Verification:
    """Compares a pipe with the plain model on a batch: outputs, loss, all gradients and all buffers by name.

        report = fxpipe.verify(pipe, tokens, target=target, loss_fn=F.cross_entropy)
        print(report)
        assert report

    Run it before a long training, on a batch of your own data. With `loss_fn` the pipe runs `forward_backward`;
    without, it is called, and runs the backward of a sum that gives each number of the outputs its own weight. Under
    `torch.no_grad()` only outputs and buffers are compared. Parameters, gradients, buffers and random generators are
    restored.

    The reference is the plain model on the whole mini-batch, on the first device of the pipe, or on the CPU if it does
    not fit there. If forward draws random numbers, changes buffers, or normalizes over the batch, micro-batches differ
    by design: then the reference is the plain model on the same micro-batches with the same random numbers, and
    `pipe.eval()` compares the whole mini-batch.

    Args:
        pipe: a pipe of one process.
        args, kwargs: the model's inputs, as for `pipe`. They are not written to.
        target, loss_fn, reduction: as for `forward_backward`.

    Returns:
        A report that is true if all differences are rounding, and prints as a table.

    Raises:
        ArgumentTypeError: `pipe` is not a pipe of one process.
        StateError: forward draws random numbers that cannot be reproduced.
        FxpipeError: the pipe refuses the batch, as it would in training.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentTypeError(
            f"pipe is {with_article(pipe)}; expected what fxpipe.pipeline(model, devices) returns for one process"
        )
    inside, model = pipe._fxpipe, unwrap(pipe)
    refuse_inputs_by_name(model.forward, target, loss_fn, reduction)
    check_reduction(reduction)
    loss_fn = loss_fn if torch.is_grad_enabled() else None
    with inside.engine.running():
        given_inputs = inside.find([ModelCall(args, kwargs, ())], in_one=loss_fn is not None)
    bound, leaves, batch = given_inputs.bound, given_inputs.leaves, given_inputs.batch
    traced = next(graph.traced for graph in inside.graphs if graph.bound is bound)
    calls, shares = [ModelCall(args, kwargs, () if target is None else (target,))], [1.0]
    count = inside.settings.micro_batches(batch)
    reference = f"the plain model on the mini-batch of {count_text(batch, 'sample')}"
    if count > 1 and (reason := _why_micro_batches_differ(traced, bound)):
        reference = f"the plain model over the same {count} micro-batches, since {reason}"
        if not torch.is_grad_enabled():
            raise StateError(f"{reason}: under no_grad nothing is compared over micro-batches; verify with gradients")
        if reduction == "batch":
            raise StateError(
                f"{reason}: micro-batches have no loss of all samples (reduction='batch') to compare; verify in "
                "evaluation: pipe.eval()"
            )
        calls = _micro_batches(traced, leaves, batch, count, calls[0].target)
        shares = [size / batch for size in samples_per_micro_batch(batch, count)]
    dtypes = {shape.dtype for node in traced.graph.nodes for shape in info(node).shapes}
    step = _Step(
        model,
        loss_fn,
        reduction,
        shares,
        unit=max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0),
        input_names=tuple(leaf.path for leaf in traced.leaves),
        opaque=opaque_methods(traced),
        traced=traced,
    )
    try:
        want, *moved = step.of_plain_model(calls, bound.devices[0], 1)
        differences = compare(want, have := step.of_pipe(pipe, calls), moved)
        if any(one.allowed < one.size < math.inf for one in differences):
            want, *moved = step.of_plain_model(calls, bound.devices[0], MOVES)
            differences = compare(want, have, moved)
    finally:
        for leaf, gradient in step.loss_leaves.values():
            leaf.grad = gradient
    return Verification(differences, reference)


def opaque_methods(traced: Traced) -> OpaqueMethods:
    calls = [call for node in traced.graph.nodes if (call := info(node).opaque) is not None]
    return {(call.module, call.method): call.calls_before or () for call in calls if call.module is not None}


def _why_micro_batches_differ(traced: Traced, bound: BoundProgram) -> str:
    """Returns the reason why micro-batches differ from the mini-batch by design; empty if they do not."""
    for node in traced.nodes:
        if info(node).is_random and info(node).is_graph_break:
            raise StateError(
                f"forward goes on as Python from {info(node).source} and draws random numbers there, which cannot be "
                "drawn again; verify the pipe in evaluation: pipe.eval()"
            )
        if info(node).is_random:
            return f"forward draws random numbers at {info(node).source}"
        if node.target in NORM_FUNCTIONS and named_arguments(node).get("training"):
            return f"batch norm normalizes each micro-batch at {info(node).source}"
    repeated = frozenset[str]().union(*(stage.repeated for stage in bound.program.stages))
    changed = next((name for name in bound.program.changes if name not in repeated), None)
    return "" if changed is None else f"forward changes {changed!r}"


def _micro_batches(
    traced: Traced, leaves: Sequence[Any], batch: int, count: int, target: tuple[Any, ...]
) -> list[ModelCall]:
    rows = rows_of_inputs(traced.in_dims)
    targets = scatter_target(target, batch, count, [torch.device("cpu")], rows) if target else [()] * count
    inputs = (pytree.tree_unflatten(part, traced.in_spec) for part in scatter(leaves, traced.in_dims, count))
    return [ModelCall(args, kwargs, own) for (args, kwargs), own in zip(inputs, targets, strict=True)]


@dataclass(slots=True)
class _Step:
    """A step of the pipe or of the plain model, and the state to restore after it."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    reduction: str
    shares: Sequence[float]  # by micro-batch
    unit: float  # unit of rounding: the largest eps of the dtypes in the graph
    input_names: tuple[str, ...]
    opaque: OpaqueMethods
    traced: Traced
    with_gradients: set[str] = field(default_factory=set)  # inputs that require grad before forward, which may ask too
    # The leaves that loss_fn uses, and their earlier gradients.
    loss_leaves: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)

    def _begin(self, calls: Sequence[ModelCall], device: torch.device | None) -> list[ModelCall]:
        """Copies inputs, which a step may write to and which get gradients; clears gradients of `loss_leaves`."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().to(device or tensor.device, copy=True)
            return copied.requires_grad_(tensor.requires_grad)

        for leaf, _ in self.loss_leaves.values():
            leaf.grad = None
        self.with_gradients = {name for name, value in self._inputs(calls).items() if value.requires_grad}
        return [ModelCall(*map_tensor_leaves(copy, (call.args, call.kwargs, call.target))) for call in calls]

    def of_pipe(self, pipe: Pipeline, calls: Sequence[ModelCall]) -> Values:
        with preserve_state(self.model), without_gradients(self.model):
            calls = self._begin(calls, None)
            first = calls[0]
            if len(calls) > 1:
                function, reduction = (self.loss_fn, self.reduction) if self.loss_fn else (weighted_sum, "sum")
                parts = [(call.args, call.kwargs, next(iter(call.target), None)) for call in calls]
                loss, outputs = pipe.forward_backward(
                    micro_batches=parts, loss_fn=function, reduction=reduction, return_outputs=True
                )
            elif self.loss_fn is not None:
                loss, output = pipe.forward_backward(
                    *first.args, target=next(iter(first.target), None), loss_fn=self.loss_fn, reduction=self.reduction,
                    return_outputs=True, **first.kwargs,
                )  # fmt: skip
                outputs = [output]
            else:
                outputs = [pipe(*first.args, **first.kwargs)]
                loss = weighted_sum(outputs[0])
                if loss.requires_grad:
                    loss.backward()
            return self._values(outputs, loss, calls)

    def of_plain_model(self, calls: Sequence[ModelCall], device: torch.device, moves: int) -> list[Values]:
        """Returns the values of a step of the plain model, without and with moved weights, inputs and gradients."""
        try:
            return [self._of_plain_model(calls, device, move) for move in range(moves + 1)]
        except RuntimeError as error:
            if device.type == "cpu" or allocator_error(error) is None:
                raise
        return self.of_plain_model(calls, torch.device("cpu"), moves)

    def _of_plain_model(self, calls: Sequence[ModelCall], device: torch.device, move: int) -> Values:
        model = self.model
        with preserve_state(model), without_gradients(model), model_on(model, device):
            calls = self._begin(calls, device)
            inputs = self._inputs(calls)
            seed, outputs, losses, divisor = draw_seed(), [], [], None
            with ExitStack() as stack:
                if move:
                    of_loss = [leaf for leaf, _ in self.loss_leaves.values()]
                    floats = [tensor for tensor in inputs.values() if not _are_counts(tensor)]
                    stack.enter_context(
                        _moved_by_rounding([*model.parameters(), *floats, *of_loss], self.unit, move - 1)
                    )
                for i, call in enumerate(calls):
                    draws = SeededDraws(mix_seed(seed, i), device, DrawStream(seed), self.traced)
                    in_node = partial(getattr, draws, "is_inside")
                    options = self.traced.recording_options
                    python = python_draws(model, in_node, torch.Tensor.item) if options.draws_for_python else []
                    with draws, replaced(python), draws.as_one_node(model, self.opaque):
                        output = model(*call.args, **call.kwargs)
                    loss, weight = weighted_sum(output), None
                    if self.loss_fn is not None:
                        loss, weight = checked_loss(self.loss_fn(output, *call.target), "the plain model")
                        divisor = weight if divisor is None else divisor + weight
                        loss = loss * (self.shares[i] if self.reduction == "mean" and weight is None else 1.0)
                    if loss.requires_grad:
                        self._note_loss_leaves(loss, output)
                        loss.backward()
                    outputs.append(output)
                    losses.append(loss.detach())
                values = self._values(outputs, torch.stack(losses).sum(), calls)
        if divisor is None:
            return values
        return {
            n: v / float(divisor) if n.kind in ("loss", "gradient") and v is not None else v for n, v in values.items()
        }

    def _note_loss_leaves(self, loss: torch.Tensor, output: Any) -> None:
        tensors = [leaf for _, leaf in named_leaves(output) if isinstance(leaf, torch.Tensor)]
        of_model = {id(leaf) for tensor in tensors for leaf in leaves_below(tensor)}
        for leaf in leaves_below(loss) if self.loss_fn is not None else ():
            if id(leaf) not in of_model and id(leaf) not in self.loss_leaves:
                self.loss_leaves[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def _values(self, outputs: Sequence[Any], loss: torch.Tensor, calls: Sequence[ModelCall]) -> Values:
        values: Values = {}
        for i, output in enumerate(outputs):
            part = f"micro-batch {i}" if len(outputs) > 1 else ""
            values |= {Name("output", f"{part}{path}"): leaf for path, leaf in named_leaves(output)}
        if self.loss_fn is not None:
            values[Name("loss", "")] = loss
        inputs = self._inputs(calls)
        leaves: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        leaves |= {f"input {name}": value for name, value in inputs.items() if name in self.with_gradients}
        leaves |= {f"parameter {k} of loss_fn": leaf for k, (leaf, _) in enumerate(self.loss_leaves.values())}
        if torch.is_grad_enabled():
            values |= {Name("gradient", name): leaf.grad for name, leaf in leaves.items()}
        values |= {Name("buffer", name): buffer for name, buffer in self.model.named_buffers()}
        values |= {Name("input", name): value for name, value in inputs.items()}
        return {n: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}

    def _inputs(self, calls: Sequence[ModelCall]) -> dict[str, torch.Tensor]:
        inputs: dict[str, torch.Tensor] = {}
        for i, call in enumerate(calls):
            part = f" of micro-batch {i}" if len(calls) > 1 else ""
            leaves = zip(self.input_names, flatten((call.args, call.kwargs))[0], strict=True)
            inputs |= {f"{name}{part}": leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        return inputs


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of any object with their paths, including dataclasses and caches that torch does not know."""
    if isinstance(value, Mapping):
        items: list[tuple[str, Any]] = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"[{k}]", item) for k, item in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, nn.Module, type)) and not callable(value):
        items = [(f".{key}", item) for key, item in vars(value).items()]
    else:
        yield path, value
        return
    for key, item in items:
        yield from named_leaves(item, path + key)


def weighted_sum(output: Any) -> torch.Tensor:
    """Returns a loss in which each number of the outputs has its own weight."""
    total = torch.zeros((), requires_grad=False)
    for _, leaf in named_leaves(output):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.requires_grad:
            numbers = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            dense = numbers.to_dense() if numbers.layout != torch.strided else numbers
            weights = torch.cos(torch.arange(dense.numel(), device=dense.device, dtype=torch.float32))
            total = total.to(dense.device) + (dense.float() * weights.view(dense.shape)).sum()
    return total


class SeededDraws(TorchFunctionMode):
    """Seeds each random function of the plain model as a pipe does in a micro-batch."""

    def __init__(self, seed: int, device: torch.device, stream: DrawStream, traced: Traced):
        super().__init__()
        self.seed, self.ordinal, self.is_inside = seed, 0, False
        self.stream, self.draws_from_stream = stream, iter(traced.draws_from_stream)
        # A number that nodes use decides nothing: each micro-batch draws another.
        self.decides = iter([not node.users for node in traced.graph.nodes if info(node).is_scalar_draw])
        devices = dict.fromkeys((torch.device("cpu"), device))
        self.generators = [accelerator.default_generator(device) for device in devices]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_inside:
            return func(*args, **(kwargs or {}))
        kwargs, before = kwargs or {}, self.ordinal
        with self.one_node():
            result = func(*args, **kwargs)
        if self.ordinal > before and is_draw_of_numbers(args, kwargs, result) and next(self.draws_from_stream, False):
            number = self.stream.take(lambda: func(*args, **kwargs))
            return number if next(self.decides, True) else result
        return result

    @contextmanager
    def one_node(self, python_rng: bool = False) -> Iterator[None]:
        """A block that counts as one random node."""
        seed = mix_seed(self.seed, self.ordinal)
        with ExitStack() as stack:
            stack.enter_context(accelerator.restore_generators(self.generators))
            if python_rng:
                stack.enter_context(seeded_python_rng(seed))
            torch.manual_seed(seed)
            of_python = python_rng_state() if python_rng else None
            seeded, self.is_inside = [g.get_state() for g in self.generators], True
            try:
                yield
            finally:
                self.is_inside = False
                is_same = all(map(torch.equal, seeded, [g.get_state() for g in self.generators]))
                if of_python is not None:
                    is_same &= same_python_rng_state(of_python, python_rng_state())
                self.ordinal += not is_same

    @contextmanager
    def as_one_node(self, model: nn.Module, opaque: OpaqueMethods) -> Iterator[None]:
        """A block in which what these methods run after their calls of the named modules is one random node."""

        def call(
            module: nn.Module, names: Sequence[str], forward: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            awaited = list(names)
            with ExitStack() as hooks, ExitStack() as node:

                def end_of(name: str) -> None:
                    if awaited and awaited[0] == name:
                        awaited.pop(0)
                        if not awaited:
                            node.enter_context(self.one_node(python_rng=True))

                for name in {*names}:
                    hook = module.get_submodule(name).register_forward_hook(lambda *_, name=name: end_of(name))
                    hooks.callback(hook.remove)
                if not awaited:
                    node.enter_context(self.one_node(python_rng=True))
                return forward(*args, **kwargs)

        places = [(model.get_submodule(path), method) for path, method in opaque]
        before = [vars(module).get(method) for module, method in places]
        for (module, method), names in zip(places, opaque.values(), strict=True):
            setattr(module, method, partial(call, module, names, getattr(module, method)))
        try:
            yield
        finally:
            for (module, method), own in zip(places, before, strict=True):
                delattr(module, method) if own is None else setattr(module, method, own)


def _are_counts(tensor: torch.Tensor) -> bool:
    """Returns whether all numbers are integers: their likelihood may be defined for integers only."""
    return tensor.is_floating_point() and torch.equal(tensor, tensor.round())


@contextmanager
def _moved_by_rounding(tensors: Sequence[torch.Tensor], unit: float, seed: int) -> Iterator[None]:
    """A block that moves numbers of these tensors and of gradients of module outputs by one unit of rounding."""
    # The gradient of a bias is a sum, which may cancel: its rounding errors are the errors of its terms. The noise is
    # added to modules of the model and of the loss that this thread calls; each call has its own errors.
    generator = torch.Generator().manual_seed(seed)
    before = [(t, t.data) for t in tensors if t.is_floating_point() or t.is_complex()]
    thread, calls = threading.get_ident(), itertools.count(1 + 1000 * seed)

    def move(call: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or gradient.layout != torch.strided:  # None: of a function whose backward returns None
            return None
        numbers = torch.arange(call, call + gradient.numel(), device=gradient.device, dtype=torch.float32)
        noise = torch.cos(numbers * numbers).view(gradient.shape)  # no random numbers, which vmap forbids
        return (gradient * (1 + unit * noise)).to(gradient.dtype)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != thread:
            return
        for _, leaf in named_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(partial(move, next(calls)))

    handle = register_module_forward_hook(hook)
    try:
        for tensor, data in before:
            noise = torch.rand(data.shape, generator=generator).to(data.device) * 2 - 1
            replace_data(tensor, (data * (1 + unit * noise)).to(data.dtype))
        yield
    finally:
        handle.remove()
        for tensor, data in before:
            replace_data(tensor, data)


def compare(want: Values, have: Values, moved: Sequence[Values]) -> tuple[Difference, ...]:
    """Compares two steps by name. `moved`: the plain model's values if its inputs and weights are moved by rounding."""
    differences = []
    for name in dict.fromkeys((*want, *have)):
        value, allowed = want.get(name, _MISSING), 0.0
        distance, place = _distance(value, have.get(name, _MISSING))
        if isinstance(value, torch.Tensor) and not math.isinf(distance):
            rounding = max(filter(math.isfinite, (_distance(value, one.get(name))[0] for one in moved)), default=0.0)
            finite = value.double().abs()[value.isfinite()] if value.layout == torch.strided else value.abs().values()
            scale = float(finite.max()) if finite.numel() else 0.0
            unit = torch.finfo(value.dtype).eps if value.is_floating_point() or value.is_complex() else 0.0
            allowed = ROUNDINGS * (rounding + unit * scale)
        differences.append(Difference(*name, distance, allowed, place if distance else ""))
    return tuple(differences)


_MISSING = "nothing"


def _distance(want: Any, have: Any) -> tuple[float, str]:
    """Returns the largest absolute difference and its index, or inf and a description if values have no distance."""
    if not (isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor)):
        is_same = want is have or (type(want) is type(have) and (want == have) is True)
        return (0.0, "") if is_same else (math.inf, f": {_text(have)} instead of {_text(want)}")
    if (want.shape, want.dtype, want.layout) != (have.shape, have.dtype, have.layout):
        return math.inf, f": {_text(have)} instead of {_text(want)}"
    if not want.numel():
        return 0.0, ""
    pair = [t.to_dense() if t.layout != torch.strided else t for t in (want, have)]
    wide = torch.complex128 if want.is_complex() else torch.float64
    left, right = (t.as_subclass(torch.Tensor).to(wide) for t in pair)
    same = (left == right) | (left.isnan() & right.isnan())
    distances = torch.where(same, 0.0, (left - right).abs().nan_to_num(math.inf, math.inf, math.inf))
    place = int(distances.argmax())
    index = [int(k) for k in torch.unravel_index(torch.tensor(place), distances.shape)]
    return float(distances.flatten()[place]), str(index) if index else ""


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "None" if value is None else value if value is _MISSING else repr(value)[:40]
