"""Weights of a model that is only looked at: of the distribution that was asked for, few of them drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.inspect import repeating
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


def test_what_is_read_or_written_to_has_been_drawn():
    with Repeating():
        tensor = torch.empty(300, 1001).normal_(3.0, 0.5)
        assert tensor.mean().item() == pytest.approx(3.0, abs=0.02)
        part = torch.empty(300, 1001).normal_(3.0, 0.5)
        part[7].zero_()
        first = torch.empty(300, 1001).normal_(3.0, 0.5)
        first.data.uniform_(-1, 1)
        embedding = nn.Embedding(300, 1001, padding_idx=5)
    assert tensor.mean().item() == pytest.approx(3.0, abs=0.02)
    assert not part[7].any()
    assert part[8].all()
    assert 0.9 < first.abs().max() <= 1
    assert not embedding.weight[5].any()
    assert embedding.weight[6].all()


def test_each_storage_gets_numbers_once_and_what_has_gone_none(monkeypatch):
    filled = []
    fill = repeating._Draw.fill

    def noting(draw):
        filled.append(draw.storage.expired())
        fill(draw)

    monkeypatch.setattr(repeating._Draw, "fill", noting)
    with Repeating():
        kept, tied = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
        for layer in (kept, tied):
            nn.init.normal_(layer.weight, 3.0, 0.5)
        tied.weight = kept.weight
        assert filled == []
    assert filled == [False, True]
    assert kept.weight.mean().item() == pytest.approx(3.0, abs=0.02)


def test_numbers_of_a_generator_are_drawn_at_once():
    source = torch.Generator()
    with Repeating():
        first, second = (torch.empty(300, 1001).normal_(generator=source.manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)


def test_weights_on_the_cpu_of_a_model_that_is_on_meta():
    with torch.device("meta"), Repeating():
        tensor = torch.empty(300, 1001, device="cpu").normal_(3.0, 0.5)
    assert tensor.mean().item() == pytest.approx(3.0, abs=0.02)
