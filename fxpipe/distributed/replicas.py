"""The replicas of a pipe in one step: the part of each in the union of mini-batches, and the total loss and gradients.

A step processes the *union*: one mini-batch that concatenates the mini-batches of all replicas. They exchange their
numbers of samples first, so each sample has equal weight. Micro-batches, and random numbers with them, are numbered
over all replicas. Gradients are summed in buckets that are sent while the last backward runs:

    last B of a stage ──▶ give("weight", stage) ──▶ bucket ──▶ all-reduce, concurrent with the rest of the step

A bucket has parameters of one dtype, in the order in which a backward completes their gradients. It is sent when it is
full and the previous ones are sent, so their order is the same on all replicas; from the device if the replicas have a
backend that sums there (`DeviceSums`), else from the CPU with gloo. What does not fit buckets is summed through CPU
memory: sparse gradients, and *late* ones, of later graphs that other replicas may not have run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.process_groups import ProcessGroupGloo
from fxpipe.cluster import BUCKET_BYTES
from fxpipe.distributed.connection import content_of, lost_connection
from fxpipe.distributed.device_transfers import WAITED_FOR, DeviceSums
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.errors import InternalError, LossError, StateError
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.loss_checks import EXACT_DTYPES, LossEvidence
from fxpipe.runtime.losses import LARGEST_UNIT, MicroBatchLosses
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.step_inputs import GivenInputs, combine, tensor_requires_grad
from fxpipe.utils import accelerator
from fxpipe.utils.batch_split import rows_of_inputs
from fxpipe.utils.output_combination import OutputCombination
from fxpipe.utils.python_objects import equal_values
from fxpipe.utils.pytree import map_tensor_leaves

StageParameter = tuple[str, int]  # parameter name, stage that uses it
NEXT_MINI_BATCH = "the next mini-batches of the other replicas"


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """The message that each rank of a replica sends at the beginning of a step to the ranks with the same stages."""

    batch: int
    micro_batches: int
    seed: int | None  # None: the step draws no random numbers
    is_synced: bool
    reduction: str
    parameters: str  # digest of the parameters in the reduction
    changes_buffers: bool  # True if forward changes buffers that the rank holds
    known: Mapping[int, Any] | None = None  # from the rank of the last stage: pieces of its mini-batch, by index
    may_differ: bool = False  # True if its weights may differ from other replicas
    joint: str = ""  # the values that need all samples together, as text: the head, and the outputs for the loss


def digest(parameters: Mapping[StageParameter, torch.Tensor]) -> str:
    """Returns a digest that differs if the parameters differ."""
    text = repr([(key, tuple(tensor.shape), tensor.dtype) for key, tensor in parameters.items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    seed: int
    micro_batches: int  # sum over replicas
    batch: int  # sum over replicas
    portions: Sequence[float] = (1.0,)  # by replica, its fraction of all samples
    firsts: Sequence[int] = (0,)  # by replica, the number of its first micro-batch
    replica: int = 0
    changes_buffers: bool = False  # True if the first replica changes buffers that this rank holds
    known: Mapping[int, Any] | None = None  # pieces of the union
    may_differ: bool = False

    @property
    def first(self) -> int:
        return self.firsts[self.replica]


def part_of(starts: Sequence[ReplicaStart], replica: int, combinations: Sequence[OutputCombination]) -> ReplicaPart:
    """Computes the part of a replica from all messages. Raises `StateError` if replicas make different calls."""
    for name, what in (
        ("is_synced", "call forward_backward within no_sync() and without"),
        ("reduction", "call forward_backward with different values of reduction"),
        ("parameters", "train different parameters (requires_grad)"),
        ("joint", "compute different values of all samples together, as forward does different things"),
    ):
        values = [getattr(start, name) for start in starts]
        if len({*values}) > 1:
            other = next(k for k, value in enumerate(values) if value != values[0])
            raise StateError(f"replica 0 and replica {other} {what}: all replicas do the same")
    batch = sum(start.batch for start in starts)
    portions = [start.batch / batch for start in starts]
    firsts = [sum(start.micro_batches for start in starts[:k]) for k in range(len(starts))]
    return ReplicaPart(
        seed=next((start.seed for start in starts if start.seed is not None), 0),
        micro_batches=sum(start.micro_batches for start in starts),
        batch=batch,
        portions=portions,
        firsts=firsts,
        replica=replica,
        changes_buffers=starts[0].changes_buffers,
        known=_known_of_union(starts, portions, combinations),
        may_differ=any(start.may_differ for start in starts),
    )


def _known_of_union(
    starts: Sequence[ReplicaStart], portions: Sequence[float], combinations: Sequence[OutputCombination]
) -> Mapping[int, Any] | None:
    """Combines the known pieces of all replicas into the pieces of the union."""
    if starts[0].known is None:
        return None
    known, different = [start.known or {} for start in starts], "the model's loss is put together differently on each"
    if any(one.keys() != known[0].keys() for one in known):
        raise LossError(f"{different} replica: return (total, weight) of a loss_fn")
    affine = (zip(one.pieces, one.reductions, strict=True) for one in combinations if one.is_affine)
    union: dict[int, Any] = {}
    for place, how in {place: how for pieces in affine for place, how in pieces if place in known[0]}.items():
        if how is None and not _are_close([one[place] for one in known]):
            raise LossError(f"{different} replica, by a value that differs: return (total, weight) of a loss_fn")
        union[place] = combine([one[place] for one in known], how, portions, "a part of the model's loss")
    return union


@dataclass(frozen=True, slots=True)
class GradientReport:
    """The gradients of a rank that are summed over replicas."""

    missing: frozenset[StageParameter] = frozenset()  # dense gradients that the reduction sums, and the rank lacks
    sparse: frozenset[StageParameter] = frozenset()  # sparse gradients of parameters in the reduction
    late: frozenset[StageParameter] = frozenset()  # gradients of other parameters


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """The loss of one replica, before the division by the weights of all replicas."""

    total: torch.Tensor  # a sum for pairs, else the loss of its mini-batch
    weight: Any = None
    unit: Any = None


@dataclass(slots=True)
class StepReport:
    """One rank's report to all ranks after the rows."""

    has_hooks: bool = False  # True if leaves of this rank have hooks, which may fail
    scale: float | None = None  # loss scale of its gradient scaler; None without a scaler
    loss: ReplicaLoss | None = None  # from the rank of the last stage
    evidence: LossEvidence = field(default_factory=LossEvidence)
    gradients: GradientReport = field(default_factory=GradientReport)
    loss_parameters: int = 0  # number of parameters that loss_fn uses


