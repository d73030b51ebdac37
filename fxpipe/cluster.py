"""Clusters: the placement of the devices of a pipeline and its replicas in nodes, and the cost of their links.

    h100 = replace(HARDWARE["h100"], nodes=4)                        # four nodes of eight
    fxpipe.plan(model, hardware=h100, data_parallel=4, example_args=(x,))   # a pipeline of 8 devices, four times

Devices fill the nodes in order. D replicas of a pipeline of P devices form a mesh of two dimensions, in the order of
`init_device_mesh("cuda", (D, P), mesh_dim_names=("data", "pipe"))`. Two nodes of four devices, two replicas of a
pipeline of four (rR.K is device K of replica R):

    mesh=("data", "pipe")    | r0.0 r0.1 r0.2 r0.3 | r1.0 r1.1 r1.2 r1.3 |    gradients cross nodes
    mesh=("pipe", "data")    | r0.0 r1.0 r0.1 r1.1 | r0.2 r1.2 r0.3 r1.3 |    one boundary crosses nodes

The model is simple, and errs on the slow side:

- All replicas act at the same time and share the network adapters. A boundary that crosses nodes in one replica costs
  as much in all replicas.
- An all-reduce over the devices of a stage reduces its gradients, in buckets of `DistributedDataParallel`'s default
  size. Each device has its full link within a node, and an even share of the node's adapters. NCCL opens several rings,
  which leave a node by different adapters, so a group over nodes has the sum of the shares of its members in a node, at
  most `within` if these are several.
- An all-reduce is the faster of a ring and a double binary tree, as NCCL chooses (src/graph/tuning.cc). With n devices
  a ring moves 2 (n - 1) / n of the bytes over each link in 2 (n - 1) steps, with a latency each; a tree moves all bytes
  twice, along the devices of each node and in 2 log2(nodes) steps between nodes.
- Reductions slow down neither transfers nor computation. CPU workers of a node have no link within it (values are
  passed by reference); gradients there are reduced as fast as between nodes.
- Replicas that take micro-batches in turn fill the nodes stage by stage, and each has every r-th micro-batch.
- Not modeled: slower backends that send through host memory (gloo), optimizers with sharded state, and the device
  memory of buckets.
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
BUCKET_BYTES = 25 * 2**20  # gradients in one all-reduce: bucket_cap_mb of DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two devices."""

    bytes_per_second: float
    latency: float = 0.0  # seconds for each transfer


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """The devices that reduce gradients together: the devices with the same stages, one of each replica."""

    size: int
    nodes: int  # number of nodes with a member
    bytes_per_second: float  # sent by each member
    hop: float  # seconds of latency between nodes, or within the node if all members are in one
    hop_within: float  # within a node

    def seconds(self, size: float) -> float:
        """Computes the seconds of an all-reduce of `size` bytes.

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
    """The devices of all replicas of a pipeline, and their nodes. Checked on construction.

    Raises:
        ArgumentError: a number is invalid, or devices are in several nodes without a link.
    """

    devices_per_node: int
    adapters_per_node: int
    within: Link | None  # between two devices of a node; None: values are passed by reference, at no cost
    between: Link | None  # between devices of two nodes; None: no link
    pipe: int = 1  # devices of a replica
    data: int = 1  # replicas
    mesh: tuple[str, str] = MESHES[0]  # the outer dimension first
    # The number of replicas of each device, if replicas take the micro-batches of one mini-batch in turn: unequal
    # numbers, or any in one process. They form no mesh, and `data` is 1.
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
        return sum(self.replicas) or self.pipe * self.data

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    def count(self, worker: int) -> int:
        return self.replicas[worker] if self.replicas else self.data

    def rate(self, worker: int, micro_batches: int) -> float:
        """Computes the speed-up of a device by its replicas that take these micro-batches in turn.

        >>> Cluster(4, 1, None, None, pipe=2, replicas=(3, 1)).rate(0, 8)
        2.6666666666666665
        """
        if not self.replicas:
            return 1.0  # each replica has a separate mini-batch
        return micro_batches / math.ceil(micro_batches / self.count(worker))

    def worker(self, row: int) -> int:
        """Returns the device of the pipe that has a row of a schedule, itself or by a replica."""
        ends = accumulate(self.replicas)
        return next(k for k, end in enumerate(ends) if row < end) if self.replicas else row

    @property
    def needs_processes(self) -> bool:
        """True if a replica spans nodes, or each replica has a separate mini-batch."""
        return self.nodes > 1 or self.data > 1

    def rank(self, replica: int, worker: int) -> int:
        """Returns the index of a device of a replica among all devices."""
        if self.replicas:
            return sum(self.replicas[:worker]) + replica % self.count(worker)
        return replica * self.pipe + worker if self.mesh[0] == DATA else worker * self.data + replica

    def node(self, replica: int, worker: int) -> int:
        return self.rank(replica, worker) // self.devices_per_node

    def adapters(self, worker_a: int, worker_b: int, replica: int = 0) -> tuple[str, ...]:
        """Returns the names of the network adapters that a transfer between two devices of a replica uses.

        >>> Cluster(2, 1, None, Link(1.0), pipe=4).adapters(1, 2)
        ('node 0 adapter 0 out', 'node 1 adapter 0 in')
        """
        if self.node(replica, worker_a) == self.node(replica, worker_b):
            return ()
        names, size = [], self.devices_per_node
        for worker, way in ((worker_a, "out"), (worker_b, "in")):
            node, place = divmod(self.rank(replica, worker), size)
            names.append(f"node {node} adapter {place * min(size, self.adapters_per_node) // size} {way}")
        return tuple(names)

    def crossings(self, worker_a: int, worker_b: int) -> int:
        """Counts the replicas in which these two devices are in different nodes."""
        replicas = range(max(self.count(worker_a), self.count(worker_b)))
        return sum(self.node(replica, worker_a) != self.node(replica, worker_b) for replica in replicas)

    @functools.lru_cache(maxsize=2**14)  # noqa: B019 (clusters are small and few)
    def link(self, worker_a: int, worker_b: int) -> Link | None:
        """Returns the link between two devices of a replica; None if values are passed by reference."""
        if worker_a == worker_b:
            return None
        if not self.crossings(worker_a, worker_b):
            return self.within
        assert self.between is not None  # by __post_init__
        if self.replicas:
            return self.between  # one micro-batch at a time
        used = Counter(name for replica in range(self.data) for name in self.adapters(worker_a, worker_b, replica))
        return Link(self.between.bytes_per_second / max(used.values()), self.between.latency)

    @functools.lru_cache(maxsize=2**14)  # noqa: B019
    def group(self, worker: int) -> ReductionGroup:
        """Returns the devices that have the stages of `worker`, in all replicas."""
        size, between = self.count(worker), self.between
        members = Counter(self.node(replica, worker) for replica in range(size))
        inside = self.within or between or Link(math.inf)  # without links all are threads of one process
        if len(members) == 1:
            return ReductionGroup(size, 1, inside.bytes_per_second, inside.latency, inside.latency)
        assert between is not None  # by __post_init__
        share = between.bytes_per_second * min(1.0, self.adapters_per_node / self.devices_per_node)
        fewest = min(members.values())
        rate = fewest * share if max(members.values()) == 1 else min(inside.bytes_per_second, fewest * share)
        return ReductionGroup(size, len(members), rate, between.latency, inside.latency)

    def reduction(self, worker: int, size: int) -> tuple[float, int]:
        """Computes the seconds to reduce `size` bytes of gradients over the replicas, and the number of buckets."""
        if self.count(worker) == 1 or not size:
            return 0.0, 1
        buckets = -(-size // BUCKET_BYTES)
        return buckets * self.group(worker).seconds(size / buckets), buckets

    def __str__(self) -> str:
        place = f"{count_text(self.nodes, 'node')} of {self.devices_per_node}"
        if self.replicas:
            numbers = "-".join(map(str, self.replicas))
            return f"a pipeline of {count_text(self.pipe, 'stage')} with {numbers} replicas in {place}"
        if self.data == 1:
            return f"a pipeline of {count_text(self.pipe, 'device')} in {place}"
        return f"{self.data} replicas of a pipeline of {count_text(self.pipe, 'device')} in {place}, mesh {self.mesh}"


def parse_mesh(mesh: Any) -> tuple[str, str]:
    """Returns `("data", "pipe")` or `("pipe", "data")`, names of dimensions as of a `DeviceMesh`.

    Raises:
        ArgumentError: `mesh` is another sequence.
        ArgumentTypeError: `mesh` is not a sequence of names.
    """
    if isinstance(mesh, str) or not isinstance(mesh, Sequence):
        raise ArgumentTypeError(f"mesh={mesh!r}: expected {' or '.join(map(repr, MESHES))}")
    if tuple(mesh) not in MESHES:
        raise ArgumentError(f"mesh={mesh!r}: expected {' or '.join(map(repr, MESHES))}, the outer dimension first")
    return MESHES[0] if tuple(mesh) == MESHES[0] else MESHES[1]


def replica_batch(batch: int, data: int, argument: str = "data_parallel") -> int:
    """Returns the number of samples of each replica of a mini-batch.

    Raises:
        ArgumentError: the mini-batch does not divide evenly.
    """
    if batch % data:
        near = [size for size in (batch // data * data, -(-batch // data) * data) if size]
        raise ArgumentError(
            f"{argument}={data}: a mini-batch of {count_text(batch, 'sample')} does not divide over {data} replicas; "
            f"give {' or '.join(map(str, near))} samples, or another number of replicas"
        )
    return batch // data
