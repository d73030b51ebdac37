"""Floats that forward computes of sizes stay sizes: one graph for all that they come to, and the model's results."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

D = 6
LENGTHS = (7, 9, 12, 5, 16, 11)


class Between(nn.Module):
    """A function of sizes between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(D, D).double(), nn.Linear(D, D).double()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(torch.tanh(self.first(x))))


def _resized(x: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.interpolate(x.transpose(1, 2), **how).transpose(1, 2)


FOLLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "size / 2": lambda x: x / (x.shape[1] / 2),
    "power": lambda x: x * x.shape[1] ** -0.5 / x.shape[1] ** 2,
    "round and floor": lambda x: x[:, math.floor(x.shape[1] * 0.2) : round(x.shape[1] * 0.75)],
    "ceil to a multiple": lambda x: F.pad(x, (0, 0, 0, math.ceil(x.shape[1] / 4) * 4 - x.shape[1])),
    "full": lambda x: x + torch.full((x.shape[1], 1), x.shape[1] / 3, dtype=x.dtype),
    "interpolate by a factor": lambda x: _resized(x, scale_factor=x.shape[1] / 4),
    "tensor": lambda x: x * torch.tensor(x.shape[1] / 3),
}
BY_CONDITION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "comparison": lambda x: x * 2 if x.shape[1] / 4 > 2.6 else x * 3,
    "least of two": lambda x: x * min(x.shape[1] / 10, 1.0),
    "absolute value": lambda x: x * abs(x.shape[1] / 2 - 5.5),
    "whole number": lambda x: x * 2 if (x.shape[1] / 2).is_integer() else x,
}
BOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int of a part": lambda x: x[:, : int(x.shape[1] * 0.5)],
    "int": lambda x: x[:, : int(x.shape[1]) - 1],
    "float": lambda x: x / float(x.shape[1]),
    "logarithm": lambda x: x * math.log(x.shape[1]),
    "float first": lambda x: x * (0.5 * x.shape[1]),
    "text of a float": lambda x: x * len(f"{x.shape[1] / 2}"),
    "rest of a float": lambda x: x * ((x.shape[1] / 2) // 1.5),
    "power of a float": lambda x: x * 2.0 ** (x.shape[1] / 8),
    # To sympy that is a product of two, rounded once: 0.1 * 3 * 10 is 3.0000000000000004 and not 3.
    "product of products": lambda x: x[:, : math.floor(x.shape[1] * 0.1 * 5)],
}


def graphs_for(function: Callable[[torch.Tensor], torch.Tensor], lengths: tuple[int, ...] = LENGTHS) -> int:
    """The number of graphs for batches of these lengths. Outputs and gradients are the plain model's."""
    model = Between(function)
    plain = copy.deepcopy(model)
    example = torch.randn(4, lengths[0], D, dtype=torch.float64)
    with fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(example,), profile_budget=0.0, progress=False) as pipe:
        for length in lengths:
            pipe.zero_grad()
            plain.zero_grad()
            x = torch.randn(4, length, D, dtype=torch.float64)
            have, want = pipe(x), plain(x)
            torch.testing.assert_close(have, want)
            have.square().sum().backward()
            want.square().sum().backward()
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)
        return len(pipe._fxpipe.graphs)


@pytest.mark.parametrize("name", FOLLOWED)
def test_two_graphs_run_all_sizes(name: str) -> None:
    assert graphs_for(FOLLOWED[name]) == 2


@pytest.mark.parametrize("name", BY_CONDITION)
def test_a_comparison_of_a_float_is_a_condition(name: str) -> None:
    assert graphs_for(BY_CONDITION[name]) == 3


@pytest.mark.parametrize("name", BOUND)
def test_a_float_that_cannot_be_followed_has_a_graph_for_each_size(name: str) -> None:
    assert graphs_for(BOUND[name], (7, 9, 12, 9)) == 3


def test_a_condition_holds_where_python_says_so() -> None:
    """1.1 * 3 is more than 3.3 in floats."""
    assert graphs_for(lambda x: x * 2 if x.shape[1] * 1.1 > 3.3 else x, (9, 7, 3, 2, 5)) == 3


def test_a_float_that_comes_to_a_plain_number_for_one_batch_is_a_number_there() -> None:
    model = Between(lambda x: x / (x.shape[1] / 2))
    traced = fxpipe.trace(model, (torch.randn(4, 7, D, dtype=torch.float64),))
    assert [node.args[1] for node in traced.nodes if "div" in node.name] == [3.5]


def test_a_mean_by_the_number_of_samples_as_a_float_is_that_of_the_mini_batch() -> None:
    model = Between(lambda x: x.sum((1, 2)).sum() / float(len(x)))
    model.last = nn.Identity()
    plain = copy.deepcopy(model)
    example = torch.randn(4, 5, D, dtype=torch.float64)
    with fxpipe.pipeline(model, ["cpu"], 2, example_args=(example,), progress=False) as pipe:
        for samples in (4, 7, 2, 12):
            x = torch.randn(samples, 5, D, dtype=torch.float64)
            torch.testing.assert_close(pipe(x), plain(x))
