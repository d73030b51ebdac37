"""Replicas of stages on simulated devices: copies of weights, sums of gradients, and nothing that is not ordered."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.oracle import closing
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.optim import StageOptimizer

pytestmark = pytest.mark.simulated
REPLICA_PLACES = {
    "2-1": (("sim:0", "sim:1"), ("sim:2",)),
    "1-2": (("sim:0",), ("sim:1", "sim:2")),
    "3-1": (("sim:3", "sim:1", "sim:2"), ("sim:0",)),
    "2-2 with a CPU": (("sim:0", "cpu"), ("sim:1", "sim:2")),
    "3": (("sim:1", "sim:0", "sim:2"),),
}


class Net(nn.Module):
    """The last layer has the weight of the first; positions are made on the device of the stage."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.a.weight
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        first = torch.tanh(self.norm(self.a(x)))
        x = self.b(first) + torch.arange(6, device=x.device)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return self.c(torch.tanh(x) + first)


def replicas_of(model, places, chunks=4, balance=("b",), **options):
    balance = list(balance) if len(places) > 1 else "auto"
    firsts = [own[0] for own in places]
    plan = fxpipe.plan(model, devices=firsts, example_args=(torch.randn(8, 6),), balance=balance, progress=False)
    plan = replace(plan, replica_devices=places)
    devices = [device for own in places for device in own]
    return fxpipe.pipeline(model, devices, chunks, plan=plan, progress=False, **options)


def plain_step(model, x, t, chunks, loss_fn=F.mse_loss):
    for part, wanted in zip(x.tensor_split(chunks), t.tensor_split(chunks), strict=True):
        (loss_fn(model(part), wanted) * (len(part) / len(x))).backward()


def assert_same(model, plain):
    pairs = [(name, p, q) for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)]
    for name, one, other in pairs:
        if other.grad is not None:
            torch.testing.assert_close(one.grad.cpu(), other.grad, msg=name, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.detach().cpu(), other.detach(), msg=name, rtol=1e-3, atol=1e-4)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), other, msg=name, rtol=1e-4, atol=1e-5)


def contrast(outputs, t):
    return F.cross_entropy(outputs @ t.T, torch.arange(len(t), device=t.device))


@pytest.mark.parametrize("places", REPLICA_PLACES)
def test_a_loss_of_all_samples_waits_for_all_replicas(places):
    torch.manual_seed(7)
    plain = Net()
    model = copy.deepcopy(plain)
    with closing(replicas_of(model, REPLICA_PLACES[places])) as pipe:
        for k in range(3):
            x, t = torch.randn(12 - k, 6), torch.randn(12 - k, 6)
            loss, outputs = pipe.forward_backward(x, target=t, loss_fn=contrast, reduction="batch", return_outputs=True)
            want = torch.cat([plain(part) for part in x.tensor_split(4)])
            wanted = contrast(want, t)
            wanted.backward()
            torch.testing.assert_close(outputs.cpu(), want.detach())
            torch.testing.assert_close(loss.cpu(), wanted.detach())
            assert_same(model, plain)


