"""The graph as a chain of plain numbers: everything that the choice of a cut needs, for one micro-batch.

A node's *place* is its index, 0 to n - 1, in execution order; stage j has the places starts[j] to starts[j + 1] - 1.
Seconds depend on the kind of device; bytes do not. What several nodes share is listed with all its places, and counts
once in each stage that has one of them:

    place          0    1    2    3    4    5
    flow          make      use            use      a value, 8 bytes
    cut                   |              |          stages 1 and 2 receive 8 bytes each; a gradient goes from stage 2 to
                                                    stage 1, and from stage 1 to stage 0
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
    """A value that one node computes and others use."""

    bytes: float
    maker: int  # place; -1: an input of the model, which every stage receives from the caller
    users: tuple[int, ...]  # places, ascending, after the maker; the number of nodes is the model's output
    returns: bool  # if True, its gradient is sent back


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """A storage that autograd keeps from forward to backward in each stage that has one of `savers`."""

    bytes: float
    maker: int  # place; -1: an input of the model
    savers: tuple[int, ...]  # places, ascending


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """A parameter or a buffer; each stage that uses it has it in memory."""

    bytes: float
    users: tuple[int, ...]  # places, ascending
    is_trained: bool  # has a gradient and optimizer state


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes in order, in plain numbers."""

    forward: tuple[tuple[float, ...], ...]  # by kind of device, then by place: seconds
    backward: tuple[tuple[float, ...], ...]
    flows: tuple[Flow, ...] = ()
    held: tuple[HeldStorage, ...] = ()
    weights: tuple[ParameterUse, ...] = ()
    working: tuple[float, ...] = ()  # by place: bytes of temporary memory; empty: memory is unknown
    forbidden_cuts: Mapping[int, str] = field(default_factory=dict)  # place -> reason why no cut is allowed before it
    first_stages: tuple[int, ...] = ()  # by place: the first stage that may have the node; empty: any
    last_stages: tuple[int, ...] = ()  # by place: the last stage that may have the node
    required_cuts: tuple[int, ...] = ()  # places that must begin a stage
    loss: tuple[float, ...] = ()  # by kind: seconds of the loss, part of `backward` of the last place; empty: no loss
    largest: Chain | None = None  # the chain at the largest sizes, for memory limits; None: this one
    is_relayed: bool = False  # stages send values only to their neighbors, as with processes: see `transferred`

    @property
    def transferred(self) -> tuple[Flow, ...]:
        """The flows as the links transfer them."""
        # If values are relayed, each stage up to the last user receives them and sends gradients back, as if all nodes
        # between used them. The first stage then sends the inputs of the model.
        if not self.is_relayed:
            return self.flows
        n, makers = len(self), [max(flow.maker, 0) for flow in self.flows]
        return tuple(
            replace(flow, maker=maker, users=tuple(range(maker + 1, min(flow.users[-1], n) + 1)))
            for flow, maker in zip(self.flows, makers, strict=True)
        )

    @property
    def of_memory(self) -> Chain:
        """The chain with the bytes for memory limits."""
        if self.largest is None:
            return self
        return replace(self.largest, forward=self.forward, backward=self.backward, loss=self.loss)

    def __len__(self) -> int:
        return len(self.forward[0])


@dataclass(frozen=True, slots=True)
class StageSite:
    """The device of a stage, its limits, and its execution mode."""

    kind: int = 0  # kind of device, an index into the chain's seconds
    memory: float | None = None  # bytes available to the stage; None: no limit
    link: Link | None = None  # from the device of the stage before; None: transfers are free
    in_flight: int = 1  # maximum number of micro-batches held at one time
    may_recompute: bool = False  # if True, the stage may recompute if it does not fit otherwise
    must_recompute: bool = False
    recomputed: int = 1  # maximum number of micro-batches with all activations at one time, if the stage recomputes
    state: float = 3.0  # bytes of gradient, optimizer state and older versions, for each byte of a trained parameter
    versions: int = 1  # number of weight versions that the stage holds

    def activations(self, recompute: bool) -> int:
        """Returns the maximum number of micro-batches for which a stage holds all saved activations."""
        return self.recomputed if recompute else self.in_flight


