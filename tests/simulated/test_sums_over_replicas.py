"""Gradients are summed over replicas in memory of devices, and nothing is read or given back too early.

Four ranks, each on its simulated device, are a mesh of two replicas of two stages; simccl (`simulated.communicator`) is
between them as NCCL is between GPUs.
"""

from datetime import timedelta

import pytest
import torch
from helpers import devices
from helpers.planted import with_fault
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxpipe
from fxpipe.distributed import device_transfers, replicas
from fxpipe.distributed.device_transfers import DeviceSums
from fxpipe.distributed.replicas import GradientReduction
from fxpipe.errors import DistributedError
from simulated import communicator
from simulated.communicator import Communicator
from simulated.ranks import SimulatedRanks, steps_around_a_hang

pytestmark = pytest.mark.simulated
QUICK = {"progress": False, "check": False, "hardware": "cpu"}


@pytest.fixture(scope="module")
def four_devices():
    with SimulatedRanks(4) as ranks:
        yield ranks


class Tied(nn.Module):
    """A weight of both stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(F.gelu(self.b(torch.tanh(self.a(x)))) * x)


def pair_loss(out, target):
    rows = target.mean(1) > 0
    return (F.mse_loss(out, target, reduction="none").mean(1) * rows).sum(), rows.sum()


def meshes(kind):
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("data", "pipe"))
    return mesh["data"], mesh["pipe"], mesh["data"].get_local_rank()


def pipe_over(kind, chunks=4, **options):
    """A pipe over the mesh, and the number of this replica."""
    data, pipe, replica = meshes(kind)
    x = torch.zeros(8, 4)
    options = QUICK | {"balance": ["b"]} | options
    return fxpipe.pipeline(Tied(), pipe, chunks, data_parallel=data, example_args=(x,), **options), replica


def all_reduces():
    return sum(one.sums for one in Communicator.all_here)


def trained(kind, schedule, loss_fn):
    """Losses, gradients and state after steps with unequal mini-batches and accumulation, and the last record."""
    pipe, replica = pipe_over(kind, schedule=schedule)
    losses = []
    with pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
        for step, sizes in enumerate([(8, 8), (7, 3), (2, 9), (8, 4)]):
            torch.manual_seed(10 * step + replica)
            x, t = torch.randn(sizes[replica], 4), torch.randn(sizes[replica], 4)
            if step == 2:
                with pipe.no_sync():
                    losses.append(pipe.forward_backward(x, target=t, loss_fn=loss_fn))
            losses.append(pipe.forward_backward(x, target=t, loss_fn=loss_fn))
            fxpipe.distributed.clip_grad_norm_(pipe, 1.0)
            optimizer.step()
            if step < 3:
                optimizer.zero_grad()
        gradients = {name: p.grad.cpu() for name, p in pipe.named_parameters()}
        state = {key: value.cpu() for key, value in pipe.state_dict().items()}
        return [loss.cpu() for loss in losses], gradients, state, pipe.last_step


def train_on_both(mesh, schedule, loss_fn):
    """What training has on devices and on the CPU, the number of sums in memory of devices, and races."""
    machine = devices.simulated_machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "BUCKET_BYTES", 10)  # a bucket for each gradient
        before = all_reduces()
        machine.begin(host_ahead=True)
        on_devices = trained("sim", schedule, loss_fn)
        torch.accelerator.synchronize()
        races, count = machine.races(), all_reduces() - before
        return on_devices[:-1], trained("cpu", schedule, loss_fn)[:-1], str(on_devices[-1]), count, races


@pytest.mark.parametrize(
    ("schedule", "loss_fn"), [("1f1b", F.mse_loss), ("zero_bubble", F.mse_loss), ("1f1b", pair_loss)]
)
def test_sums_in_memory_of_devices_have_the_bits_of_those_by_gloo(four_devices, schedule, loss_fn):
    for on_devices, on_cpu, record, count, races in four_devices.run(train_on_both, schedule, loss_fn):
        assert races == []
        assert count > 4 * 2  # several buckets in each of four steps
        assert "gradients are summed over replicas by simccl" in record
        assert all(map(torch.equal, on_devices[0], on_cpu[0]))
        for one, other in zip(on_devices[1:], on_cpu[1:], strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert torch.equal(value, other[key]), key


# -- planted faults ----------------------------------------------------------------------------------------------------


FAULTS = {
    "nothing": ((), ""),
    "sums are not waited for": ((GradientReduction, "finish", "_or_lost(work.wait)", "pass"), "read too early"),
    "sums are waited for on another stream": (
        (
            GradientReduction,
            "finish",
            "_or_lost(work.wait)",
            "from fxpipe.utils import accelerator as a\n"
            "            with a.current_streams(a.new_stream(self._device)): _or_lost(work.wait)",
        ),
        "read too early",
    ),
    "sums are used before they are there": (
        (DeviceSums, "settle", 'self._wait_on_host(accelerator.record_event(self._stream), WAITED_FOR, "sum")', "pass"),
        "read too early",
    ),
    "a gradient is read before it is there": ((DeviceSums, "take", "self._stream.wait_event(", "("), "read too early"),
    "no stream is recorded for a gradient": (
        (DeviceSums, "take", "accelerator.keep_for_stream(tensor, self._stream)", "pass"),
        "given back too early",
    ),
    "no stream is recorded for a sum": (
        (DeviceSums, "settle", "accelerator.keep_for_stream(result, stream)", "pass"),
        "given back too early",
    ),
}


def train_with_fault(mesh, lines):
    """What is seen of a fault: races, and the error."""
    machine = devices.simulated_machine()
    with pytest.MonkeyPatch.context() as patch:
        if lines:
            cls, name, *texts = lines
            patch.setattr(cls, name, with_fault(getattr(cls, name), *texts))
        machine.begin(host_ahead=True)
        pipe, _ = pipe_over("sim")
        x = torch.linspace(-1, 1, 32).reshape(8, 4)
        with pipe:
            for _ in range(3):
                pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        return machine.races()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_nothing_else_is(four_devices, name):
    lines, kind = FAULTS[name]
    seen = [text for texts in four_devices.run(train_with_fault, lines) for text in texts]
    assert any(text.startswith(kind) for text in seen) if kind else seen == [], seen


# -- failures ----------------------------------------------------------------------------------------------------------


def fail_on_one_replica(mesh):
    machine = devices.simulated_machine()
    machine.begin(host_ahead=True)
    pipe, replica = pipe_over("sim")
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    with pipe:
        losses = [pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item() for _ in range(2)]
        calls, before = [], [one for one in Communicator.all_here if not one.is_aborted]

        def loss_fn(out, target):
            calls.append(1)
            if replica and len(calls) == 4:
                raise ValueError("boom")
            return F.mse_loss(out, target)

        with pytest.raises((ValueError, DistributedError), match="boom"):
            pipe.forward_backward(x, target=x, loss_fn=loss_fn)
        assert all(one.is_aborted for one in before)
        losses += [pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item() for _ in range(2)]
        gradients = {name: p.grad.cpu() / 4 for name, p in pipe.named_parameters()}
        return losses, gradients, sum(one.sums > 0 for one in before), pipe.last_step.transport, machine.races()


def test_after_the_failure_of_a_replica_its_communicator_is_made_anew(four_devices):
    model, x = Tied(), torch.linspace(-1, 1, 32).reshape(8, 4)
    F.mse_loss(model(x), x).backward()
    for losses, gradients, count, transport, races in four_devices.run(fail_on_one_replica):
        assert transport == "simccl"
        assert len({*losses}) == 1
        assert count == 1
        assert races == []
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def hang_on_one_rank(mesh):
    timeout = 2.0 if mesh.get_rank() == 1 else 20.0  # so that it gives up first, on a busy machine as well
    pipe, _ = pipe_over("sim", timeout=timeout)
    return steps_around_a_hang(pipe, mesh.get_rank() == 1, _records_a_sum)


def _records_a_sum(frames):
    return any(frame.function == "settle" and frame.filename == device_transfers.__file__ for frame in frames)


def test_a_sum_that_hangs_is_an_error_on_all_ranks_and_the_next_step_works(four_devices):
    for losses, error in four_devices.run(hang_on_one_rank):
        assert len({*losses}) == 1
        assert "rank 1 of replica 0 has given up: after 1B3 it waited for the gradients of the other replicas" in error


def lose_a_replica_within_a_sum(mesh):
    """One replica does not come to the sum: the operations of the others end with an error."""
    pipe, replica = pipe_over("sim", timeout=8.0)
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    with pipe:
        loss = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicator, "LIMIT", timedelta(seconds=2))
            if replica:
                patch.setattr(Communicator, "allreduce", _fail_to_sum)
            with pytest.raises(DistributedError) as caught:
                pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        assert pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item() == loss
        return str(caught.value)


def _fail_to_sum(self, tensors):
    raise RuntimeError("the device is gone")


def test_a_replica_that_cannot_sum_is_an_error_on_all_ranks_and_the_next_step_works(four_devices):
    errors = four_devices.run(lose_a_replica_within_a_sum)
    assert all("waited for the gradients of the other replicas" in error for error in errors)
    assert any("the device is gone" in error for error in errors)


# -- Streams ---------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Buffers that forward changes, in the first stage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


def streamed(kind, schedule, loss_fn):
    """Losses and state after a stream of unequal mini-batches."""
    data, pipe, replica = meshes(kind)
    options = {"data_parallel": data, "example_args": (torch.zeros(8, 4),), "balance": ["norm"]} | QUICK
    with fxpipe.pipeline(Normed(), pipe, 2 if "2bw" in schedule else 1, schedule=schedule, **options) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(replica)
        sizes = [(8, 8), (7, 4), (4, 9), (8, 4), (6, 6)]
        batches = [(torch.randn(b[replica], 4, generator=generator), torch.ones(b[replica], 4)) for b in sizes]
        losses = [loss.cpu() for loss in pipe.train_stream(batches, loss_fn=loss_fn, optimizer=optimizer)]
        return losses, {key: value.cpu() for key, value in pipe.state_dict().items()}


def stream_on_both(mesh, schedule, loss_fn):
    machine = devices.simulated_machine()
    before = all_reduces()
    machine.begin(host_ahead=True)
    on_devices = streamed("sim", schedule, loss_fn)
    torch.accelerator.synchronize()
    races, count = machine.races(), all_reduces() - before
    return on_devices, streamed("cpu", schedule, loss_fn), count, races


@pytest.mark.parametrize(("schedule", "loss_fn"), [("pipedream", F.mse_loss), ("pipedream_2bw", pair_loss)])
def test_gradients_of_a_stream_are_summed_in_memory_of_devices(four_devices, schedule, loss_fn):
    results = four_devices.run(stream_on_both, schedule, loss_fn)
    for rank, (on_devices, on_cpu, count, races) in enumerate(results):
        torch.testing.assert_close(on_devices, on_cpu)
        assert count >= 5
        assert races == []
        state = on_devices[1]
        assert all(torch.equal(value, results[rank % 2][0][1][key]) for key, value in state.items())
