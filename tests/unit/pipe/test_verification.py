"""How `verify` tells rounding from an error."""

from contextlib import nullcontext

import torch
from torch import nn

import fxpipe
from fxpipe.pipe import verification


def test_an_effect_of_rounding_that_cancels_by_chance_is_measured_again(monkeypatch):
    """The gradient of the last bias is a sum that is zero but for rounding, which the first move does not show."""
    moved = verification._moved_by_rounding
    monkeypatch.setattr(verification, "_moved_by_rounding", lambda *a: nullcontext() if a[-1] == 0 else moved(*a))
    weights = torch.rand(512, 1)
    target, x = torch.cat([weights, -weights])[torch.randperm(1024)], torch.randn(1024, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 3, example_args=(x,)) as pipe:
        report = fxpipe.verify(pipe, x, target=target, loss_fn=lambda y, w: (y * w).mean())
    assert report
    (bias,) = (one for one in report.differences if one.name == "2.bias")
    assert 0 < bias.size <= bias.allowed < 1e-4
