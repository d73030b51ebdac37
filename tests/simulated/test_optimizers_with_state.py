"""Optimizers with state of before the pipe step as those of the plain model, whatever the pipe has moved."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

pytestmark = pytest.mark.simulated
DEVICES = ["sim:1", "cpu", "sim:2"]
KINDS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "one by one": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),  # has state before its first step
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 1e-2),
}


def _model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 2))


def _batch():
    return torch.randn(6, 6), torch.randn(6, 2)


def _plain_step(model, optimizer, x, t):
    optimizer.zero_grad()
    F.mse_loss(model(x), t).backward()
    optimizer.step()


def _assert_equal(plain, want, model, have):
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.detach().cpu(), one.detach(), msg=name)
        assert other.device.type == "sim" or "cpu" in DEVICES
        for key, value in want.state[one].items():
            torch.testing.assert_close(torch.as_tensor(have.state[other][key]).cpu(), torch.as_tensor(value), msg=key)


@pytest.mark.parametrize(
    ("kind", "is_planned_first"), [("AdamW", False), *((kind, True) for kind in KINDS), ("Adagrad", False)]
)
def test_an_optimizer_that_has_stepped_before_the_pipe_goes_on(kind, is_planned_first):
    plain = _model()
    want = KINDS[kind](plain.parameters())
    _plain_step(plain, want, *_batch())
    model = copy.deepcopy(plain)
    have = KINDS[kind](model.parameters())
    have.load_state_dict(copy.deepcopy(want.state_dict()))  # to where the parameters are: the CPU
    example = {"example_args": _batch()[:1]} if is_planned_first else {}
    with fxpipe.pipeline(model, DEVICES, 3, **example) as pipe:
        for _ in range(3):
            x, t = _batch()
            _plain_step(plain, want, x, t)
            have.zero_grad()
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
            have.step()
        _assert_equal(plain, want, model, have)


STEPS = {
    "overlap": ("1f1b", lambda pipe, x, t, **how: pipe.forward_backward(x, target=t, **how)),
    "micro-batches": (
        "1f1b",
        lambda pipe, x, t, **how: pipe.forward_backward(micro_batches=zip(x.chunk(3), t.chunk(3), strict=True), **how),
    ),
    "a stream": ("pipedream", lambda pipe, x, t, **how: [*pipe.train_stream([(x, t)], **how)]),
}


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("step", STEPS)
def test_state_from_before_follows_where_stages_are_updated_before_a_step_ends(step, kind):
    """The first step plans, moves the parameters, and updates them before `optimizer.step` is called."""
    plain = _model()
    want = KINDS[kind](plain.parameters())
    if kind != "Adagrad":
        _plain_step(plain, want, *_batch())
    model, (schedule, run) = copy.deepcopy(plain), STEPS[step]
    options = {name: want.defaults[name] for name in ("lr", "momentum") if name in want.defaults}
    with fxpipe.pipeline(model, DEVICES, 1, schedule=schedule) as pipe:
        have = fxpipe.optim.StageOptimizer(pipe, type(want), overlap=schedule == "1f1b", **options)
        have.load_state_dict(copy.deepcopy(want.state_dict()))
        for _ in range(2):
            x, t = _batch()
            _plain_step(plain, want, x, t)
            run(pipe, x, t, loss_fn=F.mse_loss, optimizer=have)
    _assert_equal(plain, want, model, have)
