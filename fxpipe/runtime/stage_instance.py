"""A stage in one step: its code on views of the model's tensors, and its autograd graphs.

F runs the stage on detached values, so each micro-batch has its own graph. B calls autograd for that graph, and sums
the gradients of parameters in the order of the row; W computes the gradients that B leaves. The model does not change
before the step has succeeded: parameters are read through views, and F changes copies of buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from fxpipe._torch import autograd
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import StateError
from fxpipe.rewriting.program import BatchStatistics, Stage, StageCallable, WeightGradientTape
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.caller_context import CallerStateRunner
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.exchange import BoundaryValue
from fxpipe.runtime.wiring import ValueLink


def updated_running_statistics(
    buffers: Mapping[str, torch.Tensor], micro_batches: Sequence[Sequence[BatchStatistics]]
) -> dict[str, torch.Tensor]:
    """Returns the buffers of a stage, by name, with the running statistics of deferred batch norm after a mini-batch.

    For each call of batch norm, a micro-batch gives the number n of values in a channel, their mean and their unbiased
    variance. The statistics of the mini-batch follow without cancellation (T. Chan, G. Golub, R. LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979): with N the sum of all n

        mean = sum(n mean_i) / N
        var  = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

    in float64, in the order of micro-batches, so no bit depends on the schedule. Means are rounded to the buffer's
    dtype: if values are k times farther from 0 than from each other, the relative error of the variance is about
    k / 1e7 in float32. Calls that share running statistics update them in order, as in forward.
    """
    after = dict(buffers)
    if not any(micro_batches):
        return after
    # All calls are batched: a stage may have dozens of them, with few channels each.
    widths = tuple(mean.numel() for _, _, _, mean, _, _ in micro_batches[0])
    counts = tuple(tuple(n for _, _, n, *_ in calls) for calls in micro_batches)
    means = torch.stack([torch.cat([mean for _, _, _, mean, _, _ in calls]) for calls in micro_batches])
    variances = torch.stack([torch.cat([var for _, _, _, _, var, _ in calls]) for calls in micro_batches])
    of_mean, within, between = _merge_weights(counts, widths, means.device)
    means = means.double()
    mean = (of_mean * means).sum(0)
    var = (within * variances + between * (means - mean) ** 2).sum(0)
    for call, new_mean, new_var in zip(
        _norm_calls(micro_batches[0]), mean.split(widths), var.split(widths), strict=True
    ):
        mean_name, var_name, momentum = call
        for name, new in ((mean_name, new_mean), (var_name, new_var)):
            # Rounded once, as by the kernel; exact with a momentum of 0 or 1.
            after[name] = after[name].double().lerp_(new, momentum).to(after[name].dtype)
    return after


def check_same_norm_calls(first: Sequence[BatchStatistics], other: Sequence[BatchStatistics]) -> None:
    """Raises `StateError` if micro-batches call batch norm differently, as opaque modules or two graphs may."""
    if _norm_calls(first) != _norm_calls(other):
        raise StateError(
            "deferred_batch_norm=True, but batch norm runs otherwise for some micro-batches than for others (in a "
            "module kept whole, or where forward takes another way for some of micro_batches=); let it run as often "
            "for each, with the same momentum, or give deferred_batch_norm=False"
        )


def _norm_calls(statistics: Sequence[BatchStatistics]) -> list[tuple[str, str, float]]:
    return [(mean, var, momentum) for mean, var, *_, momentum in statistics]


@functools.lru_cache(maxsize=64)  # later steps do not wait for a GPU
def _merge_weights(
    counts: tuple[tuple[int, ...], ...], widths: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns n / N, (n - 1) / (N - 1), n / (N - 1) by micro-batch and channel; `widths`: channels of each call."""
    n = torch.tensor(counts, dtype=torch.float64).repeat_interleave(torch.tensor(widths), dim=1)
    total = n.sum(0)
    return (n / total).to(device), ((n - 1) / (total - 1)).to(device), (n / (total - 1)).to(device)


# A graph holds a leaf, with its memory, until B, even if the stage has not saved its value. So received values enter
# through one node that saves nothing, and their gradients are requested by its edges. Gradients of later users enter
# there, too: autograd adds them in the input of the node, as in a leaf.

# A tensor without memory that requires grad, so that the node exists.
_entry_token = torch.empty(0, device="cpu", requires_grad=True)  # independent of the default device at import

LARGE_GRADIENT = 2**20  # bytes; smaller gradients are added after the backward, which is faster


