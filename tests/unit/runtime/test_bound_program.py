"""The tensors of the model in a step: found by name, anew in each step, each module once."""

import threading
import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.tracing.model_state import tensor_guards_of


class Counting(nn.Module):
    """Asked for a module, it makes a note."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.asked: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def get_submodule(self, target: str) -> nn.Module:
        self.asked[target] += 1
        return super().get_submodule(target)


def loss(pipe: Any, x: torch.Tensor) -> torch.Tensor:
    return pipe.forward_backward(x, target=torch.zeros_like(x), loss_fn=F.mse_loss)


def test_a_step_finds_each_module_once() -> None:
    """The way to a module takes 0.1 ms, and there are hundreds of tensors, looked up for every micro-batch."""
    model, x = Counting(), torch.randn(8, 4)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(x,)) as pipe:
        loss(pipe, x)  # verifies the loss beside
        for run in (loss, lambda pipe, x: pipe(x).sum().backward()):
            model.asked.clear()
            run(pipe, x)
            assert model.asked == {"body": 1}, "and `body` for its modules"


def test_losses_in_two_threads_put_back_what_they_hide() -> None:
    model = nn.BatchNorm1d(2)
    mean = model.running_mean
    seen, order = [], [threading.Event(), threading.Event()]

    def loss_fn(k: int) -> None:
        seen.append((type(model.running_mean).__name__, tensors.get("running_mean") is mean, guard.holds()))
        order[k].set()
        order[1 - k].wait(0.2)  # for the other loss, which would be in here too
        time.sleep(0.05 * k)

    tensors, (guard,) = ModelTensors(model, {}), tensor_guards_of(model, ["running_mean"])
    hiding = tensors.hiding(["running_mean"], loss_fn)
    threads = [threading.Thread(target=hiding, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.running_mean is mean
    assert seen == [("NotKept", True, True)] * 2
