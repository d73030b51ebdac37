"""Streams, replicas and optimizers of stages on simulated devices: nothing is unordered."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.delayed_updates import RULES, rounds_of_replicas, rule_of_replicas, train_delayed
from helpers.oracle import closing
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.optim import StageOptimizer
from fxpipe.utils import accelerator

pytestmark = pytest.mark.simulated
DEVICES = ["sim:1", "cpu", "sim:0"]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def blocks(count, norm=nn.BatchNorm1d):
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), norm(6)) for _ in range(count)))


def batches_of(count):
    return [(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(count)]


def assert_same_state(model, plain):
    for (name, want), have in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(have.cpu(), want, msg=name, rtol=1e-3, atol=1e-4)


def assert_same(model, plain):
    """Gradients, parameters and buffers."""
    for (name, have), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(have.grad.cpu(), want.grad, msg=name, rtol=1e-4, atol=1e-5)
    for (name, have), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(have.cpu(), want, msg=name, rtol=1e-4, atol=1e-5)
    assert_same_state(model, plain)


@pytest.mark.parametrize(
    ("schedule", "chunks", "options", "rule"),
    [
        ("pipedream", 1, {}, "stashing"),
        ("pipedream", 1, {"vertical_sync": True}, "vertical sync"),
        ("pipedream_2bw", 3, {}, "2bw"),
        ("pipedream", 2, {"reduction": "batch"}, "stashing"),
    ],
)
def test_a_stream_comes_to_the_weights_of_delayed_updates(schedule, chunks, options, rule):
    plain, batches = blocks(len(DEVICES)), batches_of(7)
    model = copy.deepcopy(plain)
    with fxpipe.pipeline(model, DEVICES, chunks, schedule=schedule, balance=["0", "1"]) as pipe:
        optimizer = StageOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        loss_fn = contrast if "reduction" in options else F.mse_loss
        stream = pipe.train_stream(batches, loss_fn=loss_fn, optimizer=optimizer, **options)
        losses = [loss.cpu() for loss in stream]
        want, _ = train_delayed([*plain], batches, loss_fn, adamw, RULES[rule], chunks, joint=loss_fn is contrast)
        torch.testing.assert_close(torch.stack(losses), torch.stack(want), rtol=1e-3, atol=1e-4)
        assert_same_state(model, plain)
        assert {parameter.device.type for parameter in model.parameters()} == {"sim", "cpu"}
        assert len(pipe.last_step.actions) == 7 * len(DEVICES) * (2 * chunks + 1)
        pipe.last_step.save_trace("/dev/null")


# -- Streams over replicas ---------------------------------------------------------------------------------------------

PLACES = {
    "2-1": (("sim:0", "sim:1"), ("sim:2",)),
    "1-2": (("sim:0",), ("sim:1", "sim:2")),
    "3-1": (("sim:3", "sim:1", "sim:2"), ("sim:0",)),
    "2-3 with a CPU": (("sim:0", "cpu"), ("sim:1", "sim:2", "sim:3")),
    "3": (("sim:1", "sim:0", "sim:2"),),
}


def replicated(model, places, schedule="1f1b", chunks=4, *, last="0", **options):
    """A pipe of one or two stages on these devices; `last`: the module that ends the first of two."""
    balance = [last] if len(places) > 1 else "auto"
    firsts, example = [own[0] for own in places], (torch.randn(8, 6),)
    plan = fxpipe.plan(model, devices=firsts, example_args=example, chunks=chunks, balance=balance, progress=False)
    devices, plan = [device for own in places for device in own], replace(plan, replica_devices=places)
    return closing(fxpipe.pipeline(model, devices, chunks, plan=plan, schedule=schedule, progress=False, **options))


def devices_of(places):
    return {device for own in places for device in own}


# Forwards go one after the other where there is batch norm, and side by side where there is none.
NORMS = [(nn.BatchNorm1d, "auto"), (nn.LayerNorm, "auto"), (nn.LayerNorm, 2), (nn.LayerNorm, 3)]


@pytest.mark.parametrize(
    ("places", "norm", "chunks", "schedule"),
    [
        *(("2-3 with a CPU", *norm, "pipedream") for norm in NORMS),
        *((places, *norm, "pipedream") for places, norm in zip(("2-1", "1-2", "3-1", "3"), NORMS, strict=True)),
        *((places, nn.LayerNorm, 4, "pipedream_2bw") for places in ("2-1", "1-2", "2-3 with a CPU")),
        *((places, nn.LayerNorm, 4, "joint") for places in ("2-1", "2-3 with a CPU")),
    ],
)
def test_replicas_come_to_the_weights_of_delayed_updates_by_rounds(places, norm, chunks, schedule):
    """The number of micro-batches decides how many mini-batches make an update; without one each runs as a whole."""
    own, counts = PLACES[places], tuple(map(len, PLACES[places]))
    plain, batches, parts = blocks(len(own), norm), batches_of(14), 1 if chunks == "auto" else chunks
    model = copy.deepcopy(plain)
    of_stream = {"loss_fn": F.mse_loss}
    if schedule == "joint":
        schedule, of_stream = "pipedream", {"loss_fn": contrast, "reduction": "batch"}
    with replicated(model, own, schedule, chunks, checkpoint="always") as pipe:
        optimizer, losses = StageOptimizer(pipe, torch.optim.AdamW, lr=1e-2), []
        for loss in pipe.train_stream(batches, optimizer=optimizer, **of_stream):
            assert loss.device == torch.device(own[-1][0])
            losses.append(loss.cpu())
        rule, rounds = rule_of_replicas(counts, parts), rounds_of_replicas(counts, parts)
        if schedule == "pipedream_2bw":
            rule, rounds = RULES["2bw"], ()
        elif "reduction" in of_stream:
            rule = rule_of_replicas(rounds)
        arguments = of_stream["loss_fn"], adamw, rule, parts, counts, rounds
        want, _ = train_delayed([*plain], batches, *arguments, joint="reduction" in of_stream)
        torch.testing.assert_close(torch.stack(losses), torch.stack(want), rtol=1e-3, atol=1e-4)
        assert_same_state(model, plain)
        assert {parameter.device for parameter in model.parameters()} == {torch.device(each[0]) for each in own}
        assert {one.name for one in pipe.last_step.devices} == devices_of(own)


@pytest.mark.parametrize("places", ["2-1", "1-2", "3"])
def test_streams_of_the_caller_are_those_of_buffers_and_updates(places):
    """Workers of replicas write buffers where another device has them, and weights where the first one has them."""
    own, counts = PLACES[places], tuple(map(len, PLACES[places]))
    plain, batches, devices = blocks(len(own)), batches_of(9), [*map(torch.device, devices_of(own))]
    model = copy.deepcopy(plain)
    with replicated(model, own, "pipedream", "auto", example_args=(torch.randn(6, 6),)) as pipe:
        for device in devices:
            accelerator.synchronize(device)
        with accelerator.current_streams(*map(accelerator.new_stream, devices)):
            optimizer = StageOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
            list(pipe.train_stream(batches, loss_fn=F.mse_loss, optimizer=optimizer))
            state = {name: value.cpu() for name, value in model.state_dict().items()}
        train_delayed([*plain], batches, F.mse_loss, adamw, rule_of_replicas(counts), replicas=counts, rounds=counts)
        for name, one in plain.state_dict().items():
            torch.testing.assert_close(state[name], one, msg=name, rtol=1e-3, atol=1e-4)


def loss_with_a_limit(y, t):
    if bool((t > 100).any()):
        raise ArithmeticError("too large")
    return F.mse_loss(y, t)


def test_a_stream_over_replicas_that_fails_or_is_left_settles_what_it_has_sent():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    with replicated(model, PLACES["1-2"], "pipedream", "auto") as pipe:
        optimizer, data = StageOptimizer(pipe, torch.optim.SGD, lr=0.1), batches_of(12)
        bad = [*data[:5], (data[5][0], data[5][1] + 1e3), *data[6:]]
        with pytest.raises(ArithmeticError, match="too large") as caught:
            list(pipe.train_stream(bad, loss_fn=loss_with_a_limit, optimizer=optimizer))
        assert "on sim:2" in caught.value.__notes__[0]
        with pipe.train_stream(data, loss_fn=loss_with_a_limit, optimizer=optimizer) as stream:
            next(stream)
        assert len(set(stream.applied)) == 1
        pipe.forward_backward(data[0][0], target=data[0][1], loss_fn=loss_with_a_limit)


# -- Optimizers of stages ----------------------------------------------------------------------------------------------

KINDS = {
    "AdamW": {"lr": 1e-2},
    "one by one": {"lr": 1e-2, "foreach": False, "amsgrad": True},
    "lr as a tensor": {"lr": torch.tensor(1e-2), "foreach": False},
}


class Net(nn.Module):
    """The last layer has the weight of the first, on another device."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


