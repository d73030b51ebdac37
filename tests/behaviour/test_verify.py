"""`fxpipe.verify`: what it compares with, what it finds, and that it leaves no trace."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import closing
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentTypeError, LossError, StateError


class Blocks(Layered, a=(4, 6), between=nn.Tanh, b=(6, 3)):
    """Two layers with whatever stands between them."""

    def forward(self, x):
        return {"logits": self.b(self.between(self.a(x)))}


class Counts(Layered, seen=lambda: torch.zeros(())):
    def forward(self, h):
        self.seen += 1
        return h / self.seen


class DrawsInPython(nn.Module):
    def forward(self, h):
        return h * random.random() + torch.rand_like(h).numpy().mean().item()


class LeftOut(nn.Module):
    def forward(self, h):
        h = h * torch.rand(1)  # decides nothing: each micro-batch draws another
        return h if torch.rand(()) < 0.5 else F.dropout(h.tanh(), 0.5)


def piped(model, chunks=4, **options):
    return closing(fxpipe.pipeline(model, ["cpu", "cpu"], chunks, example_args=(torch.randn(8, 4),), **options))


def cross_entropy(out, target):
    return F.cross_entropy(out["logits"], target)


def batch(samples=9):
    return torch.randn(samples, 4), torch.randint(3, (samples,))


def kinds(report):
    return {difference.kind for difference in report.differences}


def test_a_right_pipe_is_equal_within_rounding():
    x, target = batch()
    with piped(Blocks()) as pipe:
        report = fxpipe.verify(pipe, x.requires_grad_(), target=target, loss_fn=cross_entropy)
        assert report
        assert kinds(report) == {"output", "loss", "gradient", "input"}
        names = {d.name for d in report.differences if d.kind == "gradient"}
        assert names == {*dict(pipe.named_parameters()), "input x"}
        assert "and the plain model on the mini-batch of 9 samples: equal within rounding" in str(report)
        assert fxpipe.verify(pipe, x)  # without a loss: every number of the outputs counts
        with torch.no_grad():
            assert kinds(fxpipe.verify(pipe, x, target=target, loss_fn=cross_entropy)) == {"output", "input"}


class LeftOutByPython(Blocks):
    def forward(self, x):
        h = F.dropout(self.a(x))
        return {"logits": self.b(h if random.random() < 0.5 else self.between(h))}


@pytest.mark.parametrize("model", [lambda: Blocks(between=nn.Sequential(LeftOut(), LeftOut())), LeftOutByPython])
def test_layers_that_are_left_out_by_chance_are_left_out_of_the_plain_model_too(model):
    with piped(model(), 2, profile_budget=0.0) as pipe:
        for seed in range(4):
            torch.manual_seed(seed)
            assert fxpipe.verify(pipe, batch()[0])


class DrawsBeforeAndBehind(Blocks):
    """Dropout in modules that are recorded, and in the rest of forward, which runs as Python."""

    def forward(self, x):
        h = self.between(self.between(self.a(x)))
        if h.abs().max() > 0:
            h = F.dropout(h.tanh())
        return {"logits": self.b(h)}


def test_draws_in_the_rest_of_a_forward_are_those_of_one_node():
    with piped(DrawsBeforeAndBehind(between=nn.Sequential(nn.Linear(6, 6), nn.Dropout())), 2) as pipe:
        assert any("rest" in name for stage in pipe.plan.stages for name in stage.nodes)
        assert fxpipe.verify(pipe, batch()[0])


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (lambda out, t: F.cross_entropy(out["logits"], t, reduction="sum"), "sum"),
        (lambda out, t: (F.cross_entropy(out["logits"], t, reduction="sum", ignore_index=0), (t != 0).sum()), "mean"),
    ],
)
def test_losses_are_taken_as_forward_backward_takes_them(loss_fn, reduction):
    x, target = batch()
    for between in (nn.Tanh(), nn.Dropout(0.4)):
        with piped(Blocks(between=between)) as pipe:
            assert fxpipe.verify(pipe, x, target=target, loss_fn=loss_fn, reduction=reduction)


def test_what_the_loss_uses_is_compared_and_put_back():
    criterion, (x, _) = nn.Linear(3, 3), batch()
    criterion.weight.grad = torch.ones(3, 3)
    with piped(Blocks()) as pipe:
        report = fxpipe.verify(pipe, x, target=x[:, :3], loss_fn=lambda out, t: F.mse_loss(criterion(out["logits"]), t))
    assert report
    assert {"parameter 0 of loss_fn", "parameter 1 of loss_fn"} <= {d.name for d in report.differences}
    assert torch.equal(criterion.weight.grad, torch.ones(3, 3))
    assert criterion.bias.grad is None


@pytest.mark.parametrize(
    ("between", "reason", "has_loss"),
    [
        (nn.Dropout(0.4), "draws random numbers", True),
        (nn.Dropout(0.4), "draws random numbers", False),
        (DrawsInPython(), "draws random numbers", True),
        (nn.BatchNorm1d(6), "batch norm", False),
        (Counts(), "changes 'between.seen'", True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*kept whole.*")
def test_what_differs_over_micro_batches_is_compared_over_micro_batches(between, reason, has_loss):
    x, target = batch()
    more = {"target": target, "loss_fn": cross_entropy} if has_loss else {}
    with piped(Blocks(between=between)) as pipe:
        report = fxpipe.verify(pipe, x, **more)
        assert report, report
        assert reason in report.reference
        assert "over the same 4 micro-batches" in report.reference
        with torch.no_grad(), pytest.raises(StateError, match="verify with gradients"):
            fxpipe.verify(pipe, x)
        if reason == "batch norm":
            assert "on the mini-batch" in fxpipe.verify(pipe.eval(), x).reference


def test_it_leaves_no_trace():
    model = Blocks(between=nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.2)))
    x, target = batch()
    with piped(model) as pipe:
        pipe.forward_backward(x, target=target, loss_fn=cross_entropy)
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        gradients = {name: (p.grad, p.grad.clone()) for name, p in pipe.named_parameters()}
        rng, values = torch.get_rng_state(), x.clone()
        fxpipe.verify(pipe, x, target=target, loss_fn=cross_entropy)
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is gradients[name][0]
            assert torch.equal(parameter.grad, gradients[name][1])
        assert torch.equal(torch.get_rng_state(), rng)
        assert torch.equal(x, values)


@pytest.fixture
def spoiled(monkeypatch):
    """Changes what `forward_backward` of a pipe leaves behind."""

    def spoil(pipe, change):
        run = type(pipe).forward_backward

        def wrong(self, *args, **kwargs):
            return change(*run(self, *args, **kwargs))

        monkeypatch.setattr(type(pipe), "forward_backward", wrong)

    return spoil


CHANGES = {
    "output": ("micro-batch 1['logits']", "[0, 2]"),
    "shape": ("micro-batch 1['logits']", "float32[1, 3] instead of float32[2, 3]"),
    "element": ("b.bias", "[1]"),
    "missing": ("a.weight", "None instead of float32[6, 4]"),
    "loss": ("", ""),
    "buffer": ("between.running_mean", ""),
}


@pytest.mark.parametrize("part", CHANGES)
def test_each_part_of_a_step_is_compared(part, spoiled):
    x, target = batch(8)
    with piped(Blocks(between=nn.BatchNorm1d(6))) as pipe:

        def change(loss, outputs):
            if part == "output":
                outputs[1]["logits"][0, 2] += 1e-3
            elif part == "shape":
                outputs[1]["logits"] = outputs[1]["logits"][:1]
            elif part == "element":
                pipe.b.bias.grad[1] *= 1.001
            elif part == "missing":
                pipe.a.weight.grad = None
            elif part == "buffer":
                pipe.between.running_mean += 1e-3
            return loss * (1.001 if part == "loss" else 1), outputs

        spoiled(pipe, change)
        report = fxpipe.verify(pipe, x, target=target, loss_fn=cross_entropy)
        (one,) = report.wrong
        name, text = CHANGES[part]
        assert one.name == name
        assert text in str(report)


def test_what_the_pipe_refuses_and_what_is_no_pipe_is_refused():
    x, target = batch(8)
    with piped(Blocks()) as pipe, pytest.raises(LossError, match="no mean over samples"):
        fxpipe.verify(pipe, x, target=target, loss_fn=lambda out, t: cross_entropy(out, t).sqrt())
    with pytest.raises(ArgumentTypeError, match="pipe is a Blocks; expected what fxpipe"):
        fxpipe.verify(Blocks(), x)


@pytest.mark.parametrize(
    ("names", "samples"), [(["2.bias"], 8), (["parameter 0 of loss_fn", "parameter 1 of loss_fn"], 16)]
)
def test_rounding_of_a_sum_that_cancels_is_allowed(names, samples):
    """The gradient of the last bias is a sum of signs, so that neither it nor a change of weights or inputs tells."""
    signs, criterion = torch.tensor([1.0, -1.0]).repeat(samples // 2)[:, None], nn.Linear(3, 1)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(samples, 3)
    if names == ["2.bias"]:
        model[2], criterion = criterion, nn.Identity()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        report = fxpipe.verify(pipe, x, target=signs, loss_fn=lambda y, sign: (criterion(y) * sign).mean())
    assert report
    allowed = {one.name: one.allowed for one in report.differences}
    assert all(0 < allowed[name] < 1e-4 for name in names)


class Shifted(Layered, a=3, b=3, first=nn.Dropout, second=nn.Dropout, bias=lambda: nn.Parameter(torch.randn(3))):
    """The bias gets a gradient of either sign, of two modules whose outputs have one shape."""

    def forward(self, x):
        x = self.a(x)
        return self.b(x) + self.first(x + self.bias) - self.second(x + self.bias)


def test_rounding_of_two_modules_does_not_cancel():
    x = torch.randn(8, 3)
    with fxpipe.pipeline(Shifted().eval(), ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        report = fxpipe.verify(pipe.eval(), x, target=torch.randn(8, 3), loss_fn=F.mse_loss)
    (bias,) = (one for one in report.differences if one.name == "bias")
    assert report
    assert 0 < bias.allowed < 1e-4


class Likelihood(Layered, rate=4):
    """Poisson's, which is defined for whole numbers. Forward asks for gradients of its input, as for forces."""

    def forward(self, x):
        return torch.distributions.Poisson(self.rate(x.requires_grad_()).exp()).log_prob(x)


def test_counts_stay_whole_numbers():
    x = torch.randint(4, (8, 4)).float()
    with closing(fxpipe.pipeline(Likelihood(), ["cpu", "cpu"], 2, example_args=(x,))) as pipe:
        assert fxpipe.verify(pipe, x, target=x, loss_fn=F.mse_loss)


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return None


class Stopped(Layered, a=4, b=4, c=4):
    """Autograd calls the hooks of an output without a gradient all the same, with None."""

    def forward(self, x):
        x = self.a(x)
        return self.c(x + Stop.apply(self.b(x)))


class PerSample(Layered, inner=4):
    """Kept whole, since it uses `vmap`, which lets nobody draw random numbers."""

    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: self.inner(row).square().sum()))(x)


@pytest.mark.parametrize("middle", [Stopped, PerSample])
def test_modules_without_gradients_and_transforms_of_functions_are_compared(middle):
    model, x = nn.Sequential(nn.Linear(4, 4), middle(), nn.Linear(4, 4)), torch.randn(8, 4)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        assert fxpipe.verify(pipe, x, target=torch.randn(8, 4), loss_fn=F.mse_loss)
