"""The plan of a cut: the figures of its stages, and what goes between them, as data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import fx

from fxpipe.deciding.formulas import flops, stage_bytes, value_bytes
from fxpipe.deciding.outcomes import Cut
from fxpipe.deciding.remarks import heaviest, line_of, tied, whole
from fxpipe.deciding.shares import shares
from fxpipe.deciding.sites import link_of
from fxpipe.hardware import shared_between
from fxpipe.partitioning.chain import Link
from fxpipe.plans import Plan, Portal, Sending, StagePlan, StageSeconds, StageWork
from fxpipe.plans.action_costs import action_seconds
from fxpipe.plans.retargeting import on_link
from fxpipe.polynomials import Polynomial, total
from fxpipe.profiling import NodeCost
from fxpipe.rewriting import Program
from fxpipe.rewriting.copies import choose_copies
from fxpipe.rewriting.program import INPUT
from fxpipe.scheduling import schedule_text
from fxpipe.settings import Settings
from fxpipe.simulation import transfers_of
from fxpipe.tracing import Traced
from fxpipe.tracing.modes import evaluating
from fxpipe.tracing.sizing.shapes import bytes_for, bytes_of
from fxpipe.work import Operation, Work


def copies_of(cut: Cut, program: Program, samples: int) -> tuple[tuple[str, ...], ...]:
    """For each stage the nodes that it had better compute for itself than receive; none where nothing is sent."""
    if all(site.link is None for site in cut.sites):
        return ((),) * len(cut.sites)
    receive = [None if site.link is None else _arrival(site.link) for site in cut.sites]
    sizes = sizes_of(cut.traced, samples)

    def if_all_were(kind: int) -> tuple[tuple[str, ...], ...]:
        seconds = {cost.name: cost.forward.at(samples) for cost in cut.profiles[kind].nodes}
        return choose_copies(cut.traced, program, seconds, sizes, receive)

    found = {kind: if_all_were(kind) for kind in {site.kind for site in cut.sites}}
    return tuple(found[site.kind][j] for j, site in enumerate(cut.sites))


def _arrival(link: Link) -> Callable[[float], float]:
    return lambda size: link.latency + size / link.bytes_per_second


def describe(
    cut: Cut,
    program: Program,
    copies: Sequence[Collection[str]],
    batch: int,
    settings: Settings,
) -> Plan:
    """The plan.

    Args:
        program: of the cut, with `copies`: the nodes that each stage computes for itself.
        batch: samples of the mini-batch; figures are given for its largest micro-batch.
        settings: with all that was left to planning.
    """
    traced, samples = cut.traced, settings.largest_micro_batch(batch)
    formulas = _formulas(traced, program, samples)
    by_kind = [{cost.name: cost for cost in profile.nodes} for profile in cut.profiles]
    names = [node.name for node in traced.nodes]
    bytes_of_stages = stage_bytes(cut, cut.profiles, samples)
    ends = [*cut.starts[1:], len(names)]
    hardware, operations = settings.hardware, dict[Operation, int]()
    knows_work = all(cost.work is not None for profile in cut.profiles for cost in profile.nodes)
    stages = []
    for j, (start, end) in enumerate(zip(cut.starts, ends, strict=True)):
        load, memory, costs = cut.loads[j], cut.sites[j].memory, by_kind[cut.sites[j].kind]
        own = [costs[name] for name in names[start:end]]
        sent = _sent(program, j, formulas)
        copied = [costs[name] for name in copies[j]]
        gradients = int(load.state_bytes / cut.sites[j].state)
        update = 0.0 if hardware is None else hardware.update_seconds(gradients, load.state_bytes - gradients)
        stages.append(
            StagePlan(
                index=j,
                device=str(settings.devices[j]),
                nodes=tuple(names[start:end]),
                code=program.stages[j].code,
                forward_seconds=load.forward_seconds + sum(cost.forward.at(samples) for cost in copied),
                backward_seconds=load.backward_seconds,
                parameter_bytes=int(load.parameter_bytes),
                activation_bytes=int(load.received_bytes + load.held_bytes),
                sent_bytes=sent(samples),
                # Both are sums, rounded.
                weight_seconds=min(load.backward_seconds, math.fsum(cost.weight.at(samples) for cost in own)),
                action_seconds=action_seconds(str(settings.devices[j])),
                copies=tuple(copies[j]),
                state_bytes=int(load.state_bytes),
                gradient_bytes=gradients,
                memory_limit=None if memory is None else int(memory),
                bytes=bytes_of_stages[j],
                flops=flops(cut.profiles[0], {*names[start:end]}),
                fixed=StageSeconds(
                    math.fsum(cost.forward.fixed for cost in (*own, *copied)),
                    math.fsum(cost.backward.fixed for cost in own),
                    math.fsum(cost.weight.fixed for cost in own),
                ),
                sent=sent,
                work=_work(own, copied, operations) if knows_work else StageWork(),
                update_seconds=update,
                modules=tuple(node.meta["module"] for node in traced.nodes[start:end]),
                shares=shares(own, samples),
            )
        )
    lines = {node.name: line_of(node) for node in traced.graph.nodes}
    return Plan(
        stages=tuple(stages),
        portals=tuple(
            Portal(s.name, s.source, s.target, formulas[s.name](samples), formulas[s.name], lines[s.name])
            for s in program.skips
        ),
        devices=tuple(map(str, settings.devices)),
        schedule=schedule_text(settings.schedule, settings.chunks, settings.placement),
        chunks=settings.chunks,
        micro_batch=samples,
        checkpoint=settings.checkpoint,
        balance=cut.balance,
        tracer=traced.tracer,
        fingerprint=traced.fingerprint(),
        why=traced.why,
        guards=tuple(map(str, traced.guards.questions)) if traced.guards else (),
        estimated_for=cut.profiles[0].estimated_for,
        placement=settings.placement,
        bottlenecks=cut.bottlenecks,
        sendings=_sendings(traced, program, formulas, settings, samples),
        batch=batch,
        evaluating=evaluating(traced.model),
        tied=tied(traced, program),
        whole=whole(traced),
        heaviest=heaviest(cut, samples),
        operations=tuple(operations) if knows_work else (),
    )


def sizes_of(traced: Traced, samples: int) -> dict[str, int]:
    """By name of a node: bytes of its value."""
    nodes: Sequence[fx.Node] = list(traced.graph.nodes)
    return {n.name: bytes_for(bytes_of(n.meta.get("shapes", ())), traced.batch, samples) for n in nodes}


def _sent(program: Program, stage: int, formulas: Mapping[str, Polynomial]) -> Polynomial:
    """What goes to the next stage; portals not counted."""
    following = program.stages[stage + 1].receives if stage + 1 < len(program.stages) else ()
    return total(formulas[value.name] for value in following if value.source == stage)


def _formulas(traced: Traced, program: Program, samples: int) -> dict[str, Polynomial]:
    """By name: bytes of all values that are sent."""
    names = {value.name for stage in program.stages for value in stage.receives}
    return {n.name: value_bytes(n, traced.batch, samples) for n in traced.graph.nodes if n.name in names}


def _sendings(
    traced: Traced, program: Program, formulas: Mapping[str, Polynomial], settings: Settings, samples: int
) -> tuple[Sending, ...]:
    """All that goes between stages, by pairs of them; the outputs go to the caller, and are not among it."""
    effects = traced.effects
    assert effects is not None
    returns = {node.name for node, requires_grad in effects.requires_grad.items() if requires_grad}
    users: dict[tuple[int, str], list[int]] = {}
    for j, stage in enumerate(program.stages):
        for value in stage.receives:
            if value.source != INPUT:
                users.setdefault((value.source, value.name), []).append(j)
    found: dict[tuple[int, int], list[Polynomial]] = {}
    for (source, name), stages in users.items():
        for way in transfers_of(source, stages, 0, returns=name in returns):
            found.setdefault((way.source, way.target), []).append(formulas[name])
    hardware, placement = settings.hardware, settings.placement
    sendings = []
    for (source, target), sizes in sorted(found.items()):
        one, other = placement[source], placement[target]
        over = () if hardware is None else shared_between(hardware, one, other)
        sent = Sending(source, target, sum(size(samples) for size in sizes), 0.0, 0.0, total(sizes), len(sizes), over)
        sendings.append(on_link(sent, link_of(settings, one, other)))
    return tuple(sendings)


def _work(costs: Sequence[NodeCost], copied: Sequence[NodeCost], places: dict[Operation, int]) -> StageWork:
    """Of a stage, with `places` of operations that grow as needed."""

    def counted(operations: Iterable[Operation]) -> tuple[tuple[int, int], ...]:
        return tuple(Counter(places.setdefault(one, len(places)) for one in operations).items())

    works = [cost.work or Work() for cost in costs]
    return StageWork(
        counted(one for work in (*works, *(cost.work or Work() for cost in copied)) for one in work.forward),
        counted(one for work in works for one in work.backward),
        counted(one for work in works for one in work.to_inputs),
    )
