"""With `chunks=1`, and of micro-batches that are handed over, nothing is cut: no input has to hold a batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError

DEVICES = ["cpu", "cpu"]


class TwoTowers(Layered, image=(8, 16), text=(6, 16), scale=lambda: nn.Parameter(torch.ones(()))):
    """CLIP: each sample is compared with all others."""

    def forward(self, image, text):
        image, text = F.normalize(self.image(image).relu(), dim=-1), F.normalize(self.text(text).relu(), dim=-1)
        logits = image @ text.t() * self.scale.exp()
        return logits, F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


class Rolled(Layered, first=8, last=(8, 3)):
    def forward(self, x):
        h = self.first(x).relu()
        return self.last(h + h.roll(1, 0) - h.max())


class Field(Layered, first=8, last=(8, 3)):
    """Points and centers, of which there are as many as there are: no dimension is the batch."""

    def forward(self, points, centers):
        near = torch.softmax(-torch.cdist(self.first(points), centers), dim=-1)
        return self.last(near @ centers)


class Noting(Layered, first=8, last=(8, 3)):
    """Leaves a tensor of the autograd graph in an attribute, and writes to an input that holds no samples."""

    def forward(self, x, memory):
        h = self.first(x)
        self.noted = h @ h.t()
        memory.copy_(h.detach().mean(0))
        return self.last(h.relu())


class Speech(Layered, first=8, last=(8, 5)):
    """CTC: the labels of all samples follow each other, and their number has nothing to do with that of the samples."""

    def forward(self, x, labels, frames, lengths):
        scores = self.last(self.first(x).relu()).log_softmax(-1)
        return F.ctc_loss(scores.transpose(0, 1), labels, frames, lengths)


def speech(samples):
    lengths = torch.randint(1, 4, (samples,))
    return torch.randn(samples, 9, 8), torch.randint(1, 5, (int(lengths.sum()),)), torch.full((samples,), 9), lengths


MODELS = {
    "two_towers": (TwoTowers, lambda n: (torch.randn(n, 8), torch.randn(n, 6)), lambda out: out[1]),
    "rolled": (Rolled, lambda n: (torch.randn(n, 8),), lambda out: out.square().mean()),
    "field": (Field, lambda n: (torch.randn(n, 8), torch.randn(7, 8)), lambda out: out.square().mean()),
    "speech": (Speech, speech, lambda out: out),
    "noting": (Noting, lambda n: (torch.randn(n, 8), torch.zeros(8)), lambda out: out.square().mean()),
}


@pytest.mark.parametrize("name", MODELS)
def test_with_one_micro_batch_any_model_is_the_plain_one(name):
    make, inputs, loss_of = MODELS[name]
    torch.manual_seed(0)
    plain = copy.deepcopy(model := make())
    pipe = fxpipe.pipeline(model, DEVICES, chunks=1)
    for samples in (6, 4, 6, 5):
        args = inputs(samples)
        plain.zero_grad()
        own, copied = [value.clone() for value in args], [value.clone() for value in args]
        expected = plain(*own)
        loss_of(expected).backward()
        pipe.zero_grad()
        actual = pipe(*copied)
        loss_of(actual).backward()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(copied, own)
        assert_same_gradients(pipe, plain, loose=[*dict(plain.named_parameters())])
        pipe.zero_grad()
        loss = pipe.forward_backward(*args, loss_fn=loss_of)
        torch.testing.assert_close(loss, loss_of(expected).detach())
        assert_same_gradients(pipe, plain, loose=[*dict(plain.named_parameters())])
        is_whole = name != "two_towers"  # which meet at the end only
        assert ("samples_per_second" not in pipe.last_step.metrics()) == is_whole, "their number is not known"
        if name == "noting":
            torch.testing.assert_close(pipe.noted, plain.noted)
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(*(value.clone() for value in args)), plain(*args))
        pipe.train()


@pytest.mark.parametrize(
    ("name", "chunks", "sizes"),
    [
        ("two_towers", 4, [((4, 8), (4, 6))] * 3),
        ("two_towers", 4, [((3, 8), (3, 6)), ((5, 8), (5, 6))]),
        ("rolled", 4, [((4, 8),)] * 3),
        ("field", 4, [((4, 8), (7, 8))] * 3),
        ("field", 1, [((3, 8), (3, 8)), ((5, 8), (2, 8))]),
        ("speech", 4, [3, 5]),
    ],
)
def test_micro_batches_that_are_handed_over_are_those_of_gradient_accumulation(name, chunks, sizes):
    """Each counts the same, if nothing is a mean over samples or samples meet in the loss."""
    make, inputs, loss_of = MODELS[name]
    torch.manual_seed(0)
    plain = copy.deepcopy(model := make())
    pipe = fxpipe.pipeline(model, DEVICES, chunks=chunks, schedule="1f1b")
    for _ in range(2):
        calls = [inputs(call) if isinstance(call, int) else tuple(map(torch.randn, call)) for call in sizes]
        plain.zero_grad()
        losses = [loss_of(plain(*args)) for args in calls]
        sum(losses).div(len(calls)).backward()
        pipe.zero_grad()
        loss = pipe.forward_backward(micro_batches=[(args, {}, None) for args in calls], loss_fn=loss_of)
        torch.testing.assert_close(loss, sum(losses).detach() / len(calls))
        assert_same_gradients(pipe, plain, loose=[*dict(plain.named_parameters())])


def test_what_cannot_be_cut_is_refused_with_more_micro_batches():
    make, inputs, loss_of = MODELS["rolled"]
    pipe = fxpipe.pipeline(make(), DEVICES, chunks=2)
    pipe.forward_backward(micro_batches=[(inputs(4), {}, None)] * 2, loss_fn=loss_of)  # whose graphs are of no use then
    with pytest.raises(ArgumentError):
        pipe(*inputs(4))
    with pytest.raises(ArgumentError):
        fxpipe.pipeline(make(), DEVICES, chunks=2)(*inputs(4))


def test_a_plan_of_one_micro_batch_is_one_of_one():
    plan = fxpipe.plan(Rolled(), 2, chunks=1, example_args=(torch.randn(8, 8),))
    assert plan.chunks == 1
    with pytest.raises(ArgumentError):
        fxpipe.pipeline(Rolled(), DEVICES, plan=plan, chunks=2)(torch.randn(8, 8))
