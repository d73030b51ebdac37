"""Gradients of 1 MiB and more are the plain model's; hooks on nodes of autograd work, or are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients
from torch import nn

import fxpipe
from fxpipe.errors import TraceError

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


def square_weight():
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)


class Frozen(Layered, first=(8, WIDTH), last=(WIDTH, 4), weight=square_weight):
    def forward(self, x):
        return self.last(Straight.apply(self.first(x), self.weight).tanh())


class Tied(Layered, first=(8, WIDTH), square=WIDTH, last=(WIDTH, 4)):
    def forward(self, x):
        return self.last(self.square(self.square(self.first(x)).tanh()))


class Bag(Layered, last=(16, 4)):
    def forward(self, x):
        return self.last(self.table((x * 1000).long().abs()).mean(1))


class SparseAndDense(Layered, table=lambda: nn.Embedding(200, 16, sparse=True), middle=16):
    """A table whose gradients are sparse in the first stage and dense in the last."""

    def forward(self, x):
        h = self.table((x * 10).long().abs()).mean(1)
        return self.middle(self.middle(h).tanh()) @ self.table.weight.t()


BAGS = {
    "sparse": lambda: Bag(table=nn.Embedding(20_000, 16, sparse=True)),
    "dense table": lambda: Bag(table=nn.Embedding(20_000, 16)),
}
MODELS = {"no gradient": Frozen, "tied": Tied, "sparse and dense": SparseAndDense, **BAGS}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", MODELS)
def test_large_gradients_are_those_of_the_plain_model(name, schedule):
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


def on_its_node(y: torch.Tensor) -> None:
    y.grad_fn.register_hook(lambda into, out: tuple(None if g is None else g * 2 for g in into))


def before_its_node(y: torch.Tensor) -> None:
    y.grad_fn.register_prehook(lambda out: tuple(None if g is None else g * 2 for g in out))


def on_the_node_before(y: torch.Tensor) -> None:
    y.exp().grad_fn.next_functions[0][0].register_prehook(lambda out: None)
    before_its_node(y)


HOOKS = [on_its_node, before_its_node, on_the_node_before]


class Hooking(Layered, layer=4):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.requires_grad:
            self.hook(y)
        return torch.tanh(y)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_module_that_hooks_nodes_is_kept_whole_and_its_hooks_are_called(hook: Callable[..., None]) -> None:
    """Gradients came out without what the hook does to them."""
    plain = nn.Sequential(nn.Linear(4, 4), Hooking(hook=hook), nn.Linear(4, 4))
    x, t = torch.randn(6, 4), torch.randn(6, 4)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
        F.mse_loss(plain(x), t).backward()
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
        assert pipe._fxpipe.first.traced.whole.keys() == {"1"}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_that_hooks_nodes_itself_is_refused(hook: Callable[..., None]) -> None:
    with pytest.raises(TraceError, match=r"looks at a node of autograd \(grad_fn\) at .*test_backward.py:\d+; do so"):
        fxpipe.trace(Hooking(hook=hook), (torch.randn(4, 4),))
