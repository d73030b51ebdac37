"""Creates the plan of a cut: the figures of its stages, and the transfers between them, as data."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.hardware import NodeWork, Operation
from fxpipe.partitioning.chain import flow_of_storage, kept_by_stage
from fxpipe.planning.choose import Cut
from fxpipe.planning.cost_model import chain_of, largest_lengths, value_flows, worker_link
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.plans import Plan, data
from fxpipe.planning.plans.retarget import LOOPBACK, MESSAGE_SECONDS, place_transfer
from fxpipe.profiling import NodeCost, Profile, Seconds
from fxpipe.profiling.formulas import size_point, size_polynomial
from fxpipe.profiling.memory import count_flops_and_bytes
from fxpipe.rewriting.program import PIPE_INPUT, Program, value_users
from fxpipe.rewriting.relay_routes import relay_routes
from fxpipe.scheduling.factory import schedule_text
from fxpipe.simulation import transfers_of
from fxpipe.tracing import Traced
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.fake_tensors import with_fake_tensors
from fxpipe.tracing.model_state import evaluating_modules
from fxpipe.tracing.node_info import bytes_formula, info
from fxpipe.tracing.source_lines import UNKNOWN_LINE
from fxpipe.tracing.tensors import tensor_bytes
from fxpipe.tracing.traced import InputLeaf, attribute_tensor, opaque_name
from fxpipe.utils.locks import DISPATCH_MODE_LOCK, planning_block
from fxpipe.utils.polynomial import ZERO, Polynomial, SizePoint, fit_counts, polynomial_sum, polynomial_through
from fxpipe.utils.polynomial_bound import polynomial_bound

FITTED_SIZES = (1, 2, 3, 4)  # micro-batch sizes at which working memory is computed, in addition to the planned size


def stage_bytes(
    traced: Traced, starts: Sequence[int], profiles: Sequence[Profile], samples: int
) -> list[data.StageBytes]:
    """Computes the memory of each stage; figures are exact for `samples`, the size of the planned micro-batch."""
    profile = profiles[0]
    chain = chain_of(traced, profiles, samples, {})
    storages, lengths = flow_of_storage(chain), profile.lengths
    costs = {cost.name: cost for cost in profile.nodes}

    def polynomial(formula: sympy.Expr) -> Polynomial:
        return size_polynomial(formula, traced.batch, samples, lengths)

    flows = [polynomial(formula) for formula, *_ in value_flows(traced)]
    held = [polynomial(saved.bytes) for saved in profile.saved]
    working = [{polynomial(costs[node.name].working_bytes)} for node in traced.nodes]
    if profile.loss is not None:
        working[-1].add(polynomial(profile.loss.working_bytes))
    # The sizes at which polynomials are compared to find the largest.
    most = dict(largest_lengths(traced, profile))
    values = [
        [(symbol.name, value) for value in sorted({max(1, size // 2), size, size + 1, 2 * size, most[symbol]})]
        for symbol, size in lengths
    ]
    points = [SizePoint(b, sizes) for b in sorted({*FITTED_SIZES, samples}) for sizes in itertools.product(*values)]
    stages = []
    for j, (start, end) in enumerate(zip(starts, [*starts[1:], len(chain)], strict=True)):
        plain, again = (kept_by_stage(chain, starts, j, way, storages) for way in (False, True))
        portals = polynomial_sum(flows[i] for i in plain.portals)
        largest, *elsewhere = _largest_of(set().union(*working[start:end]), size_point(samples, lengths), points)
        portals_again = polynomial_sum(flows[i] for i in {*again.portals} - {*plain.portals})
        stages.append(
            data.StageBytes(
                received=polynomial_sum(flows[i] for i in plain.inputs) + portals,
                held=polynomial_sum([*(held[i] for i in plain.held), *(flows[i] for i in plain.views)]),
                working=largest,
                portals=portals,
                again=polynomial_sum(flows[i] for i in {*again.inputs} - {*plain.inputs}) + portals_again,
                portals_again=portals_again,
                working_elsewhere=tuple(elsewhere),
            )
        )
    return stages


def _largest_of(
    polynomials: Collection[Polynomial], here: SizePoint, points: Sequence[SizePoint]
) -> tuple[Polynomial, ...]:
    """Returns the largest polynomial, or several if it depends on the dynamic sizes; the largest at `here` is first."""
    values = {one: [one.value(point.values) for point in (here, *points)] for one in polynomials or (ZERO,)}
    most = [max(column) for column in zip(*values.values(), strict=True)]
    for one, own in values.items():
        if own == most:
            return (one,)
    fitted = polynomial_through([(point, math.ceil(most[k + 1])) for k, point in enumerate(points)])
    if fitted is not None or not here.others:
        counted = tuple((point, math.ceil(most[k])) for k, point in enumerate((here, *points)))
        return (fit_counts(tuple(dict(counted).items()), here),)
    largest = [one for one, own in values.items() if any(map(operator.eq, own, most))]
    return tuple(sorted(largest, key=lambda one: (-values[one][0], str(one))))


def user_line_of(node: fx.Node) -> str:
    line = info(node).source
    return "" if line == UNKNOWN_LINE else line


def tied_parameters(traced: Traced, program: Program) -> tuple[data.TiedParameter, ...]:
    names, users = defaultdict[torch.Tensor, list[str]](list), defaultdict[torch.Tensor, list[int]](list)
    for name, parameter in traced.model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    nodes = {str(node.target): node for node in traced.graph.nodes if node.op == "get_attr"}
    for j, stage in enumerate(program.stages):
        for name in stage.attributes:
            users[attribute_tensor(traced, nodes[name])].append(j)
    return tuple(
        data.TiedParameter(tuple(own), tuple(dict.fromkeys(users[key])), tensor_bytes(key))
        for key, own in names.items()
        if key in users and (len(own) > 1 or len({*users[key]}) > 1)
    )


def opaque_nodes(traced: Traced) -> tuple[data.OpaqueNode, ...]:
    """Lists modules and methods that are one node of the graph; if one is called several times, its first call."""
    opaque: dict[str, data.OpaqueNode] = {}
    for node in traced.nodes:
        call = info(node).opaque
        if call is not None and call.module is not None:
            name = opaque_name(node) if info(node).is_graph_break else call.path
            opaque.setdefault(name, data.OpaqueNode(name, call.why, user_line_of(node)))
    return tuple(opaque.values())


_SHARE_DIGITS = 5  # shares are only displayed, and a plan has thousands of them


def time_shares(costs: Sequence[NodeCost], samples: int) -> tuple[float, ...]:
    """Computes the share of each node in the forward and backward seconds of all; empty if nothing takes time."""
    seconds = [(cost.forward + cost.backward).at(samples) for cost in costs]
    total = math.fsum(seconds)
    return tuple(round(part / total, _SHARE_DIGITS) for part in seconds) if total else ()


def plan_of_cut(cut: Cut, program: Program, batch: int, settings: Settings) -> Plan:
    """Creates the plan; its figures are for the largest micro-batch of a mini-batch of `batch` samples."""
    traced, samples = cut.traced, settings.largest_micro_batch(batch)
    by_kind = [{cost.name: cost for cost in profile.nodes} for profile in cut.profiles]
    names, here = [node.name for node in traced.nodes], size_point(samples, cut.profiles[0].lengths).values
    sizes_of_stages, sizes_of_plan = formulas_of_sizes(traced, program, cut.starts, cut.profiles, samples, settings)
    ends = [*cut.starts[1:], len(names)]
    hardware, operations = settings.hardware, dict[Operation, int]()
    costs_of_work = [cost for profile in cut.profiles for cost in (*profile.nodes, profile.loss) if cost is not None]
    knows_work = all(cost.work is not None for cost in costs_of_work)

    def total(seconds: Iterable[Seconds]) -> Polynomial:
        return polynomial_sum(one.formula(here) for one in seconds)

    stages, seconds_of_nodes = [], list[tuple[fx.Node, int, Seconds]]()
    for j, (start, end) in enumerate(zip(cut.starts, ends, strict=True)):
        cost, memory, kind = cut.costs[j], cut.sites[j].memory, cut.sites[j].kind
        own = [by_kind[kind][name] for name in names[start:end]]
        seconds_of_nodes += [(traced.nodes[start + i], j, one.forward + one.backward) for i, one in enumerate(own)]
        loss = cut.profiles[kind].loss if end == len(names) else None
        update = 0.0 if hardware is None else hardware.update_seconds(cost.gradient_bytes, cost.optimizer_bytes)
        stages.append(
            data.StagePlan(
                index=j,
                device=str(settings.devices[j]),
                nodes=tuple(names[start:end]),
                code=program.stages[j].code,
                forward_seconds=cost.forward,
                backward_seconds=cost.backward,
                parameter_bytes=int(cost.parameter_bytes),
                activation_bytes=int(cost.received_bytes + cost.saved_bytes),
                weight_seconds=cost.weight or 0.0,
                action_seconds=cost.action,
                state_bytes=int(cost.gradient_bytes + cost.optimizer_bytes),
                gradient_bytes=int(cost.gradient_bytes),
                memory_limit=None if memory is None else int(memory),
                formulas=data.StageSeconds(
                    total(one.forward for one in own),
                    total(one.backward for one in own),
                    total(one.weight for one in own),
                    ZERO if loss is None else total((loss.forward, loss.backward)),
                ),
                work=_stage_work(own, loss, operations) if knows_work else data.StageWork(),
                update_seconds=update,
                modules=tuple(info(node).module for node in traced.nodes[start:end]),
                shares=time_shares(own, samples),
                loss_seconds=cost.loss or (0.0 if loss is None else (loss.forward + loss.backward).at(samples)),
                host=cost.host,
                **sizes_of_stages[j],
            )
        )
    node, stage, seconds = max(seconds_of_nodes, key=lambda one: one[2].at(samples))  # if several are equal, the first
    return Plan(
        stages=tuple(stages),
        devices=tuple(map(str, settings.devices)),
        schedule=schedule_text(settings.schedule, settings.chunks, settings.placement),
        chunks=settings.chunks,
        micro_batch=samples,
        checkpoint=settings.checkpoint,
        balance=cut.balance,
        fingerprint=traced.fingerprint(),
        why=traced.why,
        guards=tuple(map(str, traced.guards.guards)) if traced.guards else (),
        estimated_for=cut.profiles[0].estimated_for,
        placement=settings.placement,
        replica_devices=tuple(tuple(map(str, own)) for own in settings.replica_workers),
        bottlenecks=cut.bottlenecks,
        batch=batch,
        is_joint=settings.is_joint,
        evaluating=evaluating_modules(traced.model),
        tied=tied_parameters(traced, program),
        whole=opaque_nodes(traced),
        heaviest=data.HeaviestNode(node.name, stage, seconds.at(samples), user_line_of(node), seconds.formula(here)),
        operations=tuple(operations) if knows_work else (),
        processes=settings.processes,
        cluster=settings.cluster,
        **sizes_of_plan,
    )


def formulas_of_sizes(
    traced: Traced,
    program: Program,
    starts: Sequence[int],
    profiles: Sequence[Profile],
    samples: int,
    settings: Settings,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the fields that depend on the micro-batch size and the dynamic sizes: of each stage, and of the plan."""
    profile = profiles[0]
    here = size_point(samples, profile.lengths).values
    sent_names = {value.name for stage in program.stages for value in stage.receives}
    sent_names |= {name for _, name in value_users(program)}
    formulas = {  # bytes of all values sent between stages or exchanged with the caller
        node.name: size_polynomial(bytes_formula(info(node).full_shapes), traced.batch, samples, profile.lengths)
        for node in traced.graph.nodes
        if node.name in sent_names
    }
    lines = {node.name: user_line_of(node) for node in traced.graph.nodes}
    memory, names = stage_bytes(traced, starts, profiles, samples), [node.name for node in traced.nodes]
    assert traced.effects is not None
    returns = {node.name for node, requires_grad in traced.effects.requires_grad.items() if requires_grad}
    stages = []
    for j, (start, end) in enumerate(pairwise([*starts, len(names)])):
        following = program.stages[j + 1].receives if j + 1 < len(program.stages) else ()
        sent = polynomial_sum(formulas[value.name] for value in following if value.source == j)  # without portals
        own = {*names[start:end]}
        total = sympy.Add(*(cost.flops + cost.backward_flops for cost in profile.nodes if cost.name in own))
        flops = polynomial_bound(total, profile.batch, *(symbol for symbol, _ in profile.lengths))
        stages.append({"bytes": memory[j], "flops": flops, "sent": sent, "sent_bytes": sent.at(here)})
    largest = dict(largest_lengths(traced, profile))
    dims: dict[sympy.Basic, list[str]] = {}
    for (place, dim), formula in traced.dynamic.formulas.items():
        dims.setdefault(formula, []).append(f"dimension {dim} of {traced.leaves[place].path}")
    return stages, {
        "portals": tuple(
            data.Portal(s.name, s.source, s.target, formulas[s.name].at(here), formulas[s.name], lines[s.name])
            for s in program.skips
        ),
        **_planned_transfers(program, returns, formulas, settings, here),
        "sizes": tuple(
            data.PlannedSize(
                symbol.name, size, largest[symbol], *traced.dynamic.bounds(symbol), tuple(dims.get(symbol, ()))
            )
            for symbol, size in profile.lengths
        ),
    }


