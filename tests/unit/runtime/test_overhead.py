"""What an action costs, in counts: seconds differ from run to run, calls do not."""

import sys
from collections import defaultdict

import pytest
import torch
from helpers.layered import Layered
from helpers.tried_orders import InterleavedExecutor
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.runtime.run import Run
from fxpipe.scheduling.actions import ActionKind

STAGES, CHUNKS = 3, 8


class Scale(Layered, factor=lambda: nn.Parameter(torch.ones(()))):
    """One operation with a parameter."""

    def forward(self, x):
        return x * self.factor


def _mean(y):
    return y.mean()


@pytest.fixture(scope="module")
def pipe():
    x = torch.randn(CHUNKS, 4)
    model = nn.Sequential(*(Scale() for _ in range(STAGES)))
    pipe = fxpipe.pipeline(model, ["cpu"] * STAGES, CHUNKS, example_args=(x,), balance=[1] * STAGES)
    pipe._fxpipe.engine.executor = InterleavedExecutor(0)
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=_mean)
    return pipe


def test_calls_of_an_action(pipe, monkeypatch):
    """Functions that Python calls, builtins and the model's own among them."""
    found = defaultdict(int)
    perform = Run.perform

    def counted(self, action):
        def note(frame, event, arg):
            found[action] += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            perform(self, action)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Run, "perform", counted)
    pipe.forward_backward(torch.randn(CHUNKS, 4), loss_fn=_mean)
    most = defaultdict(int)
    for action, count in found.items():
        has_loss = action.kind is ActionKind.FORWARD and action.stage == STAGES - 1
        name = "F and loss" if has_loss else str(action.kind)
        most[name] = max(most[name], count)
    assert most["F"] <= 63
    assert most["B"] <= 38
    assert most["F and loss"] <= 150


def test_operations_of_a_micro_batch(pipe):
    """Beside the model's and those of autograd: values are detached and entered, nothing is computed."""
    counts = defaultdict(int)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        pipe.forward_backward(torch.randn(CHUNKS, 4), loss_fn=_mean)
    assert counts["aten.full_like.default"] == CHUNKS, "the gradient that each loss begins with"
    assert counts["aten.ones_like.default"] == 0
    # Forward, its two gradients in backward, but for the input's, which wants none.
    assert counts["aten.mul.Tensor"] == CHUNKS * (STAGES + 2 * STAGES - 1)
