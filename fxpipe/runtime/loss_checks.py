"""Checks that the losses of micro-batches add up to the loss of the mini-batch: by weights of elements, and by values.

The loss of all outputs is compared by its value and by the gradients of the outputs: if the head of a model starts with
zeros, all tokens have the same loss, and in the first step a mean over tokens looks like a mean over samples.

An output without the batch dimension is known for the mini-batch only if it is equal in all micro-batches, or a mean or
sum that the loss uses as such. A weighted mean of losses that the model itself computes is neither: then the other
outputs' gradients are compared, if any. A loss that draws random numbers is not compared: see `losses`. Over processes
every rank has a part of the `LossEvidence` of a run, and `LossVerdict` decides for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from fxpipe._torch.autograd import gradients_of, output_shape, saved_reduction, saved_total_weight
from fxpipe.errors import LossError
from fxpipe.rewriting.program import ReceivedValue
from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.runtime.losses import LOSS_REMEDIES, MODEL_LOSS_REMEDIES, LossCall, MicroBatchLosses, are_bitwise_equal
from fxpipe.runtime.stage_instance import BackwardHandle
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.utils.python_state import PythonState, parts_of_function
from fxpipe.utils.pytree import flatten

TORCH_MEAN, TORCH_SUM = 1, 2  # `reduction` in the autograd nodes of torch's losses
VALUE = "none in some micro-batch, with loss 0 or NaN"  # the key of micro-batch losses among sums and means
MOST_HEAD_NODES = 64  # larger heads are not checked


class LossReduction(NamedTuple):
    """A sum or mean in the head of a graph."""

    edge: GradientEdge  # receives its gradient
    count: Any  # its divisor: number of elements, or a tensor if elements have weights


@dataclass(slots=True)
class LossWeightingCheck:
    """The weights of elements, by sum or mean and by micro-batch; filled by all workers in every step.

    An element (a sample, a token, a pixel) must have the same weight in each micro-batch. A mean over tokens without
    padding gives too much weight to a short micro-batch: the gradient is wrong, and no value shows it if the model
    itself computes the loss, or if padding occurs after the verified step.

    Autograd's graph of the loss shows it, within microseconds: the gradient that arrives at a mean over n elements is n
    times the weight of each element. Only the head of the graph is read, from the loss through 0-dim values to the
    first sums and means. A loss without any passes.
    """

    is_on: bool
    reduced: frozenset[tuple[int, str]]  # outputs (maker, name) without the batch, reduced by the model; if it is on
    # By place and micro-batch, flat since workers write at the same time: the gradient that has arrived, and the
    # divisor of the mean.
    gradients: dict[tuple[tuple[Any, ...], int], tuple[torch.Tensor, Any]] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)  # losses of micro-batches, if combined by a mean

    @classmethod
    def of(cls, bound: BoundProgram, is_on: bool) -> LossWeightingCheck:
        """Returns the check for a program, without outputs that the user has said how to combine."""
        reduced = {
            (output.source, output.name)
            for place, (output, how) in enumerate(zip(bound.program.outputs, bound.out_dims, strict=True))
            if how in ("mean", "sum") and isinstance(output, ReceivedValue) and place not in bound.told
            if bound.wiring.users[output.source, output.name] == (len(bound.devices),)
        }
        return cls(is_on, frozenset(reduced if is_on else ()))

    def note(
        self, place: Any, i: int, reductions: Sequence[LossReduction], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Records the gradients that have arrived at `reductions` in micro-batch i; `place`: of the graph."""
        for ordinal, (reduction, gradient) in enumerate(zip(reductions, gradients, strict=True)):
            if gradient is not None:
                key = place, len(reductions), ordinal, reduction.edge.node.name()
                self.gradients[key, i] = (gradient, reduction.count)

    def note_roots(self, j: int, i: int, pending: BackwardHandle, arrived: Sequence[torch.Tensor | None]) -> None:
        """Records the gradients of outputs that stage j has reduced."""
        for name, root, gradient in zip(pending.names, pending.roots, arrived, strict=True):
            if (j, name) not in self.reduced or gradient is None:
                continue
            if reductions := reductions_under(root.node, root.output_nr):
                edges = [reduction.edge for reduction in reductions]
                gradients = gradients_of(edges, [root], [gradient], keep_graph=True)
                self.note((j, name), i, reductions, gradients)

    def difference(self, share: Callable[[int], Any], means_only: bool = False) -> str | None:
        """Describes how the weights of elements differ between micro-batches, or None. Waits for their values."""
        # `share`: the weight of a micro-batch. `means_only`: no sums, which the model may divide by its own numbers.
        by_place: dict[tuple[Any, ...], dict[int, tuple[torch.Tensor, Any]]] = {}
        for (key, i), noted in self.gradients.items():
            by_place.setdefault(key, {})[i] = noted
        for i, loss in self.values.items():  # 0, or 0 / 0: apparently no elements counted
            has_some = ((loss - loss == 0) & (loss != 0)).double()
            by_place.setdefault((VALUE,), {})[i] = has_some.new_tensor(float(share(i))), has_some
        for (*_, name), by_micro_batch in by_place.items():
            are_sums = all(isinstance(count, int) and count == 1 for _, count in by_micro_batch.values())
            if means_only and (are_sums or name == VALUE):
                continue
            gradients, counts = zip(*by_micro_batch.values(), strict=True)
            ones = zip(by_micro_batch, map(_weight_of_one, _floats(gradients), _floats(counts)), strict=True)
            known = {i: one for i, one in sorted(ones) if not math.isnan(one)}
            exact = all(gradient.dtype in (torch.float32, torch.float64) for gradient in gradients)
            tolerance = 1e-5 if exact else 3e-2
            if _are_close([*known.values()], tolerance):
                continue
            shares = {i: float(share(i)) for i in known}
            if _are_close([value / shares[i] for i, value in known.items() if shares[i]], tolerance):
                continue
            least, most = min(known, key=lambda i: abs(known[i])), max(known, key=lambda i: abs(known[i]))
            times = abs(known[most] / known[least]) if known[least] else math.inf
            return (
                f"the loss takes a sum or mean over elements ({name.removesuffix('0').removesuffix('Backward')}) that "
                f"count {times:.3g} times as much in micro-batch {most} as in micro-batch {least}; in the whole "
                "mini-batch all count the same, and the gradients would be wrong. Is it a mean over tokens or pixels "
                "of which some do not count (ignore_index, a mask)?"
            )
        return None