def _planned_transfers(
    program: Program,
    returns: Collection[str],
    formulas: Mapping[str, Polynomial],
    settings: Settings,
    here: Mapping[str, int],
) -> dict[str, tuple[data.PlannedTransfer, ...]]:
    """Returns the transfers between stages in one process, and the packets between processes of devices."""
    # In one process by pairs of stages, without outputs, which go to the caller. A packet is for each cut and
    # direction: stages between relay values (`relay_routes`), inputs of later stages, and outputs of earlier ones.
    placement = settings.placement
    where = placement, settings.cluster, partial(worker_link, settings)
    receivers: dict[tuple[int, str], list[int]] = {}
    for j, stage in enumerate(program.stages):
        for value in stage.receives:
            if value.source != PIPE_INPUT:
                receivers.setdefault((value.source, value.name), []).append(j)
    sizes_by_ends: dict[tuple[int, int], list[Polynomial]] = {}
    for (source, name), stages in receivers.items():
        for way in transfers_of(source, stages, 0, returns=name in returns):
            sizes_by_ends.setdefault((way.source, way.target), []).append(formulas[name])
    sendings = []
    for ends, sizes in sorted(sizes_by_ends.items()):
        total = sum(size.at(here) for size in sizes)
        way = data.PlannedTransfer(*ends, total, size=polynomial_sum(sizes), values=len(sizes))
        sendings.append(place_transfer(way, *where))
    users, packets = value_users(program), []
    routes = relay_routes(users, placement)
    for cut in (cut for cut in range(len(placement) - 1) if routes.crosses(cut)):
        # With the stages that they are for; on a rank without one of these, they are relayed.
        values = [(key[1], users[key]) for key in routes.down[cut]]
        gradients = [(name, (end,)) for _, name, end in routes.up[cut] if name in returns]
        for ends, parts in (((cut, cut + 1), values), ((cut + 1, cut), gradients)):
            receiver = placement[ends[1]]
            size = polynomial_sum(formulas[name] for name, _ in parts)
            relayed = polynomial_sum(formulas[n] for n, stages in parts if receiver not in map(routes.rank, stages))
            packet = data.PlannedTransfer(*ends, size.at(here), handling=MESSAGE_SECONDS, size=size, relayed=relayed)
            packets.append(place_transfer(packet, *where, LOOPBACK))
    return {"sendings": tuple(sendings), "packets": tuple(packets)}


