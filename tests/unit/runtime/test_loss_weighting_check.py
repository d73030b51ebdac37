"""When elements of a loss count the same in all micro-batches, and when they do not."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import GradientEdge

from fxpipe.runtime.loss_weighting_check import LossReduction, LossWeightingCheck, reductions_under

MEAN = SimpleNamespace(name=lambda: "MeanBackward0")


def _difference(gradients, counts, share=lambda i: 1.0, means_only=False, dtype=torch.float32):
    elements = LossWeightingCheck(True, frozenset())
    for i, (gradient, count) in enumerate(zip(gradients, counts, strict=True)):
        found = [LossReduction(GradientEdge(MEAN, 0), count)]
        elements.note("loss", i, found, [torch.tensor(gradient, dtype=dtype)])
    return elements.difference(share, means_only)


def test_elements_that_count_the_same_are_right():
    assert _difference([1.0, 2.0], [4, 8]) is None
    assert _difference([1.0, 1.0 + 5e-6], [4, 4]) is None  # a last bit


@pytest.mark.parametrize("times", [1.001, 1.01, 1.1, 1.25])
def test_a_difference_of_a_thousandth_is_one(times):
    words = _difference([1.0, times], [4, 4])
    assert f"(Mean) that count {times:.3g} times as much in micro-batch 1 as in micro-batch 0" in words


def test_half_precision_has_fewer_digits():
    assert _difference([1.0, 1.02], [4, 4], dtype=torch.bfloat16) is None
    assert _difference([1.0, 1.1], [4, 4], dtype=torch.bfloat16)


def test_a_micro_batch_of_no_elements_that_counts_is_wrong():
    """A mean over none: what it hands on would be shared by nobody."""
    assert "count inf times as much in micro-batch 1" in _difference([1.0, 1.0], [4, 0])
    assert _difference([1.0, 0.0], [4, 0]) is None
    assert _difference([1.0, math.inf], [4, 4]) is None  # an overflow, for a scaler of gradients to see


def test_micro_batches_may_count_by_their_share():
    assert _difference([1.0, 3.0], [4, 4], share=lambda i: (1.0, 3.0)[i]) is None
    assert _difference([1.0, 3.0], [4, 4], share=lambda i: (1.0, 2.0)[i])


def test_sums_may_be_left_out():
    assert _difference([1.0, 3.0], [1, 1])
    assert _difference([1.0, 3.0], [1, 1], means_only=True) is None
    assert _difference([1.0, 3.0], [4, 4], means_only=True)


def test_the_head_of_a_graph():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    loss = 2 * x.mean() + (weight.sum() - 1) * 3
    assert [r.count for r in reductions_under(loss.grad_fn, 0)] == [12, 1]
    assert reductions_under((x.mean() * x).sum().grad_fn, 0)[0].count == 1  # what is beyond a sum is not looked at
