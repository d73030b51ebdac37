"""Shapes that fake tensors cannot tell: they are seen in real runs, and the pipeline is right at every batch size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.oracle import assert_step
from helpers.traced_shapes import Forward, shapes, traced
from torch import library, nn
from torch._subclasses import FakeTensor

import fxpipe
from fxpipe import trace
from fxpipe._torch import torch_pytree as pytree
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import OpaqueCall, info, update_info
from fxpipe.tracing.record.record_model import input_leaves, record
from fxpipe.tracing.shapes import symbolic_run
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes


class ReadsValues(torch.autograd.Function):
    """Its Python branches on what it is given, so that it cannot run on fake tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = 2.0 if bool((x * x).sum() >= 0) else 0.0
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


class Loops(torch.autograd.Function):
    """Its Python loops over the samples; fake tensors would run through it, with the batch size of the example."""

    @staticmethod
    def forward(ctx, x):
        return torch.stack([x[row] * 3 for row in range(x.shape[0])])

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Masked(torch.autograd.Function):
    """x: [b, T, 6], mask: [T, T]"""

    @staticmethod
    def forward(ctx, x, mask):
        assert bool(mask.isfinite().all())
        return (mask * (x @ x.mT)) @ x


class Shapes(torch.autograd.Function):
    """Several outputs of several kinds of sizes."""

    @staticmethod
    def forward(ctx, x):
        assert not bool(x.isnan().any())
        return x.new_zeros(3 * x.shape[0] + 2, 4), x.T.double(), x.sum()


@library.custom_op("fxpipe_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator without a rule for fake tensors."""
    return x * 2


def selected(lin: Any, x: torch.Tensor) -> torch.Tensor:
    """The same number of each sample, which nobody can know without values."""
    h = lin(x)
    largest = h >= h.topk(2, 1).values[:, -1:]
    return h[largest].view(x.shape[0], 2)


def make_function(name: str, forward: Any) -> type[torch.autograd.Function]:
    """A function that fake tensors do not run."""
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x: forward(x))})


SEEN: dict[str, tuple[Any, list[str], tuple[int, ...]]] = {
    "function that reads values": (lambda lin, x: ReadsValues.apply(lin(x)), ["float32[b, 6]"], (0,)),
    "function that loops": (lambda lin, x: lin(Loops.apply(x)), ["float32[b, 6]"], (0,)),
    "operator without a rule": (lambda lin, x: doubled(lin(x)), ["float32[b, 6]"], (0,)),
    "several": (lambda lin, x: Loops.apply(ReadsValues.apply(doubled(lin(x))).T).T, ["float32[b, 6]"], (0,)),
    "transposed": (lambda lin, x: ReadsValues.apply(lin(x).T) + 1, ["float32[6, b]"], (1,)),
    "flattened": (lambda lin, x: ReadsValues.apply(lin(x).view(-1, 2)).reshape(x.shape[0], 2, 3),
        ["float32[b, 2, 3]"], (0,)),
    "rows of samples": (lambda lin, x: ReadsValues.apply(lin(x).view(-1, 2)), ["float32[3*b, 2]"], (0,)),
    "as many of each sample": (selected, ["float32[b, 2]"], (0,)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "samples"), each_once(SEEN, [4, 1]))
def test_sizes_are_seen_in_real_runs(name, samples):
    forward, made, out_dims = SEEN[name]
    result = traced(forward, torch.randn(samples, 6))
    assert (shapes(result), result.in_dims, result.out_dims) == (made, (0,), out_dims)


def test_sizes_with_factor_and_offset_of_each_output():
    result = traced(lambda lin, x: sum(y.sum() for y in Shapes.apply(lin(x).detach())) + lin(x).sum(), out_dims="sum")
    (node,) = [n for n in result.nodes if n.name == "Shapes"]
    assert [str(shape) for shape in info(node).shapes] == ["float32[3*b + 2, 4]", "float64[6, b]", "float32[]"]


class Transposed(torch.autograd.Function):
    """Strides that do not grow evenly with the samples, and Python that reads values."""

    @staticmethod
    def forward(ctx, x):
        assert bool((x * x).sum() >= 0)
        rows = x.new_empty(2, len(x), 6, 2 * len(x)).permute(1, 0, 2, 3)[..., 0]
        return rows.copy_(x[:, None])

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sum(1)


