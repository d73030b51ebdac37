"""Parameters move between the CPU and devices of any make, and stay the objects that they are."""

import copy

import pytest
import torch
from helpers.layered import Layered
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


def test_a_graph_from_before_a_parameter_has_moved_does_not_lose_its_gradient():
    layer, x = nn.Linear(2, 1), torch.ones(1, 2)
    loss = layer(x).sum()
    replace_data(layer.weight, layer.weight.data.to("sim:0"))
    with pytest.raises(fxpipe.errors.StateError, match="call backward before, or forward again"):
        loss.backward()
    assert layer.weight.grad is None


class MakesTensors(Layered, first=4, last=(4, 2), shifts=lambda: [torch.ones(4), torch.full((4,), 2.0)]):
    """Runs on the CPU only, as it stands."""

    def forward(self, x):
        x = self.first(x) + self.shifts[0] + torch.arange(4.0)
        return self.last(x * self.shifts[1]) + torch.zeros(2)


def test_a_forward_that_makes_tensors_on_the_cpu_becomes_a_pipeline_of_devices():
    plain, x = MakesTensors(), torch.randn(6, 4)
    with fxpipe.pipeline(copy.deepcopy(plain), ["sim:0", "sim:1"], 2, example_args=(x,)) as pipe:
        for model in (pipe, plain):
            model(x).sum().backward()
        for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.grad.cpu(), want.grad)
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(x).cpu(), plain.eval()(x))


def test_an_error_of_a_forward_is_that_of_the_device_on_which_the_model_is():
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError(f"not on {self.weight.device.type}")

    for device in ("sim", "cpu"):
        with pytest.raises(ValueError, match=f"not on {device}"):
            fxpipe.pipeline(Fails(2, 2).to(device), ["sim:0", "sim:1"], 2, example_args=(torch.randn(4, 2),))