def check_scales(reports: Sequence[Sequence[StepReport]]) -> None:
    """Raises `StateError` on all ranks if their gradient scalers differ."""
    scales = {report.scale for of_replica in reports for report in of_replica}
    if len(scales) > 1:
        texts = ", ".join("none" if scale is None else f"scale {scale:g}" for scale in scales)
        raise StateError(
            f"grad_scaler differs between ranks ({texts}): make one with the same arguments on all ranks, pass it in "
            "all calls, and call step and update on all ranks"
        )


def loss_of_replica(losses: MicroBatchLosses) -> ReplicaLoss:
    """Returns the loss as a message to other replicas. Raises `LossError` if it does not require grad."""
    loss = losses.total()
    pair = (*map(losses.sum_of, (losses.values, losses.weights)), losses.unit) if losses.returns_weights else (loss,)
    return ReplicaLoss(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in pair))


def parameters_of_loss(one: MiniBatch) -> list[tuple[nn.Parameter, torch.Tensor, int]]:
    """Returns the parameters that loss_fn uses, with the sums and counts of their gradients."""
    own = [] if one.loss is None else one.loss.own.values()
    return [(leaf, gradient, count) for leaf, gradient, count in own if isinstance(leaf, nn.Parameter)]


def drop_gradients_of_loss(one: MiniBatch) -> None:
    """Drops the gradients of parameters that loss_fn uses, because the first replica has the same gradients."""
    for leaf, gradient, count in parameters_of_loss(one):
        one.loss.own[id(leaf)] = (leaf, torch.zeros_like(gradient), count)  # type: ignore[union-attr]