def _stage_work(costs: Sequence[NodeCost], loss: NodeCost | None, places: dict[Operation, int]) -> data.StageWork:
    """Counts the operations of a stage; adds new operations to `places`."""

    def counted(operations: Iterable[Operation]) -> tuple[tuple[int, int], ...]:
        return tuple(Counter(places.setdefault(one, len(places)) for one in operations).items())

    works = [cost.work or NodeWork() for cost in costs]
    return data.StageWork(
        counted(one for work in works for one in work.forward),
        counted(one for work in works for one in work.backward),
        counted(one for work in works for one in work.to_inputs),
        () if loss is None or loss.work is None else counted((*loss.work.forward, *loss.work.backward)),
    )


@planning_block()
def plan_with_dynamic_sizes(
    plan: Plan, first: Sequence[InputLeaf], traced: Traced, program: Program, starts: Sequence[int], settings: Settings
) -> Plan | None:
    """Returns the plan with formulas of another graph of its stages; None if it is invalid at planned sizes."""
    # The second graph of a pipe has symbols for its sizes. Its bytes and FLOPs are counted on tensors without values,
    # and seconds grow with the FLOPs. `first`: inputs of the planned graph. A node that needs values raises its error.
    samples = plan.micro_batch
    lengths = traced.dynamic.lengths_of(first)
    if lengths is None or not traced.holds_at(samples, lengths):
        return None
    assert traced.effects is not None
    with DISPATCH_MODE_LOCK, with_fake_tensors(traced.model, _inputs_at(traced, lengths), always=True) as leaves:
        counts = count_flops_and_bytes(traced, traced.effects, leaves, samples)
    nodes, point = tuple(counts.nodes[node] for node in traced.nodes), size_point(samples, lengths)
    profile, here = Profile(nodes, samples, traced.batch, "", saved=counts.saved, sizes=point.others), point.values
    sizes_of_stages, sizes_of_plan = formulas_of_sizes(traced, program, starts, [profile], samples, settings)
    stages = []
    for stage, sizes, (start, end) in zip(
        plan.stages, sizes_of_stages, pairwise([*starts, len(traced.nodes)]), strict=True
    ):
        costs = profile.nodes[start:end]
        flops, back = (
            polynomial_sum(size_polynomial(one, traced.batch, samples, lengths) for one in of)
            for of in ([cost.flops for cost in costs], [cost.backward_flops for cost in costs])
        )
        sizes = {**sizes, "flops": flops + back, "sent_bytes": stage.sent_bytes}
        stages.append(replace(stage, formulas=_formulas(stage, flops, back, here), **sizes))
    return replace(plan, stages=tuple(stages), **sizes_of_plan)


