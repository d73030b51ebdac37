"""Gradients of 1 MiB and more are added while backward makes others: they are the plain model's."""

import copy

import pytest
import torch
from torch import nn

import fxpipe

WIDTH = 512  # 1 MiB for a square weight


class Straight(torch.autograd.Function):
    """A product that gives its weight no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), None


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        return self.last(Straight.apply(self.first(x), self.weight).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.square, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.last(self.square(self.square(self.first(x)).tanh()))


class Bag(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.last = nn.Embedding(20_000, 16, sparse=sparse), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.table((x * 1000).long().abs()).mean(1))


MODELS = {"no gradient": Frozen, "tied": Tied, "sparse": lambda: Bag(True), "dense table": lambda: Bag(False)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", MODELS)
def test_large_gradients_are_those_of_the_plain_model(name, schedule):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(x,), schedule=schedule) as pipe:
        for _ in range(2):  # the second step adds to the gradients of the first
            pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
            plain(x).square().mean().backward()
        for (path, ours), (_, theirs) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), path
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())
