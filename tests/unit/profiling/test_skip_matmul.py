"""Zeros in place of products: where, in what memory, and that nothing which is counted changes by them."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.models import GPT, ResNet, UNet
from helpers.saved_bytes import Of, counted
from torch import nn

import fxpipe
from fxpipe.profiling import saved_storages as saving
from fxpipe.profiling.memory import unread_nodes
from fxpipe.profiling.saved_storages import observe_storages
from fxpipe.profiling.skip_matmul import SkipMatmul, ValuesNeededError
from fxpipe.tracing import trace

aten = torch.ops.aten


def laid_out(*shape: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """One shape in several layouts."""
    x = torch.ones(shape, dtype=dtype)
    yield x
    yield torch.ones((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-1, -2)
    yield torch.ones((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    yield torch.ones((1,) * len(shape), dtype=dtype).expand(shape)


def agree(function: Callable[..., Any], *args: Any) -> bool:
    """Does the mode answer, and as the real function does?"""
    real, mode = function(*args), SkipMatmul()
    with mode:
        made = function(*args)
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (real, made)), strict=True)
    for want, have in pairs:
        if want is None:
            assert have is None
            continue
        assert (have.shape, have.stride(), have.dtype) == (want.shape, want.stride(), want.dtype)
        assert have.untyped_storage().nbytes() == want.untyped_storage().nbytes()
        assert not mode.has_zeros or not have.any()
    return mode.has_zeros


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    each_once(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64],
        [(3, 4, 5), (1, 4, 1), (0, 4, 5), (3, 0, 5)],
    ),
)
def test_products_of_matrices_lie_in_memory_as_the_real_ones(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    n, k, m = sizes
    for left, right in itertools.product(laid_out(n, k, dtype=dtype), laid_out(k, m, dtype=dtype)):
        assert agree(aten.mm.default, left, right)
        for bias in (torch.ones(m, dtype=dtype), torch.ones(n, 1, dtype=dtype), torch.ones((), dtype=dtype)):
            assert agree(aten.addmm.default, bias, left, right)
    for left, right in itertools.product(laid_out(2, n, k, dtype=dtype), laid_out(2, k, m, dtype=dtype)):
        assert agree(aten.bmm.default, left, right)
        assert agree(aten.baddbmm.default, torch.ones(1, 1, m, dtype=dtype), left, right)


def in_formats(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    if tensor.dim() == 3:
        yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        yield tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


@pytest.mark.parametrize(("dimensions", "dtype"), each_once([2, 1, 3], [torch.float32, torch.float64, torch.bfloat16]))
def test_convolutions_lie_in_memory_as_the_real_ones(dimensions: int, dtype: torch.dtype) -> None:
    answered = 0
    for batch, size, kernel, stride, padding, groups, transposed, has_bias in itertools.product(
        (1, 2), (1, 6), (1, 3), (1, 2), (0, 1), (1, 4), (False, True), (False, True)
    ):
        if size == 1 and kernel + padding > 1:
            continue  # some are refused
        data = torch.ones((batch, 4, *[size] * dimensions), dtype=dtype)
        weight = torch.ones((4, 8 // groups if transposed else 4 // groups, *[kernel] * dimensions), dtype=dtype)
        channels = 8 if transposed else 4
        numbers = [
            [stride] * dimensions,
            [padding] * dimensions,
            [1] * dimensions,
            transposed,
            [0] * dimensions,
            groups,
        ]
        for x, w in itertools.product(in_formats(data), in_formats(weight)):
            bias = torch.ones(channels, dtype=dtype) if has_bias else None
            answered += agree(aten.convolution.default, x, w, bias, *numbers)
            gradient = torch.ones_like(aten.convolution.default(x, w, bias, *numbers))
            mask = [True, True, has_bias]
            agree(aten.convolution_backward.default, gradient, x, w, [channels] if has_bias else None, *numbers, mask)
    empty, weight = data[:0], torch.ones((4, 4, *[1] * dimensions), dtype=dtype)
    agree(aten.convolution.default, empty, weight, None, *numbers[:3], False, numbers[4], 1)
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        assert answered


def test_what_is_wrong_with_arguments_is_said_by_the_real_product() -> None:
    with SkipMatmul() as mode:
        for left, right in [
            (torch.ones(2, 3), torch.ones(4, 5)),
            (torch.ones(2, 3), torch.ones(3, 5, dtype=torch.float64)),
            (torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
        ]:
            with pytest.raises(RuntimeError):
                aten.mm.default(left, right)
        with pytest.raises(RuntimeError, match="expand"):
            aten.addmm.default(torch.ones(4), torch.ones(2, 3), torch.ones(3, 5))
    assert not mode.has_zeros


def test_values_are_told_only_before_a_product_was_left_out() -> None:
    x = torch.ones(2, 2)
    with SkipMatmul():
        assert x.sum().item() == 4
        y = x @ x
        assert y[torch.tensor([1])].shape == (1, 2)
        for read in (y.sum().item, lambda: bool(y.any()), y.nonzero, lambda: y[y > 0], lambda: torch.equal(y, x)):
            with pytest.raises(ValuesNeededError):
                read()


# -- in counting -------------------------------------------------------------------------------------------------------


def choosing(m: Any, x: torch.Tensor) -> torch.Tensor:
    """How many rows go on depends on a product."""
    h = m.linear(x)
    is_positive = h.detach() > 0
    return h.masked_scatter(is_positive, h[is_positive].square())


@fxpipe.leaf
def clipped(h: torch.Tensor) -> torch.Tensor:
    return h.exp() if h.detach().numpy().any() else h


def counts_of(model: nn.Module, x: torch.Tensor, samples: int) -> Any:
    traced = trace(model, (x,))
    counts = counted(traced, [x], samples)
    return list(counts.nodes.values()), counts.saved


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (GPT, (8, 7)),
        (ResNet, (8, 3, 8, 8)),
        (UNet, (8, 3, 16, 16)),
        (lambda: nn.LSTM(16, 5, batch_first=True), (8, 4, 16)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (8, 5, 8)),
        (lambda: Of(lambda m, x: clipped(m.linear(x)) @ m.frozen), (8, 4)),
        (lambda: Of(lambda m, x: torch.linalg.inv(m.linear(x))), (8, 4, 4)),
        (lambda: Of(choosing), (8, 6, 4)),
    ],
)
def test_what_is_counted_is_what_products_leave(monkeypatch: pytest.MonkeyPatch, make: Any, shape: Any) -> None:
    x = torch.randint(0, 17, shape) if make is GPT else torch.randn(shape)
    model = make()
    found = counts_of(model, x, 2)
    monkeypatch.setattr(saving.SkipMatmul, "at", lambda mode, node: torch.enable_grad())
    assert found == counts_of(model, x, 2)


def test_nodes_whose_values_come_to_code_that_may_read_are_computed() -> None:
    def model(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = m.linear(x), x @ m.frozen
        a.mul_(2)
        return F.linear(clipped(a), m.frozen) + b

    traced = trace(Of(model), (torch.randn(8, 4),))
    names = {node.name for node in unread_nodes(traced.effects)}
    assert {node.name for node in traced.nodes} - names == {"linear", "mul", "clipped", "clipped_0"}


def test_one_node_of_a_kind_stands_for_others_as_a_tensor_of_its_own() -> None:
    """Attention whose query, key and value are of one kind has three gradients all the same."""

    def attends(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(m.linear(x), m.linear(x), m.linear(x))

    x = torch.randn(8, 2, 3, 4)
    traced = trace(Of(attends), (x,))
    found = [observe_storages(traced, traced.effects, [x], SkipMatmul(), once).probes for once in (False, True)]
    assert found[0] == found[1]