def test_strides_that_are_no_formula():
    result = traced(lambda lin, x: Transposed.apply(lin(x)).sum(1))
    assert shapes(result) == ["float32[b, 6]"]


@pytest.mark.parametrize("samples", [4, 3])
def test_mask_of_two_lengths_has_no_batch_where_only_real_runs_tell(samples):
    """Also where the length happens to equal the number of samples."""
    args = torch.randn(samples, 4, 6), torch.tril(torch.ones(4, 4))
    result = traced(lambda lin, x, mask: Masked.apply(lin(x), mask), *args)
    assert (result.in_dims, result.out_dims, shapes(result)) == ((0, None), (0,), ["float32[b, 4, 6]"])


def test_batches_that_must_be_even():
    def pairs(x):
        assert not bool(x.isnan().any())
        return x.view(-1, 2, 6).flip(1).view(-1, 6)

    function = make_function("Pairs", pairs)
    assert shapes(traced(lambda lin, x: function.apply(lin(x)), out_dims=0)) == ["float32[b, 6]"]


def test_function_that_does_fix_the_batch_size_says_so():
    function = make_function("Fixed", lambda x: x.view(4, 6) * 2)
    with pytest.raises(ArgumentError, match=r"cannot vary: args\[0\] \(size 4, fixed by Fixed at"):
        traced(lambda lin, x: function.apply(lin(x)))


def test_rows_chosen_by_value_look_like_no_formula():
    function = make_function("Chosen", lambda x: x[[row for row, value in enumerate(x[:, 0].tolist()) if value > 0]])
    x = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None].expand(4, 6).contiguous()
    for chosen in (x, -x):  # with one sample more or less: one row more or less; as many rows
        with pytest.raises(TraceError, match="sizes must grow evenly with the samples"):
            traced(lambda lin, x: function.apply(x) + lin.bias, chosen)


def test_what_real_runs_raise_is_told():
    def refuse(x):
        if bool(x.isnan().any()) or x.shape[0] not in (4, 5):
            raise ValueError("four or five, please")
        return x * 2

    function = make_function("Picky", refuse)
    with pytest.raises(TraceError, match=r"real runs with 4, 8 and 12 samples: ValueError: four or five, please"):
        traced(lambda lin, x: function.apply(lin(x)))


def opaque(forward: Any, *args: Any) -> Traced:
    """Traced with every autograd.Function opaque: nobody runs it on fake tensors."""
    model = Forward(function=forward)
    result = record(model, args, {})
    for node in result.nodes:
        if node.name.startswith("Real"):
            update_info(node, opaque=OpaqueCall({}, pytree.tree_structure(())))
    return add_shapes(result, input_leaves(model, args, {})[2])


class Real(torch.autograd.Function):
    """Counts its runs, all of which must be real."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        assert not isinstance(x, FakeTensor)
        Real.runs += 1
        return x[:, ::2].contiguous(), x * 2


def test_opaque_nodes_are_never_run_on_fake_tensors_and_seen_together():
    def forward(lin, x):
        for _ in range(5):
            half, x = Real.apply(lin(x))
        return half

    Real.runs = 0
    result = opaque(forward, torch.randn(4, 6))
    assert shapes(result) == ["float32[b, 3]"]
    assert Real.runs == 5 * (1 + 3)  # the recording, and one real run for each number of samples


class Model(Layered, a=6, norm=lambda: nn.BatchNorm1d(6), b=6):
    """Batch norm, dropout and functions that cannot run on fake tensors."""

    def forward(self, x):
        return self.b(Loops.apply(torch.dropout(ReadsValues.apply(self.norm(self.a(x))), 0.5, self.training)))


def test_real_runs_leave_no_trace():
    model, x = Model(), torch.randn(4, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    trace(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_pipeline_is_the_model_at_every_size():
    model = Model().eval()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 6),)) as pipe:
        for samples in (4, 1, 2, 3, 5, 32):
            assert_step(pipe, copy.deepcopy(model), torch.randn(samples, 6))


def test_nothing_is_run_for_real_where_fake_tensors_tell(monkeypatch):
    def refuse(*args: Any) -> None:
        raise AssertionError("a real run")

    monkeypatch.setattr(symbolic_run, "observe_shapes", refuse)
    assert shapes(traced(lambda lin, x: lin(x))) == ["float32[b, 6]"]