# -- The load of a stage on its device: seconds, and bytes of memory, for any start and end ----------------------------
#
# All figures are for one micro-batch of a stage that has the places start to end - 1 of a chain.
#
# **Seconds** are the sum of computation (forward twice if the stage recomputes) and of what the stage receives, since a
# device copies what it receives before it computes. It receives
#
# - each flow that an earlier stage computes and this stage uses, once, over the link into this stage, even if it is a
#   portal. Inputs of the model cost nothing.
# - a gradient for each returning flow that this stage computes or uses and a later stage uses, over the link into the
#   next stage: gradients go from a user to the next earlier user, and from the first user to the maker.
#
# If values are relayed (`Chain.is_relayed`), they and their gradients count at each cut between maker and last user.
# A transfer takes `latency + bytes / bytes_per_second`.
#
# **Memory** is `stage_memory` of the weights, each once, with gradients and optimizer state if trained; the received
# flows and the other storages that are kept for backward; and the largest working memory of a place.
#
# A stage that recomputes keeps everything it receives. Any other stage keeps the received flows that return or are
# saved here. A storage saved here but computed in an earlier stage arrived as a flow, and must not count twice. So the
# flows of a place and the storages made there that outlive it are paired by size: the largest with the largest, and so
# on. A storage that arrived as a view made by another node counts in addition to that flow, a slight overestimate.
#
# Sums are rounded once, at the end, so that equal stages have equal numbers.


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The cost of a stage of a cut, and its load on its device."""

    cost: StageCost
    recompute: bool  # if True, its forward runs again before its backward
    seconds: float  # computation and transfers for one micro-batch
    memory: float  # bytes, for all micro-batches held at one time, at the largest sizes
    memory_cost: StageCost  # at the largest sizes


def stage_loads(
    chain: Chain, sites: Sequence[StageSite], starts: Sequence[int], recompute: Sequence[bool]
) -> tuple[StageLoad, ...]:
    """Computes the load of each stage of a cut; stage j is on `sites[j]`."""
    storages, largest = flow_of_storage(chain), chain.of_memory
    largest_storages = storages if largest is chain else flow_of_storage(largest)
    flows, ends, links = chain.transferred, [*starts[1:], len(chain)], [*(site.link for site in sites[1:]), None]
    loads = []
    for j, (site, start, end, again) in enumerate(zip(sites, starts, ends, recompute, strict=True)):
        cost = _stage_cost(chain, site, starts, j, again, storages)
        held = cost if largest is chain else _stage_cost(largest, site, starts, j, again, largest_storages)
        forward, backward = chain.forward[site.kind][start:end], chain.backward[site.kind][start:end]
        transfers = [sending_seconds(flow, site.link) for flow in flows if flow_arrives(flow, start, end)]
        for flow in flows if j + 1 < len(sites) else ():
            is_touched = start <= flow.maker < end or any_within(flow.users, start, end)
            if flow.returns and is_touched and any_within(flow.users, end, len(chain)):
                transfers.append(sending_seconds(flow, links[j]))
        work = [*forward, *backward, *(forward if again else ())]
        memory = held.memory(site.in_flight, site.activations(again))
        loads.append(StageLoad(cost, again, math.fsum(work + transfers), memory, held))
    return tuple(loads)


def recompute_choices(site: StageSite) -> tuple[bool, ...]:
    """Returns the possible choices to recompute or not, the preferred one first."""
    if site.must_recompute:
        return (True,)
    return (False, True) if site.may_recompute else (False,)


def any_within(places: Sequence[int], start: int, end: int) -> bool:
    """Returns True if one of these ascending places is from `start` to `end - 1`."""
    first = bisect_left(places, start)
    return first < len(places) and places[first] < end


def flow_arrives(flow: Flow, start: int, end: int) -> bool:
    return 0 <= flow.maker < start and any_within(flow.users, start, end)


def sending_seconds(flow: Flow, link: Link | None) -> float:
    return 0.0 if link is None else link.latency + flow.bytes / link.bytes_per_second


def flow_of_storage(chain: Chain) -> dict[int, int]:
    """Maps the index of a held storage to the index of the flow that brings it to later stages; see above."""
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
    chain: Chain, site: StageSite, starts: Sequence[int], stage: int, recompute: bool, storages: Mapping[int, int]
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
    """Values that a stage keeps for backward, by index in its chain."""

    held: tuple[int, ...]  # storages
    views: tuple[int, ...]  # flows that brought storages as views; one for each storage
    inputs: tuple[int, ...]  # flows from the stage before
    portals: tuple[int, ...]  # flows from earlier stages


def kept_by_stage(
    chain: Chain, starts: Sequence[int], stage: int, recompute: bool, storages: Mapping[int, int]
) -> KeptByStage:
    """Finds the values that a stage keeps for backward. `storages`: see `flow_of_storage`."""
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
