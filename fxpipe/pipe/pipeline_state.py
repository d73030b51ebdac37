"""The state of a pipe: its plan, its graphs and its engine.

Graphs are looked up for the inputs of a step, or recorded and split. The first graph decides the stages and the
devices of parameters; later graphs are split so that nodes stay with their parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from fxpipe._torch.module_internals import module_flags
from fxpipe._torch.tensor_data import replace_data
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, FxpipeError, StateError
from fxpipe.pipe.graph_cache import CachedGraph, GraphCache, GraphInputs
from fxpipe.pipe.model_calls import ModelCall, note_of_micro_batch, parse_micro_batches
from fxpipe.pipe.optimizer_state import OptimizerStateMover
from fxpipe.pipe.program_binding import bind_program
from fxpipe.planning.dynamic_plan import plan_with_dynamic_sizes
from fxpipe.planning.entry import prepare
from fxpipe.planning.evaluation_check import refusal_of_evaluation
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.options.stage_placement import DROP_IN_SCHEDULE
from fxpipe.planning.passes import PreparedGraph, holds_for_lengths, holds_for_sizes, prepare_additional_graph
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.simulate_plan import simulate
from fxpipe.planning.tuning.auto_options import with_best_chunks
from fxpipe.runtime import BoundProgram, Engine, Executor, StepRecord, executor_for
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.stage_updates import OverlappedUpdates, StagewiseOptimizer, noting_updates
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.scheduling import Schedule, make_schedule
from fxpipe.tracing.cache_key import GraphKey, InputsKey
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.model_state import slots_of
from fxpipe.tracing.print_calls import warn_of_prints
from fxpipe.tracing.record.input_reads import refuse_other_answers
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.source_lines import warn_user
from fxpipe.tracing.tensors import has_values
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import least_samples
from fxpipe.tracing.verify.written_inputs import refuse_unwritable_inputs
from fxpipe.utils.batch_split import micro_batch_sizes, samples_per_micro_batch
from fxpipe.utils.locks import planning_block
from fxpipe.utils.progress import show_progress
from fxpipe.utils.pytree import flatten, has_own_attributes
from fxpipe.utils.random_generators import peek_seed
from fxpipe.utils.units import human_bytes

T = TypeVar("T")


class PipelineState:
    """The state of a pipe, separate from the names of the model: its plan, graphs and engine."""

    can_overlap_updates = True  # an optimizer can update stages within a step

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan | None, executor: Executor):
        self.model, self.asked, self.given_plan = model, settings, plan
        self.settings = settings  # completed by planning
        self.engine = Engine(model, executor, settings.row_devices)
        self.optimizer_states = OptimizerStateMover(model)
        self.plan: Plan | None = None
        self.first: PreparedGraph | None = None
        self.graphs = GraphCache()
        self.closed = False
        self.was_moved = False  # the warning about `to(device)` was issued
        self.was_passed_by = False  # the warning about a replaced forward was issued
        self.checks_evaluation = plan is None  # predict, with the first plan, if evaluation will be refused
        self._devices_ahead: dict[str, torch.device] = {}  # by tensor, if planned without values
        self._chosen_for = (False, 0)  # (is training, samples) for which the number of micro-batches was chosen
        self._has_prints = self._has_drop_in = self._has_generated = False
        self._stages_of_parameters: dict[int, tuple[torch.Tensor, int]] = {}  # by identity: tensor, its updating stage
        self._sized: tuple[Plan, PreparedGraph, Plan] | None = None  # plan, graph, plan with dynamic sizes

    def plan_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans a model without values; the first call with values plans again with measured seconds."""
        with torch.inference_mode(False), torch.enable_grad(), show_progress(self.settings.progress):
            prepared = prepare(self.model, args, kwargs, self.settings, self.given_plan, peek_seed())
        self.plan = prepared.plan
        for stage, device in zip(reversed(prepared.program.stages), reversed(prepared.settings.devices), strict=True):
            self._devices_ahead.update(dict.fromkeys(stage.attributes, device))  # the first stage that uses it wins

    def check_open(self) -> None:
        """Raises `StateError` if the pipe is closed."""
        if self.closed:
            raise StateError("the pipe is closed; make a new one with fxpipe.pipeline(model, ...)")

    # -- tensors of this process and of the other processes ------------------------------------------------------------

    def together(self) -> contextlib.AbstractContextManager[object]:
        """A block that all processes of the pipe enter."""
        return contextlib.nullcontext()

    def from_all(self, value: T, what: str) -> list[T]:
        """Returns the values that the processes pass, one for each."""
        return [value]

    def from_first(self, value: T, what: str) -> T:
        """Returns the value that the first process passes, in all processes."""
        return value

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters, buffers and plain attributes in this process by name, tied ones once."""
        return {slot.name: tensor for slot, tensor in slots_of(self.model).items()}

    def own_without_values(self) -> list[str]:
        """Returns the names of the tensors that stages of this process need and that have no values yet."""
        return names_without_values(self.model)

    def device_of(self, name: str) -> torch.device:
        """Returns the device of the first stage that uses a tensor without values; the device of stage 0 if none does.

        Raises:
            StateError: there is no plan yet.
        """
        if self.plan is None:
            raise StateError(
                "the pipe has no plan yet, so nobody knows which device a parameter goes to: give example_args to "
                "fxpipe.pipeline"
            )
        return self._devices_ahead.get(name, self.settings.devices[0])

    def plan_of_all_sizes(self) -> Plan | None:
        """Returns the plan; with formulas for dynamic sizes, if a graph of the same kind was recorded with them."""
        plan, first = self.plan, self.first
        if plan is None or first is None or plan.sizes:
            return plan
        same = (one for one, _ in reversed(self.graphs.entries) if one.traced.key == first.traced.key)
        prepared = next((one for one in same if one.traced.dynamic.symbols), None)
        if prepared is None:
            return plan
        if self._sized is None or self._sized[0] is not plan or self._sized[1] is not prepared:
            sized = None
            with contextlib.suppress(Exception):  # operators that need values only have the example's costs
                sized = plan_with_dynamic_sizes(plan, first.traced.leaves, prepared)
            self._sized = plan, prepared, plan if sized is None else sized
        return self._sized[2]

    def add_prepared(self, prepared: PreparedGraph) -> None:
        """Adds a graph that was profiled and split elsewhere."""
        self._take_plan_of(prepared)
        self._keep(prepared)

    def _take_plan_of(self, prepared: PreparedGraph) -> None:
        """Uses the plan of the first graph, and drops the loss for planning, to free its example target."""
        settings = replace(prepared.settings, loss=None)
        self.first, self.plan = replace(prepared, settings=settings), prepared.plan
        self.settings, self.asked = settings, replace(self.asked, loss=None)

    def warn_of_drop_in_memory(self, micro_batches: int, batch: int, is_call: bool = True) -> None:
        """Warns once if all F before all B exceed the memory limit that the plan meets for another schedule.

        `is_call`: a call and its backward run so; else a step whose loss needs all samples.
        """
        plan = self.plan
        if self._has_drop_in or plan is None or self.settings.schedule == DROP_IN_SCHEDULE:
            return
        self._has_drop_in = True
        if all(stage.memory_limit is None for stage in plan.stages):
            return
        simulation = simulate(plan, schedule=DROP_IN_SCHEDULE, chunks=micro_batches, batch=batch)
        for device, memory, limit in zip(simulation.devices, simulation.memory, simulation.limits, strict=True):
            if limit is not None and memory.peak > limit:
                what, other = "A loss that needs all samples together runs", ""
                if is_call:
                    what, other = "pipe(x) and its backward, as trainers call it, run", "train by that, or "
                warn_user(
                    f"{what} as {DROP_IN_SCHEDULE}, which keeps all micro-batches: {human_bytes(memory.peak)} on "
                    f"{device}, where the limit is {human_bytes(limit)}. The plan is for the schedule "
                    f"{plan.schedule!r} of pipe.forward_backward: {other}plan for it: "
                    f"fxpipe.pipeline(..., schedule={DROP_IN_SCHEDULE!r})"
                )
                return

    def last_step(self) -> StepRecord | None:
        """Returns the record of the last step, with the planned memory of devices whose memory is measured."""
        record = self.engine.last_step
        if record is None or self.plan is None or all(one.peak_memory is None for one in record.devices):
            return record
        order = DROP_IN_SCHEDULE if record.schedule == DROP_IN_SCHEDULE else None
        needs = simulate(self.plan, schedule=order).fits.needs
        planned: Counter[str] = Counter()  # several workers may share a device
        for device, need in zip(record.devices, needs, strict=True):
            planned[device.name] += 0 if device.peak_memory is None else int(need)
        devices = [replace(one, planned_memory=planned[one.name] or None) for one in record.devices]
        return replace(record, devices=tuple(devices))

    def warn_of_missing_cache(self) -> None:
        if not self._has_generated:
            self._has_generated = True
            warn_user(
                "generate: a pipe cannot take a cache of keys and values, so each token runs the whole text again "
                "(use_cache=False, which you can pass yourself). For long texts, generate with the plain model"
            )

    def compile_stages(self, options: Mapping[str, Any] | None) -> None:
        """Compiles the stages; graphs are recorded again when they are needed next."""
        self.settings, self.asked = (replace(one, compile=options) for one in (self.settings, self.asked))
        if self.first is not None:
            self.first = replace(self.first, settings=self.settings)
        self.graphs.clear()

    def accelerators(self) -> list[torch.device]:
        return [device for device in dict.fromkeys(self.settings.row_devices) if device.type != "cpu"]

    def keep_on_stages(self, device: torch.device) -> None:
        """Leaves the model on the devices of its stages, although a trainer moves it to `device`; warns once.

        Optimizer state that the trainer moves to `device` follows the parameters.
        """
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            self.optimizer_states.note_move(name, device)
        if not self.was_moved:
            self.was_moved = True
            devices = ", ".join(map(str, self.settings.row_devices))
            warn_user(
                f"the pipe was not moved to {device}: it places its own stages on [{devices}]. To free these, close "
                "the pipe and move the model: pipe.close(); fxpipe.unwrap(pipe).cpu()"
            )

    def settle(self) -> None:
        """Moves tensors to the first stage of this process that uses them; the objects stay the same."""
        if self.first is None:
            return
        moved = {*self.first.traced.constants}
        for j in self._own_stages(self.settings.placement):
            device = self.settings.devices[j]
            for name in self.first.program.stages[j].attributes:
                if name not in moved:
                    moved.add(name)
                    tensor = ModelTensors(self.model, {}).get(name)
                    if tensor.device != device and has_values(tensor):
                        torch.clear_autocast_cache()  # cached casts stay on the old device
                        self.optimizer_states.note_move(name, tensor.device)
                        replace_data(tensor, tensor.data.to(device))
                        if tensor.grad is not None and tensor.grad.device != device:
                            replace_data(tensor.grad, tensor.grad.data.to(device))
        for module in self.model.modules():
            # cuDNN needs the weights of an RNN in one block; otherwise it copies them at every call, with a warning.
            if isinstance(module, nn.RNNBase) and len({weight.device for weight in module.parameters(False)}) == 1:
                module.flatten_parameters()

    def _own_stages(self, placement: Sequence[int]) -> Sequence[int]:
        """Returns the stages whose tensors live in this process."""
        return range(len(placement))

    def _check_values_to_record(self) -> None:
        """Raises `StateError` if the model has tensors without values."""
        if missing := names_without_values(self.model):
            raise StateError(
                f"the model has no values to run with: {missing[0]!r} is a meta or fake tensor; give it some first "
                "(fxpipe.distributed.load(pipe, path) reads a checkpoint; or load_state_dict(..., assign=True))"
            )

    # -- training ------------------------------------------------------------------------------------------------------

    def checking(self) -> contextlib.AbstractContextManager[object]:
        """A block in which arguments are checked and micro-batches are read."""
        return contextlib.nullcontext()

    def running(self) -> contextlib.AbstractContextManager[object]:
        """A block within `checking` in which a step runs."""
        return self.engine.running()

    def read_micro_batches(self, micro_batches: Any) -> list[ModelCall] | None:
        """Parses the argument `micro_batches`; None if this process does not need them."""
        return parse_micro_batches(micro_batches)

    def train(
        self,
        calls: Sequence[ModelCall] | None,
        is_handed_over: bool,
        call: LossCall,
        optimizer: StagewiseOptimizer | None,
    ) -> tuple[torch.Tensor, Any, bool]:
        """Runs a step of `forward_backward`.

        Args:
            calls: a mini-batch, or micro-batches; None if this process does not need them.
            is_handed_over: `calls` are micro-batches.

        Returns:
            The loss, the outputs or None, and whether the optimizer has updated the stages within the step.
        """
        assert calls is not None
        given_inputs = self.find(calls, is_handed_over)
        takes_all, count = given_inputs.takes_all(call.reduction), len(given_inputs.samples)
        if takes_all:
            self.warn_of_drop_in_memory(count, given_inputs.batch, is_call=False)
        schedule = self.schedule_for(count, DROP_IN_SCHEDULE if takes_all else None)
        updates = self.overlapped_updates(optimizer)
        with noting_updates(updates):
            loss, outputs = self.engine.forward_backward(given_inputs, schedule, call, updates)
        return loss, outputs, updates is not None and bool(updates.begun)

    # -- updates of the weights --------------------------------------------------------------------------------------

    def update(self, optimizer: StagewiseOptimizer) -> None:
        """Steps an optimizer: the parameters of each stage in its worker, if workers exist."""
        parameters = optimizer.parameters()
        if self.closed or self.first is None:
            optimizer.step_parameters(parameters)
            return
        with self.engine.running():
            by_stage = self.parameters_by_stage(optimizer)
            steps = {j: functools.partial(optimizer.step_parameters, of_stage) for j, of_stage in by_stage.items()}
            self.engine.update(steps, self.settings.devices, self.settings.placement, self.settings.replicas)

    def overlapped_updates(self, optimizer: StagewiseOptimizer | None) -> OverlappedUpdates | None:
        """Returns the updates of stages within a step; None unless the optimizer has `overlap`."""
        if optimizer is None or not optimizer.overlap:
            return None
        parameters = self.parameters_by_stage(optimizer)
        optimizer.begin_updates(in_stream=False)
        return OverlappedUpdates(optimizer, parameters)

    def parameters_by_stage(self, optimizer: StagewiseOptimizer) -> dict[int, list[torch.Tensor]]:
        """Groups an optimizer's parameters by the stage that updates them, in order of the stages.

        Called before updates begin: the optimizer's state follows parameters that the pipe has moved.

        Raises:
            StateError: the optimizer cannot be stepped stage by stage.
        """
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in optimizer.parameters():
            groups.setdefault(self.stage_of_parameter(parameter), []).append(parameter)
        parameters = dict(sorted(groups.items()))
        optimizer.check_parts([*parameters.values()])
        self.optimizer_states.follow(optimizer)
        return parameters

    def stage_of_parameter(self, parameter: torch.Tensor) -> int:
        """Returns the stage that updates a parameter: the first that uses it in the first graph.

        For a parameter that no stage uses: the first stage on its device, or stage 0.
        """
        if id(parameter) not in self._stages_of_parameters:
            self._stages_of_parameters.clear()  # a parameter may have been replaced
            assert self.first is not None
            tensors = ModelTensors(self.model, self.first.traced.constants)
            for j, stage in enumerate(self.first.program.stages):
                for tensor in map(tensors.get, stage.attributes):
                    self._stages_of_parameters.setdefault(id(tensor), (tensor, j))
            devices = self.settings.devices
            for other in self.model.parameters():
                stage_there = devices.index(other.device) if other.device in devices else 0
                self._stages_of_parameters.setdefault(id(other), (other, stage_there))
        known = self._stages_of_parameters.get(id(parameter))
        return 0 if known is None else known[1]

    # -- graphs ------------------------------------------------------------------------------------------------------

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
            largest = max(range(count), key=lambda i: inputs[i].elements)
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
        batch = own.samples_of(graph[0].traced)
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
        if graph is None or inputs.are_far_from(graph[0].traced):
            return None
        is_open = self._may_choose_chunks(inputs.samples_of(graph[0].traced))
        return None if is_open else self._given_mini_batch(graph, inputs, in_one=True)

    def _given_mini_batch(self, graph: CachedGraph, inputs: GraphInputs, in_one: bool) -> GivenInputs:
        """Splits a mini-batch into micro-batches; raises if it cannot run."""
        (prepared, bound), leaves = graph, inputs.leaves
        traced, batch = prepared.traced, inputs.samples_of(prepared.traced)
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
                samples.append(one.samples_of(prepared.traced) if counts_samples else 1)
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
        return not inputs.are_far_from(traced) or holds_for_lengths(traced, inputs.call.args, inputs.call.kwargs)

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

    def _record_graph(self, call: ModelCall, seed: int, count: int | None) -> CachedGraph:
        """Records and splits a graph for a mini-batch, or for one of `count` micro-batches."""
        return self._make_graph(call.args, call.kwargs, seed, count)

    # -- streams -------------------------------------------------------------------------------------------------------

    def check_stream_program(self, bound: BoundProgram, held: Collection[int]) -> None:
        """Raises `StateError` if a program cannot run in a stream. `held`: identities of trained parameters."""
        tensors = ModelTensors(self.model, bound.constants)
        for j, stage in enumerate(bound.program.stages):
            for name in stage.attributes:
                tensor = tensors.get(name)
                home = self.stage_of_parameter(tensor) if id(tensor) in held else j
                if home != j:
                    raise StateError(
                        f"the parameter {name!r} is used by stages {home} and {j}, which update their weights at "
                        "different times: it would have no version that both share. Let one stage have all of it "
                        "(balance=), untie it, leave it out of the optimizer, or train with forward_backward and "
                        "schedule='1f1b'"
                    )
        if bound.program.left or bound.program.written_inputs:
            what = (
                f"sets the attribute {next(iter(bound.program.left))!r}"
                if bound.program.left
                else f"writes to the input {next(iter(bound.program.written_inputs))}"
            )
            raise StateError(
                f"forward {what}, which is put together when a step has ended; in a stream the next mini-batches have "
                "begun by then: return it as an output, keep it in a buffer, or train with forward_backward"
            )

    def schedule_for(self, micro_batches: int, name: str | None = None) -> Schedule:
        """Returns the schedule of a step: of `forward_backward`, or the named one."""
        settings = self.settings
        return make_schedule(
            name or settings.schedule,
            len(settings.placement),
            micro_batches,
            settings.checkpoint,
            settings.placement,
            settings.replicas,
        )

    @planning_block()
    def _make_graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, micro_batches: int | None = None
    ) -> CachedGraph:
        """Records and splits a graph; the first one decides the devices of parameters.

        `micro_batches`: their number, if the inputs are one of them; None for a mini-batch.
        """
        self._check_values_to_record()
        try:
            if self.first is None:
                # Plan for training, even if the first call only evaluates; a plan that was passed has its own mode.
                with torch.inference_mode(False), torch.enable_grad(), show_progress(self.settings.progress):
                    first = prepare(self.model, args, kwargs, self.settings, self.given_plan, seed, micro_batches)
                    reason = self._refusal_of_evaluation(first, args, kwargs, seed)
                self._take_plan_of(first)
                assert self.first is not None
                if self.settings.row_devices != self.asked.row_devices:  # a map of modules needs fewer devices
                    self.engine.executor.close()
                    self.engine.executor = executor_for(self.settings.row_devices)
                    self.engine.devices = self.settings.row_devices
                self.settle()
                kept = self._keep(self.first)
                traced = self.first.traced
                if reason:
                    warn_user(
                        f"{type(self.model).__name__} can be trained as a pipe, but its evaluation (model.eval(), "
                        f"torch.no_grad(), inputs such as these) will be refused: {reason}"
                    )
                now = module_flags(self.model), ThreadState.now()
                if (traced.flags, traced.state) == now and traced.holds_for_model():
                    refuse_other_answers(traced.input_reads, flatten((args, kwargs))[0])
                    return kept
            with show_progress(self.settings.progress):
                (inputs,) = self._graph_inputs([ModelCall(args, kwargs, ())], seed)
                dynamic = self.graphs.dynamic_dims(inputs)
                settings = self.settings if micro_batches is None else replace(self.settings, chunks=1)
                kept = self._keep(prepare_additional_graph(self.first, args, kwargs, settings, seed, dynamic))
            refuse_other_answers(kept[0].traced.input_reads, flatten((args, kwargs))[0])
            return kept
        except Exception as error:
            _add_batch_size_note(error, self.model, args, kwargs)
            raise

    def _refusal_of_evaluation(
        self, first: PreparedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
    ) -> str | None:
        """Returns why the evaluation of a model will be refused although it can be trained; None if it will not."""
        if not self.checks_evaluation:
            return None
        self.checks_evaluation = False
        error = refusal_of_evaluation(first, args, kwargs, seed)
        return None if error is None else str(error)

    def _keep(self, prepared: PreparedGraph) -> CachedGraph:
        traced = prepared.traced
        traced.refuse_inference_mode()
        bound = bind_program(prepared, self.settings)
        self.graphs.add(prepared, bound)
        least = max(self.settings.least_samples, least_samples(traced))
        self.settings = replace(self.settings, least_samples=least)
        if bound.moving_buffers and self.settings.chunks > 1:
            warn_user(
                f"{type(self.model).__name__} changes the buffer {bound.moving_buffers[0]!r} in evaluation, and each "
                "micro-batch would find what the one before has left: a call runs its mini-batch in one micro-batch, "
                "one stage after another. Keep the buffer as it is in evaluation (of quantization: disable_observer) "
                "for a pipeline"
            )
        if self.plan is not None and (new := [r for r in traced.reasons_of_fixed_sizes if r not in self.plan.why]):
            self.plan = replace(self.plan, why=(*self.plan.why, *new))
        self.graphs.warn_of_many(traced)
        if traced.print_lines and not self._has_prints:
            self._has_prints = True
            warn_of_prints(self.model, traced.print_lines)
        return prepared, bound


def _add_batch_size_note(error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Adds a note to an error of the model if its inputs disagree on the batch size."""
    if isinstance(error, FxpipeError):
        return
    sizes_by_path = [(leaf.path, leaf.shape[0]) for leaf in input_leaves(model, args, kwargs)[0] if leaf.shape]
    if len({size for _, size in sizes_by_path}) > 1:
        sizes = ", ".join(f"{path}: {size}" for path, size in sizes_by_path)
        error.add_note(
            f"fxpipe: inputs differ in dimension 0 ({sizes}); if it holds the batch, give all the same number of "
            "samples"
        )
