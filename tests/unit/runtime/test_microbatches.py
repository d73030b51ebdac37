"""A mini-batch cut into parts, and put together again."""

import re
from typing import Any

import pytest
import torch

from fxpipe.errors import UnequalOutputsError
from fxpipe.runtime.microbatches import gather, scatter, scatter_gradient, target_dims
from fxpipe.utils.batch_split import BatchDim, samples_per_micro_batch


def test_sizes_are_those_of_the_parts_and_the_larger_ones_come_first() -> None:
    assert samples_per_micro_batch(7, 3) == [3, 2, 2]
    for batch in range(9):
        for count in range(1, 6):
            assert samples_per_micro_batch(batch, count) == [
                len(part) for part in torch.arange(batch).tensor_split(count)
            ]


def test_rows_of_a_sample_stay_together() -> None:
    tiles = torch.arange(15)
    parts = [part for (part,) in scatter([tiles], [BatchDim(0, rows=3)], 2)]
    assert [part.tolist() for part in parts] == [[*range(9)], [*range(9, 15)]]
    assert target_dims([tiles, 7], 5, {1, 3}) == [BatchDim(0, rows=3), None]


def test_parts_are_as_dense_as_the_whole() -> None:
    whole = torch.randn(3, 8)
    (first, turned), (second, _) = scatter([whole, whole.t()], [1, 0], 2)
    assert first.is_contiguous()
    assert second.is_contiguous()
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert not turned.is_contiguous()


@pytest.mark.parametrize(
    ("how", "shapes"),
    [
        (0, [(2, 5), (2, 7)]),
        (1, [(2, 5), (3, 5)]),
        ("mean", [(3,), (1,)]),
        ("sum", [(3,), ()]),
        ("stack", [(1,), (2,)]),
    ],
)
def test_parts_that_cannot_be_put_together_are_refused_by_name(how: Any, shapes: list[tuple[int, ...]]) -> None:
    """Broadcast they would add up to something else."""
    parts = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(
        UnequalOutputsError, match=re.escape(f"the output 3 comes out of micro-batches with the shapes {shapes[0]}")
    ):
        gather(parts, how, [0.5, 0.5], "the output 3")


@pytest.mark.parametrize("how", ["mean", "sum", "stack", 0, 1, None])
def test_the_gradient_of_what_is_put_together_is_that_of_its_parts(how: Any) -> None:
    weights = [3 / 7, 2 / 7, 2 / 7]
    shapes = [torch.Size((size, 2)) for size in (3, 2, 2)] if how == 0 else [torch.Size((2, 2))] * 3
    parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
    like = gather(parts, how, weights)
    gradient = torch.randn(like.shape)
    # `gather` detaches: here what it does, with autograd.
    whole = {
        "mean": lambda: sum(part * weight for part, weight in zip(parts, weights, strict=True)),
        "sum": lambda: sum(parts),
        "stack": lambda: torch.stack(parts),
        None: lambda: parts[0],
    }.get(how, lambda: torch.cat(parts, how))()
    assert torch.equal(whole, like)
    want = torch.autograd.grad(whole, parts, gradient, allow_unused=True)
    for w, h in zip(want, scatter_gradient(gradient, shapes, how, weights), strict=True):
        assert (w is None) == (h is None)
        assert w is None or torch.equal(w, h)
