"""The passes from a model to a plan, in order: trace, profile, decide, rewrite.

The first two run the model and take seconds; the others are fast. So one `ProfiledModel` serves many plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe.cluster import replica_batch
from fxpipe.errors import ArgumentError, FxpipeError
from fxpipe.hardware import Hardware
from fxpipe.partitioning.manual_cuts import cut_least_misplaced
from fxpipe.planning.choose import Cut, choose_cut
from fxpipe.planning.cost_model import device_kind, device_kinds
from fxpipe.planning.describe_cut import plan_of_cut
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.retarget import resize_plan
from fxpipe.profiling import Profile, profile
from fxpipe.profiling.profile_data import profile_for
from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.rewriting.program import Program
from fxpipe.scheduling.factory import schedule_text
from fxpipe.tracing import Traced, trace, trace_unverified
from fxpipe.tracing.dynamic_sizes import NO_DYNAMIC_DIMS, DynamicDims
from fxpipe.tracing.model_state import in_mode, look_on_recording_device, model_on, move_inputs, preserve_state
from fxpipe.tracing.print_calls import mute_repeated_prints
from fxpipe.tracing.tensors import slice_samples, tensor_bytes
from fxpipe.tracing.traced import attribute_tensor
from fxpipe.tracing.verify import compared_sizes
from fxpipe.tracing.verify.effects import least_samples
from fxpipe.utils.batch_split import micro_batch_sizes
from fxpipe.utils.locks import planning_block
from fxpipe.utils.progress import phase, show_phases, show_progress
from fxpipe.utils.pytree import flatten

MeasuredKinds: TypeAlias = tuple[tuple[str, ...], int | None, tuple[Profile, ...]]


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A traced and profiled model: its graph, and the costs of nodes for any number of samples."""

    traced: Traced
    profiles: tuple[Profile, ...]  # one for each kind of device
    kinds: tuple[str, ...]  # measured kinds of devices
    threads: int | None  # torch threads while a CPU was measured: a worker's share; None: no CPU was measured
    hardware: Hardware | None  # the target of the estimates; None: measured
    batch: int  # samples of the mini-batch

    def holds_for(self, settings: Settings) -> bool:
        """Returns True if the measured seconds are valid for the settings' workers; see `profile_again`."""
        if settings.hardware != self.hardware:
            return False
        if self.hardware is not None:
            return True
        names = {device_kind(device) for device in settings.workers}
        threads = self.threads if "cpu" in names else None
        return names <= {*self.kinds} and threads in (None, _worker_threads(settings.workers))

    def profiles_for(self, settings: Settings) -> list[Profile]:
        if self.hardware is not None:
            return [self.profiles[0]]
        return [self.profiles[self.kinds.index(device_kind(device))] for device in device_kinds(settings.workers)]


def trace_and_profile(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int = 0
) -> ProfiledModel:
    """Traces and profiles the model for one replica, as training will run it, with a mini-batch of all replicas."""
    # Graph and model are compared, and nodes are measured, on micro-batches of the size that `settings.chunks` gives.

    def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, int, MeasuredKinds]:
        in_all = replace(settings, chunks=settings.chunks * settings.data_parallel)
        traced, batch = trace_batch(model, args, kwargs, in_all, seed)
        batch = batch_of_replica(traced, batch, settings.data_parallel)
        return traced, batch, _profile_kinds(traced, args, kwargs, batch, settings)

    with mute_repeated_prints(), in_mode(model, None):
        device, (traced, batch, (kinds, threads, profiles)) = look_on_recording_device(
            model, settings.workers, args, kwargs, look
        )
    traced = replace(traced, device=device)
    return ProfiledModel(traced, profiles, kinds, threads, settings.hardware, batch)


