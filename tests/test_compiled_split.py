"""Backward in two of compiled stages: their weights get their gradients in W."""

from __future__ import annotations

import copy
import shutil
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same_gradients, assert_same_state
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.rewriting import split
from fxpipe.rewriting.splitting import split_weights
from fxpipe.rewriting.tapping import tap_weights
from fxpipe.runtime.step import Step
from fxpipe.scheduling.actions import Kind
from fxpipe.tracing import trace

BATCH = 7  # uneven over three micro-batches
AOT = {"backend": "aot_eager"}

# torch hides this warning while it compiles, by a way that does not heed what pytest makes of warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Uses(nn.Module):
    """A use of every kind, in a model that changes in place what it may."""

    def __init__(self):
        super().__init__()
        self.tokens, self.first, self.again = nn.Embedding(11, 6, padding_idx=-1), nn.Linear(6, 8), nn.Linear(8, 8)
        self.only_bias, self.only_weight, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.only_bias.weight.requires_grad_(False)
        self.only_weight.bias.requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.right, self.turned, self.bias = (nn.Parameter(torch.randn(s) * 0.4) for s in ((8, 6), (6, 8), (6,)))
        self.conv, self.wide = nn.Conv1d(5, 4, 3, padding="same"), nn.ConvTranspose1d(4, 5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.with_b = nn.Linear(6, 6)  # its weight is used by more than linear

    def forward(self, ids):
        x = self.tokens(ids)
        y = F.relu(self.again(self.first(x)), inplace=True)
        y = self.again(y).mul_(0.5) + y
        y = self.only_weight(torch.tanh(self.frozen(self.only_bias(y))))
        with torch.no_grad():
            gate = self.first(x).sigmoid()
        y = y * gate
        y = torch.tanh(y @ self.right) @ self.turned.t()[:, :6].contiguous()[:6, :6]
        y = torch.addmm(self.bias, y.reshape(-1, 6), self.with_b.weight).view(y.shape) + self.with_b(y)
        y = self.wide(self.norm(torch.cat([self.conv(y), y[:, :1]], 1))[:, :4])
        return F.linear(y[..., :6], self.tokens.weight)


def ids():
    return torch.randint(0, 11, (BATCH, 5))


def square(y):
    return y.float().square().mean()


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def stages_of(model, *args, starts=(0,)):
    return split(trace(model, args, chunks=3), starts, [torch.device("cpu")] * len(starts)).stages


def both(model, args, steps=3, compile=AOT, **how):
    """Steps of the model with an optimizer, in a plain loop and with compiled stages whose backward is split."""
    ours = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, ours)]
    how = {"chunks": 3, "example_args": args, "schedule": "zero_bubble"} | how
    with (
        fxpipe.pipeline(model, ["cpu", "cpu"], **how) as plain,
        fxpipe.pipeline(ours, ["cpu", "cpu"], compile=compile, **how) as compiled,
    ):
        for seed in range(steps):
            losses = []
            for pipe in (plain, compiled):
                torch.manual_seed(seed)
                losses.append(pipe.forward_backward(*args, loss_fn=square))
            torch.testing.assert_close(*losses)
            assert_same_gradients(ours, model, loose=[n for n, _ in model.named_parameters()])
            yield model, ours
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_state(ours, model, exact=False)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_steps(checkpoint):
    for _ in both(Uses(), (ids(),), checkpoint=checkpoint):
        pass


def test_the_same_parameters_are_left_to_w():
    for starts in ((0,), (0, 9)):
        for stage in stages_of(Uses(), ids(), starts=starts):
            tapped = tap_weights(stage)
            assert tapped.weighed == split_weights(stage).weighed != frozenset()
            assert tapped.taps is not None
