"""`fxpipe.tune`: its arguments, and the search for a model or for a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from fxpipe.cluster import MESHES, parse_mesh, replica_batch
from fxpipe.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from fxpipe.hardware import planned_devices
from fxpipe.planning.cost_model import planned_workers, with_memory_at_hand
from fxpipe.planning.options import parse
from fxpipe.planning.options.parse import BALANCES, COMPARED_SCHEDULES, TRAINING_SCHEDULES, Devices, parse_choices
from fxpipe.planning.options.pipeline_options import (
    AUTO,
    OPTION_DEFAULTS,
    TRACING_OPTIONS,
    ModelOptions,
    Settings,
    is_default,
    make_settings,
    shows_options,
)
from fxpipe.planning.passes import ProfiledModel, batch_of_replica, holds_for_chunks, trace_and_profile
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning import candidates
from fxpipe.planning.tuning.candidates import Candidate, CandidateResult, MemoryLimits, PlanSource, Tuning, rank_fitting
from fxpipe.scheduling import CHECKPOINTS
from fxpipe.utils.locks import planning_block
from fxpipe.utils.output_combination import needing_all
from fxpipe.utils.progress import progress as bar
from fxpipe.utils.progress import show_phases, show_progress
from fxpipe.utils.units import parse_count, with_article

CERTAIN_CANDIDATES = 4  # the best that the search finds with certainty, of one number of replicas
PLAN_ARGUMENTS = ("model_or_plan", "batch_size", "schedules", "chunks", "checkpoint", "memory_limit", "progress")


@shows_options(ModelOptions, after="balance")
def tune(
    model_or_plan: nn.Module | Plan,
    devices: Devices | None = None,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    batch_size: int | None = None,
    schedules: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
    checkpoint: Sequence[str] | None = None,
    stages_per_device: Sequence[int] | None = None,
    balance: str = "auto",
    data_parallel: int | str = 1,
    mesh: Sequence[str] | None = None,
    processes: bool = False,
    **options: Unpack[ModelOptions],
) -> Tuning:
    """Finds the configuration with the fastest simulated step of `forward_backward` that fits into memory.

        tuning = fxpipe.tune(model, ["cuda:0", "cuda:1"], example_args=(x,), memory_limit="70GiB")
        print(tuning)                                           # all candidates; the choice is marked
        pipe = fxpipe.pipeline(model, **tuning.best.arguments)

        cluster = replace(HARDWARE["h100"], nodes=4)            # pipeline x data, on 32 devices
        tuning = fxpipe.tune(model, hardware=cluster, data_parallel="auto", example_args=(x,))

    Tries every combination of the schedules, of 1, 2, 4, ... micro-batches up to the samples of the mini-batch, and of
    1, 2 or 4 stages on a device; each with its best cut. A candidate that does not fit into memory is also tried with
    recomputation: in all stages, for all but the last micro-batch, and only in stages that need it.

    With data_parallel="auto", also tries every number of replicas that divides devices and mini-batch, and whose
    pipelines can hold parameters, gradients and optimizer state; in both orders of the mesh, unless all devices are in
    one node. One replica is simulated, and the reduction of gradients over all of them.

    Not tried: other orders of the devices, or fewer devices; cuts by hand and pins (for these use chunks="auto",
    schedule="auto" in `fxpipe.pipeline`); more than 32 micro-batches for each device unless nothing fits otherwise;
    more than 4,096 forwards of one replica if several numbers of replicas are tried; recomputing if a candidate fits
    without it, or would be slower than the best even with unlimited memory. A candidate is not cut if it would be
    slower than the best even with perfectly balanced stages and no transfers; its row reports this. The same profile
    always leads to the same choice.

    Args:
        model_or_plan: a module, which is traced, profiled and left unchanged; or a plan, which keeps its stages, and
            for which schedules, micro-batches and checkpoint modes are tried.
        devices: as for `fxpipe.pipeline`, of all replicas. With `hardware` they need not be present; by default all
            devices of a cluster. A number: that many devices of `hardware`, or CPU workers, as for `fxpipe.plan`. Not
            with a plan.
        example_args, example_kwargs: a mini-batch as in training.
        batch_size: samples of the mini-batch, if different from the example.
        schedules, chunks, checkpoint, stages_per_device: try these only. Checkpoint modes are "never", "except_last"
            and "always"; each given mode is tried.
        loss_fn, target: of `forward_backward`: the loss is costed with the model.
        balance: the balance of the stages: "auto", "block" or "optimal".
        memory_limit: memory available to stages on a device, as for `fxpipe.pipeline`; replaces a plan's limits.
        hardware: the hardware for which seconds, memory and links are estimated, as for `fxpipe.plan`.
        optimizer_state, profile, profile_budget, in_dims, dynamic_shapes, out_dims, leaf_modules, check: as for
            `fxpipe.pipeline`.
        progress: show bars, if stderr is a terminal.
        data_parallel: the number of replicas of the pipeline; "auto": the best number. Needs `hardware`.
        mesh: the order of replicas, as for `fxpipe.plan`. None: the better order.
        processes: each device has its own process, as for `fxpipe.plan`.

    Returns:
        A `Tuning`: `best`, a row with its plan, and `rows`, one for each candidate. `best.arguments` are the arguments
        for `fxpipe.pipeline`; its drop-in call always runs gpipe's order, with the memory of gpipe.

    Raises:
        MemoryLimitError: nothing fits; names the least sufficient limit.
        FxpipeError: an argument is invalid, or the model cannot be traced or cut; see `fxpipe.errors`.
    """
    arguments = {**locals(), **options}
    hardware, memory_limit = options.get("hardware"), options.get("memory_limit")
    show = parse.parse_switch("progress", options.get("progress", True))
    with planning_block(), show_progress(show), show_phases("planning"):
        names = COMPARED_SCHEDULES if schedules is None else parse_choices("schedules", schedules, TRAINING_SCHEDULES)
        modes = None if checkpoint is None else parse_choices("checkpoint", checkpoint, CHECKPOINTS)
        counts = None if chunks is None else _parse_counts("chunks", chunks)
        each = None if stages_per_device is None else _parse_counts("stages_per_device", stages_per_device)
        size = None if batch_size is None else parse_count("batch_size", batch_size)
        if isinstance(model_or_plan, Plan):
            for name, parameter in inspect.signature(tune).parameters.items():
                is_of_model = name in arguments and name not in PLAN_ARGUMENTS
                if is_of_model and not is_default(arguments[name], parameter.default):
                    raise ArgumentError(
                        f"{name} beside a plan, which has its stages: give the model, or leave {name} out"
                    )
            return _tune_plan(model_or_plan, size, memory_limit, names, counts, modes)
        if not isinstance(model_or_plan, nn.Module):
            raise ArgumentTypeError(
                f"model_or_plan is {with_article(model_or_plan)}; expected a torch.nn.Module or a fxpipe.Plan"
            )
        if not (example_args or example_kwargs):
            raise ArgumentError("example_args is empty: give a mini-batch to study the model with, as in (x,)")
        if balance not in BALANCES:
            raise ArgumentError(f"balance={balance!r}: expected {', '.join(map(repr, BALANCES))}; tune cuts by itself")
        ways = _replica_settings({**options, "balance": balance, "processes": processes}, devices, data_parallel, mesh)
        settings = with_memory_at_hand(ways[-1], model_or_plan)
        kwargs = example_kwargs or {}
        whole = replace(settings, data_parallel=1, chunks=settings.chunks * settings.data_parallel)
        profiled = trace_and_profile(model_or_plan, example_args, kwargs, whole)
        if size not in (None, profiled.batch) and not profiled.traced.holds_at(size):
            raise ArgumentError(
                f"batch_size={size}: forward reads the batch size, and mini-batches of {size} run another graph than "
                f"the example of {profiled.batch}: give example_args of {size} samples"
            )
        profiled = replace(profiled, batch=size or profiled.batch)
        others = {
            name: arguments[name]
            for name in TRACING_OPTIONS
            if name in options and not is_default(arguments[name], OPTION_DEFAULTS[name])
        }
        if needing_all(profiled.traced.combinations) is not None:
            names = (parse.DROP_IN_SCHEDULE,)
        plans = _plans_of_replicas(profiled, ways, data_parallel == AUTO, settings.memory_at_hand)
        longest = max(plans.values(), key=lambda one: one.devices)
        limits: MemoryLimits = [worker.memory for worker in planned_workers(longest.settings)]
        each = each or candidates.TRIED_STAGES_PER_DEVICE
        rows = _search_all(
            lambda count: candidates.candidates_of_model(names, count, each), plans, limits, counts, modes, others
        )
        rows = _check_best(rows, profiled, example_args, kwargs, settings)
        return _tuning_of_rows(rows, limits, profiled.batch)


def _tune_plan(
    plan: Plan,
    size: int | None,
    memory_limit: Any,
    names: Sequence[str],
    counts: Sequence[int] | None,
    modes: Sequence[str] | None,
) -> Tuning:
    data = plan.data_parallel
    batch = plan.batch or plan.chunks * plan.micro_batch
    if size is not None:
        batch = replica_batch(size, data, "a plan with data_parallel")
    mesh = MESHES[0] if plan.cluster is None else plan.cluster.mesh
    own_limits = parse.parse_memory_limit(memory_limit, len(plan.workers))
    limits: MemoryLimits = candidates.memory_limits_of(plan) if own_limits is None else own_limits
    plans = {(data, mesh): candidates.PlanVariants(plan, batch)}
    rows = _search_all(
        lambda count: candidates.candidates_of_plan(plan, names, count), plans, limits, counts, modes, {}
    )
    return _tuning_of_rows(rows, limits, batch * data)


def _search_all(
    of: Callable[[Sequence[int]], Iterable[Candidate]],
    plans: Mapping[tuple[int, tuple[str, str]], PlanSource],
    limits: MemoryLimits,
    counts: Sequence[int] | None,
    modes: Sequence[str] | None,
    others: dict[str, Any],
) -> tuple[CandidateResult, ...]:
    """Returns the rows for `plans`, by (number of replicas, mesh); tries more micro-batches only if nothing fits."""
    rows: tuple[CandidateResult, ...] = ()
    is_one = len(plans) == 1
    for is_usual in (True, False) if counts is None else (True,):
        tried = []
        for (data, mesh), source in plans.items():
            most = candidates.MAX_CHUNKS_PER_WORKER * source.devices
            every = candidates.chunks_for_batch(source.batch, source.batch)
            usual = [count for count in every if (count <= most) == is_usual]
            for one in of(usual if counts is None else counts):
                if is_one or source.devices * one.stages_per_device * one.chunks <= FORWARDS_OF_REPLICA:
                    tried.append(replace(one, data_parallel=data, mesh=mesh))
        with bar("tuning", len(tried), "candidates") as step:
            rows += candidates.search_candidates(
                tried,
                lambda candidate: plans[candidate.data_parallel, candidate.mesh],
                limits,
                modes=modes,
                others=others,
                wanted=CERTAIN_CANDIDATES if is_one else 1,
                least_gain=0.0 if is_one else LEAST_GAIN_OF_REPLICATION,
                step=step,
            )
        if any(row.fits for row in rows):
            return rows
    if any(row.plan is not None for row in rows):
        raise MemoryLimitError(candidates.shortage_message(rows, limits))
    whys = dict.fromkeys(row.why for row in rows)
    raise ArgumentError(
        "nothing can be tried: " + ("; ".join(whys) or "no schedule goes with stages_per_device; leave it out")
    )


def _tuning_of_rows(rows: Sequence[CandidateResult], limits: MemoryLimits, batch: int) -> Tuning:
    best = rank_fitting(rows)[0]
    assert best.plan is not None
    limited = replace(best, plan=candidates.with_memory_limits(best.plan, limits))
    ordered = candidates.order_for_table(limited if row is best else row for row in rows)
    return Tuning(limited, ordered, batch, best.plan.workers, best.plan.estimated_for)


def _check_best(
    rows: Sequence[CandidateResult],
    profiled: ProfiledModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
) -> tuple[CandidateResult, ...]:
    """Returns the rows after checking that the model accepts the micro-batches of the best row."""
    refused: list[int] = []  # numbers of micro-batches, of all replicas

    def count(row: CandidateResult) -> int:
        return row.chunks * row.data_parallel

    # Rank again after each check: the tolerance for equal steps depends on the best remaining row.
    while best := rank_fitting(row for row in rows if count(row) not in refused):
        if holds_for_chunks(profiled.traced, profiled.batch, args, kwargs, count(best[0]), settings):
            break
        refused.append(count(best[0]))
    else:
        raise ArgumentError(
            f"the model takes no micro-batches of the sizes that were tried (chunks={refused}), or does something else "
            "there than on whole mini-batches: give other chunks, or a larger batch_size"
        )
    why = "the model does not take micro-batches of this size, or does something else there"
    return tuple(
        replace(row, plan=None, step_seconds=0.0, memory=(), why=why) if count(row) in refused else row for row in rows
    )


def _parse_counts(argument: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, int)) or not isinstance(value, Sequence):
        raise ArgumentTypeError(f"{argument}={value!r}: expected a list of whole numbers, as in [1, 2, 4]")
    if not value:
        raise ArgumentError(f"{argument}=[]: expected whole numbers, at least 1")
    return tuple(dict.fromkeys(parse_count(argument, one) for one in value))


# No cut of a large model is perfectly even, so a candidate must gain at least this share with perfect stages.
LEAST_GAIN_OF_REPLICATION = 0.1
FORWARDS_OF_REPLICA = 2**12  # maximum to simulate if several numbers of replicas are tried; takes a tenth of a second


def _replica_settings(
    options: Mapping[str, Any], devices: Devices | None, data_parallel: Any, mesh: Any
) -> list[Settings]:
    """Returns settings for each number and order of replicas to try, from long pipelines to short ones."""
    hardware = parse.parse_hardware_option(options.get("hardware"))
    if devices is None or isinstance(devices, int):
        devices = planned_devices(None if devices is None else parse_count("devices", devices), hardware)
    if data_parallel != AUTO:
        counts = [parse_count("data_parallel", data_parallel, "'auto' or a whole number of replicas")]
    elif hardware is None:
        raise ArgumentError(
            "data_parallel='auto' without hardware: the links between replicas are not known; give hardware, as in "
            "hardware='h100'"
        )
    else:
        workers = len(parse.parse_devices(devices, anywhere=True))
        counts = [count for count in range(1, workers + 1) if workers % count == 0]
    asked, all_settings = None if mesh is None else parse_mesh(mesh), []
    over_nodes = 0  # number of devices if they are in several nodes
    if hardware is not None and isinstance(devices, Sequence) and len(devices) > hardware.devices_per_node:
        over_nodes = len(devices)
    for data in counts:
        orders = MESHES if over_nodes and data not in (1, over_nodes) else MESHES[:1]
        for order in orders if asked is None else (asked,):
            own = {**options, "devices": devices, "data_parallel": data, "mesh": order}
            all_settings.append(make_settings(own, anywhere=options.get("hardware") is not None))
    return all_settings


def _plans_of_replicas(
    profiled: ProfiledModel, ways: Sequence[Settings], is_auto: bool, memory_at_hand: Mapping[torch.device, int | None]
) -> dict[tuple[int, tuple[str, str]], candidates.ModelPlans]:
    """Returns the plans of a replica for each number of replicas and each mesh to try, or raises if none can be."""
    plans, lacking = dict[tuple[int, tuple[str, str]], candidates.ModelPlans](), list[str]()
    for way in ways:
        data = way.data_parallel
        if is_auto and (profiled.batch % data or not profiled.traced.holds_at(profiled.batch // data)):
            continue
        batch = batch_of_replica(profiled.traced, profiled.batch, data)
        # Each candidate sets its chunks.
        settings = replace(way, chunks=1, left=frozenset(), memory_at_hand=memory_at_hand)
        source = candidates.ModelPlans(replace(profiled, batch=batch), settings, is_auto)
        lack = source.lasting_shortage() if is_auto else ""
        if lack:
            lacking.append(lack)
        else:
            plans[data, way.mesh] = source
    if not plans and lacking:
        raise MemoryLimitError(f"no number of replicas fits into memory: {lacking[0]}")
    if not plans:
        counts = dict.fromkeys(str(way.data_parallel) for way in ways)
        raise ArgumentError(
            f"data_parallel='auto': a mini-batch of {profiled.batch} samples does not divide over any of "
            f"{', '.join(counts)} replicas"
        )
    return plans
