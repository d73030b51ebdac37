"""The ranks of a pipe: who they are, and blocks of code that end well on all of them or on none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe import accelerator
from fxpipe._torch.process_groups import PrefixStore
from fxpipe.distributed.connection import Connection
from fxpipe.distributed.failures import ConnectionLost, FailureBoard, FailureReport, error_text, wait_for_ranks
from fxpipe.errors import ArgumentError, DistributedError, InternalError

_pipes_of: Counter[str] = Counter()  # by process group, the pipes that this process has made on it


def process_group_of(devices: DeviceMesh | dist.ProcessGroup) -> tuple[dist.ProcessGroup, torch.device]:
    """Returns the process group of a pipe and this rank's device.

    Raises:
        ArgumentError: a mesh of several dimensions, or one that this process is not in, or of devices that are not
            here.
    """
    if isinstance(devices, DeviceMesh):
        if devices.ndim != 1:
            names = devices.mesh_dim_names
            remedy = f"devices=mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names=, and devices=mesh[name]"
            raise ArgumentError(
                f"devices is a mesh of {devices.ndim} dimensions {tuple(devices.shape)}; a pipe runs along one of "
                f"them: give {remedy}"
            )
        if devices.get_coordinate() is None:
            raise ArgumentError(
                f"devices is a mesh of ranks {devices.mesh.tolist()}, and this process, rank {dist.get_rank()}, is "
                "none of them: call fxpipe.pipeline on the ranks of the mesh only"
            )
        kind, group = devices.device_type, devices.get_group()
    else:
        group = devices
        if not isinstance(group, dist.ProcessGroup):  # what `new_group` returns to those who are not in it
            raise ArgumentError(
                f"devices is a process group that this process, rank {dist.get_rank()}, is not in: call "
                "fxpipe.pipeline on its ranks only"
            )
        kind = "cpu" if dist.get_backend(group) == "gloo" else accelerator.accelerator_type() or "cpu"
    return group, accelerator.parse_device("devices", kind)


class RankGroup:
    """This process among the ranks of a pipe."""

    def __init__(self, devices: DeviceMesh | dist.ProcessGroup, timeout: float):
        self.process_group, self.device = process_group_of(devices)
        self.rank, self.size, self.timeout = self.process_group.rank(), self.process_group.size(), timeout
        # Those that all ranks have made: where one has not come, the next attempt has the same number.
        self._name = self.process_group.group_name
        self._number = _pipes_of[self._name] + 1
        self._store = PrefixStore(f"fxpipe/{self._name}/{self._number}", self.process_group.get_group_store())
        self._connection: Connection | None = None
        self._board: FailureBoard | None = None
        self._is_inside = False
        self.doing = ""  # the last action that this rank has begun
        self.generation = 0

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise InternalError("ranks talk outside of a block that they go through together")
        return self._connection

    @contextlib.contextmanager
    def together(self) -> Iterator[Connection]:
        """A block that all ranks go through. Where it fails on one, it fails on all, and the next one begins anew.

        Raises:
            DistributedError: it has failed on another rank, or a rank is gone.
        """
        connection, lost = self._connect(), None
        self.doing = ""
        try:
            yield connection
            connection.finish_all_sends()
        except ConnectionLost as error:
            lost = error
        except BaseException as error:
            self._fail(FailureReport(self.rank, self.doing, error=error_text(error), heard=connection.heard))
            raise
        if lost is not None:
            report = FailureReport(self.rank, self.doing, waiting=lost.what, heard=connection.heard)
            board = self._board
            assert board is not None
            self._fail(report)
            raise board.cause(report, lost)

    def _connect(self) -> Connection:
        """Returns the connection; a new one, where the last one has failed or there was none yet."""
        if self._connection is None:
            store = PrefixStore(str(self.generation), self._store)
            wait_for_ranks(store, self.rank, self.size, self.timeout)
            _pipes_of[self._name] = max(_pipes_of[self._name], self._number)
            self._board = FailureBoard(store, self.rank, self.size)
            try:
                self._connection = Connection(PrefixStore("gloo", store), self.rank, self.size, self.timeout)
            except RuntimeError as error:
                self._fail(FailureReport(self.rank, "", error=f"no connection to the other ranks: {error}"))
                raise DistributedError(f"no connection to the other ranks: {error}") from error
        self._connection.heard.clear()
        return self._connection

    def _fail(self, report: FailureReport) -> None:
        """Leaves the report, then closes: others who find the connection closed find the report."""
        assert self._board is not None
        self._board.leave(report)
        self.generation += 1  # what is on its way in this one is never read
        self.close()

    def leave(self) -> None:
        """Ends this rank's part in the pipe; ranks that still call it are told."""
        if self._connection is not None:
            self._fail(FailureReport(self.rank, self.doing, error="StateError: the pipe was closed on this rank"))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._board = None

    def __getstate__(self) -> Any:
        raise ArgumentError("a pipe over processes cannot be copied or pickled; save its state_dict()")
