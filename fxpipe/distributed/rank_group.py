"""The ranks of a pipe, and blocks of code that succeed on all of them or on none.

With data parallelism there are several *replicas* of the pipe, each on separate ranks. A process has one connection to
the other ranks of its replica, and one to the ranks with the same stages in other replicas. A failure closes both.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe._torch.process_groups import PrefixStore, ProcessGroupGloo, Store
from fxpipe.distributed.connection import Connection, losing
from fxpipe.distributed.device_transfers import DeviceSums, DeviceTransfers, device_backend
from fxpipe.distributed.failures import ConnectionLost, FailureBoard, FailureReport, meet_ranks
from fxpipe.errors import ArgumentError, ArgumentTypeError, DistributedError
from fxpipe.utils import accelerator
from fxpipe.utils.units import with_article

OUTSIDE = "ranks talk outside of a block that they go through together"
_pipes_of: Counter[str] = Counter()  # by process group, the number of pipes that this process has created on it


def process_group_of(argument: str, devices: DeviceMesh | dist.ProcessGroup) -> tuple[dist.ProcessGroup, str]:
    """Returns the process group and device type of an argument; raises `ArgumentError` for a process outside of it."""
    if isinstance(devices, DeviceMesh):
        if devices.ndim != 1:
            raise ArgumentError(
                f"{argument} is a mesh of {devices.ndim} dimensions {devices.mesh_dim_names}; a pipe runs along one: "
                'with mesh_dim_names=("data", "pipe") give devices=mesh["pipe"], data_parallel=mesh["data"]'
            )
        if devices.get_coordinate() is None:
            raise ArgumentError(
                f"{argument} is a mesh of ranks {devices.mesh.tolist()}, and this process, rank {dist.get_rank()}, is "
                "none of them: call fxpipe.pipeline on the ranks of the mesh only"
            )
        return devices.get_group(), devices.device_type
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # `new_group` returns it to ranks outside the group
    if devices is outside:
        raise ArgumentError(
            f"{argument} is a process group that this process, rank {dist.get_rank()}, is not in: call "
            "fxpipe.pipeline on its ranks only"
        )
    if not isinstance(devices, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"{argument} is {with_article(devices)}; expected a DeviceMesh of one dimension, or a process group"
        )
    kind = "cpu" if dist.get_backend(devices) == "gloo" else accelerator.accelerator_type() or "cpu"
    return devices, kind


class RankDevice(NamedTuple):
    """The device of a rank, and its backend for transfers between devices."""

    type: str
    backend: str | None  # None: transfers use CPU memory
    uuid: str | None  # None if torch does not report it


def common_transport(devices: Sequence[RankDevice], kind: str = "rank") -> str:
    """Returns the backend for transfers between all devices, or why they use CPU memory. `kind`: "rank" or "replica".

    >>> common_transport([RankDevice("cuda", "nccl", "GPU-1"), RankDevice("cuda", "nccl", "GPU-2")])
    'nccl'
    >>> common_transport([RankDevice("cuda", "nccl", "GPU-1")] * 2)
    'memory of the CPU, by gloo: ranks 0 and 1 share one device, which nccl does not allow'
    """
    through_cpu = "memory of the CPU, by gloo"
    first = devices[0].backend
    if len(devices) == 1 or all(one.type == "cpu" for one in devices):
        return through_cpu
    other = next((rank for rank, one in enumerate(devices) if one.backend is None or one.backend != first), None)
    if first is None or other is not None:  # if there is no first, it is the other
        type_ = devices[other or 0].type
        return f"{through_cpu}: the process group of {kind} {other} has no backend for {type_} that all {kind}s have"
    ranks: dict[str, int] = {}
    for rank, one in enumerate(devices):
        if one.uuid is not None and ranks.setdefault(one.uuid, rank) != rank:
            return f"{through_cpu}: {kind}s {ranks[one.uuid]} and {rank} share one device, which {first} does not allow"
    return first


class RankGroup:
    """This process and its connections to the other ranks of a pipe."""

    def __init__(
        self,
        devices: DeviceMesh | dist.ProcessGroup,
        timeout: float,
        data_parallel: DeviceMesh | dist.ProcessGroup | None = None,
    ):
        self.process_group, kind = process_group_of("devices", devices)
        self.device = accelerator.parse_device("devices", kind)
        self.rank, self.size, self.timeout = self.process_group.rank(), self.process_group.size(), timeout
        self.data_group = None if data_parallel is None else process_group_of("data_parallel", data_parallel)[0]
        self.replica = 0 if self.data_group is None else self.data_group.rank()
        self.replica_count = 1 if self.data_group is None else self.data_group.size()
        if self.data_group is not None:
            own, others = map(dist.get_process_group_ranks, (self.process_group, self.data_group))
            if {*own} & {*others} != {dist.get_rank()}:
                raise ArgumentError(
                    f"data_parallel has ranks {others} and devices has ranks {own}: of one mesh with a dimension for "
                    'each, of names "data" and "pipe" say, give devices=mesh["pipe"], data_parallel=mesh["data"]'
                )
        # Counts pipes that all ranks have created: if a rank is missing, the next attempt has the same number.
        self._name = self.process_group.group_name
        self._number = _pipes_of[self._name] + 1
        self._connection: Connection | None = None
        self._replicas: Connection | None = None
        self.transfers: DeviceTransfers | None = None  # if all ranks of the replica have a backend for their devices
        self.transport = ""  # transfers between ranks, as text for users
        self.device_sums: DeviceSums | None = None  # if all replicas of the rank have a backend that sums gradients
        self.any_device_sums = False  # True if any rank has `device_sums`
        self.reduction = ""  # sums of gradients over replicas, as text for users
        self._data_store: Store | None = None
        self._data_groups = 0  # created in this generation
        self._board: FailureBoard | None = None
        self.doing = ""  # the last action that this rank has begun
        self.generation = 0
        self.when_closed: list[Callable[[], None]] = []  # called after the connections are closed

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, OUTSIDE
        return self._connection

    @property
    def replicas(self) -> Connection:
        """The connection to the ranks with the same stages in other replicas, numbered by replica."""
        assert self._replicas is not None, OUTSIDE
        return self._replicas

    @property
    def is_first(self) -> bool:
        """Returns whether this rank makes decisions for all ranks: rank 0 of replica 0."""
        return self.rank == self.replica == 0

    def everybody(self, value: Any, what: str, *, is_long: bool = False) -> list[list[Any]]:
        """Gathers the objects of all ranks of all replicas, by replica and rank."""
        own = self.connection.all_gather(value, what, is_long=is_long)
        return self.replicas.all_gather(own, what, is_long=is_long)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gathers the objects of the ranks of this replica."""
        return self.connection.all_gather(value, what)

    def broadcast(self, value: Any, what: str) -> Any:
        """Sends an object of the first rank to all ranks of all replicas. The first rank may be planning meanwhile."""
        if self.rank == 0:
            value = self.replicas.broadcast(value, 0, what, is_long=True)
        return self.connection.broadcast(value, 0, what, is_long=True)

    def data_parallel_group(self) -> ProcessGroupGloo:
        """Creates a group of the ranks that have the same stages in all replicas, for this generation."""
        assert self._data_store is not None
        with losing("the other replicas"):
            store = PrefixStore(f"gradients/{self._data_groups}", self._data_store)
            self._data_groups += 1
            return ProcessGroupGloo(store, self.replica, self.replica_count, timedelta(seconds=self.timeout))

    @contextlib.contextmanager
    def together(self) -> Iterator[Connection]:
        """Runs a block on all ranks. If it fails on one, all raise (others `DistributedError`); the next reconnects."""
        connection = self._connect()
        self.doing = ""
        try:
            yield connection
            connection.finish_all_sends()
            if self.transfers is not None:
                self.transfers.settle()
        except ConnectionLost as lost:  # a name that outlives this block would close a reference cycle
            report, board = self._report(waiting=lost.what), self._board
            assert board is not None
            self._fail(report)
            raise board.cause(report, lost) from None
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            self._fail(self._report(error="\n".join([f"{type(error).__name__}: {error}", *notes])))
            raise

    def _report(self, waiting: str = "", error: str = "") -> FailureReport:
        return FailureReport(self.replica * self.size + self.rank, self.doing, waiting, error)

    def _connect(self) -> Connection:
        if self._connection is None:
            store = self._meet(self.process_group, "rank")
            data_store = None if self.data_group is None else self._meet(self.data_group, "replica")
            _pipes_of[self._name] = max(_pipes_of[self._name], self._number)
            self._board = FailureBoard(store, self.rank, self.size, timeout=self.timeout)
            try:
                self._connection = Connection(PrefixStore("gloo", store), self.rank, self.size, self.timeout)
                self.transport, backend = self._transport(self.process_group, self._connection, "rank")
                if backend is not None:
                    devices = PrefixStore("devices", store)
                    self.transfers = DeviceTransfers(backend, self.device, devices, self.rank, self.timeout)
                self._data_store, self._data_groups = data_store, 0
                if data_store is None:
                    self._replicas = Connection(store, 0, 1, self.timeout)
                else:
                    self._connect_replicas(data_store)
            except (RuntimeError, ConnectionLost) as error:
                self._fail(self._report(error=f"no connection to the other ranks: {error}"))
                raise DistributedError(f"no connection to the other ranks: {error}") from error
        return self.connection

    def _meet(self, group: dist.ProcessGroup, kind: str) -> Store:
        """Waits for all ranks of a group, in this generation; returns a store of theirs."""
        path = f"fxpipe/{group.group_name}/{self._number}/{self.generation}"
        store = PrefixStore(path, group.get_group_store())
        return meet_ranks(store, group.rank(), group.size(), self.timeout, kind)

    def _transport(self, group: dist.ProcessGroup, connection: Connection, kind: str) -> tuple[str, str | None]:
        """Agrees with other ranks or replicas on how tensors move; returns that as text, and the backend of devices."""
        own = RankDevice(self.device.type, device_backend(group, self.device), accelerator.device_uuid(self.device))
        text = common_transport(connection.all_gather(own, f"the devices of all {kind}s"), kind)
        return text, own.backend if text == own.backend else None

    def _connect_replicas(self, store: Store) -> None:
        assert self.data_group is not None
        self._replicas = Connection(PrefixStore("gloo", store), self.replica, self.replica_count, self.timeout)
        self.reduction, backend = self._transport(self.data_group, self._replicas, "replica")
        if backend is not None:
            own_store, count = PrefixStore("devices", store), self.replica_count
            self.device_sums = DeviceSums(backend, self.device, own_store, self.replica, count, self.timeout)
        # One board for all, on the store of the world; the token separates it from keys of ended processes.
        own = (dist.get_rank(), uuid.uuid4().hex, self.device_sums is not None)
        ranks = self.everybody(own, "the ranks of all replicas")
        self.any_device_sums = any(has_sums for of_replica in ranks for *_, has_sums in of_replica)
        name = hashlib.sha256(repr(sorted(map(sorted, ranks))).encode()).hexdigest()[:16]
        world = dist.group.WORLD
        assert world is not None
        board = PrefixStore(f"fxpipe/board/{name}/{self._number}/{self.generation}", world.get_group_store())
        number = self.replica * self.size + self.rank
        self._board = FailureBoard(board, number, self.size, self.replica_count, self.timeout)

    def _fail(self, report: FailureReport) -> None:
        """Leaves the report, then closes: other ranks read it when they find the connection closed."""
        if self._board is None:  # the pipe was closed within the block, and has already left its report
            return
        self._board.leave(report)
        self.generation += 1  # messages in flight in the old generation are never read
        self.close()

    def leave(self) -> None:
        """Ends this rank's part in the pipe; ranks that still call it get an error."""
        if self._connection is not None:
            self._fail(self._report(error="StateError: the pipe was closed on this rank"))

    def close(self) -> None:
        for one in (self.transfers, self.device_sums, self._connection, self._replicas):
            if one is not None:
                one.close()
        for close in self.when_closed:
            close()
        self._connection = self._replicas = self._board = None
        self.transfers = self.device_sums = None
