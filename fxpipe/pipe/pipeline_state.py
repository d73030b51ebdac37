"""The state of a pipe: its programs (`programs`), its engine, and which stage has and updates a parameter."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpipe._torch.tensor_data import replace_data
from fxpipe.errors import StateError
from fxpipe.pipe.model_calls import ModelCall, parse_micro_batches
from fxpipe.pipe.programs import Programs
from fxpipe.planning.describe_cut import plan_with_dynamic_sizes
from fxpipe.planning.entry import prepare
from fxpipe.planning.options.parse import DROP_IN_SCHEDULE
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.passes import PreparedGraph
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.simulate_plan import simulate
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.executors import executor_for
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.stage_updates import OverlappedUpdates, StagewiseOptimizer, noting_updates
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.runtime.step_record import StepRecord
from fxpipe.scheduling import Schedule, make_schedule
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.model_state import slots_of
from fxpipe.tracing.source_lines import warn_user
from fxpipe.tracing.tensors import has_values
from fxpipe.utils.accelerator import peek_seed
from fxpipe.utils.progress import show_progress
from fxpipe.utils.units import human_bytes


class OneProcess:
    """The processes of a pipe in one process, as `distributed.rank_group.RankGroup`."""

    def together(self) -> contextlib.AbstractContextManager[object]:
        """A block that all processes enter."""
        return contextlib.nullcontext()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all processes."""
        return [value]

    def broadcast(self, value: Any, what: str) -> Any:
        """Returns the value of the first process."""
        return value