def _weighted(y, t):
    weights = (t > 0).float()
    return ((y - t) ** 2 * weights).sum(), weights.sum()


def _weighted_step(plain, optimizer, x, t):
    total, weight = _weighted(plain(x), t)
    (total / weight).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "overlap", "schedule"),
    [
        ("AdamW", True, "1f1b"),
        ("AdamW", False, "zero_bubble"),
        ("one by one", False, "1f1b"),
        ("one by one", True, "zero_bubble"),
        ("lr as a tensor", True, "zero_bubble"),
        ("lr as a tensor", False, "1f1b"),
    ],
)
def test_steps_come_to_the_weights_of_the_plain_optimizer(kind, overlap, schedule):
    torch.manual_seed(7)
    model = copy.deepcopy(plain := Net())
    want = torch.optim.AdamW(plain.parameters(), **copy.deepcopy(KINDS[kind]))
    with fxpipe.pipeline(model, DEVICES, 3, schedule=schedule, balance=["a", "b"]) as pipe:
        have = StageOptimizer(pipe, torch.optim.AdamW, overlap=overlap, **copy.deepcopy(KINDS[kind]))
        for k, (x, t) in enumerate(batches_of(4)):  # the first one plans, and moves the parameters
            if k == 2:
                have.load_state_dict(copy.deepcopy(want.state_dict()))
            pipe.forward_backward(x, target=t, loss_fn=_weighted, optimizer=have)
            _weighted_step(plain, want, x, t)
        assert_same_state(model, plain)
        assert all(have.state[parameter]["exp_avg"].device == parameter.device for parameter in model.parameters())
        assert {parameter.device.type for parameter in model.parameters()} == {"sim", "cpu"}
        assert sorted(str(s.action) for s in pipe.last_step.spans if str(s.action.kind) == "U") == ["0U2", "1U2", "2U2"]


