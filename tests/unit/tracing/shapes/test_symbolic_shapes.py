"""The symbolic batch: which dimension holds it, what depends on it, and how outputs of micro-batches go together."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from helpers.traced_shapes import shapes, traced
from torch import nn

from fxpipe import trace
from fxpipe.errors import ArgumentError
from fxpipe.tracing.shapes.symbolic_run import product_sizes

b = sympy.Symbol("b", integer=True, positive=True)


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_dimension_of_size_1_beside_larger_ones_is_broadcast():
    result = traced(lambda lin, x, p: lin(x) + p, torch.randn(4, 6), torch.randn(1, 6))
    assert result.in_dims == (0, None)


def test_inputs_that_never_meet():
    result = traced(lambda lin, x, y: (lin(x), lin(y)), torch.randn(4, 6), torch.randn(4, 6))
    assert (result.in_dims, result.out_dims) == ((0, 0), (0, 0))


def test_in_dims_by_place_and_by_name():
    class Two(nn.Module):
        def forward(self, x, table):
            return x + table.sum(0)

    args = (torch.randn(5, 4, 6), torch.randn(4, 6))
    for in_dims in ((1, None), {"x": 1, "table": None}):
        assert trace(Two(), args, in_dims=in_dims).in_dims == (1, None)


def test_input_without_batch_that_nothing_fixes_is_told_by_in_dims():
    table = torch.randn(4, 6)
    with pytest.raises(ArgumentError, match=r"act on each other.*\(in_dims=\{'args\[0\]': 0, 'args\[1\]': 0\} was"):
        traced(lambda lin, x, t: lin(lin(x) * lin(t).sum()), torch.randn(4, 6), table)
    assert traced(lambda lin, x, t: lin(x) * t.sum(), torch.randn(4, 6), table, in_dims=(0, None)).in_dims == (0, None)


BAD_INPUTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "different sizes": (
        lambda lin, x, y: (lin(x * lin(x).sum()), lin(y * lin(y).sum())), (torch.randn(4, 6), torch.randn(3, 6)), {},
        r"inputs disagree on the batch size \(args\[0\]: 4, args\[1\]: 3\).*None in in_dims",
    ),
    "no tensors": (lambda lin, n: lin(torch.ones(n, 6)), (3,), {}, "no input has a batch dimension"),
    "features only": (
        lambda lin, x: lin(x), (torch.randn(6),), {},
        r"cannot vary: args\[0\] \(size 6, fixed by lin at .*test_symbolic_shapes.py:\d+\)",
    ),
    "size written down": (
        lambda lin, x: lin(x.view(4, 6)), (torch.randn(4, 6),), {}, r"cannot vary.*fixed by view.*x.shape\[0\]",
    ),
    "in_dims too large": (lambda lin, x: lin(x), (torch.randn(4, 6),), {"in_dims": 2}, r"dimension 2 for input args\["),
    "in_dims of wrong length": (
        lambda lin, x: lin(x), (torch.randn(4, 6),), {"in_dims": (0, 0)}, r"does not fit the inputs \['args\[0\]'\]",
    ),
    "in_dims of fixed dim": (lambda lin, x: lin(x), (torch.randn(4, 6),), {"in_dims": 1}, "cannot vary.*fixed by lin"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs(name):
    forward, args, options, message = BAD_INPUTS[name]
    with pytest.raises(ArgumentError, match=message):
        traced(forward, *args, **options)


# -- sizes -----------------------------------------------------------------------------------------------------------

SYMBOLIC: dict[str, tuple[Any, str]] = {
    "view": (lambda lin, x: lin(x).view(x.shape[0], 2, -1), "float32[b, 2, 3]"),
    "shape unpacked": (lambda lin, x: lin(x).view(*x.shape[:-1], 2, 3).reshape(x.shape[:1] + (6,)), "float32[b, 6]"),  # noqa: RUF005
    "isinstance": (lambda lin, x: lin(x) if isinstance(x.shape, torch.Size) else None, "float32[b, 6]"),
    "full": (lambda lin, x: torch.full((x.shape[0], 1), 2.0) + lin(x), "float32[b, 6]"),
    "arange": (lambda lin, x: lin(x)[torch.arange(x.shape[0]), 0], "float32[b]"),
    "arithmetic": (lambda lin, x: lin(x).new_zeros(2 * x.shape[0] + 3 * x.shape[0], 3), "float32[5*b, 3]"),
    "divmod": (lambda lin, x: lin(x).view(x.shape[0], divmod(x.shape[1], 2)[0], 2), "float32[b, 3, 2]"),
    "numel": (lambda lin, x: lin(x).view(x.numel() // 6, 6), "float32[b, 6]"),
    "prod": (lambda lin, x: lin(x).view(math.prod(x.shape[:1]), 6), "float32[b, 6]"),
    "expand": (lambda lin, x: torch.ones(6).expand(x.shape) + lin(x), "float32[b, 6]"),
    "broadcast": (lambda lin, x: lin(x) + x.new_ones(torch.broadcast_shapes(x.shape, (6,))), "float32[b, 6]"),
    "round, ceil": (lambda lin, x: lin(x).view(round(x.shape[0]), math.ceil(x.shape[1] / 2), 2), "float32[b, 3, 2]"),
    "flattened": (lambda lin, x: lin(x).view(-1, 2), "float32[3*b, 2]"),
    "pad": (lambda lin, x: F.pad(lin(x), (1, 1)), "float32[b, 8]"),
    "diagonal": (lambda lin, x: lin(x) * (x @ x.T).fill_diagonal_(1).diagonal()[:, None], "float32[b, 6]"),
    "interpolate": (lambda lin, x: F.interpolate(lin(x)[:, None], scale_factor=2), "float32[b, 1, 12]"),
    "text of a size": (lambda lin, x: lin(x) if f"{x.shape[1]:3d}" == "  6" else None, "float32[b, 6]"),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_sizes_that_depend_on_the_batch_stay_symbolic(name):
    forward, shape = SYMBOLIC[name]
    result = traced(forward)
    assert shapes(result) == [shape]
    assert result.out_dims == (0,)


def test_fixed_sizes_are_constants_of_the_graph():
    result = traced(lambda lin, x: lin(x).view(x.shape[0], x.shape[1] // 2, 2) * math.sqrt(x.shape[1]))
    assert [node.name for node in result.nodes] == ["lin", "size", "view", "mul"]
    assert result.nodes[2].args[1:] == (result.nodes[1], 3, 2)


READS: dict[str, tuple[Any, list[Any]]] = {
    "greater": (lambda lin, x: lin(x) if x.shape[0] > 1 else x, [b > 1]),
    "even": (lambda lin, x: lin(x) if x.shape[0] % 2 == 0 else x, ["Eq(Mod(b, 2), 0)"]),
    "maximum": (lambda lin, x: lin(x).new_zeros(max(x.shape[0], 3), 6)[: x.shape[0]] + lin(x), [b >= 3]),
    "in a list": (lambda lin, x: lin(x) if x.shape[0] in (2, 4, 8) else x, [sympy.Ne(b, 2), sympy.Eq(b, 4)]),
    "fixed": (lambda lin, x: lin(x) if x.shape[1] > 3 and x.ndim == 2 else x, []),
}


@pytest.mark.parametrize("name", READS)
def test_comparisons_of_the_batch_size_are_kept(name):
    forward, conditions = READS[name]
    result = traced(forward)
    assert [str(read.condition) for read in result.batch_conditions] == [str(condition) for condition in conditions]
    assert all(read.where.rpartition(":")[0] == __file__ for read in result.batch_conditions)


def test_size_that_depends_on_values_is_a_value_that_is_read():
    graph = traced(lambda lin, x: lin(x) if x[x > 0].shape[0] > 3 else x)
    assert [(g.expected, g.text.split()[0]) for g in graph.guards.guards] == [(True, "gt")]
    graph = traced(lambda lin, x: lin(x) if (h := lin(x))[h > 0].shape[0] > 3 else x)
    assert re.search(
        r"reads a size \(gt\) that depends on the inputs and .* at .*test_symbolic_shapes.py:\d+", graph.why[0]
    )
    assert traced(lambda lin, x: lin(x) if torch.ones(x.shape[0]).sum() > 1 else x).guards.guards  # of the batch size


# -- outputs ---------------------------------------------------------------------------------------------------------

OUTPUTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "transposed": (lambda lin, x: lin(x).T, (1,)),
    "loss": (lambda lin, x: F.mse_loss(lin(x), x), ("mean",)),
    "constants": (lambda lin, x: (lin(x), torch.arange(4), lin.weight, 3, None, "text", x.shape[1:]), (0, *[None] * 6)),
    "tuple of states": (lambda lin, x: nn.LSTM(6, 5, 2)(x) if False else (lin(x)[None], lin(x)), (1, 0)),
    "rows of all samples": (lambda lin, x: lin(x).view(-1, 3), (0,)),
    "means and sums": (lambda lin, x: (lin(x).mean(0), lin(x).sum(), (x > 0).sum(0)), ("mean", "sum", "sum")),
    "batch size": (lambda lin, x: (lin(x), x.shape[0], x.numel()), (0, "sum", "sum")),
    "shape": (lambda lin, x: (lin(x), x.shape), (0, "sum", None)),
    "contrastive": (lambda lin, x: lin(x) @ x.T, ("combined",)),
    "vector": (lambda lin, x: lin(x).amax(0), ("combined",)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_where_the_batch_is_in_the_outputs(name):
    forward, out_dims = OUTPUTS[name]
    assert traced(forward).out_dims == out_dims


def test_flattened_rows_in_the_order_of_the_samples_are_checked_by_value():
    assert traced(lambda lin, x: lin(x).flatten(0, 1), torch.randn(4, 3, 6)).out_dims == (0,)
    assert traced(lambda lin, x: lin(x).transpose(0, 1).flatten(0, 1), torch.randn(4, 3, 6)).out_dims == ("combined",)
    with pytest.raises(ArgumentError, match=r"samples act on each other at .*'stack'.*keep rows in the order"):
        traced(lambda lin, x: lin(lin(x).transpose(0, 1).flatten(0, 1)), torch.randn(4, 3, 6))


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_one_word_for_all_outputs_is_for_those_without_the_batch(how):
    """A model that returns its loss beside its logits: these were summed over micro-batches as well."""
    result = traced(lambda lin, x: (lin(x).mean(), lin(x), lin.weight * 2, x @ lin(x).T), out_dims=how)
    assert result.out_dims == (how, 0, None, how)


def test_rows_that_a_mask_selects_are_rows_of_samples():
    assert traced(lambda lin, x: lin(x)[x > 0]).out_dims == (0,)
    descending = torch.arange(4.0).flip(0)[:, None].expand(4, 6)
    assert traced(lambda lin, x: (lin(x), torch.unique(x)), descending).out_dims == (0, "combined")


@pytest.mark.parametrize(
    ("forward", "out_dims", "found"),
    [
        (OUTPUTS["contrastive"][0], "stack", ("stack",)),
        (OUTPUTS["vector"][0], "mean", ("mean",)),
        (lambda lin, x: lin(x).sum(), "sum", ("sum",)),
        (
            lambda lin, x: (lin(x), {"loss": lin(x).sum(), "size": 3}),
            (0, {"loss": "sum", "size": None}),
            (0, "sum", None),
        ),
        (lambda lin, x: (lin(x), lin(x).mT), (0, -1), (0, 1)),
        (lambda lin, x: (lin(x), lin(x)), 0, (0, 0)),
    ],
)
def test_out_dims_override(forward, out_dims, found):
    assert traced(forward, out_dims=out_dims).out_dims == found


@pytest.mark.parametrize(
    ("out_dims", "message"),
    [
        ("median", r"gives 'median' for the output lin of shape \[b, 6\].*'mean', 'sum', 'stack'"),
        (2, "gives 2 for the output"),
        ((0, 0), "does not fit the output, which has 1 leaves"),
    ],
)
def test_wrong_out_dims(out_dims, message):
    with pytest.raises(ArgumentError, match=message):
        traced(lambda lin, x: lin(x), out_dims=out_dims)


MASKED = [f"ehab ehcb ehcd {mask}" for mask in ("ac", "e1ac", "ehac")]
PRODUCTS = dict.fromkeys(["ab cb", "nab cb c", "hab hcb hcd", *MASKED], True)
PRODUCTS |= dict.fromkeys(["b cb", "ab ca", "ehab 1hcb 1hcd", "ehab ehcb ehdd", "ehab ehcb ehcd fehac"], False)


@pytest.mark.parametrize("case", PRODUCTS)
def test_sizes_of_products_are_those_of_torch_or_left_to_it(case: str) -> None:
    sizes = {letter: size for size, letter in enumerate("abcdefhn", 3)} | {"1": 1}
    tensors = [torch.randn([sizes[letter] for letter in shape]) for shape in case.split()]
    function, args = F.scaled_dot_product_attention if "h" in case else F.linear, (*tensors[:3],)
    options = {"attn_mask": tensors[3]} if len(tensors) > 3 else {}
    told = product_sizes(function, args, options)
    assert told == (function(*args, **options).shape if PRODUCTS[case] else None)


def test_strides_of_attention_are_those_that_its_kernel_gives() -> None:
    def forward(lin: Any, x: torch.Tensor) -> torch.Tensor:
        heads = lin(x).unflatten(-1, (2, 3)).transpose(1, 2)
        return x * F.scaled_dot_product_attention(heads, heads, heads).stride(1)

    assert traced(forward, torch.randn(4, 5, 6), chunks=2).out_dims == (0,)
