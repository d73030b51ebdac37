"""What the user changes in a model after planning is followed at the next step."""

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_state, assert_step
from torch import nn

import fxpipe


class Changing(nn.Module):
    """Its forward goes by much."""

    factor = 2.0  # of the class

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6)])
        self.norms[1].weight = self.norms[0].weight
        self.plain = [nn.LeakyReLU(0.1), nn.Dropout(1.0).eval()]
        self.names = {"a"}
        self.ordered = collections.OrderedDict(a=[1.0])
        self.array = np.ones(2)
        self.queue = collections.deque([1.0])
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[1](self.norms[0](self.first(x))) * self.factor * self.ordered["a"][0] * self.queue[0]
        x = self.plain[1](self.plain[0](x))
        x = x if self.mask is None else x * self.mask
        x = x * float(self.array[1])
        x = x * getattr(self, "gain", 1.0) * (3 if "b" in self.names else 1)
        x = x * (2 if x.requires_grad else 1) * (0.5 if self.second.weight.requires_grad else 1)
        return self.second(x)


def _freeze_first(m: Changing) -> None:
    m.first.requires_grad_(False)
    m.norms.requires_grad_(False)


def _tie_buffers(m: Changing) -> None:
    m.norms[1].running_mean, m.norms[1].running_var = m.norms[0].running_mean, m.norms[0].running_var


NARROW = nn.Linear(6, 3)
CHANGES: dict[str, Callable[[Changing], Any]] = {
    "an attribute": lambda m: setattr(m, "factor", 0.7),
    "a name in a set": lambda m: m.names.add("b"),
    "an item in an ordered dict": lambda m: m.ordered["a"].__setitem__(0, 0.3),
    "an item of a queue": lambda m: m.queue.__setitem__(0, 0.3),
    "an item of an array": lambda m: m.array.__setitem__(1, 0.3),
    "an attribute of a module in a list": lambda m: setattr(m.plain[0], "negative_slope", 0.8),
    "the mode of a module in a list": lambda m: m.plain[1].train(),
    "a bias": lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(6))),
    "a buffer": lambda m: setattr(m, "mask", torch.full((6,), 0.4)),
    "a weight untied": lambda m: setattr(m.norms[1], "weight", nn.Parameter(torch.full((6,), 0.7))),
    "weights tied": lambda m: setattr(m.second, "weight", m.first.weight),
    "a layer of another shape": lambda m: setattr(m, "second", copy.deepcopy(NARROW)),
    "a parameter": lambda m: setattr(m, "gain", nn.Parameter(torch.full((6,), 0.6))),
    "forward": lambda m: setattr(m.second, "forward", functools.partial(F.linear, weight=m.second.weight)),
    "frozen": _freeze_first,
    "frozen where it is asked": lambda m: m.second.requires_grad_(False),
    "tied buffers": _tie_buffers,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_followed(name):
    model = copy.deepcopy(plain := Changing())
    with fxpipe.pipeline(model, ["cpu", "cpu"], 1) as pipe:
        assert_step(pipe, plain, torch.randn(8, 6))
        for m in (model, plain):
            CHANGES[name](m)
        for _ in range(2):
            assert_step(pipe, plain, torch.randn(8, 6))
            assert_same_state(pipe, plain, exact=False)
        assert len(pipe._fxpipe.graphs) == 2


def test_what_forward_does_not_ask_needs_no_other_graph():
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2) as pipe:
        assert_step(pipe, copy.deepcopy(model), torch.randn(8, 6))
        model[0].requires_grad_(False)
        assert_step(pipe, copy.deepcopy(model), torch.randn(8, 6))
        assert len(pipe._fxpipe.graphs) == 1


class Told(Layered, first=6, second=6):
    def forward(self, x: torch.Tensor, names: set[str], factors: np.ndarray) -> torch.Tensor:
        x = self.first(x) * float(factors.sum())
        return self.second(x * 2 if "b" in names else x)


def test_inputs_that_are_no_tensors_may_change_inside():
    model = Told()
    x, names, factors = torch.randn(8, 6), {"a"}, np.ones(1)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2) as pipe:
        for step in range(4):
            if step == 1:
                names.add("b")
            if step == 2:
                factors[0] = 3.0
            if step == 3:
                factors = np.full(2, 3.0)
            torch.testing.assert_close(pipe(x, names, factors), model(x, names, factors))
        assert len(pipe._fxpipe.graphs) == 4
        pipe(x, {"a", "b"}, np.full(2, 3.0))
        assert len(pipe._fxpipe.graphs) == 4
