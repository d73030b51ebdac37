"""Training on simulated devices: steps, optimizers, mixed precision, dropout, statistics, losses, and failures."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from helpers.models import GPT
from torch import nn

import fxpipe
from fxpipe.runtime import run
from fxpipe.utils import accelerator

pytestmark = pytest.mark.simulated
TOKENS, WIDTH, LENGTH, BATCH, CHUNKS = 17, 8, 5, 6, 3
TWO, FOUR = ["sim:0", "sim:1"], ["sim:0", "sim:1", "sim:2", "sim:3"]


def language(blocks: int = 4, dropout: float = 0.0) -> GPT:
    """As GPT-2: the first weight is the last one, too."""
    return GPT(TOKENS, WIDTH, blocks, 2, dropout)


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(count):
    return [torch.randint(TOKENS, (2, BATCH, LENGTH)).unbind(0) for _ in range(count)]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "drop-in"])
@pytest.mark.parametrize("devices", [TWO, FOUR], ids=["two", "four"])
def test_a_language_model_trains_as_on_one_device(devices, schedule):
    """With an optimizer made before the pipe, whose moments follow the parameters."""
    plain = language().double()  # of a gradient that is nothing but rounding Adam makes a step as large as any
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (plain, model)]
    data = batches(3)
    options = {"schedule": schedule} if schedule != "drop-in" else {"checkpoint": "always"}
    with fxpipe.pipeline(model, devices, CHUNKS, example_args=data[0][:1], **options) as pipe:
        for tokens, target in data:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(plain(tokens), target).backward()
            if schedule == "drop-in":
                loss_of(pipe(tokens), target.to(devices[-1])).backward()
            else:
                pipe.forward_backward(tokens, target=target, loss_fn=loss_of)
            for optimizer in optimizers:
                optimizer.step()
        assert {p.device.type for p in pipe.parameters()} == {"sim"}
        for (name, have), want in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.cpu(), want, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("in_one", [True, False])
def test_losses_are_scaled_over_devices(in_one):
    """Autocast on the devices, and a scaler that skips a step with gradients that are infinite."""
    plain = language(2)
    model = copy.deepcopy(plain).to("sim:0")  # planned where it runs, in the precision in which it runs
    plain.to("sim:0")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    scalers = [torch.amp.GradScaler("sim", init_scale=scale) for scale in (2.0**8, 2.0**8)]
    with torch.autocast("sim", torch.bfloat16), fxpipe.pipeline(model, TWO, 2, example_args=batches(1)[0][:1]) as pipe:
        for tokens, target in batches(3):
            tokens, target = tokens.to("sim:0"), target.to("sim:0")
            loss = loss_of(plain(tokens), target)
            scalers[0].scale(loss).backward()
            if in_one:
                pipe.forward_backward(tokens, target=target, loss_fn=loss_of, grad_scaler=scalers[1])
            else:
                scalers[1].scale(loss_of(pipe(tokens), target.to("sim:1"))).backward()
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.cpu(), want.cpu(), rtol=2e-2, atol=2e-3)


def test_an_infinite_gradient_on_one_device_skips_the_step_on_all():
    model = language(2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("sim", init_scale=2.0**20)
    (tokens, target), *_ = batches(1)
    with fxpipe.pipeline(model, TWO, 2, example_args=(tokens,)) as pipe:
        before = copy.deepcopy(pipe.state_dict())
        pipe.forward_backward(tokens, target=target, loss_fn=loss_of, grad_scaler=scaler)
        [*pipe.parameters()][-1].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**19
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, before[name]), name


CUTS = {
    "two devices": (TWO, 4, {}),
    "four devices": (FOUR, 4, {}),
    "all recomputed": (TWO, 4, {"checkpoint": "always"}),
    "split backward": (FOUR, 4, {"schedule": "zero_bubble"}),
    "two stages a device": (TWO, 4, {"schedule": "interleaved_1f1b", "stages_per_device": 2}),
}


@pytest.mark.parametrize("name", [name for name in CUTS])
def test_dropout_is_the_same_whatever_the_cut(name):
    """Random numbers are those of the seed, the micro-batch and the node, not of a device, a schedule or its timing."""
    (tokens, target), *_ = batches(1)
    start = language(4, dropout=0.3)
    results = []
    for devices, chunks, options in ((["sim:0", "sim:0"], 4, {}), CUTS[name]):
        with fxpipe.pipeline(copy.deepcopy(start), devices, chunks, example_args=(tokens,), **options) as pipe:
            torch.manual_seed(7)
            loss = pipe.forward_backward(tokens, target=target, loss_fn=loss_of)
            results.append([loss.cpu(), *(p.grad.cpu() for p in pipe.parameters())])
    for have, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(have, want)


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


def test_the_host_stays_near_the_devices(monkeypatch):
    """Before it queues an action it has waited for the fifth last one: what is on its way takes no more memory."""
    marks, waited, mark, wait = [], [], run.mark_time, accelerator.wait_on_host
    monkeypatch.setattr(run, "mark_time", lambda stream: marks.append(mark(stream)) or marks[-1])
    monkeypatch.setattr(accelerator, "wait_on_host", lambda event, *rest: waited.append(event) or wait(event, *rest))
    tokens, target = batches(1)[0]
    with fxpipe.pipeline(language(2), TWO, BATCH, example_args=(tokens,), checkpoint="never") as pipe:
        pipe.forward_backward(tokens, target=target, loss_fn=loss_of)
        marks.clear()
        waited.clear()
        pipe.forward_backward(tokens, target=target, loss_fn=loss_of)
    ends = {id(event) for event in marks}
    assert sum(id(event) in ends for event in waited) == 2 * (2 * BATCH - run.HOST_AHEAD)