def enter_graph(
    links: Sequence[ValueLink], received: Sequence[BoundaryValue]
) -> tuple[list[Any], list[ValueLink], list[GradientEdge]]:
    """Returns the values for the stage, the links whose value requires grad, and the edges of their gradients."""
    uses: list[Any] = []
    wanted: list[ValueLink] = []
    edges: list[GradientEdge] = []
    places: list[int] = []
    through: list[torch.Tensor] = []
    is_recorded = torch.is_grad_enabled()
    for link, entering in zip(links, received, strict=True):
        value = entering.value
        if isinstance(value, torch.Tensor):
            if not (entering.requires_grad and is_recorded):
                value = value.detach()
            elif type(value) is torch.Tensor:
                places.append(len(uses))
                through.append(value)
            else:  # a subclass needs a leaf, since the node would drop its class
                value = value.detach().requires_grad_()
                wanted.append(link)
                edges.append(autograd.gradient_edge_of(value))
        uses.append(value)
    if through:
        entered = autograd.graph_entry(*through, _entry_token)
        node: Any = entered[0].grad_fn
        for k, place in enumerate(places):
            uses[place] = entered[k]
            wanted.append(links[place])
            edges.append(GradientEdge(node, k))
    return uses, wanted, edges


class BackwardHandle(NamedTuple):
    """The parts of the graph of F or R that B needs."""

    links: list[ValueLink]  # received values that require grad
    leaves: list[GradientEdge]  # edges of the gradients of received values
    names: list[str]  # values whose gradients B starts from
    roots: list[GradientEdge]  # edges where they enter
    tape: WeightGradientTape | None  # if the backward is split


class StageResult(NamedTuple):
    sent: Sequence[Any]
    buffers: dict[str, torch.Tensor]  # after the run
    statistics: list[BatchStatistics]  # from deferred batch norm
    pending: BackwardHandle


