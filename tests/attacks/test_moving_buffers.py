"""Buffers that forward moves in evaluation: outputs are the mini-batch's, and not those of micro-batches in a row."""

import copy
import warnings
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state
from torch import nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

import fxpipe


class Moving(Layered):
    """A module with a buffer, and a function that moves it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(self, x)


def observe(module: Moving, x: torch.Tensor) -> torch.Tensor:
    module.state.copy_(torch.maximum(module.state, x.detach().abs().max()))
    return x + ((x / module.state).mul(7).round().mul(module.state / 7) - x).detach()


def count(module: Moving, x: torch.Tensor) -> torch.Tensor:
    module.state += 1
    return x / module.state


def assign_mean(module: Moving, x: torch.Tensor) -> torch.Tensor:
    module.state = 0.9 * module.state + 0.1 * x.detach().mean(0)
    return x - module.state


def write_mean(module: Moving, x: torch.Tensor) -> torch.Tensor:
    module.state.lerp_(x.detach().mean(0), 0.1)
    return x - module.state


def write_part(module: Moving, x: torch.Tensor) -> torch.Tensor:
    module.state[:1] = x.detach().amax(0)[:1]
    return x + module.state


def move_in_evaluation_only(module: Moving, x: torch.Tensor) -> torch.Tensor:
    return x if module.training else write_mean(module, x)


def use_first(module: Moving, x: torch.Tensor) -> torch.Tensor:
    y = x + module.state  # what the samples before have left
    module.state.copy_(x.detach()[-1])
    return y


def keep_table(module: Moving, x: torch.Tensor) -> torch.Tensor:
    module.state = torch.linspace(0, 1, x.shape[1])  # the same in each micro-batch
    return x * module.state


def around(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def hooked() -> nn.Module:
    model = around(Moving(move=lambda module, x: x * module.state.clone(), state=torch.ones(8)))

    def move(module: Any, args: Any, output: torch.Tensor) -> None:
        module.state.add_(output.detach().mean(0))

    model[1].register_forward_hook(move)
    return model


def shared() -> nn.Module:
    model = around(Moving(move=write_mean, state=torch.zeros(8)))
    return nn.Sequential(model, model[1], nn.Linear(8, 8))


CASES: dict[str, Any] = {
    "observer": lambda: around(Moving(move=observe, state=torch.ones(()))),
    "counter": lambda: around(Moving(move=count, state=torch.zeros(()))),
    "mean, set": lambda: around(Moving(move=assign_mean, state=torch.zeros(8))),
    "mean, written": lambda: around(Moving(move=write_mean, state=torch.zeros(8))),
    "a part": lambda: around(Moving(move=write_part, state=torch.zeros(8))),
    "in evaluation only": lambda: around(Moving(move=move_in_evaluation_only, state=torch.zeros(8))),
    "used before it moves": lambda: around(Moving(move=use_first, state=torch.zeros(8))),
    "a table of sizes": lambda: around(Moving(move=keep_table, state=torch.zeros(8))),
    "a forward hook": hooked,
    "used twice": shared,
    "fake quantization": lambda: around(FakeQuantize(observer=MovingAverageMinMaxObserver)),
    "fused fake quantization": lambda: around(FusedMovingAvgObsFakeQuantize()),
    "batch norm that trains": lambda: around(nn.BatchNorm1d(8)),
}


def to_evaluation(model: nn.Module) -> None:
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train()


@pytest.mark.parametrize(
    ("name", "whole"),
    [*((name, False) for name in CASES), *((name, True) for name in ("observer", "mean, set", "fake quantization"))],
)
def test_evaluation_is_of_the_mini_batch(name, whole):
    plain = copy.deepcopy(model := CASES[name]())
    to_evaluation(plain)
    options: dict[str, Any] = {"leaf_modules": [type(model[1])]} if whole else {}
    x = torch.randn(6, 8)
    with (
        warnings.catch_warnings(),
        fxpipe.pipeline(model, ["cpu", "cpu"], 3, example_args=(x,), progress=False, **options) as pipe,
    ):
        warnings.simplefilter("ignore")
        to_evaluation(pipe)
        for step in range(3):
            x = torch.randn(6, 8) * (1 + step)
            with torch.set_grad_enabled(step == 2):
                have, want = pipe(x), plain(x)
            torch.testing.assert_close(have, want)
            assert_same_state(pipe, plain, exact=False)
        want.square().mean().backward()
        have.square().mean().backward()
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
