"""Parameters move between the CPU and devices of any make, and stay the objects that they are."""

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe._torch.tensor_data import replace_data

pytestmark = pytest.mark.simulated


def test_a_parameter_that_moves_keeps_its_gradient_and_its_hooks():
    """torch refuses `.data =` between the CPU and a backend that is not its own."""
    layer, calls = nn.Linear(2, 1, bias=False), []
    weight = layer.weight
    weight.register_hook(lambda gradient: calls.append("gradient") or gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    layer(torch.ones(1, 2)).sum().backward()
    gradient = weight.grad
    for device in ("sim:1", "cpu", "sim:2"):
        calls.clear()
        replace_data(weight, weight.data.to(device))
        assert (weight.device, weight.grad.device) == (torch.device(device), torch.device(device))
        assert layer.weight is weight
        assert weight.grad is gradient
        weight.grad = None
        layer(torch.ones(1, 2, device=device)).sum().backward()
        assert weight.grad.tolist() == [[2, 2]]
        assert calls == ["gradient", "accumulated"]
        gradient = weight.grad


def test_a_parameter_that_a_graph_holds_is_not_moved_away_from_it():
    layer, x = nn.Linear(2, 1), torch.ones(1, 2)
    loss = layer(x).sum()
    with pytest.raises(RuntimeError, match="incompatible tensor type") as caught:
        replace_data(layer.weight, layer.weight.data.to("sim:0"))
    assert "drop outputs and losses" in caught.value.__notes__[0]
    loss.backward()
    assert layer.weight.grad is not None


def test_a_model_on_the_cpu_becomes_a_pipeline_of_devices():
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 4)
    model = copy.deepcopy(plain)
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1), [*model.parameters()]
    with fxpipe.pipeline(model, ["sim:0", "sim:1"], 2, example_args=(x,)) as pipe:
        pipe(x).sum().backward()
        plain(x).sum().backward()
        optimizer.step()
        torch.optim.SGD(plain.parameters(), 0.1).step()
        for parameter, moved, want in zip(before, pipe.parameters(), plain.parameters(), strict=True):
            assert parameter is moved
            torch.testing.assert_close(moved.cpu(), want)