class StageTotals:
    """The sums of a stage over a step, for all its programs: gradients, and buffers that change."""

    def __init__(self, is_handed_over: bool = False) -> None:
        self.is_handed_over = is_handed_over  # each micro-batch changes all state, as a call of the model
        self.buffers: dict[str, torch.Tensor] = {}  # changed buffers, after the last F
        self.assigned: set[str] = set()  # names of buffers that forward sets to another tensor
        self.sums: dict[str, torch.Tensor] = {}
        self.when_final: Callable[[StageTotals, str], None] | None = None  # called with each name whose sum is complete
        self._counters: dict[str, torch.Tensor] = {}  # values after any F, because each F leaves the same
        self._statistics: dict[int, list[BatchStatistics]] = {}  # from deferred batch norm, by micro-batch
        self._counts: dict[str, int] = {}

    def finish_forward(self, stage: Stage, i: int, ran: StageResult) -> None:
        """Stores the buffers and statistics of an F, for the next micro-batch and for the end of the step."""
        if not ran.buffers:
            return  # then there are no statistics of buffers either
        from_start = {*stage.counters, *(() if self.is_handed_over else stage.repeated)}
        for name, value in ran.buffers.items():
            (self._counters if name in from_start else self.buffers)[name] = value
        self._statistics[i] = ran.statistics
        first = next(iter(self._statistics.values()))
        if first or ran.statistics:
            check_same_norm_calls(first, ran.statistics)

    def final_buffers(
        self, others: Sequence[StageTotals], bring: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the buffers that change, after all micro-batches. `bring`: moves buffers of `others`, replicas."""
        statistics = {i: calls for one in (self, *others) for i, calls in one._statistics.items()}
        ordered = [
            [
                (mean_name, var_name, n, bring(mean), bring(var), momentum)
                for mean_name, var_name, n, mean, var, momentum in statistics[i]
            ]
            for i in sorted(statistics)
        ]
        for calls in ordered[1:]:
            check_same_norm_calls(ordered[0], calls)
        buffers = {name: bring(value) for name, value in (self.buffers | self._counters).items()}
        return updated_running_statistics(buffers, ordered)

    def add(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        for name, gradient in gradients:
            if gradient is not None:
                count = self._counts.get(name, 0)
                self.sums[name] = add_gradient(self.sums.get(name), gradient, count)
                self._counts[name] = count + 1
                if self.when_final is not None:
                    self.when_final(self, name)
            del gradient  # before the next gradient is computed


class StageInstance:
    """A stage on its device, with the tensors of the model that it uses."""

    def __init__(
        self,
        stage: Stage,
        function: StageCallable,
        links: Sequence[ValueLink],
        bring: Callable[[torch.Tensor], torch.Tensor],
        tensors: ModelTensors,
        state: ThreadState,
        totals: StageTotals,
    ):
        """`function`: the stage's code; `bring`: moves a tensor to the stage's device; `state`: of the caller."""
        self.stage, self.function, self.links, self.grad = stage, function, links, state.grad
        self.totals = totals
        self._run_as_caller = CallerStateRunner(state)
        self.views: dict[str, torch.Tensor] = {}  # parameters only
        constants: dict[str, torch.Tensor] = {}
        self._detached_parameters: dict[str, torch.Tensor] = {}  # as tapes refer to them
        changes = stage.changes
        for name in stage.attributes:
            tensor = tensors.get(name)
            if tensor.is_meta:
                raise StateError(
                    f"{name!r} is on the meta device, where it has no values: something has moved it there since "
                    "planning; give the model its values back (to_empty, load_state_dict), or make another pipe"
                )
            moved = bring(tensor.detach())
            if name in changes:
                if name not in totals.buffers:
                    totals.buffers[name] = moved.clone()  # the drop-in commits before R reads the buffers of F
            elif tensor.is_floating_point() or tensor.is_complex():
                self.views[name] = moved.requires_grad_(tensor.requires_grad and state.grad)
            else:
                constants[name] = moved
        totals.assigned.update(stage.assigns)
        # Shared by all micro-batches.
        self._fixed = [self.views.get(name, constants.get(name)) for name in stage.attributes]
        of_b = {n: view for n, view in self.views.items() if n not in function.split_parameters}
        summed = {n: view for n, view in of_b.items() if view.requires_grad}
        self._names, self._summed = [*summed], [*summed.values()]  # parameters whose gradients B sums
        self._all = frozenset(summed)
        self._large = frozenset(n for n, view in summed.items() if view.nbytes >= LARGE_GRADIENT)

    def versions(self, received: Sequence[BoundaryValue]) -> list[int]:
        """Returns the versions of the tensors that a run on these values reads and the caller could write to."""
        tensors = (*self._fixed, *(one.value for one in received))
        return [autograd.version_of(x) if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in tensors]

    def check_unchanged(self, received: Sequence[BoundaryValue], versions: Sequence[int]) -> None:
        """Raises `StateError` if a tensor was written to since F, so that R would compute other values."""
        names = (*self.stage.attributes, *(link.value.name for link in self.links))
        for name, version, expected in zip(names, self.versions(received), versions, strict=True):
            if version != expected:
                raise StateError(
                    f"{name!r} was written to between forward and backward (it is at version {version}; expected "
                    f"{expected}), and backward would recompute forward with its new values (checkpoint=): write to it "
                    "(optimizer.step(), clamp_, copy_) after backward, or call the pipe again"
                )

    def run(
        self, received: Sequence[BoundaryValue], buffers: dict[str, torch.Tensor], is_kept: bool = True
    ) -> StageResult:
        """Runs the stage on received values and copies of `buffers`. `is_kept`: keep the graph for B."""
        stage, function, attributes = self.stage, self.function, self._fixed
        if buffers:
            buffers = {name: x if name in stage.changed_at_end else x.clone() for name, x in buffers.items()}
            attributes = [buffers.get(name, fixed) for name, fixed in zip(stage.attributes, attributes, strict=True)]
        is_split = bool(function.split_parameters)
        detached = self._detached_parameters
        tape = WeightGradientTape(detached_parameters=detached) if is_split and self.grad and is_kept else None
        first = (tape,) if is_split else ()
        uses, links, leaves = enter_graph(self.links, received)
        values = self._run_as_caller(function.call, *first, *attributes, *uses)
        sent, more = values[: len(stage.sends)], values[len(stage.sends) :]
        statistics: list[BatchStatistics] = []
        if more:
            assigns = len(stage.assigns)
            buffers = buffers | {n: value.detach() for n, value in zip(stage.assigns, more[:assigns], strict=True)}
            statistics = [call for node in more[assigns:] for call in node]
        names: list[str] = []
        roots: list[GradientEdge] = []
        for link, edge in zip(links, leaves, strict=True):
            if link.later is not None:  # the gradient of a later user enters there
                names.append(link.value.name)
                roots.append(edge)
        for name, x in zip(stage.sends, sent, strict=True):
            # Without gradients there is no backward, and leaves that forward creates have no edge.
            if self.grad and isinstance(x, torch.Tensor) and autograd.takes_gradient(x):
                names.append(name)
                roots.append(autograd.gradient_edge_of(x))
        return StageResult(sent, buffers, statistics, BackwardHandle(links, leaves, names, roots, tape))

    def backward(
        self, pending: BackwardHandle, gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Sums gradients of parameters; leaves those of W on the tape. Returns gradients of `pending.leaves`."""
        roots, arrived = [], []
        for root, gradient in zip(pending.roots, gradients, strict=True):
            if gradient is not None:
                roots.append(root)
                arrived.append(gradient)
        wanted = [*self._summed, *pending.leaves]
        of_weights = len(wanted)
        if pending.tape is not None:
            wanted += pending.tape.edges
        if not roots or not wanted:
            return [None] * len(pending.leaves)
        early = self._large if self.totals.when_final is None else self._all
        # Autograd adds these gradients to their sums immediately, and keeps none.
        handles = [self.views[n].register_hook(functools.partial(self._add_now, n)) for n in early] if early else []
        try:
            with autograd.stage_backward:
                results = autograd.gradients_of(wanted, roots, arrived)
        finally:
            for handle in handles:
                handle.remove()
        of_parameters = zip(self._names, results, strict=False)
        self.totals.add([one for one in of_parameters if one[0] not in early] if early else of_parameters)
        if pending.tape is not None:
            pending.tape.arrived(results[of_weights:])
        return results[len(self._summed) : of_weights]

    def _add_now(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.totals.add([(name, gradient)])
        if gradient is None or gradient.layout != torch.strided:
            return None
        return gradient.new_empty(()).expand(gradient.shape)

    def weight_gradients(self, tape: WeightGradientTape) -> None:
        """Sums the gradients of the parameters that B has left."""
        with torch.no_grad():
            self.totals.add(tape.weight_gradients())
