"""Weights of a model that is only looked at: of the distribution that was asked for, few of them drawn."""

import pytest
import torch
from torch import nn

from fxpipe.inspect.random_weights import DRAWN_NUMBERS, RepeatedRandomWeights


@pytest.mark.parametrize("shape", [(2 * DRAWN_NUMBERS + 7,), (300, 1001), (DRAWN_NUMBERS + 1, 1)])
def test_large_tensors_repeat_what_was_drawn(shape):
    tensor = torch.empty(shape)
    with RepeatedRandomWeights():
        assert nn.init.normal_(tensor, 3.0, 0.5) is tensor
    flat = tensor.view(-1)
    repeated = flat[:DRAWN_NUMBERS].repeat(-(-len(flat) // DRAWN_NUMBERS))[: len(flat)]
    assert torch.equal(flat, repeated)
    assert flat[:DRAWN_NUMBERS].unique().numel() > DRAWN_NUMBERS // 2
    assert tensor.mean().item() == pytest.approx(3.0, abs=0.02)
    assert tensor.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(DRAWN_NUMBERS), lambda: torch.empty(600, 400).t()], ids=["small", "t"]
)
def test_others_are_drawn_as_ever(make):
    torch.manual_seed(0)
    want = make().uniform_(-1, 1)
    torch.manual_seed(0)
    with RepeatedRandomWeights():
        have = make().uniform_(-1, 1)
    assert torch.equal(want, have)


def test_a_module_is_made_with_gradients():
    with RepeatedRandomWeights():
        layer = nn.Linear(512, 512)
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf
    assert layer.weight.abs().max() <= 512**-0.5
    with RepeatedRandomWeights(), torch.device("meta"):
        assert nn.Linear(512, 512).weight.is_meta


def test_what_is_read_or_written_to_has_been_drawn():
    with RepeatedRandomWeights():
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


def test_numbers_of_a_generator_are_drawn_at_once():
    source = torch.Generator()
    with RepeatedRandomWeights():
        first, second = (torch.empty(300, 1001).normal_(generator=source.manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)


def test_weights_on_the_cpu_of_a_model_that_is_on_meta():
    with torch.device("meta"), RepeatedRandomWeights():
        tensor = torch.empty(300, 1001, device="cpu").normal_(3.0, 0.5)
    assert tensor.mean().item() == pytest.approx(3.0, abs=0.02)