def reductions_under(node: Any, number: int) -> list[LossReduction]:
    """Returns the first sums and means on the paths from a 0-dim value through 0-dim values, in graph order."""
    reductions: list[LossReduction] = []
    todo: list[tuple[Any, int]] = [(node, number)]
    seen: set[tuple[Any, int]] = set()
    while todo:
        node, number = todo.pop()
        if node is None or (node, number) in seen or not node.next_functions:  # leaves are not functions
            continue
        if (shape := output_shape(node, number)) is None or len(shape):
            continue
        seen.add((node, number))
        if len(seen) > MOST_HEAD_NODES:
            return []
        if (count := _count_of(node)) is not None:
            reductions.append(LossReduction(GradientEdge(node, number), count))
        else:
            todo.extend(reversed(node.next_functions))
    return reductions


def _count_of(node: Any) -> Any:
    """Returns the divisor of a sum or mean; None for other functions. Of saved values it reads at most a scalar."""
    name, reduction = node.name(), saved_reduction(node)
    if reduction == TORCH_MEAN and name.startswith("NllLoss"):
        return saved_total_weight(node).detach()
    if reduction == TORCH_SUM or name.startswith(("SumBackward", "NansumBackward")):
        return 1
    if reduction != TORCH_MEAN and not name.startswith("MeanBackward"):
        return None
    below, number = node.next_functions[0]
    if below is None:
        return None
    if (variable := getattr(below, "variable", None)) is not None:
        return variable.numel()
    shape = output_shape(below, number)
    return None if shape is None else math.prod(shape)


def _floats(values: Sequence[Any]) -> list[float]:
    """Returns numbers as floats; 0-dim tensors on one device together, since each read waits for the GPU."""
    if all(isinstance(value, torch.Tensor) for value in values) and len({value.device for value in values}) == 1:
        return list(torch.stack(tuple(values)).tolist())
    return [float(value) for value in values]


