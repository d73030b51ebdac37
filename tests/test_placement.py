"""Model and inputs come to one device while they are traced, and the model goes back."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from fxpipe.tracing.placement import moved, on_one_device


def test_a_model_on_one_device_stays_there():
    model = nn.Linear(2, 2)
    data = model.weight.data_ptr()
    with on_one_device(model) as device:
        assert device == torch.device("cpu")
        assert model.weight.data_ptr() == data


def test_a_model_without_tensors_leaves_its_inputs_alone():
    x = torch.randn(2)
    with on_one_device(nn.ReLU()) as device:
        assert moved((x,), device) == (x,)


def test_inputs_that_are_there_already_are_not_copied():
    x, nested = torch.randn(2), {"a": [torch.randn(2), None, 3]}
    have = moved((x, nested), torch.device("cpu"))
    assert have[0] is x
    assert have[1]["a"][0] is nested["a"][0]


def test_inputs_from_elsewhere_are_moved_and_still_require_grad():
    x = torch.randn(2, requires_grad=True)
    (there,) = moved((x,), torch.device("meta"))
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