class PipelineState(Programs):
    """The state of a pipe, separate from the names of the model: its programs and its engine."""

    can_overlap_updates = True  # an optimizer can update stages within a step

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan | None, engine: Engine | None = None):
        super().__init__(model, settings, plan)
        self.group: Any = OneProcess()
        self.engine = engine or Engine(model, executor_for(settings.row_devices), settings.row_devices)
        self.optimizer_states = OptimizerStateMover(model)
        self._devices_ahead: dict[str, torch.device] = {}  # by tensor, if planned without values
        self._stages_of_parameters: dict[int, tuple[torch.Tensor, int]] = {}  # by identity: tensor, its updating stage
        self._sized: tuple[Plan, PreparedGraph, Plan] | None = None  # plan, graph, plan with dynamic sizes

    def plan_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans a model without values; the first call with values plans again with measured seconds."""
        with torch.inference_mode(False), torch.enable_grad(), show_progress(self.settings.progress):
            prepared = prepare(self.model, args, kwargs, self.settings, self.given_plan, peek_seed())
        self.plan = prepared.plan
        devices = prepared.settings.devices
        self._devices_ahead = {name: devices[j] for name, j in prepared.program.first_users().items()}

    def take_plan_of(self, prepared: PreparedGraph) -> PreparedGraph:
        """Also moves the tensors of the model to their stages, and replaces the workers if the plan needs fewer."""
        first = super().take_plan_of(prepared)
        if self.settings.row_devices != self.asked.row_devices:  # a map of modules needs fewer devices
            self.engine.executor.close()
            self.engine.executor = executor_for(self.settings.row_devices)
            self.engine.devices = self.settings.row_devices
        self.settle()
        return first

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters, buffers and plain attributes in this process by name, tied ones once."""
        return {slot.name: tensor for slot, tensor in slots_of(self.model).items()}

    def own_without_values(self) -> list[str]:
        """Returns the names of the tensors that stages of this process need and that have no values yet."""
        return names_without_values(self.model)

    def device_of(self, name: str) -> torch.device:
        """Returns the device of the first stage that uses a tensor without values, or else of stage 0."""
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
        same = (one.prepared for one in reversed(self.graphs) if one.traced.key == first.traced.key)
        prepared = next((one for one in same if one.traced.dynamic.symbols), None)
        if prepared is None:
            return plan
        if self._sized is None or self._sized[0] is not plan or self._sized[1] is not prepared:
            sized = None
            with contextlib.suppress(Exception):  # operators that need values only have the example's costs
                sized = plan_with_dynamic_sizes(
                    plan, first.traced.leaves, prepared.traced, prepared.program, prepared.starts, prepared.settings
                )
            self._sized = plan, prepared, plan if sized is None else sized
        return self._sized[2]

    def warn_of_drop_in_memory(self, inputs: GivenInputs, is_call: bool = True, in_stream: bool = False) -> None:
        """Warns once if all F before all B exceed the memory limit that the plan meets for another schedule."""
        plan, chunks = self.plan, len(inputs.samples)
        key, schedule = ("stream", None) if in_stream else ("drop-in", DROP_IN_SCHEDULE)
        if key in self._warned or plan is None or (plan.is_joint if in_stream else plan.schedule == schedule):
            return
        self._warned.add(key)
        if all(stage.memory_limit is None for stage in plan.stages):
            return
        plan = replace(plan, is_joint=in_stream or plan.is_joint)
        simulation = simulate(plan, schedule=schedule, chunks=chunks, batch=inputs.batch)
        for device, memory, limit in zip(simulation.devices, simulation.memory, simulation.limits, strict=True):
            if limit is not None and memory.peak > limit and in_stream:
                warn_user(
                    "A loss that needs all samples together keeps the mini-batches in flight with all their "
                    f"micro-batches: {human_bytes(memory.peak)} on {device}, where the limit is {human_bytes(limit)}. "
                    "The plan does not have this loss; pass smaller mini-batches, or plan with checkpoint='always'"
                )
                return
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

    def accelerators(self) -> list[torch.device]:
        return [device for device in dict.fromkeys(self.settings.row_devices) if device.type != "cpu"]

    def keep_on_stages(self, device: torch.device) -> None:
        """Leaves the model on its stages' devices, although a trainer moves it and optimizer state to `device`."""
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            self.optimizer_states.note_move(name, device)
        devices = ", ".join(map(str, self.settings.row_devices))
        self.warn_once(
            "move",
            f"the pipe was not moved to {device}: it places its own stages on [{devices}]. To free these, close the "
            "pipe and move the model: pipe.close(); fxpipe.unwrap(pipe).cpu()",
        )

    def settle(self) -> None:
        """Moves tensors to the first stage of this process that uses them; the objects stay the same."""
        if self.first is None:
            return
        tensors, constants = ModelTensors(self.model, {}), self.first.traced.constants
        for name, j in self.first.program.first_users(self._own_stages(self.settings.placement)).items():
            device, tensor = self.settings.devices[j], None if name in constants else tensors.get(name)
            if tensor is not None and tensor.device != device and has_values(tensor):
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
        """Runs a step; returns the loss, the outputs or None, and whether the optimizer stepped within it."""
        # `calls`: a mini-batch, or micro-batches (`is_handed_over`); None if this process does not need them.
        assert calls is not None
        given_inputs = self.find(calls, is_handed_over)
        if given_inputs.takes_all(call.reduction):
            self.warn_of_drop_in_memory(given_inputs, is_call=False)
        schedule = self.schedule_of(given_inputs, call.reduction)
        updates = None
        if optimizer is not None and optimizer.overlap:
            parameters = self.parameters_by_stage(optimizer)
            optimizer.begin_updates(in_stream=False)
            updates = OverlappedUpdates(optimizer, parameters)
        with noting_updates(updates):
            loss, outputs = self.engine.forward_backward(given_inputs, schedule, call, updates)
        return loss, outputs, updates is not None and bool(updates.begun)

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

    def parameters_by_stage(self, optimizer: StagewiseOptimizer) -> dict[int, list[torch.Tensor]]:
        """Groups an optimizer's parameters by updating stage, in order; their state follows those that moved."""
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in optimizer.parameters():
            groups.setdefault(self.stage_of_parameter(parameter), []).append(parameter)
        parameters = dict(sorted(groups.items()))
        optimizer.check_parts([*parameters.values()])
        self.optimizer_states.follow(optimizer)
        return parameters

    def stage_of_parameter(self, parameter: torch.Tensor) -> int:
        """Returns the first stage that uses a parameter in the first graph; else the first on its device, or 0."""
        if id(parameter) not in self._stages_of_parameters:
            assert self.first is not None
            tensors, devices = ModelTensors(self.model, self.first.traced.constants), self.settings.devices
            used = [(tensors.get(name), j) for name, j in self.first.program.first_users().items()]
            others = [(p, devices.index(p.device) if p.device in devices else 0) for p in self.model.parameters()]
            # Computed again if a parameter was replaced. Of several names of a tensor, the one of the first stage wins.
            self._stages_of_parameters = {id(tensor): (tensor, j) for tensor, j in reversed([*used, *others])}
        _, stage = self._stages_of_parameters.get(id(parameter), (None, 0))
        return stage

    def check_stream_program(self, bound: BoundProgram, held: Collection[int]) -> None:
        """Raises `StateError` if a program cannot run in a stream. `held`: identities of trained parameters."""
        if bound.update is not None:
            raise StateError(
                f"forward changes {bound.update.names[0]!r} once for a mini-batch, when all its samples have run; in "
                "a stream the next mini-batches have begun by then: use chunks=1, or train with forward_backward"
            )
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

    def schedule_of(self, given_inputs: GivenInputs, reduction: str) -> Schedule:
        """Returns the schedule of a step of `forward_backward`."""
        takes_all, count = given_inputs.takes_all(reduction), len(given_inputs.samples)
        return self.schedule_for(count, DROP_IN_SCHEDULE if takes_all else None)

    def schedule_for(self, micro_batches: int, name: str | None = None) -> Schedule:
        """Returns the schedule of a step: of `forward_backward`, or the named one."""
        settings, placement = self.settings, self.settings.placement
        schedule, checkpoint = name or settings.schedule, settings.checkpoint
        return make_schedule(schedule, len(placement), micro_batches, checkpoint, placement, settings.replicas)