# -- Steps over replicas -----------------------------------------------------------------------------------------------


class TiedNet(nn.Module):
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


@contextmanager
def tied(places, schedule="1f1b", **options):
    """The plain model, and a pipe of a copy of it."""
    torch.manual_seed(7)
    plain = TiedNet()
    with replicated(copy.deepcopy(plain), PLACES[places], schedule, last="b", **options) as pipe:
        yield plain, pipe


def plain_step(model, x, t, loss_fn=F.mse_loss):
    for part, wanted in zip(x.tensor_split(4), t.tensor_split(4), strict=True):
        (loss_fn(model(part), wanted) * (len(part) / len(x))).backward()


def contrast(outputs, t):
    return F.cross_entropy(outputs @ t.T, torch.arange(len(t), device=t.device))


@pytest.mark.parametrize("places", PLACES)
def test_a_loss_of_all_samples_waits_for_all_replicas(places):
    with tied(places) as (plain, pipe):
        for k in range(3):
            x, t = torch.randn(12 - k, 6), torch.randn(12 - k, 6)
            loss, outputs = pipe.forward_backward(x, target=t, loss_fn=contrast, reduction="batch", return_outputs=True)
            want = torch.cat([plain(part) for part in x.tensor_split(4)])
            wanted = contrast(want, t)
            wanted.backward()
            torch.testing.assert_close(outputs.cpu(), want.detach())
            torch.testing.assert_close(loss.cpu(), wanted.detach())
            assert_same(pipe.model, plain)