def buckets_of(parameters: Mapping[StageParameter, torch.Tensor]) -> list[list[StageParameter]]:
    """Returns the parameters of each bucket, in the order in which buckets are full. `parameters`: last stage first."""
    stages = dict.fromkeys(j for _, j in parameters)
    order = [key for stage in stages for key in reversed([*parameters]) if key[1] == stage]
    filling: dict[torch.dtype, list[StageParameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    full = []
    for key in order:
        tensor = parameters[key]
        if tensor.dtype in filling and sizes[tensor.dtype] + tensor.nbytes > BUCKET_BYTES:
            full.append(filling.pop(tensor.dtype))
        if tensor.dtype not in filling:
            filling[tensor.dtype], sizes[tensor.dtype] = [], 0
        filling[tensor.dtype].append(key)
        sizes[tensor.dtype] += tensor.nbytes
    return sorted([*full, *filling.values()], key=lambda bucket: order.index(bucket[-1]))


def _are_close(values: Sequence[Any]) -> bool:
    """Returns whether values of all replicas are equal; floating point tensors, up to rounding on different devices."""
    first, kinds = values[0], {(x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in values}
    if len(kinds) > 1 or kinds == {None} or not first.is_floating_point():
        return all(equal_values(x, first) for x in values)
    tolerance = 1e-4 if first.dtype in EXACT_DTYPES else 3e-2
    return all(bool(torch.isclose(x, first, tolerance, equal_nan=True).all()) for x in values)


def target_of_union(targets: Sequence[Any], batches: Sequence[int], rows: Collection[int] = (1,), own: int = 0) -> Any:
    """Concatenates the targets of replicas: tensors with rows, and lists with an entry, for each sample.

    >>> target_of_union([(torch.tensor([2, 1]), ["a", "b"], 0.5), (torch.tensor([3]), ["c"], 0.5)], [2, 1])
    (tensor([2, 1, 3]), ['a', 'b', 'c'], 0.5)
    """

    def joined(*parts: Any) -> Any:
        if is_dataclass(type(parts[0])):
            of = {one.name: [getattr(part, one.name) for part in parts] for one in fields(parts[0])}
            return replace(parts[0], **{k: target_of_union(values, batches, rows, own) for k, values in of.items()})
        sizes = [len(x) if isinstance(x, list) or (isinstance(x, torch.Tensor) and x.dim()) else 0 for x in parts]
        if not any(sizes == [batch * number for batch in batches] for number in rows):
            if not _are_close(parts):
                raise LossError("target has a part that is not of samples and differs between replicas: pass the same")
            return parts[own]
        if isinstance(parts[0], list):
            if all(isinstance(x, torch.Tensor) and x.dim() and len(x) == len(parts[0]) for x in parts[0]):
                what = "target has a list with as many tensors as samples, and each tensor has as many rows"
                raise LossError(f"{what}: pass a tuple if these are rows of samples, else an entry (tensor,) for each")
            return [entry for part in parts for entry in part]
        if max(sizes) > 2 and all(x.dim() == 1 and x.tolist() == [*range(len(x))] for x in parts):
            what = "target numbers the samples of each replica from 0, and the loss takes the samples of all replicas"
            raise LossError(f"{what}: let loss_fn number them (torch.arange(len(output)))")
        return torch.cat(parts)

    try:
        return pytree.tree_map(joined, *targets, is_leaf=lambda x: isinstance(x, list) and len(x) == batches[0])
    except ValueError as error:
        raise LossError(f"target has different parts on different replicas: {error}") from None


class GradientReduction:
    """Sums the gradients of these parameters over replicas, once per call of `begin`."""

    def __init__(
        self, group: ProcessGroupGloo, parameters: Mapping[StageParameter, torch.Tensor], sums: DeviceSums | None = None
    ):
        """`group`: of the replicas, used only here. `parameters`: in the same order on all. `sums`: None for gloo."""
        self.like = {key: (tensor.shape, tensor.dtype, tensor.device) for key, tensor in parameters.items()}
        self._completed: set[StageParameter] = set()
        self._reducer: Any = group if sums is None else sums
        self._sums, self._device = sums, torch.device("cpu") if sums is None else sums.device
        self._buckets = buckets_of(parameters)
        self._bucket_of = {key: number for number, bucket in enumerate(self._buckets) for key in bucket}
        self._missing: list[int] = []  # by bucket, number of gradients
        self._gradients: dict[StageParameter, torch.Tensor] = {}  # waiting for their bucket
        self._begun: list[tuple[Any, torch.Tensor]] = []  # by bucket, the operation and its memory
        if sums is not None:
            sums.connect()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._sums is None else self._sums.on_stream()

    def begin(self) -> GradientReduction:
        """Begins a sum on all replicas."""
        self._completed.clear()
        self._missing = [*map(len, self._buckets)]
        self._gradients.clear()
        self._begun.clear()
        return self

    def close(self) -> None:
        """Closes the connections despite references to this object: replicas that wait for this one fail."""
        self._reducer = None
        self.begin()

    def give(self, key: StageParameter, gradient: torch.Tensor) -> None:
        """Adds the gradient of one parameter in one stage, in the dtype of the parameter; sends its bucket if full."""
        self._completed.add(key)
        shape, dtype, _ = self.like[key]
        if gradient.shape != shape:
            raise InternalError(f"the gradient of {key} has shape {(*gradient.shape,)} and not shape {(*shape,)}")
        gradient = gradient.to(self._device, dtype)
        if self._sums is not None:
            self._sums.take(gradient)
        self._gradients[key] = gradient
        self._missing[self._bucket_of[key]] -= 1
        while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
            with self._on_stream():
                bucket = self._buckets[len(self._begun)]
                memory = torch.cat([self._gradients.pop(key).reshape(-1) for key in bucket])
                self._begun.append((_or_lost(functools.partial(self._reducer.allreduce, [memory])), memory))

    def give_rest(self, gradients: dict[StageParameter, torch.Tensor]) -> GradientReport:
        """Takes the remaining gradients that it sums out of `gradients`, and adds zeros for missing ones."""
        late = gradients.keys() - self.like.keys()
        sparse = {key for key, gradient in gradients.items() if gradient.is_sparse} - late
        missing = self.like.keys() - self._completed - (gradients.keys() - sparse)
        for key, (shape, dtype, _) in self.like.items():
            if key in missing:
                self.give(key, torch.zeros(shape, dtype=dtype, device=self._device))
            elif key not in self._completed:
                self.give(key, gradients.pop(key))
        return GradientReport(frozenset(missing), frozenset(sparse), frozenset(late))

    def finish(self) -> dict[StageParameter, torch.Tensor]:
        """Waits for the sums over replicas; returns them on the devices of the parameters."""
        gradients: dict[StageParameter, torch.Tensor] = {}
        with self._on_stream():
            for bucket in self._buckets:
                work, memory = self._begun.pop(0)
                _or_lost(work.wait)
                parts = memory.split([self.like[key][0].numel() for key in bucket])
                for key, part in zip(bucket, parts, strict=True):
                    shape, _, device = self.like[key]
                    gradients[key] = part.view(shape).to(device, copy=True)
        if self._sums is not None:
            self._sums.settle(gradients.values())
        return {key: gradients[key] for key in self.like}


def _or_lost(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        failure = lost_connection(WAITED_FOR, error)
    raise failure  # out here: with torch's error as its context it would keep the connections open


class Replicas:
    """This process's replica and its communication with the others in each step."""

    def __init__(self, group: RankGroup):
        self.group = group
        self.is_synced = True  # False within no_sync(): gradients stay on their replica
        self.has_unsynced = False  # True if `.grad` has gradients that are not summed over replicas
        self._unit: float | None = None  # for losses that are pairs; the same on all replicas
        self._unreducible: set[StageParameter] = set()  # parameters with sparse gradients
        self._reduction: GradientReduction | None = None
        self._reduced: tuple[Any, ...] = ()  # generation and digest of `_reduction`
        self.may_differ = False  # True if a failed stream may have updated some replicas only
        group.when_closed.append(self.close)

    @property
    def count(self) -> int:
        return self.group.replica_count

    def close(self) -> None:
        """Resets what is equal on all replicas: when a step fails, some may have changed it and others not."""
        self._unit = None
        self._close_reduction()

    def _close_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.close()
        self._reduction, self._reduced = None, ()

    def reducible(self, parameters: Mapping[StageParameter, torch.Tensor]) -> dict[StageParameter, torch.Tensor]:
        """Returns the parameters whose gradients the reduction sums."""
        if self.count == 1:
            return {}
        return {key: p for key, p in parameters.items() if p.is_floating_point() and key not in self._unreducible}

    def begin(
        self, own: ReplicaStart | None, combinations: Sequence[OutputCombination], in_stream: bool = False
    ) -> ReplicaPart | None:
        """Exchanges messages with the other replicas; returns this one's part, or None if any has no mini-batch."""
        # In a stream all replicas use the smallest number of micro-batches of any, so that their rows are equal.
        what = NEXT_MINI_BATCH if in_stream else "the other replicas to begin the step"
        starts: list[ReplicaStart | None] = self.group.replicas.all_gather(own, what)
        known = [start for start in starts if start is not None]
        if len(known) < len(starts):
            return None
        if in_stream:
            count = min(start.micro_batches for start in known)
            known = [replace(start, micro_batches=count) for start in known]
        return part_of(known, self.group.replica, combinations)

    def check_weights(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Compares the weights of a stage over replicas after a failed stream. Raises `StateError` if they differ."""
        content = hashlib.sha256()
        for tensor in trained.values():
            content.update(content_of(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
        own = content.hexdigest()
        others = self.group.replicas.all_gather(own, "the other replicas to compare their weights")
        if len({*others}) > 1:
            raise StateError(
                f"replicas have different weights of the stage of rank {self.group.rank}: a stream has failed after "
                "some of them, not all, had made an update (notes of its error say how many): load a checkpoint on all "
                "ranks before training goes on"
            )
        self.may_differ = False

    def prepare_sum(self, parameters: Mapping[StageParameter, torch.Tensor]) -> None:
        """Creates the reduction of these `reducible` parameters if it does not exist. All replicas call it."""
        reduced = (self.group.generation, digest(parameters))
        if self._reduced != reduced:
            self._close_reduction()
            self._reduction = GradientReduction(self.group.data_parallel_group(), parameters, self.group.device_sums)
            self._reduced = reduced

    def unit(self, part: ReplicaPart) -> float | None:
        """Returns the unit of losses that are pairs; of the number of samples, while no weights are known."""
        first = 2.0 ** -(part.batch - 1).bit_length() if self.count > 1 else None
        return first if self._unit is None else self._unit

    @property
    def sums_gradients(self) -> bool:
        """Returns whether the gradients of a step are summed over replicas."""
        return self.count > 1 and self.is_synced

    @property
    def reduction(self) -> GradientReduction:
        assert self._reduction is not None
        return self._reduction

    def loss_of_union(
        self, losses: Sequence[ReplicaLoss], part: ReplicaPart, reduction: str
    ) -> tuple[torch.Tensor, Any]:
        """Returns the loss of the union, and the remaining divisor or None; sets the unit of the next step."""
        if len({loss.weight is None for loss in losses}) > 1:
            raise LossError("loss_fn returns (total, weight) on some replicas and a loss on others; return one kind")
        if reduction == "batch":
            pairs = [(loss.total, torch.as_tensor(1 if loss.weight is None else loss.weight)) for loss in losses]
            if not all(map(_are_close, zip(*pairs, strict=True))):
                shown = " and ".join(f"{float(total):.6g} / {float(weight):.6g}" for total, weight in pairs)
                what = f"replicas compute the loss of all their samples as {shown}: loss_fn uses values that differ"
                raise LossError(f"{what}, or random numbers of Python or numpy (those of torch are the same on all)")
            losses, reduction = losses[:1], "sum"
        totals, weight = [loss.total for loss in losses], losses[0].weight
        if weight is None:
            if reduction == "mean":
                totals = [total * portion for total, portion in zip(totals, part.portions, strict=True)]
            return torch.as_tensor(sum(totals[1:], totals[0])), None
        weight = sum((loss.weight for loss in losses[1:]), weight)
        self._unit = 2.0 ** -math.ceil(math.log2(min(max(float(abs(weight)), 1.0), LARGEST_UNIT)))
        divisor = torch.where(weight == 0, 1, weight) if isinstance(weight, torch.Tensor) else weight or 1
        return torch.as_tensor(sum(totals[1:], totals[0]) / weight), losses[0].unit * divisor

    @contextlib.contextmanager
    def gather(
        self, part: ReplicaPart, inputs: GivenInputs, own: Sequence[Any], ways: Sequence[Any], target: tuple[Any, ...]
    ) -> Iterator[tuple[list[Any], tuple[Any, ...]]]:
        """Yields outputs and target of the union; the block draws the random numbers of the first replica."""
        # Gradients reach the outputs of this replica, and on the first replica also values that all samples share.
        generators = [*map(accelerator.default_generator, dict.fromkeys((torch.device("cpu"), self.group.device)))]
        own_states = [generator.get_state() for generator in generators]
        values, targets, batches, states = self.union_of(part, own, ways, target, inputs.batch, own_states)
        with accelerator.restore_generators(generators) if part.replica else contextlib.nullcontext():
            for generator, state in zip(generators, states[0], strict=True):
                generator.set_state(state.cpu())
            yield values, target_of_union(targets, batches, rows_of_inputs(inputs.bound.in_dims), part.replica)

    def union_of(self, part: ReplicaPart, own: Sequence[Any], ways: Sequence[Any], *more: Any) -> tuple[Any, ...]:
        """Returns the values of the union, combined in these ways, then each of `more` from all replicas."""
        message = map_tensor_leaves(lambda t: t.detach().cpu().clone(), ([*own], *more))
        every: list[Any] = self.group.replicas.all_gather(message, "the samples of the other replicas")
        every[part.replica] = ([*own], *more)  # with gradients
        columns, *others = map_tensor_leaves(lambda t: t.to(self.group.device), [*zip(*every, strict=True)])
        values = []
        for value, parts, (how, what) in zip(own, zip(*columns, strict=True), ways, strict=True):
            if how is not None:
                value = combine(parts, 0 if how == "stack" else how, part.portions, what)
            elif not _are_close(parts):
                raise LossError(f"{what} is one value for all samples, but replicas have different ones: pass the same")
            elif part.replica and tensor_requires_grad(value):
                value = value.clone()
                value.register_hook(torch.zeros_like)
            values.append(value)
        return values, *others

    def finish_sum(
        self, gradients: Mapping[StageParameter, torch.Tensor], reports: Sequence[GradientReport]
    ) -> dict[StageParameter, torch.Tensor]:
        """Returns the sums over replicas, after all have called `give_rest`. `gradients`: others, sparse or late."""
        sums = {k: v for k, v in self.reduction.finish().items() if not all(k in one.missing for one in reports)}
        if any(one.sparse or one.late for one in reports):
            for key, value in self.sum_apart(gradients).items():
                sums[key] = add_gradient(sums.get(key), value)
        self._unreducible.update(key for one in reports for key in one.sparse)
        return sums

    def sum_apart(self, gradients: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Returns the sums over replicas of gradients that the reduction does not sum. Keys differ by replica."""
        sums: dict[Any, torch.Tensor] = {}
        own = {key: gradient.detach().cpu() for key, gradient in gradients.items()}
        for part in self.group.replicas.all_gather(own, WAITED_FOR):
            for key, gradient in part.items():
                sums[key] = add_gradient(sums.get(key), gradient)
        return {key: value.to(self.group.device) for key, value in sums.items()}

    def sum_of_loss(self, one: MiniBatch, more: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Sums the gradients of parameters that loss_fn uses, in place; returns the sums of `more`, as `sum_apart`."""
        own = parameters_of_loss(one)
        sums = self.sum_apart({**more, **{k: gradient for k, (_, gradient, _) in enumerate(own)}})
        for k, (leaf, gradient, count) in enumerate(own):
            one.loss.own[id(leaf)] = (leaf, sums.pop(k).to(gradient.device), count)  # type: ignore[union-attr]
        return sums
