"""Finds the graphs that a step runs, or records them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import module_flags
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, StateError
from fxpipe.pipe.graph_cache import CachedGraph, GraphCache, GraphInputs
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.passes import PreparedGraph, holds_for_lengths, holds_for_sizes
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning.auto_options import with_best_chunks
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.tracing.cache_key import GraphKey, InputsKey
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.tensors import has_values
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.written_inputs import refuse_unwritable_inputs
from fxpipe.utils.batch_split import micro_batch_sizes, samples_per_micro_batch
from fxpipe.utils.pytree import flatten, has_own_attributes
from fxpipe.utils.random_generators import draw_seed


class GraphFinder(ABC):
    """Finds the graphs of mini-batches and micro-batches."""

    model: nn.Module
    asked: Settings  # as the user passed them
    settings: Settings  # with the decisions of planning
    plan: Plan | None
    first: PreparedGraph | None  # the graph that decided the stages
    graphs: GraphCache
    _chosen_for: tuple[bool, int]  # (is training, samples) for which the number of micro-batches was chosen

    @abstractmethod
    def check_open(self) -> None:
        """Raises `StateError` if the pipe is closed."""

    @abstractmethod
    def _record_graph(self, call: ModelCall, seed: int, count: int | None) -> CachedGraph:
        """Records and splits a graph for a mini-batch, or for one of `count` micro-batches."""

    def find(
        self, calls: Sequence[ModelCall], is_handed_over: bool = False, in_one: bool = True, seed: int | None = None
    ) -> GivenInputs:
        """Finds the graph of a mini-batch, or of each micro-batch; records missing graphs.

        Args:
            calls: one mini-batch, or the micro-batches.
            in_one: forward and backward run in one step.
            seed: of the step; by default the next one of torch's generator.
        """
        seed = peek_seed() if seed is None else seed
        count = len(calls) if is_handed_over else None
        inputs = self._graph_inputs(calls, seed)
        if count is not None and self.first is None:  # plan for the largest
            largest = max(range(count), key=lambda i: count_elements(inputs[i].leaves))
            with note_of_micro_batch(largest, count):
                self._record_graph(calls[largest], seed, count)
            inputs = self._graph_inputs(calls, seed)
        graphs: list[CachedGraph] = []
        for i, call in enumerate(calls):
            with note_of_micro_batch(i, count):
                graph = self._known(inputs[i], is_handed_over, graphs[-1] if graphs else None)
                if graph is None:
                    graph = self._record_graph(call, seed, count)
                    # A model may set attributes in its first call: earlier keys are outdated.
                    inputs = self._graph_inputs(calls, seed)
                graphs.append(graph)
        if is_handed_over:
            return self._given_micro_batches(graphs, inputs)
        (graph,), (own,) = graphs, inputs
        batch = samples_of(graph[0].traced, own.leaves)
        if self._may_choose_chunks(batch):
            self._choose_chunks(graph[0].traced, batch, own.call)
            lengths = graph[0].traced.dynamic.lengths_of(own.leaves)
            if not graph[0].traced.holds_for(batch, self._sizes(batch), lengths):
                graph = self._known(own, False) or self._record_graph(own.call, seed, None)
        return self._given_mini_batch(graph, own, in_one)

    def find_known(self, call: ModelCall, seed: int) -> GivenInputs | None:
        """Finds the graph of a mini-batch without reading the weights, which stages may be updating.

        Returns:
            None if there is no such graph yet, or if it must be compared with the model first.
        """
        (inputs,) = self._graph_inputs([call], seed)
        graph = next((graph for graph in self.graphs if inputs.match(graph[0].traced, self._sizes)), None)
        if graph is None or _is_far(graph[0].traced, inputs):
            return None
        is_open = self._may_choose_chunks(samples_of(graph[0].traced, inputs.leaves))
        return None if is_open else self._given_mini_batch(graph, inputs, in_one=True)

    def _given_mini_batch(self, graph: CachedGraph, inputs: GraphInputs, in_one: bool) -> GivenInputs:
        """Splits a mini-batch into micro-batches; raises if it cannot run."""
        (prepared, bound), leaves = graph, inputs.leaves
        traced, batch = prepared.traced, samples_of(prepared.traced, leaves)
        lengths = traced.dynamic.lengths_of(leaves)
        if bound.moving_buffers and not in_one and not traced.holds_for(batch, (batch,), lengths):
            raise StateError(
                f"forward changes the buffer {bound.moving_buffers[0]!r} in evaluation, so the mini-batch must run in "
                "one micro-batch, and its graph is one of smaller ones: make another pipe with chunks=1, or keep the "
                "buffer as it is in evaluation"
            )
        refuse_unwritable_inputs(traced, leaves, in_one)
        count = 1 if bound.moving_buffers and not in_one else self.settings.micro_batches(batch)
        sizes = samples_per_micro_batch(batch, count)
        traced.refuse_uneven_outputs(batch, sizes)
        return GivenInputs.of_mini_batch(bound, leaves, sizes, inputs.call.target)

    def _given_micro_batches(self, graphs: Sequence[CachedGraph], inputs: Sequence[GraphInputs]) -> GivenInputs:
        """Returns the caller's micro-batches, with as few programs as their graphs allow."""
        different = {id(bound): (prepared, bound) for prepared, bound in graphs}
        if len(different) > 1:  # use the graph that fits most of them for each that it fits
            covered = {
                key: [one.match(prepared.traced) and self._holds_for_lengths(prepared.traced, one) for one in inputs]
                for key, (prepared, _) in different.items()
            }
            best = max(covered, key=lambda key: sum(covered[key]))
            graphs = [different[best] if holds else own for own, holds in zip(graphs, covered[best], strict=True)]
        # If samples interact, or no dimension holds them, a loss is not a mean over samples: weights are equal.
        counts_samples = not any(bound.is_whole or bound.is_joint for _, bound in graphs)
        samples = []
        for i, ((prepared, bound), one) in enumerate(zip(graphs, inputs, strict=True)):
            with note_of_micro_batch(i, len(inputs)):
                others = {
                    f"{leaf.path} of micro-batch {k}": value
                    for k, ((other, _), more) in enumerate(zip(graphs, inputs, strict=True))
                    if k != i and bound.program.written_inputs
                    for leaf, value in zip(other.traced.leaves, more.leaves, strict=True)
                }
                refuse_unwritable_inputs(prepared.traced, one.leaves, in_one=True, others=others)
                samples.append(samples_of(prepared.traced, one.leaves) if counts_samples else 1)
        bounds, targets = tuple(bound for _, bound in graphs), tuple(one.call.target for one in inputs)
        return GivenInputs(bounds, [one.leaves for one in inputs], tuple(samples), targets, is_handed_over=True)

    def _known(self, inputs: GraphInputs, is_part: bool, first: CachedGraph | None = None) -> CachedGraph | None:
        """Returns the graph of these inputs, or None; the graph of a mini-batch must fit its micro-batches, too.

        `first`: the graph to try first; most micro-batches have the same.
        """
        graphs = sorted(self.graphs, key=lambda graph: first is None or graph[1] is not first[1])
        for graph in graphs:
            traced = graph[0].traced
            if inputs.match(traced, None if is_part else self._sizes) and self._holds_for_lengths(traced, inputs):
                return graph
        for graph in () if is_part else graphs:  # not yet compared for such micro-batches
            traced, args, kwargs = graph[0].traced, inputs.call.args, inputs.call.kwargs
            if (
                inputs.match(traced)
                and self._holds_for_lengths(traced, inputs)
                and holds_for_sizes(traced, args, kwargs, self._sizes(traced.batch_of(inputs.leaves)), self.settings)
            ):
                return graph
        return None

    def _sizes(self, batch: int) -> frozenset[int]:
        return micro_batch_sizes(batch, self.settings.micro_batches(batch))

    def _graph_inputs(self, calls: Sequence[ModelCall], seed: int) -> list[GraphInputs]:
        """Flattens the inputs of a step.

        Raises:
            StateError: the pipe is closed.
            ArgumentError: inputs have no values.
        """
        self.check_open()
        flags, checked, inputs = module_flags(self.model), dict[int, tuple[Traced, bool]](), []
        for call in calls:
            leaves, spec = flatten((call.args, call.kwargs))
            if any(map(has_own_attributes, leaves)):
                input_leaves(self.model, call.args, call.kwargs)  # raises with the name of the input
            if not all(map(has_values, leaves)):
                raise ArgumentError(
                    "the inputs have no values (meta or fake tensors); fxpipe.plan takes such, a step cannot"
                )
            key = GraphKey(InputsKey.of(spec, leaves), flags, ThreadState.now())
            inputs.append(GraphInputs(call, leaves, key, seed, checked))
        return inputs

    def _holds_for_lengths(self, traced: Traced, inputs: GraphInputs) -> bool:
        """Compares graph and model if dynamic sizes are far from the compared ones."""
        return not _is_far(traced, inputs) or holds_for_lengths(traced, inputs.call.args, inputs.call.kwargs)

    def _may_choose_chunks(self, batch: int) -> bool:
        """Returns whether to choose the number of micro-batches again, for a mini-batch larger than all before.

        After a mini-batch with gradients, mini-batches without gradients do not count.
        """
        return "chunks" in self.asked.left and (torch.is_grad_enabled(), batch) > self._chosen_for

    def _choose_chunks(self, traced: Traced, batch: int, call: ModelCall) -> None:
        assert self.plan is not None
        if batch != self.plan.batch:  # else already chosen
            with torch.inference_mode(False), torch.enable_grad():
                self.plan = with_best_chunks(self.plan, traced, batch, call.args, call.kwargs, self.settings)
            self.settings = replace(self.settings, chunks=self.plan.chunks)
        self._chosen_for = torch.is_grad_enabled(), batch


def count_elements(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def note_of_micro_batch(i: int, count: int | None) -> Iterator[None]:
    """A block for one of `count` micro-batches of the caller, which exceptions name; None: for a mini-batch."""
    try:
        yield
    except Exception as error:
        if count is not None:
            error.add_note(f"fxpipe: raised for micro-batch {i} of the {count} in micro_batches")
        raise


def _is_far(traced: Traced, inputs: GraphInputs) -> bool:
    """Returns whether dynamic sizes are far from the sizes at which graph and model were compared."""
    lengths = traced.dynamic.lengths_of(inputs.leaves)
    return lengths is not None and traced.dynamic.is_far_from(lengths, traced.comparisons.lengths)


def samples_of(traced: Traced, leaves: Sequence[Any]) -> int:
    """Returns the number of samples in flattened inputs.

    Raises:
        ArgumentError: there are no samples.
    """
    batch = traced.batch_of(leaves)
    if batch == 0:
        raise ArgumentError(
            "the inputs hold no samples (size 0 in the batch dimension); give at least one, or skip the step"
        )
    return batch


def peek_seed() -> int:
    """Returns the next number of torch's generator without advancing it: the step draws from it."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    return draw_seed(generator)
