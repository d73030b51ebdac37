"""The batch is found among sizes that equal it, and a pipeline made from one example is right at every batch size.

Each model is traced on an example whose batch size equals another of its sizes (T, H, channels, features: all are 4),
or is a single sample. The oracle is the plain model on the whole batch.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import ArgumentError, TraceError

SIZES = (4, 1, 2, 3, 5, 32)


class Attention(Layered, position=lambda: nn.Embedding(4, 4), qkv=(4, 12), out=4):
    """x: [b, 4, 4], mask: [4, 4], positions: [4]"""

    def forward(self, x, mask, positions):
        b, t, d = x.shape
        x = x + self.position(positions)
        q, k, v = self.qkv(x).view(b, t, 2, 3 * d // 2).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d)), mask


class Images(Layered, conv=lambda: nn.Conv2d(4, 4, 3, padding=1), scale=4, head=4):
    """x: [b, 4, 4, 4]: channels, height and width are equal too."""

    def forward(self, x):
        y = F.relu(self.conv(x))
        y = y * self.scale(y.mean((2, 3)))[:, :, None, None]  # squeeze and excitation
        y = F.interpolate(F.pad(y, (1, 1, 1, 1)), size=x.shape[-2:])
        return self.head(y.permute(0, 2, 3, 1)).flatten(1)


class Rows(Layered, a=(6, 4), b=(4, 6)):
    """x: [b, 4, 6], handled as [b * 4, 6]; a table of [4, 6] is added to each sample."""

    def forward(self, x, table):
        b, t, d = x.shape
        rows = self.b(torch.tanh(self.a((x + table).view(b * t, d))))
        return rows.view(-1, t, d) * torch.arange(t).view(1, t, 1), rows


class TimeFirst(Layered, lstm=lambda: nn.LSTM(4, 4), head=4):
    """x: [4, b, 4], memory: [b, 4]"""

    def forward(self, x, memory):
        h = x.new_zeros(1, x.shape[1], 4)
        y, (_, c) = self.lstm(x, (h, memory[None]))
        return self.head(y), c[-1]


class Pairs(Layered, a=4, b=4):
    """Samples as queries over features: x: [b, 4], keys: [4, 4]. All products of equal sizes are possible."""

    def forward(self, x, keys):
        weights = torch.softmax(self.a(x) @ keys.T / x.shape[-1] ** 0.5, -1)
        eye = torch.eye(x.shape[1])
        return self.b(weights @ keys) @ eye, x.new_ones(x.shape[0], x.shape[0]).sum(1) / x.shape[0]


class Lengths(Layered, a=4):
    """x: [b, 4, 4], lengths: [b]; scale: a number of no dimensions"""

    def forward(self, x, lengths, scale):
        mask = torch.arange(x.shape[1])[None] < lengths[:, None]
        y = self.a(x * scale).masked_fill(~mask[..., None], 0)
        return {"mean": y.sum(1) / lengths[:, None], "mask": mask, "length": x.shape[1]}


MASK = torch.tril(torch.ones(4, 4)).bool()
CASES: dict[type[nn.Module], Any] = {  # inputs for a number of samples, in_dims and out_dims, whether in_dims are given
    Attention: (lambda b: (torch.randn(b, 4, 4), MASK, torch.arange(4)), ((0, None, None), (0, None)), False),
    Images: (lambda b: (torch.randn(b, 4, 4, 4),), ((0,), (0,)), False),
    Rows: (lambda b: (torch.randn(b, 4, 6), torch.randn(4, 6)), ((0, None), (0, 0)), False),
    TimeFirst: (lambda b: (torch.randn(4, b, 4), torch.randn(b, 4)), ((1, 0), (1, 0)), True),
    Pairs: (lambda b: (torch.randn(b, 4), torch.randn(4, 4)), ((0, None), (0, 0)), True),
    Lengths: (
        lambda b: (torch.randn(b, 4, 4), torch.randint(1, 5, (b,)), torch.tensor(2.0)),
        ((0, 0, None), (0, 0, None)),
        False,
    ),
}


def sum_of_squares(output: Any) -> torch.Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.square().sum() for leaf in leaves]).sum()


@pytest.mark.parametrize("example", [4, 1])
@pytest.mark.parametrize("kind", CASES)
def test_pipeline_of_one_example_is_the_model_at_every_size(kind, example):
    model = kind()
    make_inputs, dims, are_given = CASES[kind]
    in_dims = dims[0] if are_given else None
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=make_inputs(example), in_dims=in_dims) as pipe:
        for samples in SIZES:
            inputs = make_inputs(samples)
            ours, want = pipe(*inputs), plain(*inputs)
            torch.testing.assert_close(ours, want)
            sum_of_squares(ours).backward()
            sum_of_squares(want).backward()
            for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
            model.zero_grad()
            plain.zero_grad()
        assert len(pipe._fxpipe.graphs) == 1  # one trace answers for all of them
        traced = pipe._fxpipe.graphs[0][0].traced
        assert (traced.in_dims, traced.out_dims) == dims


def test_single_row_beside_a_single_sample_is_another_graph_for_more_samples():
    """positions: [1, T] may be the batch of the example with one sample; of that with four it is not."""
    model = Attention().eval()
    positions = torch.arange(4)[None]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(1, 4, 4), MASK, positions)) as pipe:
        for samples in SIZES:
            x = torch.randn(samples, 4, 4)
            torch.testing.assert_close(pipe(x, MASK, positions), model(x, MASK, positions))


class Squeezes(Layered, a=4, b=4):
    def forward(self, x):
        return self.squeeze(self.b(self.a(x)))


@pytest.mark.parametrize("example", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "out", "squeeze"),
    [
        ((1, 4), 4, lambda y: y.squeeze()),
        ((4,), 1, lambda y: y.squeeze()),
        ((4,), 4, lambda y: y.squeeze(0)),
        ((1, 4), 4, lambda y: torch.squeeze(y, dim=(0, 1)).sigmoid()),
    ],
    ids=["all", "head", "first", "both"],
)
def test_squeeze_leaves_micro_batches_of_one_sample_their_batch(shape, out, squeeze, example):
    plain = copy.deepcopy(model := Squeezes(squeeze=squeeze, b=nn.Linear(4, out)))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(torch.randn(example, *shape),)) as pipe:
        for samples in SIZES:
            x = torch.randn(samples, *shape)
            ours, want = pipe(x), plain(x)
            torch.testing.assert_close(ours, want)
            ours.square().sum().backward()
            want.square().sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)


def test_squeeze_in_place_that_would_take_the_batch_is_refused():
    model = Squeezes(squeeze=lambda y: y.squeeze_().sigmoid())
    with pytest.raises(TraceError, match=r"has 1 dimensions with 1 samples .*name the dimensions"):
        fxpipe.trace(model, (torch.randn(4, 1, 4),), chunks=4)


def test_model_that_takes_its_batch_from_elsewhere_says_so():
    class Kept(Layered, a=4, state=lambda: torch.zeros(4, 4)):
        """Its state has the batch size of the example."""

        def forward(self, x):
            return self.a(x) + self.state

    with pytest.raises(ArgumentError, match=r"cannot vary: x \(size 4, fixed by add at .*test_batch.py"):
        fxpipe.trace(Kept(), (torch.randn(4, 4),))


def test_outputs_whose_rows_do_not_add_up_are_refused():
    class EveryOther(Layered, first=6, second=6):
        def forward(self, x):
            y = self.first(x)
            return self.second(y[0::2])

    model = EveryOther()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 6),)) as pipe:
        x = torch.randn(8, 6)
        torch.testing.assert_close(pipe(x), model(x))
        for batch in (6, 2):
            with pytest.raises(ArgumentError, match=r"rows for \d samples .*choose the batch size and chunks"):
                pipe(torch.randn(batch, 6))
