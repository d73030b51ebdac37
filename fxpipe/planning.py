"""The passes that make a plan, in order: trace, profile, decide, rewrite.

The first two look at the model and take seconds; the others look at what was found, and take little. So they are two
functions, `study` and `planned`, and one study serves many plans: for other numbers of devices and micro-batches, other
schedules, checkpoint modes and balances.

    studied = study(model, args, kwargs, settings)
    for chunks in (2, 4, 8):
        print(planned(studied, replace(settings, chunks=chunks)).plan)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.plans import Plan

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from fxpipe.deciding import Cut
    from fxpipe.hardware import Hardware
    from fxpipe.profiling import Profile
    from fxpipe.rewriting import Program
    from fxpipe.scheduling import ScheduleLike
    from fxpipe.settings import Settings
    from fxpipe.tracing import Traced
    from fxpipe.tracing.ways import Tracer


@dataclass(frozen=True, slots=True)
class Studied:
    """A model that was looked at: its graph, and what the nodes cost, for any number of samples."""

    traced: Traced
    orders: tuple[Traced, ...]  # the graph as traced and, where there is one, in an order that sends less
    profiles: tuple[Profile, ...]  # one for each kind of device
    kinds: tuple[str, ...]  # of devices that were measured
    threads: int | None  # of torch while a CPU was measured, a worker's share of the cores; None: none was
    hardware: Hardware | None  # that the profiles were estimated for
    batch: int  # samples of the mini-batch
    fingerprint: str  # of the graph

    def holds_for(self, settings: Settings) -> bool:
        """Are the seconds those of the workers that the settings ask for? See `studied_again`."""
        from fxpipe.deciding.sites import kind_of

        if settings.hardware != self.hardware:
            return False
        if self.hardware is not None:
            return True
        names = {kind_of(device) for device in settings.workers}
        threads = self.threads if "cpu" in names else None
        return names <= {*self.kinds} and threads in (None, _worker_threads(settings.workers))

    def profiles_for(self, settings: Settings) -> list[Profile]:
        """One for each kind among the settings' workers, in order."""
        from fxpipe.deciding.sites import kind_of, kinds_of

        if self.hardware is not None:
            return [self.profiles[0]]
        return [self.profiles[self.kinds.index(kind_of(device))] for device in kinds_of(settings.workers)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph that is ready to run, and the plan that it follows."""

    plan: Plan
    traced: Traced
    program: Program
    settings: Settings  # with all that was left to planning
    is_reordered: bool


def plan(
    model: nn.Module,
    stages: int | None = None,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    devices: Sequence[str | torch.device] | None = None,
    chunks: int | str = "auto",
    schedule: ScheduleLike = "1f1b",
    checkpoint: str | Sequence[str] = "auto",
    balance: str | Sequence[int] | Sequence[str] | Mapping[str, Any] = "auto",
    pin: Mapping[str, Any] | None = None,
    stages_per_device: int | None = None,
    memory_limit: Any = None,
    optimizer_state: float = 2.0,
    hardware: str | Hardware | None = None,
    profile: Profile | str | Path | None = None,
    profile_budget: float | None = None,
    tracer: Tracer = "auto",
    in_dims: Any = None,
    out_dims: Any = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    check: bool = True,
    progress: bool = True,
) -> Plan:
    """Plans a pipeline without making it: traces, profiles, cuts, and leaves the model as it was.

        plan = fxpipe.plan(model, 2, example_args=(x,))
        print(plan)                     # the stages, what they cost, what they send
        print(plan.stages[1].code)
        plan.memory(1, b=8)             # bytes that stage 1 needs with micro-batches of 8

    Args:
        model: any module. Of one without values (on the meta device, or made under a FakeTensorMode) the seconds are
            estimates, and `Plan.estimated_for` says of what hardware.
        stages: how many, and `devices` for each one; the plan has more where pins or memory ask for several on a device
            (see `checkpoint`), and with schedule="auto". With `devices`, may be left out. Without `devices` all are
            planned for the CPU or, with `hardware`, for as many GPUs of that kind.
        example_args, example_kwargs: a mini-batch as training will use it.
        hardware: seconds, memory and links are those of this hardware, which need not be here: a name of
            `fxpipe.hardware.HARDWARE` ("a100-80gb", "h100", "h200", "cpu"), or a `Hardware`.
        devices, chunks, schedule, checkpoint, balance, pin, stages_per_device, memory_limit, optimizer_state, profile,
            profile_budget, tracer, in_dims, out_dims, leaf_modules, check, progress: as for `fxpipe.pipeline`.

    Raises:
        FxpipeError: an argument cannot be used, or the model cannot be traced or cut so; see `fxpipe.errors`.
        Exception: what the model itself raises on the inputs, with a note.
    """
    from fxpipe.arguments import parse_given_hardware, parse_stages_per_device
    from fxpipe.placing import parse_schedule_to_train, workers_for
    from fxpipe.progress import showing
    from fxpipe.settings import AUTO, USUAL_SCHEDULE, make_settings

    per_device = parse_stages_per_device(stages_per_device)
    given_hardware = parse_given_hardware(hardware)
    if devices is None and stages is not None:
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise ArgumentError(f"stages={stages!r}: expected a whole number, at least 1")
        is_gpu = given_hardware is not None and given_hardware.within is not None
        order = parse_schedule_to_train(USUAL_SCHEDULE if schedule == AUTO else schedule)
        devices = [f"cuda:{k}" if is_gpu else "cpu" for k in range(workers_for(stages, order, per_device))]
    settings = make_settings(
        devices=devices,
        chunks=chunks,
        schedule=schedule,
        checkpoint=checkpoint,
        balance=balance,
        pin=pin,
        stages_per_device=per_device,
        memory_limit=memory_limit,
        optimizer_state=optimizer_state,
        hardware=given_hardware,
        profile=profile,
        profile_budget=profile_budget,
        tracer=tracer,
        in_dims=in_dims,
        out_dims=out_dims,
        leaf_modules=leaf_modules,
        check=check,
        progress=progress,
        anywhere=given_hardware is not None,
    )
    if stages is not None and stages != len(settings.placement):
        each = len(settings.placement) // len(settings.workers)
        shared = f" of {each} stages" if each > 1 else ""
        raise ArgumentError(
            f"stages={stages}, but devices has {len(settings.workers)} entries{shared}; give as many, or leave stages "
            "out"
        )
    with showing(settings.progress):
        return prepare(model, example_args, example_kwargs or {}, settings).plan


def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    given: Plan | None = None,
    seed: int = 0,
) -> Prepared:
    """All passes. With `given`, its stages are taken instead of planning new ones, for the graph of its mode.

    `seed` is that of the numbers that forward draws and reads.
    """
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device

    if given is None:
        studied = study(model, args, kwargs, settings, seed)
        if settings.left:
            from fxpipe.tuning.choosing import planned_best

            return planned_best(studied, args, kwargs, settings)
        return planned(studied, settings)
    with on_one_device(model) as device, in_mode(model, given.evaluating):
        args, kwargs = moved((args, kwargs), device)
        traced, batch = _trace(model, args, kwargs, settings, seed)
        if given.fingerprint != traced.fingerprint():
            raise ArgumentError(
                f"plan was made for another graph (fingerprint {given.fingerprint}, here {traced.fingerprint()}): the "
                "model, its mode or its inputs have changed; plan it again with fxpipe.plan"
            )
        return _as_planned(traced, given, batch, settings)


def study(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int = 0
) -> Studied:
    """Traces and profiles, as training will run the model.

    Of the settings it heeds what they say of tracing, profiling and devices, and `chunks`: graph and model are compared
    for micro-batches of that size, and there nodes are measured. The line through what was measured there and at
    another size says what others take.
    """
    from fxpipe.rewriting.ordering import ordered
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device

    with on_one_device(model) as device, in_mode(model, None):
        args, kwargs = moved((args, kwargs), device)
        traced, batch = _trace(model, args, kwargs, settings, seed)
        kinds, threads, profiles = _profiles(traced, args, kwargs, batch, settings)
    in_order = ordered(traced)
    orders = (traced,) if in_order is traced else (traced, in_order)
    return Studied(traced, orders, profiles, kinds, threads, settings.hardware, batch, traced.fingerprint())


def studied_again(studied: Studied, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Studied:
    """The study for the settings' workers: the same graph, profiled again where the seconds are not theirs.

    They are not on another kind of device, nor on a CPU for another number of workers, who have other shares of its
    cores. Costs that were given, in `settings.profile`, are taken as they are for any.
    """
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device

    if studied.holds_for(settings):
        return studied
    model = studied.traced.model
    with on_one_device(model) as device, in_mode(model, None):
        args, kwargs = moved((args, kwargs), device)
        kinds, threads, profiles = _profiles(studied.traced, args, kwargs, studied.batch, settings)
    return replace(studied, profiles=profiles, kinds=kinds, threads=threads, hardware=settings.hardware)


def is_the_model(
    studied: Studied, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, settings: Settings
) -> bool:
    """Whether the model takes micro-batches of a `chunks`-th of the batch, and the graph does the same there."""
    from fxpipe.tracing.checking.again import agrees
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device

    parts = min(chunks, studied.batch)
    sizes = {studied.batch // parts, -(-studied.batch // parts)}
    model = studied.traced.model
    with on_one_device(model) as device, in_mode(model, None):
        args, kwargs = moved((args, kwargs), device)
        return not settings.check or agrees(studied.traced, args, kwargs, sorted(sizes))


def planned(studied: Studied, settings: Settings) -> Prepared:
    """Decides and rewrites: a plan of what was studied, for workers of which the study holds."""
    from fxpipe.deciding import decide, is_by_hand

    orders = studied.orders[:1] if is_by_hand(studied.traced, settings) else studied.orders
    cut = decide(orders, studied.profiles_for(settings), studied.batch, settings)
    return prepared(cut, studied.fingerprint, studied.batch, settings)


def _as_planned(traced: Traced, given: Plan, batch: int, settings: Settings) -> Prepared:
    """The stages of a plan. Its figures follow the micro-batches; they stay those of the devices it was made for."""
    from fxpipe.plans.resizing import resized
    from fxpipe.rewriting import split
    from fxpipe.rewriting.ordering import in_order
    from fxpipe.scheduling import schedule_text

    by_name = {node.name: node for node in traced.nodes}
    names = [name for stage in given.stages for name in stage.nodes]
    if sorted(names) != sorted(by_name) or not all(stage.nodes for stage in given.stages):
        raise ArgumentError("plan does not have the nodes of the graph that its fingerprint names: it is damaged")
    reordered = in_order(traced, [by_name[name] for name in names])
    starts = tuple(accumulate((len(stage.nodes) for stage in given.stages[:-1]), initial=0))
    program = split(
        reordered, starts, settings.devices, [stage.copies for stage in given.stages], settings.deferred_batch_norm
    )
    stages = tuple(
        replace(stage, device=str(device), code=made.code)
        for stage, device, made in zip(given.stages, settings.devices, program.stages, strict=True)
    )
    plan = replace(
        resized(replace(given, stages=stages), settings.largest_micro_batch(batch), settings.checkpoint),
        devices=tuple(map(str, settings.devices)),
        schedule=schedule_text(settings.schedule, settings.chunks, settings.placement),
        chunks=settings.chunks,
        placement=settings.placement,
        batch=batch,
    )
    return Prepared(plan, reordered, program, settings, names != [node.name for node in traced.nodes])


def prepare_beside(
    first: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int = 0
) -> Prepared:
    """Another graph of a planned model (for evaluation, say), cut so that nodes stay with their parameters."""
    from fxpipe.partitioning import follow
    from fxpipe.rewriting import forbidden_cuts, split
    from fxpipe.rewriting.ordering import ordered
    from fxpipe.tracing.placement import moved, on_one_device

    model = first.traced.model
    with on_one_device(model) as device:
        args, kwargs = moved((args, kwargs), device)
        traced, _ = _trace(model, args, kwargs, settings, seed)
    if first.is_reordered:
        traced = ordered(traced)
    starts = follow(_misplaced(first, traced), forbidden_cuts(traced))
    program = split(traced, starts, settings.devices, deferred_batch_norm=settings.deferred_batch_norm)
    return replace(first, traced=traced, program=program)


def _trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int
) -> tuple[Traced, int]:
    """The graph, and the number of samples."""
    from fxpipe.tracing import trace
    from fxpipe.trees import flatten

    traced = trace(
        model,
        args,
        kwargs,
        in_dims=settings.in_dims,
        out_dims=settings.out_dims,
        chunks=settings.chunks,
        tracer=settings.tracer,
        leaf_modules=settings.leaf_modules,
        check=settings.check,
        seed=seed,
    )
    return traced, traced.batch_of(flatten((args, kwargs))[0])


def _worker_threads(workers: Sequence[torch.device]) -> int:
    """A worker's share of the cores: what is measured must be what will run."""
    import torch

    return max(1, torch.get_num_threads() // len(workers))


def _misplaced(first: Prepared, traced: Traced) -> list[list[float]]:
    """For each node and stage: bytes of parameters that would be elsewhere; least of all, a node with a known name."""
    from fxpipe.tracing.containers import bytes_in
    from fxpipe.tracing.traced import lookup

    homes: dict[str, int] = {}
    for j, stage in enumerate(first.program.stages):
        for name in stage.attributes:
            homes.setdefault(name, j)
    known = {name: stage.index for stage in first.plan.stages for name in stage.nodes}
    stages = range(len(first.plan.stages))
    table = []
    for node in traced.nodes:
        row = [0.0] * len(stages)
        for source in node.all_input_nodes:
            home = homes.get(str(source.target)) if source.op == "get_attr" else None
            if home is not None:
                size = 1.0 + bytes_in(lookup(traced, source))
                row = [cost + (size if j != home else 0.0) for j, cost in enumerate(row)]
        if node.name in known:
            row = [cost + (0.5 * abs(j - known[node.name])) for j, cost in enumerate(row)]
        table.append(row)
    return table


def _profiles(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, settings: Settings
) -> tuple[tuple[str, ...], int | None, tuple[Profile, ...]]:
    """The kinds of devices, the threads that a CPU was measured with, and a profile for each kind."""
    from fxpipe.deciding.sites import kind_of, kinds_of
    from fxpipe.profiling import profile
    from fxpipe.profiling.storing import profile_for
    from fxpipe.tracing.snapshot import undone

    kinds = kinds_of(settings.workers) if settings.hardware is None else list(settings.workers[:1])
    names = tuple(map(kind_of, kinds))
    if settings.profile is not None:
        return names, None, (profile_for(traced, settings.profile),) * len(kinds)
    threads = _worker_threads(settings.workers)
    with undone(traced.model):  # hooks, and modules kept whole, run as they are
        profiles = tuple(
            profile(
                traced,
                args,
                kwargs,
                micro_batch=_samples_to_measure(traced, batch, settings),
                budget=settings.profile_budget / len(kinds),
                threads=threads,
                hardware=settings.hardware,
                device=device if settings.hardware is None else None,
            )
            for device in kinds
        )
    is_measured = settings.hardware is None and not profiles[0].estimated_for
    return names, threads if is_measured and "cpu" in names else None, profiles


def _samples_to_measure(traced: Traced, batch: int, settings: Settings) -> int:
    """Those of a micro-batch. Where these are to be chosen yet not a single one, which not every model takes."""
    from fxpipe.tracing.checking.check import is_same_graph

    samples = settings.largest_micro_batch(batch)
    is_free = "chunks" in settings.left and samples == 1 < batch
    return 2 if is_free and is_same_graph(traced, 2) else samples


def prepared(cut: Cut, fingerprint: str, batch: int, settings: Settings) -> Prepared:
    """The stages of a cut, and the plan that describes them."""
    from fxpipe.deciding import copies_of, describe
    from fxpipe.rewriting import split

    traced = cut.traced
    settings = replace(cut.settings, checkpoint=_checkpoint(settings.checkpoint, cut.recompute))
    deferred = settings.deferred_batch_norm
    program = split(traced, cut.starts, settings.devices, deferred_batch_norm=deferred)
    copies = copies_of(cut, program, settings.largest_micro_batch(batch))
    if any(copies):
        program = split(traced, cut.starts, settings.devices, copies, deferred)
    plan = describe(cut, program, copies, batch, settings)
    plan = replace(plan, fingerprint=fingerprint)
    return Prepared(plan, traced, program, settings, traced.fingerprint() != fingerprint)


def _checkpoint(asked: str | tuple[str, ...], recompute: Sequence[bool]) -> str | tuple[str, ...]:
    """What was left to planning, decided."""
    if asked != "auto":
        return asked
    if len({*recompute}) == 1:
        return "always" if recompute[0] else "never"
    return tuple("always" if again else "never" for again in recompute)