def batch_of_replica(traced: Traced, batch: int, data: int) -> int:
    """Returns the samples of one of `data` replicas; raises `ArgumentError` if the graph is not valid for them."""
    share = replica_batch(batch, data)
    if data > 1 and not traced.holds_at(share):
        raise ArgumentError(
            f"data_parallel={data}: forward reads the batch size, and replicas with {share} of {batch} samples run "
            f"another graph: plan with example_args of {share} samples and data_parallel=1"
        )
    return share


def profile_again(
    profiled: ProfiledModel, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> ProfiledModel:
    """Profiles again for other kinds of devices or other shares of a CPU, unless `settings.profile` has the costs."""
    if profiled.holds_for(settings):
        return profiled
    model, device = profiled.traced.model, profiled.traced.device
    with model_on(model, device), in_mode(model, None):
        args, kwargs = move_inputs((args, kwargs), device)
        kinds, threads, profiles = _profile_kinds(profiled.traced, args, kwargs, profiled.batch, settings)
    return replace(profiled, profiles=profiles, kinds=kinds, threads=threads, hardware=settings.hardware)


def holds_for_chunks(
    traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, settings: Settings
) -> bool:
    """Checks that the model accepts micro-batches of a mini-batch in `chunks` parts, and agrees with its graph."""
    sizes = micro_batch_sizes(batch, chunks)
    with model_on(traced.model, traced.device), in_mode(traced.model, None):
        args, kwargs = move_inputs((args, kwargs), traced.device)
        return not settings.check or compared_sizes.agrees_with_model(traced, args, kwargs, sorted(sizes))


def holds_for_sizes(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], settings: Settings
) -> bool:
    """Checks that the graph is valid for these inputs in micro-batches of these sizes, in the mode of the model."""
    with model_on(traced.model, traced.device):
        args, kwargs = move_inputs((args, kwargs), traced.device)
        return compared_sizes.recheck_micro_batches(traced, args, kwargs, sizes, settings.out_dims is not None)


