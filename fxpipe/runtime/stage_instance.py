"""A stage in one step: its code on views of the model's tensors, and the autograd graphs that it makes.

F runs the stage on detached values, so that each micro-batch has its own graph; B calls autograd for that graph, sums
the gradients of parameters in the order of the row; if backward is split, W does so for the weights that B leaves. The
model is not changed before the step has succeeded: parameters are read through detached views, and a buffer that
forward changes is copied for each F.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from fxpipe._torch.autograd import (
    StageBackward,
    gradient_edge_of,
    gradients_of,
    graph_entry,
    takes_gradient,
    version_of,
)
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import StateError
from fxpipe.rewriting.program import BatchStatistics, Stage, StageCallable, WeightGradientTape
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.caller_context import CallerStateRunner
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.exchange import BoundaryValue
from fxpipe.runtime.running_statistics import check_same_norm_calls, updated_running_statistics
from fxpipe.runtime.wiring import ValueLink

# -- Received values as a stage uses them: where the autograd graph of a micro-batch begins --------------------------
#
# A graph keeps a leaf, with its memory, until B, also if nothing in the stage has saved its value. So received values
# enter through one node that keeps nothing, and their gradients are requested by its edges. Gradients of later users
# enter there, too: a sum is made in the node's input, as a leaf's is.

# Something that requires grad, or there would be no node: it has no memory.
_entry_token = torch.empty(0, device="cpu", requires_grad=True)  # whatever the default device is when this is imported


_stage_backward = StageBackward()

LARGE_GRADIENT = 2**20  # bytes; smaller ones are added when backward has made all of them, which is faster


def enter_graph(
    links: Sequence[ValueLink], received: Sequence[BoundaryValue]
) -> tuple[list[Any], list[ValueLink], list[GradientEdge]]:
    """Returns the values that the stage uses, the links of those that want a gradient, and the edges that yield it."""
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
            else:  # a leaf after all: it is of a class of its own, which the node would take from it
                value = value.detach().requires_grad_()
                wanted.append(link)
                edges.append(gradient_edge_of(value))
        uses.append(value)
    if through:
        entered = graph_entry(*through, _entry_token)
        node: Any = entered[0].grad_fn
        for k, place in enumerate(places):
            uses[place] = entered[k]
            wanted.append(links[place])
            edges.append(GradientEdge(node, k))
    return uses, wanted, edges


@dataclass(slots=True)
class BackwardHandle:
    """The parts of the graph made by F or R that B needs."""

    links: list[ValueLink]  # received values that require grad
    leaves: list[GradientEdge]  # where their gradients come out
    names: list[str]  # values whose gradients go in
    roots: list[GradientEdge]  # where they do
    tape: WeightGradientTape | None  # where backward is split

    def begin(self, name: str, edge: GradientEdge) -> None:
        """Notes where the gradient of a value goes in."""
        self.names.append(name)
        self.roots.append(edge)


class StageResult(NamedTuple):
    """The results of a stage for one micro-batch."""

    sent: Sequence[Any]
    buffers: dict[str, torch.Tensor]  # as they are after it
    statistics: list[BatchStatistics]  # of deferred batch norm
    pending: BackwardHandle


class StageTotals:
    """The sums of a stage over the micro-batches of a step: gradients, and the buffers that change.

    Micro-batches may run different programs; stages of one number share it.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}  # that change, as the last F left them
        self.assigned: set[str] = set()  # of those, by name, what forward sets to another tensor
        self.sums: dict[str, torch.Tensor] = {}  # of gradients, by parameter
        self.when_final: Callable[[str], None] | None = None  # told of each sum that is complete, in the last B or W
        self._counters: dict[str, torch.Tensor] = {}  # of mini-batches, as every F leaves them
        self._statistics: dict[int, list[BatchStatistics]] = {}  # of deferred batch norm, by micro-batch
        self._counts: dict[str, int] = {}  # of gradients in a sum

    def finish_forward(self, stage: Stage, i: int, ran: StageResult) -> None:
        """Stores what F leaves for that of the next micro-batch, and for the end of the step."""
        if not ran.buffers:
            return  # then it has no statistics either, which are of buffers
        for name, value in ran.buffers.items():
            (self._counters if name in stage.counters else self.buffers)[name] = value
        self._statistics[i] = ran.statistics
        first = next(iter(self._statistics.values()))
        if first or ran.statistics:
            check_same_norm_calls(first, ran.statistics)

    def final_buffers(
        self, others: Sequence[StageTotals] = (), bring: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The buffers that change, after all micro-batches.

        Args:
            others: of other replicas of the stage, which have other micro-batches; the last one is here.
            bring: to the device of the first replica, where they are to be.
        """
        statistics = {i: calls for one in (self, *others) for i, calls in one._statistics.items()}
        ordered = [statistics[i] for i in sorted(statistics)]
        buffers = self.buffers | self._counters
        if bring is not None:
            for calls in ordered[1:]:
                check_same_norm_calls(ordered[0], calls)
            ordered = [
                [
                    (mean_name, var_name, n, bring(mean), bring(var), momentum)
                    for mean_name, var_name, n, mean, var, momentum in calls
                ]
                for calls in ordered
            ]
            buffers = {name: bring(value) for name, value in buffers.items()}
        return updated_running_statistics(buffers, ordered)

    def add(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Adds gradients of parameters, by name, to their sums."""
        for name, gradient in gradients:
            if gradient is not None:
                count = self._counts.get(name, 0)
                self.sums[name] = add_gradient(self.sums.get(name), gradient, count)
                self._counts[name] = count + 1
                if self.when_final is not None:
                    self.when_final(name)
            del gradient  # before the next one is made


class StageInstance:
    """A stage with the tensors of the model that it uses, on its device."""

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
        """`function`: what runs of it; `bring`: to the stage's device; `state`: of the caller."""
        self.stage, self.function, self.links, self.grad = stage, function, links, state.grad
        self.totals = totals
        self._run_as_caller = CallerStateRunner(state)
        self.views: dict[str, torch.Tensor] = {}  # of parameters
        self.constants: dict[str, torch.Tensor] = {}
        self._detached_parameters: dict[str, torch.Tensor] = {}  # parameters as tapes have them
        for name in stage.attributes:
            tensor = tensors.get(name)
            if tensor.is_meta:
                raise StateError(
                    f"{name!r} is on the meta device, where it has no values: something has moved it there since "
                    "planning; give the model its values back (to_empty, load_state_dict), or make another pipe"
                )
            moved = bring(tensor.detach())
            if name in stage.changed_buffers or name in stage.assigns:
                if name not in totals.buffers:
                    totals.buffers[name] = moved.clone()  # the drop-in commits before R asks what F saw
            elif tensor.is_floating_point() or tensor.is_complex():
                self.views[name] = moved.requires_grad_(tensor.requires_grad and state.grad)
            else:
                self.constants[name] = moved
        totals.assigned.update(stage.assigns)
        # What is the same for every micro-batch.
        self._fixed = [self.views.get(name, self.constants.get(name)) for name in stage.attributes]
        of_b = {n: view for n, view in self.views.items() if n not in function.split_parameters}
        summed = {n: view for n, view in of_b.items() if view.requires_grad}
        self._names, self._summed = [*summed], [*summed.values()]  # whose gradients B sums
        self._all = frozenset(summed)
        self._large = frozenset(n for n, view in summed.items() if view.nbytes >= LARGE_GRADIENT)

    def uses(self, name: str) -> bool:
        """Returns whether the stage reads this tensor of the model, or sets it."""
        return name in self.stage.attributes or name in self.stage.assigns

    def versions(self, received: Sequence[BoundaryValue]) -> list[int]:
        """The versions of the tensors that a run on these values reads and that the caller could write to."""
        tensors = (*self._fixed, *(one.value for one in received))
        return [version_of(x) if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in tensors]

    def check_unchanged(self, received: Sequence[BoundaryValue], versions: Sequence[int]) -> None:
        """Raises `StateError` if a tensor was written to since F: R would compute something else."""
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
        """The stage's code on received values and copies of `buffers`. `is_kept`: B will go back through this run."""
        stage, function, attributes = self.stage, self.function, self._fixed
        if buffers:
            buffers = {name: x if name in stage.tracked_statistics else x.clone() for name, x in buffers.items()}
            attributes = [buffers.get(name, fixed) for name, fixed in zip(stage.attributes, attributes, strict=True)]
        tape = (
            WeightGradientTape(detached_parameters=self._detached_parameters)
            if function.split_parameters and self.grad and is_kept
            else None
        )
        first = (tape,) if function.split_parameters else ()
        uses, links, leaves = enter_graph(self.links, received)
        values = self._run_as_caller(function.call, *first, *attributes, *uses)
        sent, more = values[: len(stage.sends)], values[len(stage.sends) :]
        statistics: list[BatchStatistics] = []
        if more:
            assigns = len(stage.assigns)
            buffers = buffers | {n: value.detach() for n, value in zip(stage.assigns, more[:assigns], strict=True)}
            statistics = [call for node in more[assigns:] for call in node]
        pending = BackwardHandle(links, leaves, [], [], tape)
        for link, edge in zip(links, leaves, strict=True):
            if link.later is not None:  # a later user's gradient enters there, too
                pending.begin(link.value.name, edge)
        for name, x in zip(stage.sends, sent, strict=True):
            # Without gradients there is no backward, and a leaf that forward makes has no edge.
            if self.grad and isinstance(x, torch.Tensor) and takes_gradient(x):
                pending.begin(name, gradient_edge_of(x))
        return StageResult(sent, buffers, statistics, pending)

    def backward(
        self, pending: BackwardHandle, gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Sums the gradients of parameters, but for those that W computes, and puts on the tape what W needs.

        Args:
            gradients: of `pending.roots`.

        Returns:
            Those of `pending.leaves`.
        """
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
        if early:
            with self._added_as_they_come(early), _stage_backward:
                results = gradients_of(wanted, roots, arrived)
            self.totals.add((n, gradient) for n, gradient in zip(self._names, results, strict=False) if n not in early)
        else:  # without one call more, since small stages feel each
            with _stage_backward:
                results = gradients_of(wanted, roots, arrived)
            self.totals.add(zip(self._names, results, strict=False))
        if pending.tape is not None:
            pending.tape.arrived(results[of_weights:])
        return results[len(self._summed) : of_weights]

    @contextmanager
    def _added_as_they_come(self, names: Collection[str]) -> Iterator[None]:
        """A block in which autograd adds these gradients to their sums as soon as it has made them, and keeps none."""

        def add(gradient: torch.Tensor | None, name: str) -> torch.Tensor | None:
            self.totals.add([(name, gradient)])
            if gradient is None or gradient.layout != torch.strided:
                return None
            return gradient.new_empty(()).expand(gradient.shape)

        handles = [self.views[name].register_hook(functools.partial(add, name=name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def weight_gradients(self, tape: WeightGradientTape) -> None:
        """Sums the gradients of the parameters that B has left."""
        with torch.no_grad():
            self.totals.add(tape.weight_gradients())
