"""Samples that act on each other where the graph says so, whatever the values say; and models that merely look so."""

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError

OPEN = nn.Parameter(torch.ones(()))
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(3))


class Between(Layered, before=8, after=8, norm=lambda: nn.LayerNorm(8), gate=lambda: nn.Parameter(torch.zeros(()))):
    """A function between two maps, behind a gate that is closed at first."""

    def forward(self, x):
        h = torch.tanh(self.before(x))
        return self.after(self.norm(h + self.gate * self.function(h)))


def written_to_one(reads):
    """`reads` of a copy in which one element of each row is 0."""

    def function(h):
        h = h * 1
        h[..., 1] = 0
        return reads(h)

    return function


def filled_bit_by_bit(h):
    out = torch.zeros_like(h)
    out.unflatten(-1, (2, 4))[:, :, 0].copy_(h[..., :4])
    out.narrow(-1, 4, 4).fill_(1.0)
    return out - out.mean(0)


MIXING = {
    "softmax": lambda h: h.softmax(0),
    # in a part of the elements only
    "a part written to": written_to_one(lambda h: h - h.mean(0)),
    "filled bit by bit": filled_bit_by_bit,
    "samples sorted in part": written_to_one(lambda h: h.sort(0).values),
}


@pytest.mark.parametrize("name", MIXING)
def test_neither_a_closed_gate_nor_a_write_to_a_part_hides_anything(name):
    model = Between(function=MIXING[name])
    if name != "softmax":
        model.norm = nn.Identity()  # it may take out again what not all elements have
    with pytest.raises(ArgumentError, match=r"samples act on each other at .*test_batch_mixing.py:\d+.*put together"):
        fxpipe.trace(model, (X,))


def rescaled(h):
    return F.linear(h / h.abs().amax((0, 1)), torch.eye(8)) * h.abs().amax((0, 1))


def masked(h, samples=torch.arange):
    """Times a mask of ones, made in forward and read by indices of samples and places, as masks of attention are."""
    return h * torch.ones(h.shape[0], 5).bool()[samples(h.shape[0])[:, None], torch.arange(5)][..., None]


def written_in_part(h):
    h = h * 1
    h[..., 1] = 0
    h[..., 4:] += h[..., :4]
    return h


RIGHT = {
    "written to in part": written_in_part,
    "scaled and back": rescaled,
    "a mask made in forward": masked,
    "numbers for all": lambda h: h * h.new([1.0] * 8),
    "a size for an old constructor": lambda h: h * torch.FloatTensor(h.size()).fill_(2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_taken_out_again_is_no_mixing(name):
    assert fxpipe.trace(Between(function=RIGHT[name], gate=OPEN), (X,), chunks=2).out_dims == (0,)


class Speech(Layered, body=8, head=(8, 6)):
    def forward(self, x, labels):
        h = self.head(self.body(x * torch.rand(8)))  # for all samples, which no tail has
        counts = labels.ge(0).sum(1)
        frames, chosen = torch.full_like(counts, 5), labels.masked_select(labels >= 0)
        return F.ctc_loss(h.log_softmax(-1).transpose(0, 1), chosen, frames, counts)


def test_labels_that_a_mask_selects_are_those_of_their_samples():
    labels = torch.tensor([[1, 2], [3, -1], [2, 4], [5, -1], [1, -1], [2, 3]])
    assert fxpipe.trace(Speech(), (X, labels), chunks=2).out_dims == ("mean",)


HIDDEN = {  # right for all values, which nothing tells
    "times zero": lambda h: h + 0.0 * h.mean(0),
    "a mask of other samples": lambda h: masked(h, lambda b: torch.arange(b).flip(0)),
    "of what is constant": lambda h: h + torch.zeros_like(h).mean(0) * h.mean(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_cannot_be_told_is_refused(name):
    with pytest.raises(ArgumentError, match="samples act on each other at"):
        fxpipe.trace(Between(function=HIDDEN[name], gate=OPEN), (X,), chunks=2)


class Own(torch.autograd.Function):
    """A softmax that no graph knows."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.softmax(-1))
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


class Padded(Layered, before=8, after=8):
    """Of a batch that is padding only, all values are alike."""

    def forward(self, x, ids):
        return self.after(self.function(self.before(x) * (ids > 0)[..., None]))


PADDING = torch.zeros(6, 5, dtype=torch.long)


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_values_that_hide_what_an_unknown_function_does_with_a_mean_are_replaced(batch):
    model = Padded(function=lambda h: Own.apply(h - h.mean(0)))
    with pytest.raises(
        ArgumentError, match=r"samples act on each other at .*test_batch_mixing.py:\d+ \(mean goes over"
    ):
        fxpipe.trace(model, (X[:batch], PADDING[:batch]))


def test_outputs_of_one_number_for_each_sample_are_asked_as_well():
    with pytest.raises(ArgumentError, match=r"samples act on each other at .*:\d+ \(_1_mean goes over the samples\)"):
        fxpipe.trace(nn.Sequential(nn.Linear(8, 8), Total(), nn.Linear(1, 64)), (X[:, 0],))


class Total(nn.Module):
    def forward(self, h):
        h = h * (h > 1e9)
        return Own.apply(h - h.mean(0)).square().sum(-1, keepdim=True)


def test_two_samples_of_several_values_are_told_apart():
    """A mean that comes back to samples, behind one that does not, of samples in another order."""

    def function(h):
        order = h[:, 0, 0].argsort(descending=True)
        first = Own.apply(h[order] - h[order].mean((0, 2), keepdim=True))
        return Own.apply(first.tanh() - first.mean(0))

    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(Padded(function=function), (X, PADDING))


def sorted_by_first(h):
    """In another order, of which only a constant is left."""
    order = h[:, 0, 0].argsort(descending=True)
    placed = h[order]
    return torch.empty_like(h).index_copy(0, order, Own.apply(placed - placed.amax((0, 2), keepdim=True)))


@pytest.mark.parametrize(
    "function", [lambda h: Own.apply(h - h.mean((0, 2), keepdim=True)), sorted_by_first], ids=["softmax", "sorted"]
)
def test_an_unknown_function_may_take_a_mean_out_again(function):
    assert fxpipe.trace(Padded(function=function), (X, PADDING), chunks=2).out_dims == (0,)
