"""Streams on simulated devices: versions and updates on each device's stream, and nothing that is not ordered."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.delayed_updates import RULES, train_delayed
from helpers.oracle import closing
from torch import nn

import fxpipe
from fxpipe.optim import StageOptimizer

pytestmark = pytest.mark.simulated
DEVICES = ["sim:1", "cpu", "sim:0"]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize(
    ("schedule", "chunks", "options", "rule"),
    [
        ("pipedream", 1, {}, "stashing"),
        ("pipedream", 1, {"vertical_sync": True}, "vertical sync"),
        ("pipedream_2bw", 3, {}, "2bw"),
    ],
)
def test_a_stream_comes_to_the_weights_of_delayed_updates(schedule, chunks, options, rule):
    torch.manual_seed(7)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6)) for _ in DEVICES))
    model, batches = copy.deepcopy(plain), [(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(7)]
    with closing(fxpipe.pipeline(model, DEVICES, chunks, schedule=schedule, balance=["0", "1"])) as pipe:
        optimizer = StageOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        stream = pipe.train_stream(batches, loss_fn=F.mse_loss, optimizer=optimizer, **options)
        losses = [loss.cpu() for loss in stream]
        want, _ = train_delayed(
            [*plain], batches, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), RULES[rule], chunks
        )
        torch.testing.assert_close(torch.stack(losses), torch.stack(want), rtol=1e-3, atol=1e-4)
        for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(other.cpu(), one, msg=name, rtol=1e-3, atol=1e-4)
        assert {parameter.device.type for parameter in model.parameters()} == {"sim", "cpu"}
        assert len(pipe.last_step.actions) == 7 * len(DEVICES) * (2 * chunks + 1)
        pipe.last_step.save_trace("/dev/null")


def test_a_stream_that_fails_or_is_left_settles_what_it_has_sent():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    with closing(fxpipe.pipeline(model, ["sim:0", "sim:1"], schedule="pipedream", balance=["0"])) as pipe:
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        data = [(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(9)]

        def loss_fn(y, t):
            if bool((t > 100).any()):
                raise ArithmeticError("too large")
            return F.mse_loss(y, t)

        bad = [*data[:5], (data[5][0], data[5][1] + 1e3), *data[6:]]
        with pytest.raises(ArithmeticError, match="too large"):
            list(pipe.train_stream(bad, loss_fn=loss_fn, optimizer=optimizer))
        with pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer) as stream:
            next(stream)
        assert len(set(stream.applied)) == 1
        pipe.forward_backward(data[0][0], target=data[0][1], loss_fn=loss_fn, optimizer=optimizer)
