"""`fxpipe.plan`, and all passes for a pipe in order: trace, profile, decide, rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from fxpipe.errors import ArgumentError
from fxpipe.hardware import planned_devices
from fxpipe.planning import passes
from fxpipe.planning.cost_model import with_memory_at_hand
from fxpipe.planning.options import parse, pipeline_options
from fxpipe.planning.options.parse import Devices
from fxpipe.planning.options.pipeline_options import AUTO, CutAndModelOptions, Settings, shows_options
from fxpipe.planning.passes import PreparedGraph, ProfiledModel
from fxpipe.planning.plans import Plan
from fxpipe.planning.replication import choose_replicas
from fxpipe.planning.tuning.candidates import prepare_best
from fxpipe.scheduling.streams import is_stream
from fxpipe.tracing import Traced
from fxpipe.tracing.model_state import in_mode, look_on_recording_device
from fxpipe.tracing.source_lines import warn_user
from fxpipe.tracing.strategies import imbalance_warnings
from fxpipe.tracing.verify.effects import least_samples
from fxpipe.utils import accelerator
from fxpipe.utils.locks import planning_block
from fxpipe.utils.output_combination import needing_all
from fxpipe.utils.progress import phase, show_phases, show_progress
from fxpipe.utils.units import parse_count


@shows_options(CutAndModelOptions, after="chunks")
def plan(
    model: nn.Module,
    stages: Devices | None = None,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    devices: Devices | None = None,
    chunks: int | str = "auto",
    data_parallel: int | None = None,
    mesh: Sequence[str] = ("data", "pipe"),
    processes: bool = False,
    **options: Unpack[CutAndModelOptions],
) -> Plan:
    """Plans a pipeline without creating it: traces, profiles and cuts the model, and leaves it unchanged.

        plan = fxpipe.plan(model, 2, example_args=(x,))
        print(plan)                     # the stages, their costs, and their transfers
        print(plan.stages[1].code)
        plan.memory(1, b=8)             # bytes that stage 1 needs with micro-batches of 8

    Args:
        model: any module. Without values (on the meta device, or created under a FakeTensorMode) the seconds are
            estimates for the hardware in `Plan.estimated_for`.
        stages: the number of stages, and so of devices; or the devices, as `devices`. The plan has more stages if pins
            or memory require several on a device (see `checkpoint`), and with schedule="auto". A number selects devices
            as `devices` of `fxpipe.pipeline` does or, with `hardware`, that many devices of this kind.
        example_args, example_kwargs: a mini-batch as in training, of all replicas.
        hardware: the hardware for which seconds, memory and links are estimated; it need not be present. A name of
            `fxpipe.hardware.HARDWARE` ("a100-80gb", "h100", "4090", "cpu", ...), or a `Hardware`. With `nodes` it is a
            cluster, and all of its devices are used (`replace(HARDWARE["h100"], nodes=4)`).
        data_parallel: number of replicas of the pipeline, which share `devices` and the mini-batch evenly and reduce
            their gradients once per step. The plan is for one replica. None: 1 or, with balance="pipedream" and
            `hardware`, PipeDream's planner chooses stages and the replicas of each. Equal numbers are planned as if
            given here, with the better `mesh` unless it is given; unequal ones (15-1) take micro-batches in turn, in
            one process. With `stages`, each stage has one replica. `fxpipe.tune` finds a good number.
        mesh: the order of replicas in the nodes of the hardware, as the names of the dimensions of a `DeviceMesh`, the
            outer one first: ("data", "pipe") keeps each pipeline in as few nodes as possible, ("pipe", "data") the
            devices that reduce gradients together. See `fxpipe.cluster` for the model of the links.
        processes: if True, the figures are for one process per device, as over a `DeviceMesh`; always so with replicas,
            and with devices in several nodes. See `fxpipe.simulate`.
        devices, chunks, balance, pin, stages_per_device, schedule, checkpoint: as for `fxpipe.pipeline`.
        memory_limit, optimizer_state, profile, profile_budget, loss_fn, target: as for `fxpipe.pipeline`.
        in_dims, dynamic_shapes, out_dims, leaf_modules, check, progress: as for `fxpipe.pipeline`.

    Raises:
        FxpipeError: an argument is invalid, or the model cannot be traced or cut; see `fxpipe.errors`.
        Exception: any exception that the model raises on the inputs, with a note.
    """
    if isinstance(stages, Sequence) and not isinstance(stages, str):
        if devices is not None:
            raise ArgumentError(f"stages={stages!r} and devices={devices!r}: give the devices once")
        devices, stages = stages, None
    if stages is not None and data_parallel is None:
        data_parallel = 1
    hardware = options.get("hardware")
    if isinstance(devices, int):
        count = parse_count("devices", devices, "a number of devices, or a list of them")
        devices = planned_devices(count, parse.parse_hardware_option(hardware))
    elif devices is None:
        devices = _planned_devices(stages, options, data_parallel or 1)
    own = {"devices": devices, "chunks": chunks, "data_parallel": data_parallel, "mesh": mesh, "processes": processes}
    settings = pipeline_options.make_settings({**options, **own}, anywhere=hardware is not None)
    if stages is not None and stages != len(settings.placement):
        each = len(settings.placement) // len(settings.workers)
        shared = f" of {each} stages" if each > 1 else ""
        shared += f" for each of {data_parallel} replicas" if (data_parallel or 1) > 1 else ""
        raise ArgumentError(
            f"stages={stages}, but devices has {len(settings.workers)} entries{shared}; give as many, or leave stages "
            "out"
        )
    with show_progress(settings.progress):
        return prepare(model, example_args, example_kwargs or {}, settings).plan


def _planned_devices(
    stages: int | str | None, options: CutAndModelOptions, data_parallel: Any
) -> list[str] | int | None:
    """Returns a device for each worker of all replicas; without `stages` the devices of a cluster, otherwise None."""
    hardware = parse.parse_hardware_option(options.get("hardware"))
    if stages is None:
        return planned_devices(None, hardware)
    asked = options.get("schedule", AUTO)
    order = parse.parse_training_schedule(pipeline_options.DEFAULT_SCHEDULE if asked == AUTO else asked)
    per_device = options.get("stages_per_device")
    if per_device is not None:
        parse_count("stages_per_device", per_device)
    count = parse.worker_count_for(parse_count("stages", stages), order, per_device)
    return planned_devices(count * parse_count("data_parallel", data_parallel), hardware)


@planning_block()
@show_phases("planning")
def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    plan: Plan | None = None,
    seed: int = 0,
    micro_batches: int | None = None,
) -> PreparedGraph:
    """Runs all passes. With a `plan`, uses its stages for the graph of its mode, instead of planning new ones."""
    # `seed`: of the random numbers that forward draws. `micro_batches`: the inputs are one of this number; None: all.
    accelerator.refuse_capture(settings.row_devices if settings.hardware is None else ())
    if plan is None:
        settings = with_memory_at_hand(settings, model)
    as_inputs, count = settings, 1  # the settings for which the inputs are a mini-batch
    if micro_batches is not None:
        as_inputs = replace(settings, chunks=1, left=settings.left - {"chunks"})
        count = micro_batches if "chunks" in settings.left else settings.chunks
        settings = replace(as_inputs, chunks=count)
    if plan is None:
        profiled = passes.trace_and_profile(model, args, kwargs, as_inputs, seed)
        profiled = replace(profiled, batch=profiled.batch * count)
        if len(settings.workers) > 1:
            for limit in imbalance_warnings(profiled.traced):
                warn_user(limit)
        return prepare_with_choices(profiled, args, kwargs, settings)

    def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, int]:
        return passes.trace_batch(model, args, kwargs, as_inputs, seed)

    with in_mode(model, plan.evaluating):
        device, (traced, batch) = look_on_recording_device(model, settings.workers, args, kwargs, look)
        traced = replace(traced, device=device)
        if plan.fingerprint != traced.fingerprint():
            raise ArgumentError(
                f"plan was made for another graph (fingerprint {plan.fingerprint}, here {traced.fingerprint()}): the "
                "model, its mode or its inputs have changed; plan it again with fxpipe.plan"
            )
        return passes.prepare_given_plan(traced, plan, batch * count, settings)


def prepare_with_choices(
    profiled: ProfiledModel, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> PreparedGraph:
    """Plans a profiled model; the tuner chooses the options in `settings.left`."""
    phase("cutting")
    joint = needing_all(profiled.traced.combinations)
    settings = replace(settings, least_samples=least_samples(profiled.traced), is_joint=joint is not None)
    if settings.chooses_replicas:
        settings = choose_replicas(profiled.traced, profiled.profiles[0], profiled.batch, settings)
        profiled = replace(profiled, batch=profiled.batch // settings.data_parallel)
    if joint is not None and settings.chunks > 1 and not is_stream(settings.schedule):
        settings = replace(settings, schedule=parse.DROP_IN_SCHEDULE, left=settings.left - {"schedule"})
    prepared = (
        prepare_best(profiled, args, kwargs, settings) if settings.left else passes.prepare_profiled(profiled, settings)
    )
    if joint is not None and prepared.plan.schedule == parse.DROP_IN_SCHEDULE:
        why = f"{joint.where} needs all samples together: every F runs before the first B, in the order of GPipe"
        prepared = replace(prepared, plan=replace(prepared.plan, why=(*prepared.plan.why, why)))
    return prepared
