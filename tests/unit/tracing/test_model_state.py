"""Model and inputs come to one device while they are traced, and the model goes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.tracing.model_state import move_inputs, on_cpu, on_one_device, without_gradients


def test_a_model_on_one_device_stays_there():
    model = nn.Linear(2, 2)
    data = model.weight.data_ptr()
    with on_one_device(model) as device:
        assert device == torch.device("cpu")
        assert model.weight.data_ptr() == data


def test_a_model_without_tensors_leaves_its_inputs_alone():
    x = torch.randn(2)
    with on_one_device(nn.ReLU()) as device:
        assert move_inputs((x,), device) == (x,)


def test_inputs_that_are_there_already_are_not_copied():
    x, nested = torch.randn(2), {"a": [torch.randn(2), None, 3]}
    have = move_inputs((x, nested), torch.device("cpu"))
    assert have[0] is x
    assert have[1]["a"][0] is nested["a"][0]


def test_inputs_from_elsewhere_are_moved_and_still_require_grad():
    x = torch.randn(2, requires_grad=True)
    (there,) = move_inputs((x,), torch.device("meta"))
    assert there.device.type == "meta"
    assert there.requires_grad
    assert there.is_leaf
    assert x.device.type == "cpu"


def test_weights_of_an_rnn_are_put_side_by_side_where_they_come_to(monkeypatch):
    """Each moves by itself. On a GPU cuDNN then gathered them at every call, and warned."""
    model, x, flattened = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)), torch.randn(4, 4, 4), []
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda self: flattened.append(self))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)):
        assert model[1] in flattened


@pytest.fixture
def cpu_is_elsewhere(monkeypatch):
    """Stands for a second device: `cpu()` returns other numbers, and torch refuses their gradients in the same way."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.double)


def test_gradients_are_set_aside_while_parameters_are_on_the_cpu(cpu_is_elsewhere):
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0](torch.randn(4, 2)).sum().backward()
    model[1](torch.tensor([1])).sum().backward()
    model[2].bias.grad = model[0].bias.grad  # two parameters, one gradient
    model.register_buffer("scale", torch.ones(2, requires_grad=True))
    model.scale.grad = torch.ones(2)
    held = [*model.parameters(), model.scale]
    gradients, data = [p.grad for p in held], [p.data_ptr() for p in held]
    with on_cpu(held):
        assert all(p.grad is None and p.dtype == torch.float64 for p in held)
        with without_gradients(model):
            model[0](torch.randn(4, 2).double()).sum().backward()
        assert all(p.grad is None for p in held)
    assert all(p.grad is gradient for p, gradient in zip(held, gradients, strict=True))
    assert [p.data_ptr() for p in held] == data


def test_gradients_come_back_where_the_block_raises(cpu_is_elsewhere):
    model = nn.Linear(2, 2)
    model(torch.randn(4, 2)).sum().backward()
    gradient = model.weight.grad
    with pytest.raises(RuntimeError, match="dtype"), on_cpu([*model.parameters()]):
        model(torch.randn(4, 2))  # not of the dtype that the weights have there
    assert model.weight.grad is gradient
