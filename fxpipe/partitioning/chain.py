"""The graph as a chain of plain numbers: all that a cut can be judged by, for one micro-batch.

Nodes are known by their *place*, 0 to n - 1, in the order in which they run; stage j holds the places starts[j] to
starts[j + 1] - 1. Seconds depend on the kind of device; bytes do not. What several nodes share is listed with all its
places, and so counts once in each stage that has one of them:

    place          0    1    2    3    4    5
    flow          make      use            use      a value, 8 bytes
    cut                   |              |          stage 1 receives 8 bytes, stage 2 receives 8 bytes; where a gradient
                                                    comes back, stage 2 sends it to stage 1, and stage 1 to stage 0
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fxpipe.cluster import Link
from fxpipe.simulation.costs import StageCost


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that one node makes and others use."""

    bytes: float
    maker: int  # place; -1: an input of the model, which reaches each stage by itself and is sent by none
    users: tuple[int, ...]  # places, ascending, all behind the maker; the number of nodes stands for the model's output
    returns: bool  # does its gradient go back


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """A storage that autograd keeps from forward to backward in each stage that has one of these nodes."""

    bytes: float
    maker: int  # place; -1: an input of the model
    savers: tuple[int, ...]  # places, ascending


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """A parameter or a buffer: each stage that uses it has it in memory."""

    bytes: float
    users: tuple[int, ...]  # places, ascending
    is_trained: bool  # has a gradient and a state of the optimizer


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes in order, in plain numbers."""

    forward: tuple[tuple[float, ...], ...]  # by kind of device, then by place: seconds
    backward: tuple[tuple[float, ...], ...]
    flows: tuple[Flow, ...] = ()
    held: tuple[HeldStorage, ...] = ()
    weights: tuple[ParameterUse, ...] = ()
    working: tuple[float, ...] = ()  # by place: bytes held for a moment beside all of the above; none: no memory known
    forbidden_cuts: Mapping[int, str] = field(default_factory=dict)  # place -> why no cut may stand before it
    first_stages: tuple[int, ...] = ()  # by place: the first stage that may have the node; none: all are free
    last_stages: tuple[int, ...] = ()  # by place: the last one
    required_cuts: tuple[int, ...] = ()  # places before which a cut must stand
    loss: tuple[float, ...] = ()  # by kind: seconds of the loss, which are in `backward` of the last place; none: none
    largest: Chain | None = None  # the same where sizes are largest, of which memory is asked; None: here
    is_relayed: bool = False  # stages hand values to their neighbours alone, as over processes: see `transferred`

    @property
    def transferred(self) -> tuple[Flow, ...]:
        """The flows as the links transfer them.

        If values are relayed, each stage up to the last user receives a value, and its gradient comes back through all
        of them, as if all nodes between used it. Inputs of the model are then sent from the first stage.
        """
        return tuple(relayed(flow, len(self)) for flow in self.flows) if self.is_relayed else self.flows

    @property
    def of_memory(self) -> Chain:
        """The chain with the bytes of which memory limits are asked."""
        if self.largest is None:
            return self
        return replace(self.largest, forward=self.forward, backward=self.backward, loss=self.loss)

    def __len__(self) -> int:
        return len(self.forward[0])


@dataclass(frozen=True, slots=True)
class StageSite:
    """The device that a stage runs on, its limits, and its way of running."""

    kind: int = 0  # of device: which of the chain's seconds hold
    memory: float | None = None  # bytes that the stage may take; None: no limit
    link: Link | None = None  # from the device of the stage before; None: a value is handed over and costs nothing
    in_flight: int = 1  # micro-batches that are held at most at one time
    may_recompute: bool = False  # may the stage recompute where it does not fit otherwise
    must_recompute: bool = False
    recomputed: int = 1  # micro-batches of which a stage that recomputes has all activations at one time, at most
    state: float = 3.0  # bytes of gradient, optimizer state and older versions, for each byte of a trained parameter
    versions: int = 1  # of its weights that the stage holds

    def activations(self, recompute: bool) -> int:
        """Returns the micro-batches of which a stage holds all that is kept for backward at one time, at most."""
        return self.recomputed if recompute else self.in_flight


# -- The load of a stage on its device: seconds, and bytes of memory, for any start and end --------------------------
#
# All figures are for one micro-batch of a stage that holds the places start to end - 1 of a chain.
#
# **Seconds.** The stage computes its forward and its backward (forward twice if it recomputes), and it receives:
#
# - each flow that an earlier stage makes and that has a user here, once, over the link into this stage; also a portal.
#   Inputs of the model cost nothing.
# - a gradient for each returning flow that is made or used here and has a user in a later stage, over the link into the
#   next stage: gradients go from a user to the next earlier user, and from the first one to the maker.
#
# Over processes values are relayed (`Chain.is_relayed`): they and their gradients count at each cut between maker and
# last user.
#
# A transfer takes `latency + bytes / bytes_per_second`; to and from the caller of the model it costs nothing. A stage's
# *seconds* are the sum of both: a device copies what it receives before it computes.
#
# **Memory** is `stage_memory` of
#
#     weights, each once, with gradients and optimizer state of those that are trained
#     the received flows that are kept for backward
#     the other storages kept for backward, of few micro-batches if the stage recomputes
#     the largest working memory of a place
#
# A stage that recomputes keeps all that its forward was given. Any other keeps the received flows that return or are
# saved here. What is saved here and was made in an earlier stage arrived as a flow, and must not count twice: of the
# flows of a place and the storages made there that outlive it, the largest flow is taken for the largest storage, and
# so on. A storage that came as a view made by another node counts in addition to that flow: rather too much.
#
# Sums are rounded once, at the end, so that equal stages have equal numbers.


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of a stage of a cut on its device: what it costs, and what that comes to there."""

    cost: StageCost
    recompute: bool  # does it run its forward again before its backward
    receive_seconds: float  # values in forward, gradients in backward
    seconds: float  # of all: the time in which the stage is done with a micro-batch
    memory: float  # bytes, with all micro-batches that it has at one time, where sizes are largest
    memory_cost: StageCost  # there


