"""The passes that make a plan, in order: trace, profile, partition, rewrite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.plans import Plan, Portal, StagePlan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fxpipe.profiling import Profile
    from fxpipe.rewriting import Program
    from fxpipe.settings import Settings
    from fxpipe.tracing import Traced
    from fxpipe.tracing.ways import Tracer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan, with the graph and the program it was made from."""

    plan: Plan
    traced: Traced
    program: Program


def plan(
    model: nn.Module,
    stages: int | None = None,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    devices: Sequence[str | torch.device] | None = None,
    chunks: int | str = "auto",
    schedule: str = "1f1b",
    checkpoint: str = "auto",
    balance: str | Sequence[int] | Sequence[str] = "block",
    tracer: Tracer = "auto",
    in_dims: Any = None,
    out_dims: Any = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    check: bool = True,
    stages_per_device: int = 1,
) -> Plan:
    """Plans a pipeline without making it: traces, profiles, cuts, and leaves the model as it was.

        plan = fxpipe.plan(model, 2, example_args=(x,))
        print(plan)                     # the stages, what they cost, what they send
        print(plan.stages[1].code)

    Args:
        model: any module. Of one without values (on the meta device, or made under a FakeTensorMode) the seconds are
            estimates, and `Plan.estimated_for` says of what hardware.
        stages: how many; with `devices`, may be left out. Without `devices` all are planned for the CPU.
        example_args, example_kwargs: a mini-batch as training will use it.
        devices, chunks, schedule, checkpoint, balance, tracer, in_dims, out_dims, leaf_modules, check,
            stages_per_device: as for `fxpipe.pipeline`.

    Raises:
        FxpipeError: an argument cannot be used, or the model cannot be traced or cut so; see `fxpipe.errors`.
        Exception: what the model itself raises on the inputs, with a note.
    """
    from fxpipe.settings import make_settings, parse_stages_per_device

    per_device = parse_stages_per_device(stages_per_device)
    if devices is None and stages is not None:
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise ArgumentError(f"stages={stages!r}: expected a whole number, at least 1")
        if stages % per_device:
            raise ArgumentError(
                f"stages={stages} cannot be shared out with stages_per_device={per_device}; give a multiple of it"
            )
        devices = ["cpu"] * (stages // per_device)
    settings = make_settings(
        devices,
        chunks,
        schedule,
        checkpoint,
        balance,
        tracer,
        in_dims,
        out_dims,
        leaf_modules,
        check,
        stages_per_device=per_device,
    )
    if stages is not None and stages != len(settings.placement):
        shared = f" of {per_device} stages" if per_device > 1 else ""
        raise ArgumentError(
            f"stages={stages}, but devices has {len(settings.workers)} entries{shared}; give as many, or leave stages "
            "out"
        )
    return prepare(model, example_args, example_kwargs or {}, settings).plan


def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    given: Plan | None = None,
    seed: int = 0,
) -> Prepared:
    """All passes. With `given`, its stages are taken instead of planning new ones.

    `seed` is that of the numbers that forward draws and reads.
    """
    from fxpipe.partitioning import partition
    from fxpipe.profiling import profile
    from fxpipe.rewriting import forbidden_cuts
    from fxpipe.tracing.placement import moved, on_one_device
    from fxpipe.tracing.snapshot import undone

    with on_one_device(model) as device:
        args, kwargs = moved((args, kwargs), device)
        traced, micro = _trace(model, args, kwargs, settings, seed)
        if given is not None and given.fingerprint != traced.fingerprint():
            raise ArgumentError(
                f"plan was made for another graph (fingerprint {given.fingerprint}, here {traced.fingerprint()}): the "
                "model, its mode or its inputs have changed; plan it again with fxpipe.plan"
            )
        with undone(model):  # hooks, and modules kept whole, run as they are
            profiled = profile(traced, args, kwargs, micro_batch=micro, threads=_worker_threads(settings.workers))
    cut = partition(
        profiled.seconds,
        len(settings.placement),
        balance=settings.balance if given is None else tuple(len(stage.nodes) for stage in given.stages),
        forbidden=forbidden_cuts(traced),
        names=[n.name for n in traced.nodes],
        modules=[n.meta["module"] for n in traced.nodes],
    )
    return _prepared(traced, profiled, cut.starts, micro, settings)


def prepare_beside(
    first: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int = 0
) -> Prepared:
    """Another graph of a planned model (for evaluation, say), cut so that nodes stay with their parameters."""
    from fxpipe.partitioning import follow
    from fxpipe.rewriting import forbidden_cuts
    from fxpipe.tracing.placement import moved, on_one_device

    model = first.traced.model
    with on_one_device(model) as device:
        args, kwargs = moved((args, kwargs), device)
        traced, micro = _trace(model, args, kwargs, settings, seed)
    starts = follow(_misplaced(first, traced), forbidden_cuts(traced))
    return _prepared(traced, None, starts, micro, settings)


def _trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int
) -> tuple[Traced, int]:
    """The graph, and the size of the largest micro-batch."""
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
    batch = traced.batch_of(flatten((args, kwargs))[0])
    return traced, -(-batch // min(settings.chunks, batch))


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


def _prepared(
    traced: Traced, profiled: Profile | None, starts: Sequence[int], micro: int, settings: Settings
) -> Prepared:
    from fxpipe.rewriting import split
    from fxpipe.tracing.sizing.shapes import bytes_for, bytes_of

    program = split(traced, starts, settings.devices)
    nodes = traced.nodes
    made = {n.name: bytes_for(bytes_of(n.meta.get("shapes", ())), traced.batch, micro) for n in traced.graph.nodes}
    ends = [*starts[1:], len(nodes)]
    stages = []
    for j, (start, end) in enumerate(zip(starts, ends, strict=True)):
        costs = profiled.nodes[start:end] if profiled is not None else ()
        following = program.stages[j + 1].receives if j + 1 < len(starts) else ()
        stages.append(
            StagePlan(
                j,
                str(settings.devices[j]),
                tuple(n.name for n in nodes[start:end]),
                program.stages[j].code,
                sum(c.forward.at(micro) for c in costs),
                sum(c.backward.at(micro) for c in costs),
                _attribute_bytes(traced, program.stages[j].attributes),
                sum(bytes_for(c.output_bytes, profiled.batch, micro) for c in costs) if profiled is not None else 0,
                sum(made[value.name] for value in following if value.source == j),
            )
        )
    plan = Plan(
        tuple(stages),
        tuple(Portal(s.name, s.source, s.target, made[s.name]) for s in program.skips),
        tuple(map(str, settings.devices)),
        settings.schedule,
        settings.chunks,
        micro,
        settings.checkpoint,
        settings.balance if isinstance(settings.balance, str) else "by hand",
        traced.tracer,
        traced.fingerprint(),
        traced.why,
        tuple(map(str, traced.guards.questions)) if traced.guards else (),
        profiled.estimated_for if profiled is not None else "",
        settings.placement,
    )
    return Prepared(plan, traced, program)


def _attribute_bytes(traced: Traced, names: Iterable[str]) -> int:
    from fxpipe.tracing.containers import bytes_in
    from fxpipe.tracing.traced import lookup

    wanted = set(names)
    return sum(bytes_in(lookup(traced, n)) for n in traced.graph.nodes if n.op == "get_attr" and n.target in wanted)