@pytest.mark.parametrize(("places", "schedule"), each_once(PLACES, ("gpipe", "1f1b", "zero_bubble")))
def test_steps_come_to_the_weights_of_the_plain_model(places, schedule):
    own = PLACES[places]
    with tied(places, schedule) as (plain, pipe):
        optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (pipe, plain)]
        for k in range(3):
            x, t = torch.randn(12 - k, 6), torch.randn(12 - k, 6)
            loss, outputs = pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, return_outputs=True)
            assert loss.device == outputs.device == torch.device(own[-1][0])
            plain_step(plain, x, t)
            assert_same(pipe.model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert {one.device for one in pipe.parameters()} == {torch.device(each[0]) for each in own}
        assert {one.name for one in pipe.last_step.devices} == devices_of(own)


@pytest.mark.parametrize("places", ["2-1", "1-2"])
def test_the_drop_in_takes_outputs_from_replicas_and_hands_gradients_back(places):
    with tied(places, checkpoint="except_last") as (plain, pipe):
        for _ in range(2):
            x, t = torch.randn(8, 6, requires_grad=True), torch.randn(8, 6)
            again = x.detach().clone().requires_grad_()
            y = pipe(x)
            F.mse_loss(y, t.to(y.device)).backward()
            plain_step(plain, again, t)
            torch.testing.assert_close(x.grad, again.grad, rtol=1e-4, atol=1e-5)
        assert_same(pipe.model, plain)


def test_deferred_statistics_of_replicas_are_merged_where_the_buffers_are():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    alone, places = copy.deepcopy(model), (("sim:0", "sim:1", "sim:2"), ("sim:3",))
    with (
        replicated(model, places, last="2", deferred_batch_norm=True) as pipe,
        fxpipe.pipeline(alone, ["cpu"], 4, deferred_batch_norm=True, progress=False) as other,
    ):
        for _ in range(2):
            x, t = torch.randn(12, 6), torch.randn(12, 6)
            for one in (pipe, other):
                one.forward_backward(x, target=t, loss_fn=F.mse_loss)
        for (name, one), wanted in zip(model.named_buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(one.cpu(), wanted, msg=name)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("places", ["2-1", "1-2"])
def test_a_stage_optimizer_and_a_weighted_loss_add_up_over_devices(places, overlap):
    torch.manual_seed(7)
    model = copy.deepcopy(plain := nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    want = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with replicated(model, PLACES[places], last="1") as pipe:
        have = StageOptimizer(pipe, torch.optim.AdamW, overlap=overlap, lr=1e-2)
        for _ in range(4):
            x, t = torch.randn(8, 6), torch.randn(8, 6)
            pipe.forward_backward(x, target=t, loss_fn=_weighted, optimizer=have)
            _weighted_step(plain, want, x, t)
        assert_same(model, plain)


def test_a_scaler_of_losses_on_several_devices_is_refused():
    with tied("1-2") as (_, pipe):
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ArgumentError, match="grad_scaler with replicas of the last stage on sim:1, sim:2"):
            pipe.forward_backward(torch.randn(8, 6), target=torch.randn(8, 6), loss_fn=F.mse_loss, grad_scaler=scaler)