def holds_for_lengths(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compares graph and model at dynamic sizes far from those already compared, and remembers the result."""
    with model_on(traced.model, traced.device):
        args, kwargs = move_inputs((args, kwargs), traced.device)
        return compared_sizes.recheck_lengths(traced, args, kwargs)


def trace_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    seed: int,
    dynamic: DynamicDims | None = None,
) -> tuple[Traced, int]:
    """Returns the graph and the number of samples. Falls back to one micro-batch if the tuner chooses `chunks`."""

    def traced_for(chunks: int) -> Traced:
        return trace(
            model,
            args,
            kwargs,
            in_dims=settings.in_dims,
            out_dims=settings.out_dims,
            chunks=chunks,
            leaf_modules=settings.leaf_modules,
            check=settings.check,
            seed=seed,
            dynamic_shapes=settings.dynamic_shapes,
            dynamic=dynamic or NO_DYNAMIC_DIMS,
            is_whole=settings.chunks == 1 and "chunks" not in settings.left,
        )

    phase("tracing")
    try:
        traced = traced_for(settings.chunks)
    except compared_sizes.OtherMicroBatchesError:
        if "chunks" not in settings.left:
            raise
        traced = traced_for(1)
    return traced, traced.batch_of(flatten((args, kwargs))[0])


def _worker_threads(workers: Sequence[torch.device]) -> int:
    """Returns a worker's share of the cores, so that measurements use the same number of threads as training."""
    return max(1, torch.get_num_threads() // len(workers))


def _profile_kinds(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, settings: Settings
) -> MeasuredKinds:
    """Returns the kinds of devices, the number of threads used to measure a CPU, and a profile for each kind."""
    settings = replace(settings, least_samples=least_samples(traced))
    kinds = device_kinds(settings.workers) if settings.hardware is None else list(settings.workers[:1])
    names = tuple(map(device_kind, kinds))
    if settings.profile is not None:
        costs = profile_for(traced, settings.profile)
        if settings.loss is not None and costs.loss is None:
            raise ArgumentError(
                "loss_fn and a profile that does not know what a loss costs: leave loss_fn out, or make the profile "
                "with it (fxpipe.profile(traced, args, loss_fn=..., target=...))"
            )
        return names, None, (costs,) * len(kinds)
    samples = settings.largest_micro_batch(batch)
    if "chunks" in settings.left and (samples == 1 or not traced.holds_at(samples)):  # some models reject 1
        others = (size for size in (2, -(-batch // 2), batch) if samples < size <= batch and traced.holds_at(size))
        samples = next(others, samples)
    threads = _worker_threads(settings.workers)
    loss = {} if settings.loss is None else settings.loss.arguments()
    with preserve_state(traced.model):  # runs hooks and opaque modules as they are
        profiles = tuple(
            profile(
                traced,
                args,
                kwargs,
                micro_batch=samples,
                second=1 if settings.largest_micro_batch(batch) == 1 else None,  # only size 1 will run
                budget=settings.profile_budget / len(kinds),
                threads=threads,
                hardware=settings.hardware,
                device=device if settings.hardware is None else None,
                **loss,
            )
            for device in kinds
        )
    is_measured = settings.hardware is None and not profiles[0].estimated_for
    return names, threads if is_measured and "cpu" in names else None, profiles


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A graph that is ready to run, and its plan."""

    plan: Plan
    traced: Traced
    program: Program
    settings: Settings  # with all defaults resolved
    starts: tuple[int, ...]  # the place of the first node of each stage

    def on_devices(self, devices: Sequence[torch.device]) -> Program:
        """Returns the program of the same stages on other devices, for replicas."""
        return _split(self.traced, self.starts, self.settings, devices)


def _split(
    traced: Traced, starts: Sequence[int], settings: Settings, devices: Sequence[torch.device] | None = None
) -> Program:
    return split_into_stages(
        traced, starts, devices or settings.devices, settings.deferred_batch_norm, settings.compile
    )


def prepare_profiled(profiled: ProfiledModel, settings: Settings) -> PreparedGraph:
    """Decides and rewrites: plans a profiled model for workers for which its seconds are valid."""
    return prepare_cut(cut_profiled(profiled, settings), profiled.batch, settings)


def cut_profiled(profiled: ProfiledModel, settings: Settings, explains: bool = True) -> Cut:
    return choose_cut(profiled.traced, profiled.profiles_for(settings), profiled.batch, settings, explains=explains)


def prepare_cut(cut: Cut, batch: int, settings: Settings) -> PreparedGraph:
    phase("making stages")
    traced = cut.traced
    modes = tuple("always" if again else "never" for again in cut.recompute)
    decided = modes[0] if len({*modes}) == 1 else modes
    settings = replace(cut.settings, checkpoint=decided if settings.checkpoint == "auto" else settings.checkpoint)
    program = _split(traced, cut.starts, settings)
    return PreparedGraph(plan_of_cut(cut, program, batch, settings), traced, program, settings, cut.starts)


def prepare_given_plan(traced: Traced, asked: Plan, batch: int, settings: Settings) -> PreparedGraph:
    """Creates the stages of a plan. Its figures are resized to the micro-batches; they keep the plan's hardware."""
    names = [name for stage in asked.stages for name in stage.nodes]
    if names != [node.name for node in traced.nodes] or not all(stage.nodes for stage in asked.stages):
        raise ArgumentError("plan does not have the nodes of the graph that its fingerprint names: it is damaged")
    starts = tuple(accumulate((len(stage.nodes) for stage in asked.stages[:-1]), initial=0))
    program = _split(traced, starts, settings)
    stages = tuple(
        replace(stage, device=str(device), code=built.code)
        for stage, device, built in zip(asked.stages, settings.devices, program.stages, strict=True)
    )
    plan = replace(
        resize_plan(replace(asked, stages=stages), settings.largest_micro_batch(batch), settings.checkpoint),
        devices=tuple(map(str, settings.devices)),
        schedule=schedule_text(settings.schedule, settings.chunks, settings.placement),
        chunks=settings.chunks,
        placement=settings.placement,
        batch=batch,
        processes=settings.processes,
        cluster=asked.cluster if settings.processes or not asked.is_over_processes else None,
        replica_devices=tuple(tuple(map(str, own)) for own in settings.replica_workers),
    )
    return PreparedGraph(plan, traced, program, settings, starts)


@planning_block()
@show_phases("planning another graph")
def prepare_additional_graph(
    first: PreparedGraph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    seed: int = 0,
    dynamic: DynamicDims | None = None,
) -> PreparedGraph:
    """Prepares another graph of a planned model, for example for evaluation, with nodes near their parameters."""
    model = first.traced.model

    def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        return trace_batch(model, args, kwargs, settings, seed, dynamic)[0]

    device, traced = look_on_recording_device(model, settings.workers, args, kwargs, look)
    traced = replace(traced, device=device)
    starts = cut_least_misplaced(_misplacement_costs(first, traced), forbidden_cuts(traced))
    program = _split(traced, starts, settings)
    return replace(first, traced=traced, program=program, starts=tuple(starts))


def _misplacement_costs(first: PreparedGraph, traced: Traced) -> list[list[float]]:
    """Computes, by node and stage, the bytes of misplaced parameters; a known node name adds a smaller cost."""
    homes = {name: j for j, stage in reversed([*enumerate(first.program.stages)]) for name in stage.attributes}
    known = {name: stage.index for stage in first.plan.stages for name in stage.nodes}
    stages = range(len(first.plan.stages))
    table = []
    for node in traced.nodes:
        row = [0.0] * len(stages)
        for source in node.all_input_nodes:
            home = homes.get(str(source.target)) if source.op == "get_attr" else None
            if home is not None:
                size = 1.0 + tensor_bytes(attribute_tensor(traced, source))
                row = [cost + (size if j != home else 0.0) for j, cost in enumerate(row)]
        if node.name in known:
            row = [cost + (0.5 * abs(j - known[node.name])) for j, cost in enumerate(row)]
        table.append(row)
    return table


EVALUATION_SAMPLES = 2  # samples


@planning_block()
@show_phases("checking evaluation")
def refusal_of_evaluation(
    first: PreparedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0
) -> FxpipeError | None:
    """Predicts the error of a model in training mode that refuses `eval()` under `no_grad`; leaves it unchanged."""
    # Evaluation has another graph (no dropout, other branches, no gradients), which is traced at its first call. So the
    # model is also recorded in evaluation mode, on two samples, without comparing anything. Only if that fails, the
    # graph is prepared as the first evaluation would, and discarded: the error is the one that evaluation would raise.
    # This does not predict errors for other inputs, or for a graph that differs from its model.
    model, settings = first.traced.model, first.settings
    if not model.training:
        return None
    everything = [name for name, _ in model.named_modules()]
    with (
        warnings.catch_warnings(),
        mute_repeated_prints(is_first_run=False),
        show_progress(False),
        in_mode(model, everything),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # evaluation itself will issue them
        if _can_be_recorded(first, args, kwargs):
            return None
        with preserve_state(model):  # the first evaluation must see the original state
            try:
                prepare_additional_graph(first, args, kwargs, settings, seed)
            except FxpipeError as error:
                return error
            except Exception:
                return None
    return None


def _can_be_recorded(first: PreparedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Checks that a recording on few samples raises no error."""
    traced, settings = first.traced, first.settings
    with model_on(traced.model, traced.device):
        args, kwargs = move_inputs((args, kwargs), traced.device)
        leaves, spec = flatten((args, kwargs))
        few = slice_samples(leaves, traced.in_dims, 0, min(EVALUATION_SAMPLES, traced.batch_of(leaves)))
        args, kwargs = pytree.tree_unflatten(few, spec)
        try:
            trace_unverified(traced, args, kwargs, settings.in_dims, settings.out_dims)
        except Exception:
            return False
    return True