def stage_loads(
    chain: Chain, sites: Sequence[StageSite], starts: Sequence[int], recompute: Sequence[bool]
) -> tuple[StageLoad, ...]:
    """The load of each stage of a cut; stage j is on `sites[j]`."""
    storages, largest = flow_of_storage(chain), chain.of_memory
    largest_storages = storages if largest is chain else flow_of_storage(largest)
    flows, ends, links = chain.transferred, [*starts[1:], len(chain)], [*(site.link for site in sites[1:]), None]
    loads = []
    for j, (site, start, end, again) in enumerate(zip(sites, starts, ends, recompute, strict=True)):
        cost = _stage_cost(chain, site, starts, j, again, storages)
        held = cost if largest is chain else _stage_cost(largest, site, starts, j, again, largest_storages)
        forward, backward = chain.forward[site.kind][start:end], chain.backward[site.kind][start:end]
        transfers = [sending_seconds(flow, site.link) for flow in flows if flow_arrives(flow, start, end)]
        if j + 1 < len(sites):
            returning = (flow for flow in flows if gradient_arrives(flow, start, end, len(chain)))
            transfers += [sending_seconds(flow, links[j]) for flow in returning]
        work = [*forward, *backward, *(forward if again else ())]
        memory = held.memory(site.in_flight, site.activations(again))
        loads.append(StageLoad(cost, again, math.fsum(transfers), math.fsum(work + transfers), memory, held))
    return tuple(loads)


def recompute_choices(site: StageSite) -> tuple[bool, ...]:
    """Lists the choices to recompute or not that a stage there has, the preferred one first."""
    if site.must_recompute:
        return (True,)
    return (False, True) if site.may_recompute else (False,)


def any_within(places: Sequence[int], start: int, end: int) -> bool:
    """Returns whether one of these ascending places is from `start` to `end - 1`."""
    first = bisect_left(places, start)
    return first < len(places) and places[first] < end


def relayed(flow: Flow, n: int) -> Flow:
    """Returns a flow that all `n` places from its maker to its last user use."""
    maker = max(flow.maker, 0)
    return replace(flow, maker=maker, users=tuple(range(maker + 1, min(flow.users[-1], n) + 1)))


def flow_arrives(flow: Flow, start: int, end: int) -> bool:
    """Returns whether a stage receives the flow from an earlier one."""
    return 0 <= flow.maker < start and any_within(flow.users, start, end)


