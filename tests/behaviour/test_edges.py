"""Gradients at the edges: kinds of numbers, layouts of memory, sizes of nothing, and ways to ask for gradients."""

import copy
from typing import Any

import pytest
import torch
from helpers.devices import on_cpu, workers
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, closing
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, LossError

CHUNKS = 3


def pipe_of(model: nn.Module, **options: Any) -> Any:
    return closing(fxpipe.pipeline(model, workers(2), CHUNKS, **options))


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.abs().square().mean()


def assert_both_ways(model, *args, **close):
    """Outputs and gradients of the drop-in and of `forward_backward` are the plain model's, inputs included."""
    plain = copy.deepcopy(model)
    with pipe_of(model) as pipe:
        for one_pass in (False, True, True):
            for m in (pipe, plain):
                m.zero_grad()
            ours, theirs = ([_fresh(a) for a in args] for _ in range(2))
            want = plain(*theirs)
            mean_square(want).backward()
            if one_pass:
                loss, have = pipe.forward_backward(*ours, loss_fn=mean_square, return_outputs=True)
                torch.testing.assert_close(on_cpu(loss), mean_square(want).detach(), **close)
            else:
                have = pipe(*ours)
                mean_square(have).backward()
            torch.testing.assert_close(on_cpu(have), want, check_stride=False, **close)
            for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if p.grad is not None:
                    assert p.grad.dtype == q.grad.dtype
                    assert p.grad.stride() == q.grad.stride(), name
                    torch.testing.assert_close(on_cpu(p.grad), q.grad, **close)
            for a, b in zip(ours, theirs, strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, check_stride=False, **close)


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """A leaf of the same memory layout, gaps and overlaps included."""
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


# -- numbers ---------------------------------------------------------------------------------------------------------


class Complex(
    Layered,
    a=lambda: nn.Parameter(torch.randn(4, 6, dtype=torch.complex64)),
    b=lambda: nn.Linear(6, 6, dtype=torch.complex64),
    scale=lambda: nn.Parameter(torch.randn(6)),
):
    def forward(self, x):
        z = self.b(torch.fft.fft(x @ self.a))
        return torch.polar(z.abs() * self.scale.abs(), z.angle()) + z.conj()


@pytest.mark.anywhere
def test_complex_inputs_parameters_and_outputs():
    assert_both_ways(Complex(), torch.randn(7, 4, dtype=torch.complex64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(dtype)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 5e-2, "atol": 2e-2}
    assert_both_ways(model, torch.randn(7, 6, dtype=dtype), **close)


class Mixed(
    Layered,
    table=lambda: nn.Embedding(9, 6),
    low=lambda: nn.Linear(6, 6).bfloat16(),
    high=lambda: nn.Linear(6, 4).double(),
):
    """Parameters of several dtypes, and integers on the way."""

    def forward(self, ids, x):
        h = self.low((self.table(ids) + x).bfloat16())
        return self.high(h.double()) * (ids > 3).unsqueeze(1)


@pytest.mark.anywhere
def test_mixed_dtypes():
    assert_both_ways(Mixed(), torch.randint(0, 9, (7,)), torch.randn(7, 6), rtol=3e-2, atol=3e-2)


def test_a_complex_loss_is_refused():
    with pipe_of(Complex()) as pipe, pytest.raises(LossError, match=r"complex64.*0-dim floating point"):
        pipe.forward_backward(torch.randn(6, 4, dtype=torch.complex64), loss_fn=lambda y: y.sum())


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.anywhere
def test_channels_last():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(7, 3, 8, 8).to(memory_format=torch.channels_last)
    assert_both_ways(model, x, rtol=1e-4, atol=1e-5)
    with pipe_of(model) as pipe:
        for batch in (7, 3, 1):
            assert pipe(x[:batch]).is_contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "transposed": lambda: torch.randn(6, 7).t(),
    "every other": lambda: torch.randn(14, 12)[::2, ::2],
    "expanded over the batch": lambda: torch.randn(1, 6).expand(7, 6),
    "expanded over features": lambda: torch.randn(7, 1).expand(7, 6),
    "with an offset": lambda: torch.randn(9, 6)[2:],
    "a window": lambda: torch.randn(12).unfold(0, 6, 1),
    "turned": lambda: torch.randn(7, 6).flip(0),
    "conjugated": lambda: torch.randn(7, 6, dtype=torch.complex64).conj().imag,  # with the negative bit
}


@pytest.mark.anywhere
@pytest.mark.parametrize("name", LAYOUTS)
def test_inputs_of_every_layout(name):
    x = LAYOUTS[name]()
    assert x.shape == (7, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    assert_both_ways(model, x)
    with pipe_of(model, example_args=(torch.randn(7, 6),)) as pipe:
        pipe(x)
        assert len(pipe._fxpipe.graphs) == 1  # which is that of every layout


# -- nothing ---------------------------------------------------------------------------------------------------------


class WithNothing(Layered, a=6, b=(6, 4), empty=(0, 6)):
    """Values without elements, from stage to stage."""

    def forward(self, x, nothing):
        h = self.a(x)
        none = h[:, :0]
        h = torch.cat([h, nothing, none], 1) + self.empty(nothing)
        return self.b(h) + none.sum(1, keepdim=True)


@pytest.mark.anywhere
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_values_without_elements():
    assert_both_ways(WithNothing(), torch.randn(7, 6), torch.randn(7, 0))


def test_targets_without_elements():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    plain, x, target = copy.deepcopy(model), torch.randn(7, 6), torch.randn(7, 0)

    def loss_fn(y, t):
        return y.square().mean() + t.sum()

    with pipe_of(model) as pipe:
        loss_fn(plain(x), target).backward()
        pipe.forward_backward(x, target=target, loss_fn=loss_fn)
        assert_same_gradients(pipe, plain, [n for n, _ in plain.named_parameters()])
        with pytest.raises(ArgumentError, match=r"shape \(0, 4\).*7 samples"):
            pipe.forward_backward(x, target=torch.randn(0, 4), loss_fn=loss_fn)


# -- ways to ask -----------------------------------------------------------------------------------------------------


class Partly(Layered, a=6, b=(6, 4), c=(6, 2), unused=lambda: nn.Parameter(torch.randn(3))):
    """An unused parameter, and one that reaches only the second output."""

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h), self.c(h)


def test_backward_for_some_parameters_only():
    plain, x = Partly(), torch.randn(7, 6)
    plain.a.bias.requires_grad_(False)
    with pipe_of(copy.deepcopy(plain)) as pipe:
        for m in (pipe, plain):
            mean_square(m(x)[0]).backward(inputs=[m.b.weight])
        assert_same_gradients(pipe, plain, [n for n, _ in plain.named_parameters()])