def _weight_of_one(gradient: float, count: float) -> float:
    """Returns the weight of one of `count` elements; NaN if unknown: none count, or the gradient overflows."""
    if not math.isfinite(gradient) or (count == 0 and gradient == 0):
        return math.nan
    return gradient / count if count else math.inf


def _are_close(values: Sequence[float], tolerance: float) -> bool:
    if math.inf in values:
        return False
    return not values or max(values) - min(values) <= tolerance * max(map(abs, values))


MOST_VALUES = 16  # numbers and tensors in a loss function with which it is verified
EXACT_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class GatheredOutput:
    """An output of the mini-batch, with the gradients of its micro-batches."""

    value: Any  # gathered
    how: int | str | None  # dimension or kind of gathering
    gradients: Sequence[torch.Tensor | None]  # by micro-batch

    @property
    def is_trained(self) -> bool:
        return any(gradient is not None for gradient in self.gradients)


def verify_loss(
    losses: MicroBatchLosses, outputs: Sequence[GatheredOutput], tree: Callable[[list[Any]], Any]
) -> bool | None:
    """Raises `LossError` if the losses of micro-batches do not add up to the loss of all gathered `outputs`."""
    # `tree` builds the model's output. Returns True if there was something to compare; None if random numbers differ.
    if any(output.is_trained and output.how == "stack" for output in outputs):
        return False  # it has another shape than in micro-batches
    whole, gradients = _loss_of_whole(losses, outputs, tree)
    compared = [(output, g) for output, g in zip(outputs, gradients, strict=True) if g is not None]
    is_seen = not any(output.how in ("mean", "sum") for output, _ in compared)
    try:
        if is_seen or not losses.returns_weights:
            _compare_values(losses, whole)
        for output, gradient in compared:
            if isinstance(output.how, int):
                parts = [part for part in output.gradients if part is not None]
                _compare_gradients(losses, gradient, parts, output.how)
    except LossError:
        again, gradients_again = _loss_of_whole(losses, outputs, tree)
        if are_bitwise_equal([whole, *gradients], [again, *gradients_again]):
            raise
        return None  # drawn numbers are unknown
    return is_seen


