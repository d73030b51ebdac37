"""Failures that nobody could be told when they came, and backwards that were refused: raised later, or run later."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from torch import nn

import fxpipe
from fxpipe.errors import StateError
from fxpipe.optim import StageOptimizer

QUICK = {"progress": False, "check": False, "hardware": "cpu", "balance": ["0"]}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))


@pytest.fixture
def pipe():
    options = {"schedule": "pipedream", "example_args": (torch.ones(4, 4),)}
    made = fxpipe.pipeline(model(), ["cpu"] * 2, **options, **QUICK)
    yield made
    made._fxpipe.engine.executor.close()


def leave_a_stream_that_fails(pipe):
    seen, left = [], threading.Event()

    def loss_fn(y, target):
        seen.append(1)
        if len(seen) == 3:
            left.wait(60)
            raise OSError("the third mini-batch")
        return F.mse_loss(y, target)

    optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    data = [(torch.ones(4, 4), torch.ones(4, 3))] * 9
    for _ in pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer):
        left.set()
        break
    return optimizer


NEXT_CALLS = {
    "close": lambda pipe, optimizer: pipe.close(),
    "with": lambda pipe, optimizer: pipe.__exit__(None, None, None),
    "call": lambda pipe, optimizer: pipe(torch.ones(4, 4)),
    "evaluation": lambda pipe, optimizer: pipe.eval()(torch.ones(4, 4)),
    "step": lambda pipe, optimizer: pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.mean),
    "update": lambda pipe, optimizer: optimizer.step(),
    "stream": lambda pipe, optimizer: next(
        pipe.train_stream([torch.ones(4, 4)], loss_fn=torch.mean, optimizer=optimizer)
    ),
    "list of a stream": lambda pipe, optimizer: list(
        pipe.train_stream([torch.ones(4, 4)], loss_fn=torch.mean, optimizer=optimizer)
    ),
}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", NEXT_CALLS)
def test_a_failure_after_a_loop_was_left_is_raised_by_the_next_call(call, pipe):
    optimizer = leave_a_stream_that_fails(pipe)
    with pytest.raises(OSError, match="third mini-batch") as caught:
        NEXT_CALLS[call](pipe, optimizer)
    assert any("the stream was dropped" in note for note in caught.value.__notes__)
    assert any("whose loop was left before" in note for note in caught.value.__notes__)
    pipe.close()  # it is raised once


def test_a_failure_that_no_call_follows_is_printed_when_the_script_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import threading, torch, fxpipe
def loss_fn(y):
    seen.append(1)
    if len(seen) == 3:
        left.wait(60)
        raise OSError("the third mini-batch")
    return y.mean()
seen, left, model = [], threading.Event(), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
pipe = fxpipe.pipeline(model, ["cpu"] * 2, schedule="pipedream", balance=["0"], hardware="cpu", progress=False)
optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
for _ in pipe.train_stream([torch.ones(2, 4)] * 9, loss_fn=loss_fn, optimizer=optimizer):
    left.set()
    break
print("left")
"""
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "left\n"
    assert "OSError: the third mini-batch" in ended.stderr
    assert "Exception ignored" not in ended.stderr


def _in_a_stream(pipe, backward):
    def source():
        with pytest.raises(StateError, match="take the loss of the outputs again"):
            backward()
        yield from ()

    optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    assert not list(pipe.train_stream(source(), loss_fn=F.mse_loss, optimizer=optimizer))


def _in_a_loss(pipe, backward):
    def loss_fn(y):
        with pytest.raises(StateError, match="take the loss of the outputs again"):
            backward()
        return y.mean() * 0

    pipe.forward_backward(torch.ones(4, 4), loss_fn=loss_fn)
    pipe.zero_grad()


@pytest.mark.parametrize("busy", [_in_a_stream, _in_a_loss])
@pytest.mark.parametrize("how", ["loss again", "retain_graph", "torch.autograd.grad", "a sum"])
def test_a_backward_that_was_refused_can_be_called_again(how, busy, pipe):
    plain, x, target = copy.deepcopy(fxpipe.unwrap(pipe)), torch.randn(4, 4), torch.randn(4, 3)
    F.mse_loss(plain(x), target).backward()
    out = pipe(x)
    loss = F.mse_loss(out, target)
    if how == "loss again":
        busy(pipe, loss.backward)
        F.mse_loss(out, target).backward()
    elif how == "retain_graph":
        busy(pipe, lambda: loss.backward(retain_graph=True))
        loss.backward()
    elif how == "torch.autograd.grad":
        busy(pipe, lambda: torch.autograd.grad(loss, [*pipe.parameters()], retain_graph=True))
        for p, gradient in zip(pipe.parameters(), torch.autograd.grad(loss, [*pipe.parameters()]), strict=True):
            p.grad = gradient
    else:
        plain.zero_grad()
        plain(x).sum().backward()
        total = out.sum()
        busy(pipe, total.backward)
        total.backward()
    oracle.assert_same_gradients(pipe, plain, [name for name, _ in plain.named_parameters()])
    with pytest.raises((StateError, RuntimeError)):
        out.sum().backward()
