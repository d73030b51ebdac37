"""What is compared, and what is run, to see whether micro-batches may be put together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError

EXAMPLE = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))


class Head(nn.Module):
    """A linear map at the end."""

    def __init__(self, before=torch.tanh, after=lambda y: y):
        super().__init__()
        self.lin, self.head = nn.Linear(6, 6), nn.Linear(6, 9)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.head(self.before(self.lin(x))))


class Sorting(Layered, head=(6, 9), descending=lambda: False):
    def forward(self, x, keys):
        return self.head(x[keys.argsort(stable=True, descending=self.descending)])


@pytest.mark.parametrize(("samples", "descending"), each_once([2, 3, 4, 7], [False, True]))
def test_rows_that_are_sorted_where_samples_are_in_order_already(samples, descending):
    keys = torch.randn(samples).sort(descending=descending).values
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(Sorting(descending=descending), (torch.randn(samples, 5, 6), keys))


@pytest.mark.parametrize("keys", [[0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1], [0, 0, 1]])
def test_rows_that_are_sorted_where_some_are_equal(keys):
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(Sorting(), (torch.randn(len(keys), 5, 6), torch.tensor(keys)))


def test_a_mask_that_is_the_same_for_any_index_of_a_sample():
    def attend(h, mask):
        mask = torch.vmap(torch.vmap(mask, (None, 0)), (0, None))(torch.arange(len(h)), torch.arange(5))
        return F.scaled_dot_product_attention(h, h, h, mask[:, None])

    assert fxpipe.trace(Head(lambda h: attend(h, lambda b, k: k > 0)), (EXAMPLE,), chunks=2).out_dims == (0,)
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(Head(lambda h: attend(h, lambda b, k: (k > 0) | (b > 5))), (EXAMPLE,), chunks=2)


def test_rows_that_are_sorted_beside_a_mean():
    class Both(Sorting):
        def forward(self, x, keys):
            return self.head(x).square().mean(), super().forward(x, keys)

    with pytest.raises(ArgumentError, match=r"output 1 .*samples act on each other"):
        fxpipe.trace(Both(), (torch.randn(4, 5, 6), torch.arange(4)))


def test_a_mean_and_rows_of_parts_of_two_sizes():
    x = torch.randn(3, 5, 6) * torch.tensor([1.0, 2.0, 5.0]).view(3, 1, 1)
    assert fxpipe.trace(Head(after=lambda y: (torch.tanh(y).square().mean(), y)), (x,)).out_dims == ("mean", 0)


MEETING = {
    "rows that go round": (lambda h: h.roll(1, 0), torch.cat([EXAMPLE, -EXAMPLE])),
    "samples far behind": (lambda h: h * 2 + h[8:].sum(0), EXAMPLE.repeat(3, 1, 1)),
    "a sample that parts of the batch do not have": (lambda h: h + h[3], EXAMPLE.repeat(2, 1, 1)),
    "complex rows in another order": (lambda h: torch.view_as_real(torch.fft.fft(h).flip(0)).mean(-1), EXAMPLE),
    "doubles beside a constant of fewer digits": (lambda h: h + 1e-5 * h.mean(0) * torch.ones(6), EXAMPLE.double()),
    "a map with weights of a sample": (lambda h: F.linear(torch.tanh(h), h[0, [0, 1, 2, 3, 4, 0]]), EXAMPLE),
}


@pytest.mark.parametrize("name", MEETING)
def test_samples_that_act_on_each_other(name):
    function, x = MEETING[name]
    with pytest.raises(ArgumentError, match=r"samples act on each other at .*test_sample_rows.py:\d+.*put together"):
        fxpipe.trace(Head(function).to(x.dtype), (x,), chunks=2)


@pytest.mark.parametrize("samples", [2, 3])
def test_what_is_made_double_has_the_digits_that_it_had(samples):
    assert fxpipe.trace(Head(after=lambda y: y.tanh().double().exp()), (torch.randn(samples, 6),)).out_dims == (0,)


class Captions(Layered, lin=6):
    """Sentences, the longest first: of those that still go on, only the number is known."""

    def forward(self, x, lengths):
        h, out = x.new_zeros(x.shape[0], 6), []
        for place in range(x.shape[1]):
            go_on = torch.arange(x.shape[0]) < (lengths > place).sum()
            h = torch.where(go_on[:, None], torch.tanh(self.lin(h) + x[:, place]), h)
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("lengths", [[5, 4], [5, 4, 3], [5, 4, 4, 4, 3, 2, 2, 1]])
def test_samples_that_are_right_in_their_order_alone_are_refused(lengths):
    given = torch.randn(len(lengths), 5, 6), torch.tensor(lengths)
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(Captions(), given)


@pytest.mark.parametrize(
    ("function", "samples"),
    each_once(
        [lambda y: (y[0::2], y[1::2]), lambda y: y[0::2] - y[1::2], lambda y: y.view(-1, 2, 9).sum(1)],
        [4, 6, 8, 10, 12],
    ),
)
def test_samples_that_belong_together_by_two(function, samples):
    assert set(fxpipe.trace(Head(after=function), (torch.randn(samples, 6),), chunks=samples // 2).out_dims) == {0}


@torch.library.custom_op("fxpipe_test_gathering::shorten", mutates_args=())
def shorten(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    if (lengths.diff() > 0).any():
        raise ValueError("the longest come first")
    return x * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]


@shorten.register_fake
def _(x, lengths):
    return torch.empty_like(x)


@pytest.mark.parametrize("lengths", [[5, 4], [5, 4, 4, 2], [5, 4, 4, 2, 2, 1]])
def test_samples_that_must_come_in_an_order_come_in_it(lengths):
    class Shortening(nn.Module):
        def forward(self, x, lengths):
            return shorten(x, lengths)

    fxpipe.trace(Shortening(), (torch.randn(len(lengths), 5, 6), torch.tensor(lengths)))


class Masked(Layered, q=6, k=6, mask=lambda: torch.ones(5, 5).triu(1).bool()):
    """Scores with very large numbers among them."""

    def forward(self, x):
        scores = (self.q(x) @ self.k(x).transpose(1, 2)).masked_fill(self.mask, -1e9)
        return self.q(scores.flip(0).softmax(-1) @ x)


class Wide(nn.Module):
    """Attention over the samples, its queries, keys and values made by one wide map."""

    def __init__(self, width=512):
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, width), nn.Embedding(16, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.normal_(self.qkv.weight, std=2 * width**-0.5)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        q, k, v = self.qkv(x).transpose(0, 1).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))


@pytest.mark.parametrize(("model", "shape"), [(Masked, (8, 5, 6)), (Wide, (8, 5))])
def test_samples_that_act_on_each_other_in_attention(model, shape):
    x = torch.randint(100, shape) if model is Wide else torch.randn(shape)
    with pytest.raises(ArgumentError, match="put together"):
        fxpipe.trace(model().eval(), (x,))
