"""Tracing runs a model a few times, and never keeps more of it than forward does."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.oracle import assert_step
from helpers.traced_models import Forward
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.tracing.record import other_sizes as on_a_part

DEPTH, BATCH, WIDTH = 24, 8, 32


class Deep(Layered, layers=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x) * 2) + x
        return x


class Most(TorchDispatchMode):
    """Counts the activations that are there at one time.

    Not those of two samples, on which gradients are compared: these are kept, as any backward wants them.
    """

    def __init__(self, least=3):
        super().__init__()
        self.alive, self.most, self.made, self.least = [], 0, 0, least

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            type(result) is torch.Tensor
            and not result.is_meta
            and result.dim() == 2
            and self.least <= result.shape[0] < WIDTH == result.shape[1]
        ):
            self.made += 1
            gc.collect(0)
            self.alive = [one for one in self.alive if not one.expired()]
            if result.untyped_storage()._cdata not in {one.cdata for one in self.alive}:
                self.alive.append(StorageWeakRef(result.untyped_storage()))
            self.most = max(self.most, len(self.alive))
        return result


@pytest.mark.parametrize("chunks", [1, 2])
def test_activations_go_when_forward_needs_them_no_more(monkeypatch, chunks):
    monkeypatch.setattr(on_a_part, "LONG_RECORDING", 0.0)
    model = Deep()
    with Most() as seen:
        traced = fxpipe.trace(model, (torch.randn(BATCH, WIDTH),), chunks=chunks)
    assert len(traced.nodes) == 4 * DEPTH
    assert seen.made > 8 * DEPTH
    assert seen.most < DEPTH


class Norms(Deep):
    def forward(self, x):
        for layer in self.layers:
            x = F.layer_norm(layer(x), (WIDTH,))
        return x


class WithoutGradients(Deep):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(("make", "is_grad_enabled"), each_once([Deep, Norms, WithoutGradients, Deep], [True, False]))
def test_a_recording_that_is_not_compared_keeps_no_activations(make, is_grad_enabled):
    with torch.set_grad_enabled(is_grad_enabled), Most(least=2) as seen:
        fxpipe.trace(make(), (torch.randn(BATCH, WIDTH),), chunks=2, check=False)
    assert seen.made > 2 * DEPTH
    assert seen.most < DEPTH // 2, "however deep: those of the samples that are compared come in several parts"


def make_model(function):
    return Forward(lambda m, x: m.second(function(m.lin(x))), second=nn.Linear(6, 6))


def with_hooks(h):
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return h.tanh()


def without_hooks(h):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return h.tanh()


@pytest.mark.parametrize(
    "function",
    [
        with_hooks,
        without_hooks,
        lambda h: checkpoint(torch.tanh, h, use_reentrant=False),
        fxpipe.leaf(lambda h: torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(h)),
    ],
    ids=["hooks", "no hooks", "checkpoint", "torch.func"],
)
def test_what_needs_saved_tensors_has_them(function):
    model, x = make_model(function), torch.randn(BATCH, 6)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        assert_step(pipe, copy.deepcopy(model), x)


class Inner(torch.autograd.Function):
    """Goes back in its forward, and takes no for an answer."""

    @staticmethod
    def forward(ctx, x):
        try:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(y.pow(3).sum(), y)
        except Exception:
            gradient = torch.zeros_like(x)
        ctx.save_for_backward(x)
        return gradient

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 6 * x * gradient


@functools.wraps(F.relu)
def disguised(h):
    """Says that it is one of torch's."""
    with torch.enable_grad():
        y = h.detach().requires_grad_()
        return h * torch.autograd.grad(y.pow(3).sum(), y)[0]


@pytest.mark.parametrize("function", [lambda h: Inner.apply(h), fxpipe.leaf(disguised)])
def test_a_function_that_goes_back_itself_has_what_is_saved(function):
    model, x = make_model(function), torch.randn(BATCH, 6)
    assert fxpipe.trace(model, (x,)).why == (), "no other way was taken, and nothing is kept whole"
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


@fxpipe.leaf
def sparse(h):
    return h.to_sparse()


def doubled(model, h):
    table = model.table * 1.0
    table.mul_(2.0)
    return torch.sparse.mm(table, model.lin(h).t()).t()


def read_and_written(model, h):
    is_large = float(torch.sparse.sum(model.table)) > 1e6
    model.table.mul_(2.0)
    return model.lin(h).tanh() if is_large else h


def test_writing_to_a_sparse_tensor_is_seen():
    x = torch.randn(BATCH, 6)
    traced = fxpipe.trace(Forward(doubled, table=torch.eye(6).to_sparse()), (x,))
    by_name = {node.name: node for node in traced.nodes}
    alias = traced.effects.alias
    assert alias[by_name["mul"]] == alias[by_name["mul_1"]]
    assert {alias[by_name["mul"]]} in traced.effects.written_classes
    with pytest.raises(TraceError, match=r"reads the value .* that depends on 'table', which forward changes at "):
        fxpipe.trace(Forward(read_and_written, table=torch.eye(6).to_sparse()), (x,))


def test_what_names_tensors_leaves_no_node():
    traced = fxpipe.trace(make_model(lambda h: sparse(h).to_dense()), (torch.randn(BATCH, 6),))
    assert [node.name for node in traced.nodes] == ["lin", "sparse", "sparse_0", "to_dense", "second"]
