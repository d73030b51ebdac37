"""Steps on simulated devices beside the ordinary: statistics of mini-batches, weighted losses, failures, measuring."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

pytestmark = pytest.mark.simulated
TWO = ["sim:0", "sim:1"]


def _model():
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_deferred_batch_norm_tracks_the_mini_batch_over_devices(checkpoint):
    plain = _model()
    model, batches = copy.deepcopy(plain), [torch.randn(8, 4) for _ in range(3)]
    options = {"deferred_batch_norm": True, "checkpoint": checkpoint, "example_args": (batches[0],)}
    with fxpipe.pipeline(model, TWO, 4, **options) as pipe:
        for x in batches:
            pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
        first = plain[:2]  # what the first norm sees does not depend on other statistics
        for x in batches:
            first(x)
        torch.testing.assert_close(pipe.get_buffer("1.running_mean").cpu(), plain[1].running_mean)
        torch.testing.assert_close(pipe.get_buffer("1.running_var").cpu(), plain[1].running_var)
        assert pipe.get_buffer("4.num_batches_tracked").item() == len(batches)


def test_candidates_are_measured_on_the_devices():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 4)
    before = copy.deepcopy(model.state_dict())
    tuning = fxpipe.tune(model, TWO, example_args=(x,), measure=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert str(tuning)


def test_a_record_has_the_measured_peak_beside_the_planned_one():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    x, target = torch.randn(32, 64), torch.randn(32, 8)
    gc.collect()  # of the tests before
    before = [torch.accelerator.memory_allocated(d) for d in range(2)]
    with fxpipe.pipeline(model, TWO, 1, example_args=(x,), optimizer_state=0) as pipe:
        for d in range(2):
            torch.accelerator.reset_peak_memory_stats(d)
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
        record, plan = pipe.last_step, pipe.plan
        for d, device in enumerate(record.devices):
            assert device.planned_memory == int(plan.fits.needs[d])
            assert device.peak_memory == torch.accelerator.max_memory_allocated(d)
            assert 0.6 < (device.peak_memory - before[d]) / device.planned_memory < 1.4
            metrics = record.metrics()
            assert metrics[f"device_{d}/peak_memory"] == device.peak_memory
            assert metrics[f"device_{d}/planned_memory"] == device.planned_memory
        assert "device 1: peak memory" in str(record)
        pipe(x).sum().backward()
        gpipe = fxpipe.simulate(plan, schedule="gpipe").fits.needs
        assert [one.planned_memory for one in pipe.last_step.devices] == list(map(int, gpipe))

    with fxpipe.pipeline(model, ["sim:0", "sim:0"], 4, example_args=(x,)) as pipe:
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
        together = sum(map(int, pipe.plan.fits.needs))
        assert [one.planned_memory for one in pipe.last_step.devices] == [together, together]


def test_large_gradients_of_a_micro_batch_are_added_one_by_one():
    width, layers = 512, 6  # 1 MiB for each weight
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    plain, x = copy.deepcopy(model), torch.randn(8, width)
    gradients = layers * (width + 1) * width * 4
    with fxpipe.pipeline(model, ["sim:0"], 4, example_args=(x,), schedule="1f1b", checkpoint="never") as pipe:
        for _ in range(2):  # the loss is verified in the first
            pipe.zero_grad()
            torch.accelerator.synchronize("sim:0")
            before = torch.accelerator.memory_allocated("sim:0")
            torch.accelerator.reset_peak_memory_stats("sim:0")
            pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
            taken = torch.accelerator.max_memory_allocated("sim:0") - before
        plain(x).square().mean().backward()
        for have, parameter in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.grad.cpu(), parameter.grad)
    assert taken < 1.6 * gradients  # their sums, the old and the new sum of one weight and its gradient
