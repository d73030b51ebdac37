"""The state of a pipe: its plan, its graphs, found for the inputs of a step or recorded and cut, and its engine.

The first graph decides the stages and where parameters live; those beside it are cut to keep nodes where their
parameters are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import module_flags
from fxpipe._torch.thread_state import ThreadState
from fxpipe.config.pipeline_options import Settings
from fxpipe.errors import ArgumentError, FxpipeError, StateError
from fxpipe.graph_cache import GraphCache, GraphInputs
from fxpipe.planning import PreparedGraph, prepare, prepare_additional_graph
from fxpipe.planning.evaluation_check import refusal_of_evaluation
from fxpipe.planning.passes import holds_for_lengths, holds_for_sizes
from fxpipe.plans import Plan
from fxpipe.plans.retarget import resize_plan
from fxpipe.runtime import BoundProgram, Engine, Executor, executor_for, wire_program
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.losses import ambiguous_output_message
from fxpipe.scheduling import Schedule, is_searched, make_schedule
from fxpipe.tracing.cache_key import GraphKey, InputsKey
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.print_calls import warn_of_prints
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.shapes.input_pieces import InputPieces
from fxpipe.tracing.source_lines import warn_user
from fxpipe.tracing.tensors import has_values
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.written_inputs import refuse_unwritable_inputs
from fxpipe.tuning.auto_options import with_best_chunks
from fxpipe.utils.batch_split import micro_batch_sizes, samples_per_micro_batch
from fxpipe.utils.locks import planning_block
from fxpipe.utils.progress import show_progress
from fxpipe.utils.pytree import flatten

MANY_VALUE_GRAPHS = 8  # graphs that differ in what forward read only: one is warned that each step may need another


class PipelineState:
    """The state of a pipe, kept apart from the model's names: its plan, its graphs and its engine."""

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan | None, executor: Executor):
        self.model, self.asked, self.given_plan = model, settings, plan
        self.settings = settings  # with what planning has decided, once it has
        self.engine = Engine(model, executor)
        self.plan: Plan | None = None
        self.first: PreparedGraph | None = None
        self.graphs = GraphCache()
        self.closed = False
        self.checks_evaluation = plan is None  # whether evaluation will be refused is asked with the first plan
        self._chosen_for = (False, 0)  # of which mini-batches the number of micro-batches is: do they train? samples
        self._answers: dict[str, list[dict[str, str]]] = {}  # of graphs that differ in nothing else: read -> answer
        self._warned = self._has_prints = False

    def plan_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans a model without values; the first call, when it has some, plans it again with measured seconds."""
        with torch.inference_mode(False), torch.enable_grad(), show_progress(self.settings.progress):
            self.plan = prepare(self.model, args, kwargs, self.settings, self.given_plan, _peek_seed()).plan

    def add_prepared(self, prepared: PreparedGraph) -> None:
        """Takes a graph that was profiled and cut elsewhere."""
        self.first, self.plan, self.settings = prepared, prepared.plan, prepared.settings
        self._keep(prepared)

    def settle(self) -> None:
        """Moves the model's tensors to where the stages want them, should something else have moved them away."""
        assert self.first is not None
        _move_to_stages(self.model, self.first, self.settings.devices)

    def bound_program_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], in_one: bool = False
    ) -> tuple[BoundProgram, list[Any], int]:
        """The graph for these inputs, mode and state; recorded where there is none yet.

        Args:
            in_one: forward and backward run in one.
        """
        if self.closed:
            raise StateError("the pipe is closed; make a new one with fxpipe.pipeline(model, ...)")
        leaves, _ = flatten((args, kwargs))
        if not all(map(has_values, leaves)):
            raise ArgumentError(
                "the inputs have no values (meta or fake tensors); fxpipe.plan takes such, a step cannot"
            )
        seed = _peek_seed()
        prepared, bound = self._known(args, kwargs, seed) or self._make_graph(args, kwargs, seed)
        batch = prepared.traced.batch_of(leaves)
        if batch == 0:
            raise ArgumentError(
                "the inputs hold no samples (size 0 in the batch dimension); give at least one, or skip the step"
            )
        if "chunks" in self.asked.left:
            self._choose_chunks(prepared.traced, batch, args, kwargs)
            lengths = prepared.traced.dynamic.lengths_of(leaves)
            if not prepared.traced.holds_for(batch, self._sizes(batch), lengths):
                prepared, bound = self._known(args, kwargs, seed) or self._make_graph(args, kwargs, seed)
        refuse_unwritable_inputs(prepared.traced, leaves, in_one)
        prepared.traced.refuse_uneven_outputs(batch, samples_per_micro_batch(batch, self.settings.micro_batches(batch)))
        return bound, leaves, batch

    def _sizes(self, batch: int) -> frozenset[int]:
        """Samples in the micro-batches of a mini-batch."""
        return micro_batch_sizes(batch, self.settings.chunks)

    def _known(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
    ) -> tuple[PreparedGraph, BoundProgram] | None:
        """The graph of these inputs, in micro-batches as they will run, if there is one."""
        inputs = self._inputs(args, kwargs, seed)
        for graph in self.graphs.candidates(inputs, self._sizes):
            if self._holds_for_lengths(graph[0].traced, inputs, args, kwargs):
                return graph
        for graph in self.graphs.candidates(inputs):  # nobody has asked for such micro-batches yet
            traced = graph[0].traced
            sizes = self._sizes(traced.batch_of(inputs.leaves))
            if self._holds_for_lengths(traced, inputs, args, kwargs) and holds_for_sizes(
                traced, args, kwargs, sizes, self.settings
            ):
                return graph
        return None

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> GraphInputs:
        leaves, spec = flatten((args, kwargs))
        key = GraphKey(InputsKey.of(spec, leaves), module_flags(self.model), ThreadState.now())
        return GraphInputs(leaves, spec, key, seed)

    def _holds_for_lengths(
        self, traced: Traced, inputs: GraphInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Compares graph and model where dynamic sizes are far from those at which they were."""
        lengths = traced.dynamic.lengths_of(inputs.leaves)
        if not lengths or not traced.dynamic.is_far_from(lengths, traced.comparisons.lengths):
            return True
        return holds_for_lengths(traced, args, kwargs)

    def schedule_for(self, batch: int) -> Schedule:
        """Makes the schedule of a step of `forward_backward`; there must be a plan."""
        settings, demands = self.settings, None
        if is_searched(settings.schedule):
            assert self.plan is not None
            demands = resize_plan(self.plan, settings.largest_micro_batch(batch), settings.checkpoint).demands()
        n, m = len(settings.placement), settings.micro_batches(batch)
        return make_schedule(settings.schedule, n, m, settings.checkpoint, settings.placement, demands)

    def _choose_chunks(self, traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Chooses the number of micro-batches again where this mini-batch is larger than any before.

        The number is for training: once a mini-batch came with gradients on, those without count no longer.
        """
        assert self.plan is not None
        which = torch.is_grad_enabled(), batch
        if which <= self._chosen_for:
            return
        if batch != self.plan.batch:  # for which it was chosen already
            with torch.inference_mode(False), torch.enable_grad():
                self.plan = with_best_chunks(self.plan, traced, batch, args, kwargs, self.settings)
            self.settings = replace(self.settings, chunks=self.plan.chunks)
        self._chosen_for = which

    @planning_block()
    def _make_graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
    ) -> tuple[PreparedGraph, BoundProgram]:
        """Records and cuts a graph; the first one decides where parameters live."""
        if missing := names_without_values(self.model):
            raise StateError(
                f"the model has no values to run with: {missing[0]!r} is a meta or fake tensor; give it some first "
                "(model.to_empty(device='cpu'), then model.load_state_dict(...); or load_state_dict(..., assign=True))"
            )
        try:
            if self.first is None:
                # Planned as it will be trained, also where the first call only evaluates; a given plan has its mode.
                with torch.inference_mode(False), torch.enable_grad(), show_progress(self.settings.progress):
                    first = prepare(self.model, args, kwargs, self.settings, self.given_plan, seed)
                    reason = self._refusal_of_evaluation(first, args, kwargs, seed)
                self.first = first
                self.plan, self.settings = self.first.plan, self.first.settings
                if self.settings.workers != self.asked.workers:  # a map of modules needs no more
                    self.engine.executor.close()
                    self.engine.executor = executor_for(self.settings.workers)
                _move_to_stages(self.model, self.first, self.settings.devices)
                kept = self._keep(self.first)
                traced = self.first.traced
                if reason:
                    warn_user(
                        f"{type(self.model).__name__} can be trained as a pipe, but its evaluation (model.eval(), "
                        f"torch.no_grad(), inputs such as these) will be refused: {reason}"
                    )
                if (traced.flags, traced.state) == (module_flags(self.model), ThreadState.now()):
                    return kept
            with show_progress(self.settings.progress):
                dynamic = self.graphs.dynamic_dims(self._inputs(args, kwargs, seed))
                return self._keep(prepare_additional_graph(self.first, args, kwargs, self.settings, seed, dynamic))
        except Exception as error:
            _add_batch_size_note(error, self.model, args, kwargs)
            raise

    def _refusal_of_evaluation(
        self, first: PreparedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
    ) -> str | None:
        """Predicts why a model that trains will be refused when it is evaluated; one wants to hear that early."""
        if not self.checks_evaluation:
            return None
        self.checks_evaluation = False
        error, untold = refusal_of_evaluation(first, args, kwargs, seed)
        return str(error) if error is not None else ambiguous_output_message(untold[0]) if untold else None

    def _keep(self, prepared: PreparedGraph) -> tuple[PreparedGraph, BoundProgram]:
        traced = prepared.traced
        bound = BoundProgram(
            prepared.program,
            wire_program(prepared.program),
            self.settings.devices,
            traced.in_dims,
            traced.handed_out_dims,
            traced.out_spec,
            traced.state,
            traced.constants,
            left_attribute_dims=traced.left_attribute_dims,
            told=traced.told,
            combinations=traced.combinations,
            known_pieces=InputPieces.of(traced, self.settings.devices[-1]) if traced.combinations else None,
            untold=traced.untold,
        )
        self.graphs.add(prepared, bound)
        if self.plan is not None and (new := [r for r in traced.reasons_of_fixed_sizes if r not in self.plan.why]):
            self.plan = replace(self.plan, why=(*self.plan.why, *new))
        self._warn_of_values(traced)
        self._warn_of_sizes(traced)
        if traced.print_lines and not self._has_prints:
            self._has_prints = True
            warn_of_prints(self.model, traced.print_lines)
        return prepared, bound

    def _warn_of_sizes(self, traced: Traced) -> None:
        """Warns once for a pipe, where a size that cannot be dynamic has made so many graphs."""
        graphs = self.graphs.with_fixed_sizes(traced)
        if graphs > MANY_VALUE_GRAPHS and not self._warned:
            self._warned = True
            warnings.warn(
                f"{graphs} graphs of {type(self.model).__name__} differ only in sizes of inputs, and each other size "
                f"takes the time to record another: {'; '.join(traced.reasons_of_fixed_sizes)}. Let forward keep the "
                "size a size (tensor functions instead of loops), or pad to few sizes",
                stacklevel=2,
            )

    def _warn_of_values(self, traced: Traced) -> None:
        """Once for a pipe, where values that forward reads have made so many graphs that each step may make another."""
        if not traced.guards or not traced.guards.guards or self._warned:
            return
        shapes = tuple((leaf.path, leaf.dtype, leaf.shape[1:], leaf.constant) for leaf in traced.leaves)
        key = repr((traced.flags, traced.state, shapes))
        seen = self._answers.setdefault(key, [])
        seen.append({f"{guard.text} at {guard.where}": repr(guard.expected) for guard in traced.guards.guards})
        if len(seen) > MANY_VALUE_GRAPHS:
            self._warned = True
            reads = [read for read in seen[-1] if len({answers.get(read) for answers in seen}) > 1]
            warnings.warn(
                f"{len(seen)} graphs of {type(self.model).__name__} differ only in values that forward has read "
                f"({'; '.join(reads)}), and each other value takes the time to record another; keep them in tensors "
                "(torch.where, masks), take the reading outside forward, or keep the module that reads whole "
                "(leaf_modules=)",
                stacklevel=2,
            )


