"""Samples of micro-batches, and the dimension of an input that holds them."""

import copy
import pickle

import torch

from fxpipe.tracing.verify.equivalence import slice_samples
from fxpipe.utils.batch_split import BatchDim, rows_of_inputs, rows_per_sample, samples_along


def test_a_batch_dimension_is_a_number_that_knows_its_rows() -> None:
    dim = BatchDim(1, rows=4)
    assert dim == 1
    for same in (copy.deepcopy(dim), pickle.loads(pickle.dumps(dim))):
        assert (same, rows_per_sample(same)) == (1, 4)
    assert samples_along(torch.empty(3, 8), dim) == 2
    assert rows_of_inputs([0, None, dim]) == {1, 4}


def test_samples_are_taken_with_all_their_rows() -> None:
    """Those after the last are the first again."""
    x, tiles = torch.arange(3), torch.arange(6)

    def samples(start: int, stop: int) -> list[list[int]]:
        return [part.tolist() for part in slice_samples([x, tiles], [0, BatchDim(0, rows=2)], start, stop)]

    assert samples(1, 3) == [[1, 2], [2, 3, 4, 5]]
    assert samples(2, 5) == [[2, 0, 1], [4, 5, 0, 1, 2, 3]]
