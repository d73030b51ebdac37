"""Equality of values, and the samples of micro-batches with the dimension of an input that holds them."""

import copy
import math
import pickle

import numpy as np
import torch

from fxpipe.tracing.verify.equivalence import slice_samples
from fxpipe.utils.batch_split import BatchDim, rows_of_inputs, rows_per_sample, samples_along
from fxpipe.utils.python_objects import equal_values


def test_arrays_are_equal_item_by_item_and_of_one_shape() -> None:
    assert equal_values(np.ones(3), np.ones(3))
    assert not equal_values(np.ones(3), np.ones(1))
    assert not equal_values((np.ones(3), 1), (np.zeros(3), 1))


def test_answers_are_of_one_kind_and_nan_is_itself():
    assert equal_values(2, 2)
    assert not equal_values(2, 2.0)
    assert not equal_values(1, True)
    assert equal_values(float("nan"), float("nan"))  # two objects
    assert not equal_values(math.nan, 1.0)
    assert equal_values([1.0, math.nan], [1.0, math.nan])
    assert not equal_values([1.0], [1.0, 1.0])


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