def _peek_seed() -> int:
    """Returns the number that torch's generator would draw next, without advancing it: the step draws from it."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    return int(torch.randint(2**62, (), generator=generator, device="cpu").item())


def _move_to_stages(model: nn.Module, prepared: PreparedGraph, devices: Sequence[torch.device]) -> None:
    """Each parameter and buffer to the device of the first stage that uses it; the objects stay the same."""
    moved = set()
    for stage, device in zip(prepared.program.stages, devices, strict=True):
        for name in stage.attributes:
            if name not in moved and name not in prepared.traced.constants:
                tensor = ModelTensors(model, {}).get(name)
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)
                    if tensor.grad is not None:
                        tensor.grad.data = tensor.grad.data.to(device)
                moved.add(name)
    for module in model.modules():
        # cuDNN wants the weights of an RNN side by side, or gathers them at every call, and warns of it.
        if isinstance(module, nn.RNNBase) and len({weight.device for weight in module.parameters(False)}) == 1:
            module.flatten_parameters()


def _add_batch_size_note(error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Inputs that disagree on the batch size make a model fail in words of its own: add what one would look for."""
    if isinstance(error, FxpipeError):
        return
    sizes_by_path = [(leaf.path, leaf.shape[0]) for leaf in input_leaves(model, args, kwargs)[0] if leaf.shape]
    if len({size for _, size in sizes_by_path}) > 1:
        sizes = ", ".join(f"{path}: {size}" for path, size in sizes_by_path)
        error.add_note(
            f"fxpipe: inputs differ in dimension 0 ({sizes}); if it holds the batch, give all the same number of "
            "samples"
        )