@pytest.mark.parametrize(("places", "schedule"), each_once(REPLICA_PLACES, ("gpipe", "1f1b", "zero_bubble")))
def test_steps_come_to_the_weights_of_the_plain_model(places, schedule):
    torch.manual_seed(7)
    plain = Net()
    model = copy.deepcopy(plain)
    with closing(replicas_of(model, REPLICA_PLACES[places], schedule=schedule)) as pipe:
        optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (pipe, plain)]
        for k in range(3):
            x, t = torch.randn(12 - k, 6), torch.randn(12 - k, 6)
            loss, outputs = pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, return_outputs=True)
            assert loss.device == outputs.device == torch.device(REPLICA_PLACES[places][-1][0])
            plain_step(plain, x, t, 4)
            assert_same(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        homes = {torch.device(own[0]) for own in REPLICA_PLACES[places]}
        assert {one.device for one in model.parameters()} == homes
        assert {one.name for one in pipe.last_step.devices} == {
            device for own in REPLICA_PLACES[places] for device in own
        }


@pytest.mark.parametrize("places", ["2-1", "1-2"])
def test_the_drop_in_takes_outputs_from_replicas_and_hands_gradients_back(places):
    torch.manual_seed(7)
    plain = Net()
    model = copy.deepcopy(plain)
    with closing(replicas_of(model, REPLICA_PLACES[places], checkpoint="except_last")) as pipe:
        for _ in range(2):
            x, t = torch.randn(8, 6, requires_grad=True), torch.randn(8, 6)
            again = x.detach().clone().requires_grad_()
            y = pipe(x)
            F.mse_loss(y, t.to(y.device)).backward()
            plain_step(plain, again, t, 4)
            torch.testing.assert_close(x.grad, again.grad, rtol=1e-4, atol=1e-5)
        assert_same(model, plain)


def test_deferred_statistics_of_replicas_are_merged_where_the_buffers_are():
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    alone = copy.deepcopy(layers)
    model = copy.deepcopy(layers)
    places = (("sim:0", "sim:1", "sim:2"), ("sim:3",))
    with (
        closing(replicas_of(model, places, balance=["2"], deferred_batch_norm=True)) as pipe,
        fxpipe.pipeline(alone, ["cpu"], 4, deferred_batch_norm=True, progress=False) as other,
    ):
        for _ in range(2):
            x, t = torch.randn(12, 6), torch.randn(12, 6)
            for one in (pipe, other):
                one.forward_backward(x, target=t, loss_fn=F.mse_loss)
        for (name, one), wanted in zip(model.named_buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(one.cpu(), wanted, msg=name)


def _weighted(y, t):
    weights = (t > 0).float()
    return ((y - t) ** 2 * weights).sum(), weights.sum()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("places", ["2-1", "1-2"])
def test_a_stage_optimizer_and_a_weighted_loss_add_up_over_devices(places, overlap):
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model = copy.deepcopy(plain)
    want = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with closing(replicas_of(model, REPLICA_PLACES[places], balance=["1"])) as pipe:
        have = StageOptimizer(pipe, torch.optim.AdamW, overlap=overlap, lr=1e-2)
        for _ in range(4):
            x, t = torch.randn(8, 6), torch.randn(8, 6)
            pipe.forward_backward(x, target=t, loss_fn=_weighted, optimizer=have)
            total, weight = _weighted(plain(x), t)
            (total / weight).backward()
            want.step()
            want.zero_grad()
        assert_same(model, plain)


def test_a_failure_on_one_of_the_devices_leaves_all_as_it_was():
    torch.manual_seed(7)
    plain = Net()
    model = copy.deepcopy(plain)

    def loss_fn(y, t):
        if bool((t > 100).any()):
            raise ArithmeticError("too large")
        return F.mse_loss(y, t)

    with closing(replicas_of(model, REPLICA_PLACES["1-2"])) as pipe:
        x, t = torch.randn(8, 6), torch.randn(8, 6)
        pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        plain_step(plain, x, t, 4)
        bad = t.clone()
        bad[3] = 1e3
        with pytest.raises(ArithmeticError, match="too large") as caught:
            pipe.forward_backward(x, target=bad, loss_fn=loss_fn)
        assert "on sim:2, micro-batch 1" in caught.value.__notes__[0]
        assert_same(model, plain)
        pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        plain_step(plain, x, t, 4)
        assert_same(model, plain)


def test_a_scaler_of_losses_on_several_devices_is_refused():
    with closing(replicas_of(Net(), REPLICA_PLACES["1-2"])) as pipe:
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ArgumentError, match="grad_scaler with replicas of the last stage on sim:1, sim:2"):
            pipe.forward_backward(torch.randn(8, 6), target=torch.randn(8, 6), loss_fn=F.mse_loss, grad_scaler=scaler)
