"""Values and gradients go from device to device over processes, in order, and nothing is read or given back too early.

Rank r is on sim:r, and simccl (`simulated.communicator`) is between them as NCCL is between GPUs.
"""

from datetime import timedelta

import pytest
import torch
from helpers import devices
from helpers.planted import with_fault
from helpers.rank_models import DENSE_CUTS, MIXED_CUTS, Dense, Mixed, Tied, token_loss, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import fxpipe
from fxpipe.distributed.device_transfers import DeviceTransfers
from fxpipe.errors import DistributedError
from simulated import communicator
from simulated.communicator import Communicator
from simulated.ranks import SimulatedRanks, steps_around_a_hang

pytestmark = pytest.mark.simulated
QUICK = {"progress": False, "check": False, "hardware": "cpu"}
MIXED_BATCHES = [(7, 5, 1), (7, 5, 2), (7, 5, 3), (2, 5, 3), (7, 9, 4), (7, 5, 5)]


@pytest.fixture(scope="module")
def two_devices():
    with SimulatedRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_devices():
    with SimulatedRanks(4) as ranks:
        yield ranks


class Chain(nn.Sequential):
    """Eight stages."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))


def trained(placement, kind, cuts, is_over_ranks, options):
    """Losses, gradients and state after some steps, the record of the last, and races of this process."""
    torch.manual_seed(0)
    if kind is Mixed:
        model, data, loss_fn = Mixed(), [tokens(*batch) for batch in MIXED_BATCHES], token_loss
    else:
        model, loss_fn = kind(), F.mse_loss
        data = [(torch.randn(b, 4), torch.randn(b, 4)) for b, *_ in MIXED_BATCHES]
    machine = devices.simulated_machine()
    machine.begin(host_ahead=True)
    with fxpipe.pipeline(model, placement, 3, example_args=data[0][:1], balance=cuts, **QUICK | options) as pipe:
        step = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(5)
        losses = []
        for place, (x, t) in enumerate(data):
            losses.append(pipe.forward_backward(x, target=t, loss_fn=loss_fn))
            if place < len(data) - 2:
                step.step()
                step.zero_grad()
        record = pipe.last_step.transport if is_over_ranks else ""
        torch.accelerator.synchronize()
        gradients = {name: p.grad.cpu() for name, p in pipe.named_parameters()}
        state = {key: value.cpu() for key, value in pipe.state_dict().items()}
        return [loss.cpu() for loss in losses], gradients, state, record, machine.races()


def train_on_rank(mesh, kind, cuts, options):
    before = sum(one.operations for one in Communicator.all_here)
    result = trained(mesh, kind, cuts, True, options)
    return *result, sum(one.operations for one in Communicator.all_here) - before


def same_as_in_one_process(ranks, kind, cuts, **options):
    results = ranks.run(train_on_rank, kind, cuts, options)
    one = trained([f"sim:{rank}" for rank in range(ranks.size)], kind, cuts, False, options)
    for losses, gradients, state, record, races, operations in results:
        assert races == []
        assert record == "simccl"
        assert operations > 20
        assert all(map(torch.equal, losses, one[0]))
        for name, gradient in gradients.items():
            assert torch.equal(gradient, one[1][name]), name
        for key, value in state.items():
            assert torch.equal(value, one[2][key]), key


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_two_ranks_on_devices_have_the_bits_of_one_process(two_devices, schedule):
    same_as_in_one_process(two_devices, Mixed, MIXED_CUTS[4 if schedule == "zbv" else 2], schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_four_ranks_on_devices_have_the_bits_of_one_process(four_devices, schedule):
    if schedule == "1f1b":
        same_as_in_one_process(four_devices, Dense, DENSE_CUTS[4], schedule=schedule)
    else:
        cuts = [f"{number}" for number in range(7)]
        same_as_in_one_process(four_devices, Chain, cuts, schedule=schedule)


# -- planted faults ----------------------------------------------------------------------------------------------------


FAULTS = {
    "nothing": ((), ""),
    "what arrives is waited for on another stream": (
        (
            "receive",
            "memory = self._arrived(key, what)",
            "with accelerator.current_streams(self._stream): memory = self._arrived(key, what)",
        ),
        "read too early",
    ),
    "no stream is recorded for what arrives": (
        ("receive", "accelerator.keep_for_stream(memory, stream)", "pass"),
        "given back too early",
    ),
    "a send does not come behind its value": (
        ("send", "self._sends.setdefault", "with accelerator.current_streams(self._stream): self._sends.setdefault"),
        "read too early",
    ),
    "what is sent is given back at once": (
        ("finish_sends", "self._wait(self._sends[key][-1][0], what)", "pass"),
        "given back too early",
    ),
    "one communicator for both directions": (
        (
            "connect",
            "self._communicators[source, target] = channel",
            "self._communicators[source, target] = self._communicators.get((target, source)) or channel",
        ),
        "DistributedError",
    ),
}


def train_with_fault(mesh, lines):
    """What is seen of a fault: races, and the error."""
    machine = devices.simulated_machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "LIMIT", timedelta(seconds=2))
        if lines:
            name, *texts = lines
            patch.setattr(DeviceTransfers, name, with_fault(getattr(DeviceTransfers, name), *texts))
        x = torch.linspace(-1, 1, 32).reshape(8, 4)
        machine.begin(host_ahead=True)
        with fxpipe.pipeline(Tied(), mesh, 4, example_args=(x,), balance=["a"], timeout=8.0, **QUICK) as pipe:
            try:
                for _ in range(3):
                    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
            except DistributedError as error:
                return [f"DistributedError: {error}", *machine.races()]
        return machine.races()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_nothing_else_is(two_devices, name):
    lines, kind = FAULTS[name]
    seen = [text for texts in two_devices.run(train_with_fault, lines) for text in texts]
    assert any(text.startswith(kind) for text in seen) if kind else seen == [], seen


# -- failures ----------------------------------------------------------------------------------------------------------


def hang_on_one_rank(mesh):
    options = QUICK | {"timeout": 2.0 if mesh.get_rank() == 1 else 20.0}  # so that it gives up first, if busy as well
    pipe = fxpipe.pipeline(Tied(), mesh, 4, example_args=(torch.zeros(8, 4),), balance=["a"], **options)
    return steps_around_a_hang(pipe, mesh.get_rank() == 1, _records_an_arrival)


def _records_an_arrival(frames):
    return "receive" in {frame.function for frame in frames}


def test_a_transfer_that_hangs_is_an_error_on_all_ranks_and_the_next_step_works(two_devices):
    for losses, error in two_devices.run(hang_on_one_rank):
        assert len({*losses}) == 1
        assert "rank 1 has given up: after 1B3 it waited for values and gradients on their way between devices" in error


def train_through_cpu(mesh):
    """The mesh is of devices whose group has no backend for them."""
    mesh = DeviceMesh.from_group(torch.distributed.new_group(backend="gloo"), "sim")
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    before = len(Communicator.all_here)
    with fxpipe.pipeline(Tied(), mesh, 4, example_args=(x,), balance=["a"], **QUICK) as pipe:
        losses = [pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item() for _ in range(2)]
        return losses, str(pipe.last_step), len(Communicator.all_here) - before


def test_a_group_of_gloo_sends_through_memory_of_the_cpu_and_the_record_says_so(two_devices):
    for losses, record, communicators in two_devices.run(train_through_cpu):
        assert len({*losses}) == 1
        assert communicators == 0
        assert "tensors go from rank to rank by memory of the CPU, by gloo" in record