def _loss_of_whole(
    losses: MicroBatchLosses, outputs: Sequence[GatheredOutput], tree: Callable[[list[Any]], Any]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Returns the loss of all outputs together, and the gradients of the outputs."""
    values = [o.value.detach().requires_grad_() if o.is_trained else o.value for o in outputs]
    try:
        with torch.enable_grad():
            whole, scaled = losses.loss_of_whole(tree(values))
    except LossError:
        raise
    except Exception as error:
        error.add_note("fxpipe: raised by loss_fn on the gathered outputs of the mini-batch, to verify the loss")
        raise
    leaves = [value for value, output in zip(values, outputs, strict=True) if output.is_trained]
    if not (scaled.requires_grad and leaves):
        return whole, [None] * len(outputs)
    gradients = iter(torch.autograd.grad(scaled, leaves, allow_unused=True))
    return whole, [next(gradients) if output.is_trained else None for output in outputs]


def _compare_values(losses: MicroBatchLosses, whole: torch.Tensor) -> None:
    ours = losses.total()
    tolerance = 1e-4 if ours.dtype in EXACT_DTYPES else 3e-2
    # Sums that cancel out are as inexact as their largest summand.
    largest = max(float(v.abs()) for v in losses.values if v is not None)
    atol = tolerance * 1e-2 * max(1.0, largest if not losses.returns_weights else 1.0)
    if not torch.allclose(whole.double(), ours.double().to(whole.device), rtol=tolerance, atol=atol, equal_nan=True):
        raise LossError(
            f"loss_fn gives {float(whole):.6g} for the whole mini-batch, but its micro-batches add up to "
            f"{float(ours):.6g}: it is no {_expected_kind(losses)}, and the gradients would be wrong. "
            f"{losses.remedies()}"
        )


def _compare_gradients(losses: MicroBatchLosses, whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> None:
    """Compares the gradients of mini-batch and micro-batches by their norm, since single elements may cancel out."""
    is_exact = whole.dtype in EXACT_DTYPES and losses.total().dtype in EXACT_DTYPES
    squares, start = torch.zeros(3, dtype=torch.float64, device=whole.device), 0
    for part in parts:
        squares += _squared_norms(whole.narrow(dim, start, part.shape[dim]), part, losses.divisor)
        start += part.shape[dim]
    difference, *sizes = squares.sqrt().tolist()
    size = max(sizes)
    if difference > (1e-3 if is_exact else 5e-2) * size:
        raise LossError(
            f"loss_fn gives the same loss for the whole mini-batch, but the gradients of its micro-batches are "
            f"{difference / size:.2g} of their size away from its own: it is no {_expected_kind(losses)}. "
            f"{losses.remedies()}"
        )


PIECE = 1 << 20  # elements compared at a time, to bound the memory of float64 copies


def _squared_norms(whole: torch.Tensor, part: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Computes the squared norms of the difference of two gradients and of both, over elements finite in both."""
    wide = torch.complex128 if whole.is_complex() else torch.float64
    squares = torch.zeros(3, dtype=torch.float64, device=whole.device)
    for one, other in zip(whole.reshape(-1).split(PIECE), part.reshape(-1).split(PIECE), strict=True):
        if divisor is not None:
            other = other / divisor
        one, other = one.to(wide), other.to(whole.device, wide)
        known = one.isfinite() & other.isfinite()  # the scaler handles overflow
        one, other = (torch.where(known, x, 0) for x in (one, other))
        squares += torch.stack([torch.linalg.vector_norm(x).real ** 2 for x in (one - other, one, other)])
    return squares


def _expected_kind(losses: MicroBatchLosses) -> str:
    return "weighted mean" if losses.returns_weights else "mean over samples" if losses.reduction == "mean" else "sum"


# Verification keeps all outputs of a mini-batch and computes the loss again: in the 1st, 10th, 100th, ... step with a
# loss. In these steps, and on the CPU in every step, `LossWeightingCheck` checks the weights of elements.
#
# Losses are of one kind if the same code computes them, with the same values of all that it depends on
# (`utils.python_state`), from targets of the same structure, for mini-batches of one size. Numbers and tensors may
# differ in every step: each of the first MOST_VALUES of them is verified, and later ones are of the kind of the last;
# but 0 always differs from other numbers.


@dataclass(slots=True)
class LossHistory:
    """The state of verification of one kind of loss."""

    is_cheap: bool  # to read numbers, since there is no GPU to wait for
    passes: int = 0
    can_verify: bool | None = False  # the value was compared; None: the loss draws random numbers
    is_mistaken: bool = False  # elements rightly count what they do, although the check objects

    @property
    def is_due(self) -> bool:
        """True in the 1st, 10th, 100th, ... step, and again until a step passes."""
        return str(self.passes + 1).strip("0") == "1"

    @property
    def look_at_elements(self) -> bool:
        return (self.is_cheap or self.is_due) and not self.is_mistaken

    def count_pass(self, is_mistaken: bool = False) -> None:
        self.passes += 1
        self.is_mistaken |= is_mistaken


@dataclass(slots=True)
class LossHistories:
    """Histories of losses, by kind and by the values of numbers."""

    kinds: dict[Any, dict[Any, LossHistory]] = field(default_factory=dict)
    # By code: the parts of the last function with that code, its state, and the facts of these.
    _functions: dict[Any, tuple[Any, PythonState, frozenset[Any], tuple[Any, ...]]] = field(default_factory=dict)

    def of(self, given_inputs: GivenInputs, call: LossCall) -> LossHistory:
        """Returns the history of a loss of `forward_backward`."""
        bound, targets = given_inputs.bound, flatten(given_inputs.targets)[0]
        leaves = tuple((x.dtype, x.dim()) if isinstance(x, torch.Tensor) else type(x) for x in targets)
        _, _, structure, facts = self._known(call.function)
        sizes = given_inputs.batch, len(given_inputs.samples)
        return self.of_kind((structure, call.reduction, leaves, bound.out_dims, sizes), facts, bound)

    def of_kind(self, key: Any, facts: tuple[Any, ...], bound: BoundProgram) -> LossHistory:
        known = self.kinds.setdefault(key, {})
        if facts not in known:
            if len(known) == MOST_VALUES:
                return known[next(reversed(known))]
            known[facts] = LossHistory(all(device.type == "cpu" for device in bound.devices))
        return known[facts]

    def names_read(self, loss_fn: Any) -> frozenset[str]:
        """Returns the names of attributes in the code of a loss function and of what it may call."""
        return self._known(loss_fn)[1].names_read

    def _known(self, loss_fn: Any) -> tuple[Any, PythonState, frozenset[Any], tuple[Any, ...]]:
        """Returns the parts of a function, its state, and what it depends on, without and with numbers and tensors."""
        code = getattr(loss_fn, "__code__", type(loss_fn))
        parts = parts_of_function(loss_fn)
        known = self._functions.get(code)
        if known is None or [*map(id, known[0])] != [*map(id, parts)] or not known[1].holds():
            state = PythonState(values=(loss_fn,), skips_logs=True)
            known = self._functions[code] = parts, state, state.structure(), tuple(state.facts)
        return known


@dataclass(slots=True)
class LossEvidence:
    """The evidence of one process. All but `weights_of_elements` is of the process with the loss."""

    wrong: str | None = None  # describes how the weights of elements differ between micro-batches
    wrong_means: str | None = None  # describes it for means only, if the loss was not compared
    can_verify: bool | None = False  # None: the loss draws random numbers
    is_verified: bool = False
    shares: Sequence[Any] = ()  # by micro-batch, for checks in other processes
    weights_of_elements: dict[Any, Any] = field(default_factory=dict)  # recorded by the loss weighting check

    @property
    def is_proved(self) -> bool:
        """True if the micro-batches add up to the loss of all outputs."""
        return self.is_verified and bool(self.can_verify)


class LossVerdict:
    """The verdict on whether elements have the same weight in all micro-batches."""

    def __init__(self, evidence: Sequence[Sequence[LossEvidence]], last: int = 0, firsts: Sequence[int] = (0,)):
        """`evidence`: by replica and rank. `last`: of the last stage. `firsts`: by replica, the first micro-batch."""
        self._evidence, self._firsts = evidence, firsts
        self._of_last = [of_replica[last] for of_replica in evidence]
        self._wrong = [self._difference(k, one.wrong, means_only=False) for k, one in enumerate(self._of_last)]

    def _difference(self, replica: int, wrong: str | None, *, means_only: bool) -> str | None:
        """Returns how weights differ: from the rank of the last stage, or from the records of the other ranks."""
        of_last, notes = self._of_last[replica], dict[Any, Any]()
        for one in self._evidence[replica]:
            notes |= one.weights_of_elements if one is not of_last else {}
        if wrong or not notes:
            return wrong
        return LossWeightingCheck(True, frozenset(), notes).difference(of_last.shares.__getitem__, means_only)

    @property
    def is_unsure(self) -> bool:
        """Returns whether only the loss of all outputs together can decide."""
        pairs = zip(self._wrong, self._of_last, strict=True)
        return any(wrong and of_last.can_verify and not of_last.is_verified for wrong, of_last in pairs)

    def check(self, history: LossHistory | None, micro_batches: int, replica: int = 0) -> None:
        """Raises `LossError` in all processes if gradients would be wrong; else counts the pass in the history."""
        wrong_means = None
        for k, (wrong, of_last) in enumerate(zip(self._wrong, self._of_last, strict=True)):
            if wrong and not of_last.is_proved:
                wrong_means = wrong_means or self._difference(k, of_last.wrong_means, means_only=True)
        if len(self._evidence) > 1 and not any(self._wrong):
            # Elements may have different weights on different replicas, which no replica can detect alone.
            shares, notes = dict[int, Any](), dict[Any, Any]()
            for first, of_last, of_replica in zip(self._firsts, self._of_last, self._evidence, strict=True):
                shares |= {first + i: share for i, share in enumerate(of_last.shares)}
                for one in of_replica:
                    notes |= {(place, first + i): note for (place, i), note in one.weights_of_elements.items()}
            check = LossWeightingCheck(True, frozenset(), notes)
            wrong_means = check.difference(shares.__getitem__, means_only=True)
        if wrong_means:
            raise wrong_loss(wrong_means)
        if history is not None and micro_batches > 1:
            history.count_pass(is_mistaken=self._wrong[replica] is not None and self._of_last[replica].is_proved)


def wrong_loss(wrong: str) -> LossError:
    return LossError(f"{wrong} {LOSS_REMEDIES}. {MODEL_LOSS_REMEDIES}")
