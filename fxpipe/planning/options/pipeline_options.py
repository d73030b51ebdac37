"""The options of `fxpipe.pipeline`, `fxpipe.plan` and `fxpipe.tune`, each with its type and default, and the settings.

The three functions take `**options`; `shows_options` puts the options into their signatures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, cast, get_type_hints

import torch
from torch import nn

from fxpipe.cluster import MESHES, Cluster, parse_mesh
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware, check_device_count, cluster_of, device_names
from fxpipe.planning.options import parse
from fxpipe.planning.options.parse import Devices
from fxpipe.planning.plans import Plan
from fxpipe.profiling import Profile
from fxpipe.profiling.loss_cost import PlannedLoss, parse_loss
from fxpipe.scheduling import ScheduleLike
from fxpipe.utils.batch_split import largest_micro_batch
from fxpipe.utils.units import parse_count, parse_number, with_article

AUTO = "auto"


class CutOptions(TypedDict, total=False):
    """Options for cutting a graph, each with its type and default."""

    balance: Annotated[str | Sequence[int] | Sequence[str] | Mapping[str, Any], AUTO]
    pin: Annotated[Mapping[str, Any] | None, None]
    stages_per_device: Annotated[int | None, None]
    schedule: Annotated[ScheduleLike, "1f1b"]
    checkpoint: Annotated[str | Sequence[str], AUTO]


class ModelOptions(TypedDict, total=False):
    """Options that describe the model and its devices, and options for tracing."""

    memory_limit: Annotated[Any, None]
    optimizer_state: Annotated[float, 2.0]
    hardware: Annotated[str | Hardware | None, None]
    profile: Annotated[Profile | str | Path | None, None]
    profile_budget: Annotated[float | None, None]
    loss_fn: Annotated[Callable[..., Any] | None, None]
    target: Annotated[Any, None]
    in_dims: Annotated[Any, None]
    dynamic_shapes: Annotated[Any, None]
    out_dims: Annotated[Any, None]
    leaf_modules: Annotated[Sequence[str | type[nn.Module]], ()]
    check: Annotated[bool, True]
    progress: Annotated[bool, True]


class CutAndModelOptions(CutOptions, ModelOptions, total=False):
    """Options shared by `fxpipe.pipeline` and `fxpipe.plan`."""


class PipelineOptions(CutAndModelOptions, total=False):
    """All options; `fxpipe.pipeline` documents them."""

    devices: Annotated[Devices | None, None]
    chunks: Annotated[int | str, AUTO]
    deferred_batch_norm: Annotated[bool, False]
    compile: Annotated[bool | Mapping[str, Any], False]
    data_parallel: Annotated[int | None, None]
    mesh: Annotated[Sequence[str], MESHES[0]]
    processes: Annotated[bool, False]


OPTION_DEFAULTS: dict[str, Any] = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(PipelineOptions, include_extras=True).items()
}
TRACING_OPTIONS = ("in_dims", "dynamic_shapes", "out_dims", "leaf_modules", "check")
# Options for planning only, refused if a plan is passed.
PLANNING_OPTIONS = (
    *("balance", "pin", "memory_limit", "optimizer_state"),
    *("hardware", "profile", "profile_budget", "loss_fn", "target"),
)

F = TypeVar("F", bound=Callable[..., Any])


def shows_options(options: type, after: str) -> Callable[[F], F]:
    """Decorates a function with `**options`: its signature shows each one after the parameter `after`."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        place = 1 + [one.name for one in own].index(after)
        own[place:place] = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=OPTION_DEFAULTS[name],
                annotation=annotation.__forward_arg__.removeprefix("Annotated[").rpartition(",")[0],
            )
            for name, annotation in options.__annotations__.items()
        ]
        names = {one.name for one in own}

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if unknown := kwargs.keys() - names:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            return function(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return cast(F, checked)

    return decorate


def is_default(value: Any, default: Any) -> bool:
    """Returns True if an argument was omitted or has its default; never compares tensors and the like."""
    if isinstance(value, (str, float, int)):
        return bool(value == default)
    return value is default or (isinstance(value, (tuple, list, dict)) and not value and not default)


def _options_with_plan(options: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns the options, with the plan's devices, chunks and checkpoint if these were omitted."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(f"plan is {with_article(plan)}; expected a fxpipe.Plan, as from fxpipe.Plan.load(path)")
    for name in PLANNING_OPTIONS:
        value = options[name]
        if not is_default(value, OPTION_DEFAULTS[name]):
            shown = repr(value) if isinstance(value, (str, float, int, Sequence, Mapping)) else type(value).__name__
            raise ArgumentError(
                f"{name}={shown} and a plan, which is made already: leave {name} out, or make a new plan with "
                f"fxpipe.plan(model, ..., {name}=...)"
            )
    if options["devices"] is None and plan.cluster is not None and plan.cluster.nodes > 1:
        raise ArgumentError(
            f"plan is for devices in {plan.cluster.nodes} nodes, and this process has those of one: give a DeviceMesh "
            "as devices, in a process for each, or devices that are here"
        )
    chunks, checkpoint = options["chunks"], options["checkpoint"]
    return {
        **options,
        "devices": plan.row_devices if options["devices"] is None else options["devices"],
        "chunks": plan.chunks if isinstance(chunks, str) and chunks == AUTO else chunks,
        "checkpoint": plan.checkpoint if checkpoint == AUTO else checkpoint,
    }


def check_replicas(plan: Plan, ranks: int) -> None:
    """Raises `ArgumentError` if a plan with `balance="pipedream"` does not have `ranks` replicas of each stage."""
    if plan.balance != "pipedream" or (set(plan.replicas) == {ranks} and not plan.turns):
        return
    numbers = "-".join(map(str, plan.replicas))
    once = "fxpipe.plan(model, ..., balance='pipedream', data_parallel=1)"
    if plan.turns:
        raise ArgumentError(
            f"plan has stages with {numbers} replicas that take micro-batches in turn, and over processes only "
            "replicas of all stages run, which share mini-batches evenly. Run it in one process "
            f"(devices=[...] with {len(plan.row_devices)} entries), or plan with a number that is the same for all, as "
            f"in {once}, or data_parallel=2 for a mesh of two replicas"
        )
    count = plan.replicas[0]
    mesh = f"init_device_mesh(..., ({count}, {len(plan.workers)}), mesh_dim_names=('data', 'pipe'))"
    if count > 1:
        raise ArgumentError(
            f"plan has {numbers} replicas of its stages, and here each has {ranks}: run it with "
            f"mesh = {mesh}, devices=mesh['pipe'] and data_parallel=mesh['data'], or plan with {once}"
        )
    raise ArgumentError(
        f"plan has each stage once, and data_parallel has {ranks} ranks for each: leave data_parallel out, or plan "
        f"with data_parallel={ranks}"
    )


DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of a pipeline. Planning may extend `placement` and turn `checkpoint` into modes.

    Options left to the tuner have their usual values at first: "1f1b", and 4 micro-batches for each worker.
    """

    workers: tuple[torch.device, ...]  # by worker: its device
    placement: tuple[int, ...]  # by stage: its worker
    chunks: int
    schedule: ScheduleLike  # a name, or a user's table or function
    checkpoint: str | tuple[str, ...]  # "auto", a mode, or one mode for each stage
    balance: str | tuple[int, ...] | tuple[str, ...]
    in_dims: Any = None
    dynamic_shapes: Any = None  # as given by the user; interpreted with the inputs
    out_dims: Any = None
    leaf_modules: tuple[str | type[nn.Module], ...] = ()
    check: bool = True
    pins: Mapping[str, int] = field(default_factory=dict)  # name of a module or node -> worker
    memory_limits: tuple[int | None, ...] | None = None  # bytes, by worker; None: the memory of the devices
    # Bytes that a device has for the model, measured once before planning; None: unknown. Empty before planning.
    memory_at_hand: Mapping[torch.device, int | None] = field(default_factory=dict)
    optimizer_state: float = 2.0  # bytes for each byte of a trained parameter
    hardware: Hardware | None = None  # to plan for; None: the local devices
    profile: Profile | None = None  # an earlier measurement
    profile_budget: float = parse.PROFILE_BUDGET  # seconds
    loss: PlannedLoss | None = None  # applied to the outputs in each step; None: unknown
    deferred_batch_norm: bool = False
    compile: Mapping[str, Any] | None = None  # keywords of torch.compile; None: stages are not compiled
    progress: bool = True  # show progress bars if stderr is a terminal
    processes: bool = False  # each worker has its own process
    # "schedule", "chunks", "stages_per_device": those that the tuner chooses after profiling.
    left: frozenset[str] = frozenset()
    data_parallel: int = 1
    mesh: tuple[str, str] = MESHES[0]  # order of the mesh dimensions if there are several replicas
    chooses_replicas: bool = False  # `balance="pipedream"` chooses the replicas of each stage
    # By worker, the devices of its replicas that take micro-batches in turn; empty: no such replicas.
    replica_workers: tuple[tuple[torch.device, ...], ...] = ()
    runs_here: bool = False  # in this process, so chosen replicas must take turns
    least_samples: int = 1  # minimum samples of a micro-batch: batch norm needs 2 values
    is_joint: bool = False  # an output of the model needs all samples of a mini-batch; known after tracing
    ranks_per_stage: int = 1  # with processes: replicas that have their own mini-batches

    @property
    def cluster(self) -> Cluster | None:
        """The devices of all replicas by their position in nodes; None for local devices."""
        if self.hardware is None:
            return None
        return cluster_of(self.hardware, len(self.workers), self.data_parallel, self.mesh, self.replicas)

    @property
    def is_over_processes(self) -> bool:
        """True if each worker has its own process: as requested, or because devices are in several nodes."""
        return self.processes or (self.cluster is not None and self.cluster.needs_processes)

    @property
    def replicas(self) -> tuple[int, ...]:
        """By worker, the number of replicas that take micro-batches in turn; empty if there are none."""
        return tuple(map(len, self.replica_workers))

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        """By stage, the number of replicas that take micro-batches in turn; empty if there are none."""
        return tuple(self.replicas[k] for k in self.placement) if self.replicas else ()

    @property
    def row_devices(self) -> tuple[torch.device, ...]:
        """The device of each row of a schedule: of each worker or, if replicas take turns, of each replica."""
        return tuple(device for of_worker in self.replica_workers for device in of_worker) or self.workers

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage; with several replicas the first, which has the parameters."""
        return tuple(self.workers[k] for k in self.placement)

    @property
    def stage_devices(self) -> tuple[tuple[torch.device, ...], ...]:
        """By stage, the devices of all replicas that take turns."""
        return tuple(self.replica_workers[k] if self.replica_workers else (self.workers[k],) for k in self.placement)

    @property
    def figure_devices(self) -> tuple[str, ...]:
        """By worker, the device that figures are for: a device of `hardware` if given, else the worker's device."""
        names = None if self.hardware is None else device_names(self.hardware, len(self.workers))
        return tuple(names or map(str, self.workers))

    def micro_batches(self, batch: int) -> int:
        """Returns the number of micro-batches of a mini-batch: `chunks`, or fewer if there are too few samples."""
        return min(self.chunks, max(1, batch // self.least_samples))

    def largest_micro_batch(self, batch: int) -> int:
        return largest_micro_batch(batch, self.micro_batches(batch))


def make_settings(
    options: Mapping[str, Any], plan: Plan | None = None, *, anywhere: bool = False, runs_here: bool = False
) -> Settings:
    """Checks each option by itself. With a plan, omitted options have the plan's values."""
    # `anywhere`: devices need not be on this machine, as nothing runs. `runs_here`: this process runs the plan.
    options = {**OPTION_DEFAULTS, **options}
    is_any = options["schedule"] == AUTO
    order = parse.parse_training_schedule(DEFAULT_SCHEDULE if is_any else options["schedule"])
    per_device = options["stages_per_device"]
    if per_device is not None:
        parse_count("stages_per_device", per_device)
    options = {**options, "chunks": parse.chunks_of_schedule(order, options["chunks"], plan)}
    if plan is not None:
        options = _options_with_plan(options, plan)
    hardware = parse.parse_hardware_option(options["hardware"])
    data = 1 if options["data_parallel"] is None else parse_count("data_parallel", options["data_parallel"])
    rows = parse.parse_devices(options["devices"], anywhere)
    replica_workers = _workers_that_take_turns(rows, plan) if plan is not None and runs_here else ()
    if not replica_workers and len(rows) % data:
        raise ArgumentError(
            f"data_parallel={data}: {len(rows)} devices cannot be shared out evenly; give a multiple of {data}"
        )
    workers = tuple(own[0] for own in replica_workers) or rows[: len(rows) // data]
    check_device_count(hardware, len(workers), data)
    count, chunks = parse.CHUNKS_PER_WORKER * len(workers), options["chunks"]
    if not (isinstance(chunks, str) and chunks == AUTO):
        count = parse_count("chunks", chunks, "'auto' or a whole number of micro-batches")
    placement = parse.place_stages(len(workers), per_device, order, count, plan)
    if plan is not None and is_any:
        placement = plan.placement  # its stages stay where they are, and the schedule is chosen for them
    pins = {} if options["pin"] is None else parse.parse_pins("pin", options["pin"], workers)
    balance, budget = options["balance"], options["profile_budget"]
    if isinstance(balance, Mapping):
        pins = parse.parse_pins("balance", balance, workers) | pins
        balance = AUTO
    if pins and not isinstance(balance, str):
        raise ArgumentError(
            f"balance={list(balance)!r} and pins of {', '.join(map(repr, pins))}: cut by names or "
            "numbers, or pin; give one of them"
        )
    is_free = options["data_parallel"] is None and plan is None and hardware is not None and len(workers) > 1
    # Pins may need other stages.
    modes = parse.parse_checkpoint(options["checkpoint"], None if pins else len(placement))
    return Settings(
        workers=workers,
        placement=placement,
        chunks=count,
        schedule=order,
        checkpoint=modes,
        balance=parse.parse_balance(balance, len(placement)),
        in_dims=options["in_dims"],
        dynamic_shapes=options["dynamic_shapes"],
        out_dims=options["out_dims"],
        leaf_modules=parse.parse_leaf_modules(options["leaf_modules"]),
        check=parse.parse_switch("check", options["check"]),
        pins=pins,
        memory_limits=parse.parse_memory_limit(options["memory_limit"], len(workers)),
        optimizer_state=parse_number(
            "optimizer_state", options["optimizer_state"], "bytes for each byte of a parameter"
        ),
        hardware=hardware,
        profile=parse.parse_profile_option(options["profile"]),
        profile_budget=parse.PROFILE_BUDGET if budget is None else parse_number("profile_budget", budget, "seconds"),
        loss=parse_loss(options["loss_fn"], options["target"]),
        deferred_batch_norm=parse.parse_switch("deferred_batch_norm", options["deferred_batch_norm"]),
        compile=parse.parse_compile(options["compile"]),
        progress=parse.parse_switch("progress", options["progress"]),
        left=_options_for_tuner(options, is_any, pins, plan),
        data_parallel=data,
        mesh=parse_mesh(options["mesh"]),
        processes=parse.parse_switch("processes", options["processes"]),
        chooses_replicas=is_free and isinstance(balance, str) and balance == "pipedream",
        replica_workers=replica_workers,
        runs_here=runs_here,
    )


def _workers_that_take_turns(devices: tuple[torch.device, ...], plan: Plan) -> tuple[tuple[torch.device, ...], ...]:
    """Returns by worker the consecutive devices of its replicas; empty if the plan has no replicas that take turns."""
    if not plan.turns:
        return ()
    if len(devices) != sum(plan.turns):
        numbers = "-".join(map(str, plan.turns))
        raise ArgumentError(
            f"plan has devices with {numbers} replicas, which take micro-batches in turn, but devices has "
            f"{len(devices)} entries: give {sum(plan.turns)}, those of each one's replicas one after the other; or "
            "plan without replicas (data_parallel=1)"
        )
    ends = [0, *accumulate(plan.turns)]
    return tuple(devices[first:end] for first, end in pairwise(ends))


def _options_for_tuner(
    options: Mapping[str, Any], is_any: bool, pins: Mapping[str, int], plan: Plan | None
) -> frozenset[str]:
    left = {"schedule"} if is_any else set()
    if plan is None and options["chunks"] == AUTO:
        left.add("chunks")
    if plan is None and is_any and options["stages_per_device"] is None and not pins:
        is_free = isinstance(options["checkpoint"], str) and isinstance(options["balance"], str)
        is_free = is_free and options["balance"] != "pipedream"  # its stages have separate devices
        left |= {"stages_per_device"} if is_free else set()
    return frozenset(left)
