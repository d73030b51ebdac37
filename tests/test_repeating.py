"""Weights of a model that is only looked at: of the distribution that was asked for, few of them drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.inspect.repeating import DRAWN, Repeating


@pytest.mark.parametrize("shape", [(2 * DRAWN + 7,), (300, 1001), (DRAWN + 1, 1)])
def test_large_tensors_repeat_what_was_drawn(shape):
    tensor = torch.empty(shape)
    with Repeating():
        assert nn.init.normal_(tensor, 3.0, 0.5) is tensor
    flat = tensor.view(-1)
    repeated = flat[:DRAWN].repeat(-(-len(flat) // DRAWN))[: len(flat)]
    assert torch.equal(flat, repeated)
    assert flat[:DRAWN].unique().numel() > DRAWN // 2
    assert tensor.mean().item() == pytest.approx(3.0, abs=0.02)
    assert tensor.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("make", [lambda: torch.empty(DRAWN), lambda: torch.empty(600, 400).t()], ids=["small", "t"])
def test_others_are_drawn_as_ever(make):
    torch.manual_seed(0)
    want = make().uniform_(-1, 1)
    torch.manual_seed(0)
    with Repeating():
        have = make().uniform_(-1, 1)
    assert torch.equal(want, have)


def test_a_module_is_made_with_gradients():
    with Repeating():
        layer = nn.Linear(512, 512)
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf
    assert layer.weight.abs().max() <= 512**-0.5
    with Repeating(), torch.device("meta"):
        assert nn.Linear(512, 512).weight.is_meta