def _inputs_at(traced: Traced, lengths: Lengths) -> list[Any]:
    """Creates inputs with these dynamic sizes; other sizes are as recorded."""
    values, inputs = dict(lengths), list[Any]()
    for place, leaf in enumerate(traced.leaves):
        if not leaf.is_tensor:
            inputs.append(leaf.constant)
            continue
        formulas = (traced.dynamic.formulas.get((place, dim)) for dim in range(len(leaf.shape)))
        shape = [s if f is None else int(f.xreplace(values)) for s, f in zip(leaf.shape, formulas, strict=True)]
        inputs.append(torch.zeros(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad))
    return inputs


def _formulas(stage: data.StagePlan, flops: Polynomial, back: Polynomial, here: dict[str, int]) -> data.StageSeconds:
    """Scales the growing part of a stage's seconds with its FLOPs; zero for a stage without FLOPs."""

    def formula(seconds: float, known: Polynomial, work: Polynomial) -> Polynomial:
        once, fixed = work.value(here), float(known.value({**here, "b": 0}))
        return work * (Fraction(max(0.0, seconds - fixed)) / Fraction(once)) + Polynomial.in_b(fixed) if once else ZERO

    known = stage.formulas
    return data.StageSeconds(
        formula(stage.forward_seconds, known.forward, flops),
        formula(stage.backward_seconds, known.backward, back or flops),
        formula(stage.weight_seconds, known.weight, back or flops),
        formula(stage.loss_seconds, known.loss, flops),
    )
