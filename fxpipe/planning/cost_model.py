"""Converts a traced and profiled graph to plain numbers, the input of partitioning (`fxpipe.partitioning.chain`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx, nn

from fxpipe.cluster import Link
from fxpipe.hardware import MEMORY_MARGIN, local_link, local_memory
from fxpipe.partitioning.chain import Chain, Flow, HeldStorage, ParameterUse, StageSite
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.plans.retarget import LOOPBACK
from fxpipe.profiling import Profile
from fxpipe.scheduling import activations_in_flight, micro_batches_in_flight
from fxpipe.scheduling.factory import steady_schedule
from fxpipe.scheduling.streams import weight_versions
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.node_info import bytes_at, bytes_formula, info
from fxpipe.tracing.tensors import has_values, storage_of, tensor_bytes
from fxpipe.tracing.traced import Traced, attribute_tensor
from fxpipe.utils import accelerator
from fxpipe.utils.output_combination import needing_all


def chain_of(traced: Traced, profiles: Sequence[Profile], samples: int, forbidden: Mapping[int, str]) -> Chain:
    """Returns the graph as a chain, for the dynamic sizes of the profiles; its `largest` is for memory limits."""
    # `profiles`: one for each kind of device. `samples`: of the largest micro-batch. `forbidden`: place -> why no cut.
    planned, largest = profiles[0].lengths, largest_lengths(traced, profiles[0])
    chain = _chain_at(traced, profiles, samples, planned, forbidden)
    if largest == planned:
        return chain
    return replace(chain, largest=_chain_at(traced, profiles, samples, largest, forbidden))


def largest_lengths(traced: Traced, profile: Profile) -> Lengths:
    """Returns the dynamic sizes for memory limits: for each the largest announced or profiled size."""
    announced = dict(traced.dynamic.largest_lengths)
    return tuple((symbol, max(size, announced.get(symbol, size))) for symbol, size in profile.lengths)


def _chain_at(
    traced: Traced, profiles: Sequence[Profile], samples: int, lengths: Lengths, forbidden: Mapping[int, str]
) -> Chain:
    effects = traced.effects
    assert effects is not None

    def size(formula: sympy.Expr) -> float:
        return bytes_at(formula, traced.batch, samples, lengths)

    costs = [{cost.name: cost for cost in profile.nodes} for profile in profiles]
    by_place = [[of[node.name] for node in effects.nodes] for of in costs]
    place = {node.name: p for node, p in effects.place.items()}
    profiled = [*(place[cost.name] for cost in profiles[0].nodes), -1]  # place in the profile -> place in `traced`
    backward = [[cost.backward.at(samples) for cost in row] for row in by_place]
    working = [size(cost.working_bytes) for cost in by_place[0]]
    loss: tuple[float, ...] = ()
    if all(profile.loss is not None for profile in profiles):
        # The last place is always on the last stage, which computes the loss. During a joint tail all stages wait.
        of_loss = [profile.loss for profile in profiles if profile.loss is not None]
        if needing_all(traced.combinations) is None:
            loss = tuple((cost.forward + cost.backward).at(samples) for cost in of_loss)
            for row, seconds in zip(backward, loss, strict=True):
                row[-1] += seconds
        working[-1] = max(working[-1], size(of_loss[0].working_bytes))
    used = [
        (attribute_tensor(traced, node), sorted(effects.place[user] for user in node.users if user in effects.place))
        for node in traced.graph.nodes
        if node.op == "get_attr"
    ]
    return Chain(
        forward=tuple(tuple(cost.forward.at(samples) for cost in row) for row in by_place),
        backward=tuple(map(tuple, backward)),
        flows=tuple(Flow(size(one), maker, users, back) for one, maker, users, back in value_flows(traced)),
        held=tuple(
            HeldStorage(size(saved.bytes), profiled[saved.maker], tuple(sorted(profiled[p] for p in saved.savers)))
            for saved in profiles[0].saved
        ),
        weights=tuple(ParameterUse(tensor_bytes(one), tuple(users), one.requires_grad) for one, users in used if users),
        working=tuple(working),
        loss=loss,
        forbidden_cuts=forbidden,
    )


def value_flows(traced: Traced) -> Iterable[tuple[sympy.Expr, int, tuple[int, ...], bool]]:
    """Yields the flows of a graph, in the order of a chain: for any sizes the bytes, then as in `Flow`."""
    effects = traced.effects
    assert effects is not None
    outputs = {
        o for o in (*traced.handed_out, *effects.written_inputs, *traced.left.values()) if isinstance(o, fx.Node)
    }
    with_gradient = {effects.alias[node] for node, requires_grad in effects.requires_grad.items() if requires_grad}
    first_writers = dict[int | None, int]()
    for place, classes in enumerate(effects.written_classes):
        first_writers |= {alias: place for alias in classes if alias not in first_writers}
    for node, place in effects.place.items():
        maker, returns = place, effects.requires_grad.get(node, False)
        users = sorted(effects.place[user] for user in node.users if user in effects.place)
        if node in outputs:
            users.append(len(effects.nodes))
        if maker < 0 and (writer := first_writers.get(effects.alias[node])) is not None:
            # The stage that first writes to an input does so on a clone, which becomes a value of that stage.
            maker, returns, users = writer, effects.alias[node] in with_gradient, [u for u in users if u > writer]
        if users:
            yield bytes_formula(info(node).full_shapes), maker, tuple(users), returns


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    kind: int  # devices of one kind are equally fast
    memory: float | None  # bytes available to its stages; None: no limit


def device_kinds(devices: Sequence[torch.device]) -> list[torch.device]:
    """Returns one device of each kind, in order of appearance; these have to be profiled."""
    kinds: dict[str, torch.device] = {}
    for device in devices:
        kinds.setdefault(device_kind(device), device)
    return list(kinds.values())


def remaining_kinds(before: Settings, now: Settings) -> tuple[int, ...]:
    """Maps the kinds of devices that workers still have to the profiled kinds: kind now -> kind before."""
    if before.hardware is not None:
        return (0,)
    names = [device_kind(device) for device in device_kinds(before.workers)]
    return tuple(names.index(device_kind(device)) for device in device_kinds(now.workers))


def planned_workers(settings: Settings) -> tuple[PlannedWorker, ...]:
    names = [device_kind(device) for device in device_kinds(settings.workers)]
    workers = []
    for k, device in enumerate(settings.workers):
        if settings.memory_limits is not None:
            limit = settings.memory_limits[k]
        elif settings.hardware is not None:
            limit = settings.hardware.usable_memory
        else:  # several workers may share a device
            at_hand = settings.memory_at_hand
            memory = at_hand[device] if device in at_hand else local_memory(device)
            shared = settings.row_devices.count(device)
            limit = None if memory is None else int(memory * (1 - MEMORY_MARGIN)) // shared
        workers.append(PlannedWorker(0 if settings.hardware else names.index(device_kind(device)), limit))
    return tuple(workers)


def stage_devices_of(settings: Settings, batch: int) -> tuple[StageSite, ...]:
    """Returns a site for each stage, for mini-batches of `batch` samples; stages share a worker's memory evenly."""
    workers, placement = planned_workers(settings), settings.placement
    modes = (settings.checkpoint,) * len(placement) if isinstance(settings.checkpoint, str) else settings.checkpoint
    again = [mode if mode == "except_last" else "always" for mode in modes]  # by stage, the mode if it recomputes
    n, m = len(placement), settings.micro_batches(batch)
    how = settings.replicas, settings.is_joint
    schedule = steady_schedule(settings.schedule, m, tuple(again), placement, *how)
    flights, recomputed = micro_batches_in_flight(schedule), activations_in_flight(schedule)
    sites = []
    for j, k in enumerate(placement):
        memory = workers[k].memory
        versions = weight_versions(settings.schedule, n, j, m, settings.stage_replicas, settings.is_joint)
        link = worker_link(settings, placement[j - 1], k) if j else None
        is_between_processes = settings.is_over_processes and j > 0 and placement[j - 1] != k
        if link is None and is_between_processes and settings.workers[k].type == "cpu":
            link = LOOPBACK
        sites.append(
            StageSite(
                kind=workers[k].kind,
                memory=None if memory is None else memory / placement.count(k),
                link=link,
                in_flight=flights[j],
                may_recompute=modes[j] == "auto" and memory is not None,
                must_recompute=modes[j] in ("always", "except_last"),
                recomputed=recomputed[j],
                state=versions + settings.optimizer_state,
                versions=versions,
            )
        )
    return tuple(sites)


def device_kind(device: torch.device) -> str:
    """Returns the name of a device's kind: two GPUs of the same model are of one kind."""
    if device.type == "cpu":
        return device.type
    return accelerator.device_name(device) or str(device)


def with_memory_at_hand(settings: Settings, model: nn.Module) -> Settings:
    """Returns settings with the memory of each device for the model: free memory plus memory of the model."""
    if settings.hardware is not None or settings.memory_limits is not None:
        return settings
    at_hand = {}
    for device in dict.fromkeys(settings.workers):
        memory = local_memory(device)
        at_hand[device] = None if memory is None else memory + _bytes_of_model(model, device)
    return replace(settings, memory_at_hand=at_hand)


def _bytes_of_model(model: nn.Module, device: torch.device) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [tensor.grad for tensor in model.parameters() if tensor.grad is not None]
    on_device = {storage_of(t): tensor_bytes(t) for t in tensors if t.device == device and has_values(t)}
    return sum(on_device.values())


def worker_link(settings: Settings, one: int, other: int) -> Link | None:
    """Returns the link between two workers; None if values are passed without a copy."""
    if one == other:
        return None
    cluster = settings.cluster
    if cluster is not None:
        return cluster.link(one, other)
    return local_link(settings.workers[one], settings.workers[other])