class OptimizerStateMover:
    """Moves the optimizer state of a model's parameters that a pipe has moved.

    State from before the move (of steps without the pipe, `load_state_dict`, or the constructor, as of `Adagrad`) is on
    the old devices. torch does not list the optimizers of a parameter, so from the first move until the pipe is closed
    or the model is freed, a hook for all optimizers moves the state before their next step. The pipe calls `follow`
    before overlapped updates and streams, which update stages before `step` is called.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._devices_before: dict[str, set[torch.device]] = {}  # by name of a moved parameter
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers handled since the last move
        self._hook: Any = None

    def note_move(self, name: str, before: torch.device) -> None:
        """Records that a tensor of the model was moved from the device `before`."""
        self._devices_before.setdefault(name, set()).add(before)
        self._seen.clear()
        model = self._model()
        if self._hook is None and model is not None:
            self._hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.follow(optimizer))
            weakref.finalize(model, self._hook.remove)

    def close(self) -> None:
        """Removes the hook; if there are gradients, so that a step may follow, not before the model is freed."""
        if self._hook is not None and all(parameter.grad is None for parameter, _ in self._moved().values()):
            self._hook.remove()
            self._hook = None

    def _moved(self) -> dict[int, tuple[nn.Parameter, set[torch.device]]]:
        """Returns the moved parameters, by identity, with their earlier devices."""
        model = self._model()
        named = () if model is None else model.named_parameters(remove_duplicate=False)
        return {id(p): (p, self._devices_before[name]) for name, p in named if name in self._devices_before}

    def follow(self, optimizer: Any) -> None:
        """Moves the state of an optimizer to the current devices of its parameters, before it updates them."""
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        moved = self._moved()
        for group in optimizer.param_groups:
            is_step_on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if id(parameter) in moved and isinstance(state, dict):
                    before = moved[id(parameter)][1]
                    for key, value in state.items():
                        if key != "step" or is_step_on_device:
                            state[key] = _follow(value, before, parameter.device)


def _follow(value: Any, before: set[torch.device], device: torch.device) -> Any:
    """Moves the tensors of a value from the earlier devices of a parameter to its current device."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device in before else value
    if isinstance(value, Mapping):
        return {key: _follow(item, before, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_follow(item, before, device) for item in value)
    return value
