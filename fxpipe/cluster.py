"""Clusters: where the devices of a pipeline and of its replicas are, and what is sent between them.

    h100 = replace(HARDWARE["h100"], nodes=4)                        # four nodes of eight
    fxpipe.plan(model, hardware=h100, data_parallel=4, example_args=(x,))   # a pipeline of 8 devices, four times

Devices fill one node after the other. With D replicas of a pipeline of P devices they form a mesh of two dimensions,
in the order that `init_device_mesh("cuda", (D, P), mesh_dim_names=("data", "pipe"))` has. Two nodes of four devices,
two replicas of a pipeline of four (rR.K is device K of replica R):

    mesh=("data", "pipe")    | r0.0 r0.1 r0.2 r0.3 | r1.0 r1.1 r1.2 r1.3 |    gradients cross nodes
    mesh=("pipe", "data")    | r0.0 r1.0 r0.1 r1.1 | r0.2 r1.2 r0.3 r1.3 |    one boundary crosses nodes

The model is simple, and rather too slow than too fast:

- All replicas do the same at the same time, and share the network adapters. A boundary costs as much as for the replica
  for which it crosses nodes, if there is one.
- The gradients of a stage are reduced by an all-reduce over the devices that have it, in buckets of the default size of
  `DistributedDataParallel`. Within a node each device has its whole link, and in addition an even share of its node's
  adapters. NCCL opens several rings, which leave a node by different adapters, so a group has the shares of all its
  members in a node: in one node the bandwidth `within`, else the least of that (if it has several devices in a node)
  and of those shares together.
- An all-reduce is the faster of a ring and a double binary tree, as NCCL chooses (src/graph/tuning.cc): with n devices
  a ring moves 2 (n - 1) / n of the bytes over each link in 2 (n - 1) steps, each of which takes a latency; a tree all
  of them twice, along the devices of each node and in 2 log2(nodes) steps between nodes.
- Reductions slow down neither transfers nor computation. On CPUs, where values are handed over within a node, gradients
  are reduced as fast as between nodes.
- Replicas that take micro-batches in turn fill the nodes stage by stage, and each has every r-th micro-batch; a
  boundary that crosses nodes for any of them does so for all.
- A backend that sends through the memory of the host, as gloo does, takes longer. Each replica has all of its
  optimizer's state, and buckets take no memory of a device.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.utils.units import count_text

DATA, PIPE = "data", "pipe"
MESHES = ((DATA, PIPE), (PIPE, DATA))
BUCKET_BYTES = 25 * 2**20  # of gradients that are reduced at once: bucket_cap_mb of DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two devices."""

    bytes_per_second: float
    latency: float = 0.0  # seconds for each transfer


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """The devices that reduce gradients together: those that have the same stages, one of each replica."""

    size: int
    nodes: int  # over which they stand
    bytes_per_second: float  # that each of them sends
    hop: float  # seconds of latency from one node to another; within a node where all are in one
    hop_within: float  # within a node

    def seconds(self, size: float) -> float:
        """Computes the seconds of an all-reduce of so many bytes.

        >>> ReductionGroup(4, 1, 1e9, 0.0, 0.0).seconds(1e9)
        1.5
        """
        if self.size == 1:
            return 0.0
        n, each = self.size, size / self.bytes_per_second
        ring = 2 * (n - 1) * (self.hop + each / n)
        in_node = math.ceil(n / self.nodes) - 1
        tree = 2 * (in_node * self.hop_within + math.ceil(math.log2(self.nodes)) * self.hop + each)
        return min(ring, tree)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of all replicas of a pipeline, by their place in nodes. Checked when made.

    Raises:
        ArgumentError: a number cannot be, or devices are in several nodes between which there is no link.
    """

    devices_per_node: int
    adapters_per_node: int
    within: Link | None  # between two devices of a node; None: a value is handed over and costs nothing
    between: Link | None  # between devices of two nodes; None: there is none
    pipe: int = 1  # devices of a replica
    data: int = 1  # replicas
    mesh: tuple[str, str] = MESHES[0]  # the dimensions, the outer one first
    # Of each device of the pipe, where they take the micro-batches of one mini-batch in turn, which is no mesh: unequal
    # ones, and any in one process. `data` is 1.
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.replicas and (len(self.replicas) != self.pipe or min(self.replicas) < 1 or self.data != 1):
            raise ArgumentError(
                f"a cluster with replicas={self.replicas}: expected 1 or more for each of {self.pipe} devices, and "
                "data=1"
            )
        for name in ("devices_per_node", "adapters_per_node", "pipe", "data"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"a cluster with {name}={getattr(self, name)}: expected at least 1")
        if self.mesh not in MESHES:
            raise ArgumentError(f"mesh={self.mesh!r}: expected {' or '.join(map(repr, MESHES))}")
        if self.nodes > 1 and self.between is None:
            raise ArgumentError(
                f"hardware has no link between nodes (between=None), and {self.devices} devices stand in "
                f"{self.nodes} nodes of {self.devices_per_node}: give it one, or use at most {self.devices_per_node} "
                "devices"
            )

    @property
    def devices(self) -> int:
        """The number of devices, of all replicas."""
        return sum(self.replicas) or self.pipe * self.data

    @property
    def nodes(self) -> int:
        """The number of nodes that have a device."""
        return -(-self.devices // self.devices_per_node)

    def count(self, worker: int) -> int:
        """Returns the number of replicas of a device."""
        return self.replicas[worker] if self.replicas else self.data

    def rate(self, worker: int, micro_batches: int) -> float:
        """Computes how many times as fast as one device its replicas go through so many micro-batches, in turn.

        >>> Cluster(4, 1, None, None, pipe=2, replicas=(3, 1)).rate(0, 8)
        2.6666666666666665
        """
        if not self.replicas:
            return 1.0  # each replica has a mini-batch of its own
        return micro_batches / math.ceil(micro_batches / self.count(worker))

    def worker(self, row: int) -> int:
        """Returns the device of the pipe whose replica has a row of a schedule, or that has it itself."""
        ends = accumulate(self.replicas)
        return next(k for k, end in enumerate(ends) if row < end) if self.replicas else row

    @property
    def needs_processes(self) -> bool:
        """Returns True if one process cannot have all devices of a replica, or replicas have mini-batches each."""
        return self.nodes > 1 or self.data > 1

    def rank(self, replica: int, worker: int) -> int:
        """Returns the place of a device of a replica among all devices."""
        if self.replicas:
            return sum(self.replicas[:worker]) + replica % self.count(worker)
        return replica * self.pipe + worker if self.mesh[0] == DATA else worker * self.data + replica

    def node(self, replica: int, worker: int) -> int:
        """Returns the node of a device of a replica."""
        return self.rank(replica, worker) // self.devices_per_node

    def adapters(self, worker_a: int, worker_b: int, replica: int = 0) -> tuple[str, ...]:
        """Finds what the way between two devices of a replica shares with others: the adapters of two nodes, by name.

        >>> Cluster(2, 1, None, Link(1.0), pipe=4).adapters(1, 2)
        ('node 0 adapter 0 out', 'node 1 adapter 0 in')
        """
        if self.node(replica, worker_a) == self.node(replica, worker_b):
            return ()
        ranks = self.rank(replica, worker_a), self.rank(replica, worker_b)
        return tuple(f"{self._adapter(rank)} {way}" for rank, way in zip(ranks, ("out", "in"), strict=True))

    def _adapter(self, rank: int) -> str:
        size = self.devices_per_node
        return f"node {rank // size} adapter {rank % size * min(size, self.adapters_per_node) // size}"

    def crossings(self, worker_a: int, worker_b: int) -> int:
        """Counts the replicas for which the way between two devices leads from one node to another."""
        replicas = range(max(self.count(worker_a), self.count(worker_b)))
        return sum(self.node(replica, worker_a) != self.node(replica, worker_b) for replica in replicas)

    def link(self, worker_a: int, worker_b: int) -> Link | None:
        """The way between two devices of a replica; None where a value is handed over."""
        return _link(self, worker_a, worker_b)

    def group(self, worker: int) -> ReductionGroup:
        """The devices that have what `worker` has, in all replicas."""
        return _group(self, worker)

    def reduction(self, worker: int, size: int) -> tuple[float, int]:
        """Computes the seconds in which so many bytes of gradients are reduced over the replicas, and the buckets."""
        if self.count(worker) == 1 or not size:
            return 0.0, 1
        buckets = -(-size // BUCKET_BYTES)
        return buckets * self.group(worker).seconds(size / buckets), buckets

    def group_crossings(self, worker: int) -> int:
        """Counts the ways from one device of a group to the next, in a ring, that lead to another node."""
        nodes = {self.node(replica, worker) for replica in range(self.count(worker))}
        return len(nodes) if len(nodes) > 1 else 0

    def __str__(self) -> str:
        place = f"{count_text(self.nodes, 'node')} of {self.devices_per_node}"
        if self.replicas:
            numbers = "-".join(map(str, self.replicas))
            return f"a pipeline of {count_text(self.pipe, 'stage')} with {numbers} replicas in {place}"
        if self.data == 1:
            return f"a pipeline of {count_text(self.pipe, 'device')} in {place}"
        return f"{self.data} replicas of a pipeline of {count_text(self.pipe, 'device')} in {place}, mesh {self.mesh}"


@functools.lru_cache(maxsize=2**14)
def _link(cluster: Cluster, worker_a: int, worker_b: int) -> Link | None:
    if worker_a == worker_b:
        return None
    if not cluster.crossings(worker_a, worker_b):
        return cluster.within
    assert cluster.between is not None  # checked when made
    if cluster.replicas:
        return cluster.between  # one micro-batch after the other
    used = Counter(name for replica in range(cluster.data) for name in cluster.adapters(worker_a, worker_b, replica))
    return Link(cluster.between.bytes_per_second / max(used.values()), cluster.between.latency)


@functools.lru_cache(maxsize=2**14)
def _group(cluster: Cluster, worker: int) -> ReductionGroup:
    size = cluster.count(worker)
    members = Counter(cluster.node(replica, worker) for replica in range(size))
    inside = cluster.within or cluster.between or Link(math.inf)  # without a network all are threads of one process
    if len(members) == 1:
        return ReductionGroup(size, 1, inside.bytes_per_second, inside.latency, inside.latency)
    between = cluster.between
    assert between is not None  # checked when made
    share = between.bytes_per_second * min(1.0, cluster.adapters_per_node / cluster.devices_per_node)
    fewest = min(members.values())
    rate = fewest * share if max(members.values()) == 1 else min(inside.bytes_per_second, fewest * share)
    return ReductionGroup(size, len(members), rate, between.latency, inside.latency)


# -- What users say of a cluster -------------------------------------------------------------------------------------


def parse_mesh(mesh: Any) -> tuple[str, str]:
    """`("data", "pipe")` or `("pipe", "data")`, as names of the dimensions of a `DeviceMesh`."""
    if isinstance(mesh, str) or not isinstance(mesh, Sequence):
        raise ArgumentTypeError(f"mesh={mesh!r}: expected {' or '.join(map(repr, MESHES))}")
    if tuple(mesh) not in MESHES:
        raise ArgumentError(f"mesh={mesh!r}: expected {' or '.join(map(repr, MESHES))}, the outer dimension first")
    return MESHES[0] if tuple(mesh) == MESHES[0] else MESHES[1]


def replica_batch(batch: int, data: int, argument: str = "data_parallel") -> int:
    """Returns the samples of a replica of a mini-batch."""
    if batch % data:
        near = [size for size in (batch // data * data, -(-batch // data) * data) if size]
        raise ArgumentError(
            f"{argument}={data}: a mini-batch of {count_text(batch, 'sample')} does not divide over {data} replicas; "
            f"give {' or '.join(map(str, near))} samples, or another number of replicas"
        )
    return batch // data