def gradient_arrives(flow: Flow, start: int, end: int, n: int) -> bool:
    """Returns whether a stage receives a gradient of it from a later one; place `n` is the model's output."""
    touched = start <= flow.maker < end or any_within(flow.users, start, end)
    return flow.returns and touched and any_within(flow.users, end, n)


def sending_seconds(flow: Flow, link: Link | None) -> float:
    """Computes the seconds that it takes to send a flow, or its gradient."""
    return 0.0 if link is None else link.latency + flow.bytes / link.bytes_per_second


def flow_of_storage(chain: Chain) -> dict[int, int]:
    """Index of a held storage -> index of the flow that it is in a later stage. See the module's text."""
    flows: dict[int, list[int]] = defaultdict(list)
    helds: dict[int, list[int]] = defaultdict(list)
    for i, flow in enumerate(chain.flows):
        if flow.maker >= 0:
            flows[flow.maker].append(i)
    for i, held in enumerate(chain.held):
        if held.maker >= 0 and held.savers[-1] > held.maker:
            helds[held.maker].append(i)
    pairs: dict[int, int] = {}
    for maker in flows.keys() & helds.keys():
        largest_flows = sorted(flows[maker], key=lambda i: -chain.flows[i].bytes)
        largest_helds = sorted(helds[maker], key=lambda i: -chain.held[i].bytes)
        pairs |= dict(zip(largest_helds, largest_flows, strict=False))
    return pairs


def _stage_cost(
    chain: Chain,
    site: StageSite,
    starts: Sequence[int],
    stage: int,
    recompute: bool,
    storages: Mapping[int, int],
) -> StageCost:
    start, end = [*starts, len(chain)][stage : stage + 2]
    weights = [w for w in chain.weights if any_within(w.users, start, end)]
    trained = [w.bytes for w in weights if w.is_trained]
    forward, backward = chain.forward[site.kind][start:end], chain.backward[site.kind][start:end]
    loss = chain.loss[site.kind] if chain.loss and end == len(chain) else 0.0
    kept = kept_by_stage(chain, starts, stage, recompute, storages)
    saved = [*(chain.held[i].bytes for i in kept.held), *(chain.flows[i].bytes for i in kept.views)]
    return StageCost(
        math.fsum(forward),
        max(0.0, math.fsum((*backward, -loss))),
        loss=loss,
        parameter_bytes=math.fsum(w.bytes for w in weights),
        gradient_bytes=math.fsum(trained),
        optimizer_bytes=math.fsum(size * (site.state - site.versions) for size in trained),
        version_bytes=math.fsum(size * (site.versions - 1) for size in trained),
        saved_bytes=math.fsum(saved),
        input_bytes=math.fsum(chain.flows[i].bytes for i in kept.inputs),
        portal_bytes=math.fsum(chain.flows[i].bytes for i in kept.portals),
        working_bytes=max(chain.working[start:end], default=0.0),
    )


@dataclass(frozen=True, slots=True)
class KeptByStage:
    """The things that a stage keeps for backward, by index in its chain."""

    held: tuple[int, ...]  # storages
    views: tuple[int, ...]  # flows of which storages came to it as views; one for each
    inputs: tuple[int, ...]  # flows of the stage before
    portals: tuple[int, ...]  # flows of stages before that


def kept_by_stage(
    chain: Chain, starts: Sequence[int], stage: int, recompute: bool, storages: Mapping[int, int]
) -> KeptByStage:
    """Finds what a stage keeps for backward. `storages`: see `flow_of_storage`."""
    before, start, end = [0, *starts, len(chain)][stage : stage + 3]
    held, views, arrived_and_saved = [], [], set()
    for i, storage in enumerate(chain.held):
        if not any_within(storage.savers, start, end):
            continue
        flow = storages.get(i) if storage.maker < start else None
        if flow is None:
            held.append(i)
        elif any_within(chain.flows[flow].users, start, end):
            arrived_and_saved.add(flow)
        else:
            views.append(flow)
    arrived = [(i, flow) for i, flow in enumerate(chain.flows) if flow_arrives(flow, start, end)]
    kept = [(i, flow) for i, flow in arrived if recompute or flow.returns or i in arrived_and_saved]
    inputs, portals = (tuple(i for i, flow in kept if (flow.maker >= before) == is_input) for is_input in (True, False))
    return KeptByStage(tuple(held), tuple(views), inputs, portals)
