"""Which ranks send from device to device, and what tells why they do not; devices are in tests/simulated."""

import pytest
import torch
import torch.distributed as dist

from fxpipe._torch import process_groups
from fxpipe.distributed import device_transfers
from fxpipe.distributed.device_transfers import DeviceSums, DeviceTransfers, device_backend
from fxpipe.distributed.rank_group import RankDevice, common_transport

CUDA = torch.device("cuda", 0)
THROUGH_CPU = "memory of the CPU, by gloo"


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ("cpu:gloo,cuda:nccl", "nccl"),
        ("cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:gloo", None),
        ("cpu:mpi,cuda:mpi", None),
        ("cpu:gloo", None),
    ],
)
def test_the_backend_is_the_one_that_the_process_group_has_for_the_device(monkeypatch, config, backend):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(device_transfers, "has_communicators", lambda name: True)
    assert device_backend(None, CUDA) == backend
    assert device_backend(None, torch.device("cpu")) is None


def test_a_backend_that_torch_was_built_without_is_none(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(process_groups, "_OWN_BACKENDS", {"nccl": "ProcessGroupOfAnotherBuild"})
    assert device_backend(None, CUDA) is None


@pytest.mark.parametrize(
    ("devices", "transport"),
    [
        ([("cuda", "nccl", "a"), ("cuda", "nccl", "b")], "nccl"),
        ([("npu", "hccl", None), ("npu", "hccl", None)], "hccl"),
        ([("cpu", None, None)] * 2, THROUGH_CPU),
        ([("cuda", "nccl", "a")], THROUGH_CPU),
        (
            [("cuda", "nccl", "a"), ("cuda", "nccl", "b"), ("cuda", "nccl", "a")],
            f"{THROUGH_CPU}: ranks 0 and 2 share one device, which nccl does not allow",
        ),
        (
            [("cuda", "nccl", "a"), ("cuda", None, "b")],
            f"{THROUGH_CPU}: the process group of rank 1 has no backend for cuda that all ranks have",
        ),
        (
            [("cuda", None, "a"), ("cuda", None, "b")],
            f"{THROUGH_CPU}: the process group of rank 0 has no backend for cuda that all ranks have",
        ),
    ],
)
def test_all_ranks_settle_on_one_way_and_say_which(devices, transport):
    assert common_transport([RankDevice(*one) for one in devices]) == transport


def test_replicas_are_told_as_replicas():
    devices = [RankDevice("cuda", "nccl", "a")] * 2
    assert common_transport(devices, "replica") == (
        f"{THROUGH_CPU}: replicas 0 and 1 share one device, which nccl does not allow"
    )


class Communicator:
    def __init__(self, error):
        self.error, self.calls = error, []

    def abort(self):
        self.calls.append("abort")
        if self.error is not None:
            raise self.error

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.mark.parametrize(("error", "calls"), [(None, ["abort"]), (RuntimeError(), ["abort", "shutdown"])])
def test_a_communicator_that_cannot_be_aborted_is_shut_down(error, calls):
    communicator = Communicator(error)
    assert process_groups.abort_communicator(communicator)
    assert communicator.calls == calls


@pytest.mark.parametrize("can_end", [True, False])
def test_memory_of_a_communicator_that_cannot_be_ended_is_never_used_again(monkeypatch, can_end):
    monkeypatch.setattr(device_transfers, "_NEVER_REUSED", kept := [])
    monkeypatch.setattr(device_transfers.accelerator, "new_stream", lambda device: None)
    communicator = Communicator(None) if can_end else object()
    memory = sent, received, summed = torch.zeros(1), torch.ones(1), torch.zeros(1)
    transfers = DeviceTransfers("nccl", CUDA, None, 0, 1.0)
    transfers._communicators = {(0, 1): communicator}
    transfers._sends, transfers._receives = {"a": [(None, sent)]}, {"b": (None, received)}
    sums = DeviceSums("nccl", CUDA, None, 0, 2, 1.0)
    sums._communicator, sums._memory = communicator, [summed]
    for one in (transfers, sums):
        one.close()
    assert not any((transfers._sends, transfers._receives, sums._memory))
    assert [*map(id, kept)] == ([] if can_end else [*map(id, memory)])
