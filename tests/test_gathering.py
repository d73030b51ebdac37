"""What is compared, and what is run, to see whether micro-batches may be put together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError
from fxpipe.tracing.checking import gathering
from fxpipe.tracing.checking.check import PIECE, agree

EXAMPLE = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))


class Head(nn.Module):
    """A linear map at the end."""

    def __init__(self, before=torch.tanh, after=lambda y: y):
        super().__init__()
        self.lin, self.head = nn.Linear(6, 6), nn.Linear(6, 9)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.head(self.before(self.lin(x))))


@pytest.fixture
def maps(monkeypatch):
    """Linear maps that run while halves are compared."""
    seen = []

    def noting(node, values_of):
        if node.target is F.linear:
            seen.append(node.name)
        return call(node, values_of)

    call = gathering.call
    monkeypatch.setattr(gathering, "call", noting)
    return seen


def test_a_last_map_of_samples_is_not_run(maps):
    fxpipe.trace(Head(), (EXAMPLE,))
    assert len(maps) == 3
    assert len({*maps}) == 1


@pytest.mark.parametrize(
    "model",
    [
        Head(after=torch.relu),
        Head(after=lambda y: (y, y.relu())),
        Head(after=lambda y: y.mean((1, 2))),
        Head(before=lambda h: h.relu_().sigmoid_()),
    ],
    ids=["goes on", "has other users", "is summed", "is of what is written to"],
)
def test_any_other_map_is_run(maps, model):
    fxpipe.trace(model, (EXAMPLE,))
    assert len(maps) == 6


@pytest.mark.parametrize("function", [lambda h: h.cumsum(0), lambda h: h - h.mean(0), lambda h: h.flip(0)])
def test_samples_that_act_on_each_other_before_it(function):
    with pytest.raises(ArgumentError, match=r"output 0 \(head, .*put together"):
        fxpipe.trace(Head(function), (EXAMPLE,))


@pytest.mark.parametrize("places", [1, 2, 3])
def test_rows_that_go_round(places):
    with pytest.raises(ArgumentError, match="put together"):
        fxpipe.trace(Head(lambda h: h.roll(places, 0)), (torch.cat([EXAMPLE, -EXAMPLE]),))


def test_a_map_with_weights_of_a_sample():
    class Mixing(nn.Module):
        def forward(self, x):
            return F.linear(torch.tanh(x), x[0])

    with pytest.raises(ArgumentError, match="put together"):
        fxpipe.trace(Mixing(), (EXAMPLE,))


@pytest.mark.parametrize("shape", [(0,), (3,), (2, PIECE)])
def test_values_agree_to_the_largest_of_all_pieces(shape):
    """A number among small ones may be wrong by what the largest one is rounded by, wherever that is."""
    want = torch.ones(shape)
    have = want.clone()
    assert agree(want, have)
    if not want.numel():
        return
    have.view(-1)[-1] += 1e-3
    assert not agree(want, have)
    want.view(-1)[0] = have.view(-1)[0] = 1e3
    assert agree(want, have)
    want.view(-1)[-1] = have.view(-1)[-1] = float("nan")
    assert agree(want, have)
    have.view(-1)[-1] = 1.0
    assert not agree(want, have)
