"""Plain numbers that depend on the batch size: the same outputs and gradients as the plain model, at every batch
size."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.layered import Layered
from helpers.oracle import assert_step
from helpers.traced_models import Forward, is_graph_of
from torch import nn

import fxpipe
from fxpipe import trace
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.opaque_call import leaf
from fxpipe.tracing.shapes.observed_shapes import simplest_formula
from fxpipe.tracing.verify.compared_sizes import holds_for_micro_batches
from fxpipe.utils.batch_split import samples_per_micro_batch

T = 4  # of the inputs [b, T, 6]: also the batch size of the example


def make_model(forward: Any) -> nn.Module:
    return Forward(forward, out=nn.Linear(6, 6))


@functools.lru_cache
def _positions(length: int) -> int:
    return 2 * length


def count(x: torch.Tensor) -> int:
    """The number of samples, as a plain number that nothing follows."""
    return sum(1 for _ in [0] * x.shape[0])


_tables = {str(n): float(n) for n in range(64)}

RIGHT: dict[str, Any] = {
    # what leaves the world of sizes
    "view(int)": lambda m, x: m.out(m.lin(x).view(int(x.shape[0]), -1).view(len(x), T, 6)),
    "rows": lambda m, x: m.out(m.lin(x).view(len(x) * T, 6)).view(len(x), T, 6),
    "rows counted": lambda m, x: m.out(m.lin(x).view(count(x) * T, 6)).view(count(x), T, 6),
    "numpy prod": lambda m, x: m.out(m.lin(x).view(int(np.prod(x.shape[:2])), 6)).reshape(x.shape),
    "arange(len)": lambda m, x: m.out(m.lin(x)[torch.arange(len(x)), 0]),
    "full(len)": lambda m, x: m.out(m.lin(x) + 0 * torch.full((len(x), 1, 1), len(x))),
    "eye": lambda m, x: m.out((torch.eye(len(x)) @ m.lin(x).flatten(1)).view(-1, T, 6)),
    "sum / len": lambda m, x: m.out(m.lin(x)).sum() / len(x),
    "sum / tensor(len)": lambda m, x: m.out(m.lin(x)).sum() / torch.tensor(float(len(x))),
    "logarithm": lambda m, x: m.out(m.lin(x) + math.log(len(x)) - math.log(x.shape[0])),
    "sum / float": lambda m, x: m.out(m.lin(x)).sum() / float(x.shape[0]),
    "table by text": lambda m, x: m.out(m.lin(x)).sum() / _tables[f"{x.shape[0]}"],
    "minimum": lambda m, x: m.out(m.lin(x)[:, : min(len(x), 6) + T]),
    "shift": lambda m, x: m.out(m.lin(x) + torch.zeros(x.shape[0] << 1, 1, 1)[: x.shape[0]]),
    "halves": lambda m, x: m.out(torch.cat([m.lin(x[: len(x) // 2]), m.lin(x[len(x) // 2 :]) * 1.0])),
    # sizes that stay sizes
    "lru_cache": lambda m, x: m.out(m.lin(x).view(-1, _positions(x.shape[1]) // 2, 6)),
    "lru_cache of the batch": lambda m, x: m.out(
        m.lin(x).view(_positions(x.shape[0]), _positions(x.shape[1]) // 4, 6)
    ).view(x.shape),
    "batch over time": lambda m, x: m.out(m.lin(x).sum(1) / x.shape[1] + 0 * x.shape[0]),
}
SIZES = (4, 1, 2, 3, 5, 32)


def compare(pipe: Any, x: torch.Tensor) -> None:
    """A step of the pipe is that of the plain model."""
    assert_step(pipe, copy.deepcopy(pipe.model), x)


SLOW = ("numpy prod",)  # formulas that take long to find


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RIGHT])
def test_as_the_plain_model_at_every_batch_size(name):
    model = make_model(RIGHT[name])
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, example_args=(torch.randn(4, T, 6),)) as pipe:
        for size in SIZES:
            compare(pipe, torch.randn(size, T, 6))


def test_ints_in_the_graph_are_computed_from_a_size():
    traced = trace(make_model(RIGHT["rows counted"]), (torch.randn(4, T, 6),))
    assert [(node.name, node.args[1:]) for node in traced.nodes if "batch" in node.name] == [
        ("batch", (0,)), ("batch_mul", (4,)),
    ]  # fmt: skip
    assert [str(info(o).shapes[0]) for o in traced.outputs] == ["float32[b, 4, 6]"]
    assert traced.why[-1].startswith(
        "plain numbers that depend on the batch size are computed in the graph (holds for "
    )


def test_graph_holds_for_the_sizes_recorded_and_batches_of_such_micro_batches():
    traced = trace(make_model(RIGHT["rows counted"]), (torch.randn(4, T, 6),), chunks=2)
    assert traced.recorded_sizes == (2, 3, 4, 5, 6)
    x = torch.randn(8, T, 6)
    assert [n for n in range(1, 9) if is_graph_of(traced, [x[:n]])] == [2, 3, 4, 5, 6]
    held = [n for n in range(3, 9) if holds_for_micro_batches(traced, [x[:n]], samples_per_micro_batch(n, 2))]
    assert held == [3, 4, 5, 6]


def test_guards():
    def guarded(m, x):
        h = m.lin(x).view(len(x) * T, 6)
        return m.out(h).view(len(x), -1, 6) if (x > 0).all() else m.out(-h).view(len(x), -1, 6)

    with fxpipe.pipeline(make_model(guarded), ["cpu", "cpu"], chunks=2) as pipe:
        for size in (4, 3, 1):
            x = torch.rand(size, T, 6) + 0.1
            compare(pipe, x)
            compare(pipe, -x)
            compare(pipe, torch.cat([x, -x]))


LOOPS: dict[str, Any] = {
    "range(len)": lambda m, x: torch.stack([m.lin(x[n]) for n in range(len(x))]),
    "range(size)": lambda m, x: torch.stack([m.lin(x[n]) for n in range(x.shape[0])]),
    "rows": lambda m, x: torch.stack([m.lin(row) for row in x]),
    "unbind": lambda m, x: torch.stack([m.lin(row) for row in x.unbind()]),
    "sum": lambda m, x: sum(m.lin(x)[n] for n in range(len(x))).sum(),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loop_over_the_samples(name):
    with pytest.raises(
        TraceError, match=r"other functions with 2 samples than with the example's 4.*test_batch_numb"
    ) as e:
        trace(make_model(LOOPS[name]), (torch.randn(4, T, 6),))
    assert "use a tensor function over the batch, or keep the Python whole (leaf_modules=" in str(e.value)


class Looping(Layered, before=6, after=6):
    """Goes over the samples, in ways that its last node and its first differ by."""

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def _one_by_one(m, x):
    for n in range(len(x)):
        x = torch.cat([x[:n], m.lin(x[n : n + 1]), x[n + 1 :]])
    return x


@pytest.mark.parametrize("name", [*list(LOOPS)[:-1], "one by one"])
def test_module_that_goes_over_the_samples_is_kept_whole(name):
    model = Looping(inner=make_model(LOOPS.get(name, _one_by_one)))
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, example_args=(torch.randn(4, T, 6),)) as pipe:
        assert "module 'inner' is kept whole" in pipe.plan.why[0]
        for size in SIZES:
            compare(pipe, torch.randn(size, T, 6))


def test_the_batch_size_as_an_output_is_that_of_the_mini_batch():
    with fxpipe.pipeline(make_model(lambda m, x: (m.lin(x), len(x))), ["cpu", "cpu"], 2) as pipe:
        assert pipe(torch.randn(5, 6))[1] == 5


@leaf
def _row_by_row(x):
    return torch.stack([row * 2 if row.sum() > 0 else row for row in x])


def test_function_that_goes_over_the_samples_as_a_leaf():
    model = make_model(lambda m, x: m.out(_row_by_row(m.lin(x)).view(len(x), T, 6)))
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, example_args=(torch.randn(4, T, 6),)) as pipe:
        for size in SIZES:
            compare(pipe, torch.randn(size, T, 6))


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "scaled by the micro-batch": (
        lambda m, x: m.lin(m.lin(x) * torch.tensor([1.0 / len(x)])), ArgumentError,
        "outputs of micro-batches, put together, are not the output",
    ),
    "rows that depend on values": (
        lambda m, x: m.lin(x[x > 0].new_zeros(count(x[x > -9]) // 24, T, 6)), TraceError,
        "size that depends on the values of tensors|forward goes by the batch size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("values_of", [lambda length: np.arange(length, dtype=np.float32), lambda n: [0.5] * n])
def test_values_made_for_the_samples_by_python_take_a_graph_for_each_size(values_of):
    model = make_model(lambda m, x: m.lin(x) + torch.as_tensor(values_of(len(x)))[:, None, None])
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, example_args=(torch.randn(4, T, 6),)) as pipe:
        for size in (4, 8, 5, 3):
            compare(pipe, torch.randn(size, T, 6))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    forward, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fxpipe.plan(make_model(forward), 1, chunks=2, example_args=(torch.randn(4, T, 6),))


def test_a_number_without_a_formula_is_refused():
    with pytest.raises(
        TraceError, match=r"makes a plain number of the number of samples at .*test_batch_numb.*\(.*; keep"
    ):
        trace(make_model(lambda m, x: m.lin(x) * 2 ** int(x.shape[0])), (torch.randn(5, T, 6),), chunks=2)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.lin(x).new_zeros(max(x.shape[0], 3), 1, 1)[: x.shape[0]] + m.lin(x),
        # As libraries do with position ids: micro-batches of one sample need no expanding, and it does no harm.
        lambda m, x: m.lin(
            x + (torch.zeros_like(x[:1]) if x.shape[0] == 1 else torch.zeros_like(x[:1]).expand(len(x), -1, -1))
        ),
    ],
    ids=["maximum", "expand"],
)
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_read_of_the_size_does_no_harm_where_micro_batches_come_to_the_same(forward, chunks):
    x = torch.randn(4, T, 6)
    with fxpipe.pipeline(make_model(forward), ["cpu", "cpu"], chunks, example_args=(x,)) as pipe:
        compare(pipe, x)


FORMULAS: dict[str, Any] = {
    "b": lambda b: b,
    "3 b - 1": lambda b: 3 * b - 1,
    "-b": lambda b: -b,
    "half of a float": lambda b: 0.5 * b,
    "half": lambda b: b // 2,
    "half, up": lambda b: -(-b // 2),
    "third, up, and one": lambda b: -(-b // 3) + 1,
    "three halves": lambda b: 3 * b // 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_simple_formulas_hold_beyond_what_was_seen(name):
    formula = simplest_formula([(b, FORMULAS[name](b)) for b in (4, 2, 3, 5, 6, 7)])
    assert formula is not None
    assert formula.fits([(b, FORMULAS[name](b)) for b in range(1, 100)])


@pytest.mark.parametrize("number", [lambda b: min(b, 4), lambda b: b * b, lambda b: math.log(b), lambda b: 1 / b])
def test_other_numbers_have_no_formula(number):
    assert simplest_formula([(b, number(b)) for b in (4, 2, 3, 5)]) is None
