"""The target of all replicas, for a loss of all their samples."""

from dataclasses import dataclass

import pytest
import torch

from fxpipe.distributed.replicas import target_of_union
from fxpipe.errors import LossError


@dataclass
class Labels:
    classes: torch.Tensor
    names: list[str]


def test_parts_with_samples_are_concatenated_and_others_are_equal():
    first = {"labels": Labels(torch.tensor([2, 2]), ["a", "b"]), "weight": (torch.ones(3), None, 0.1, float("nan"))}
    other = {"labels": Labels(torch.tensor([1]), ["c"]), "weight": (torch.ones(3), None, 0.1, float("nan"))}
    union = target_of_union([first, other], [2, 1])
    assert union["labels"].classes.tolist() == [2, 2, 1]
    assert union["labels"].names == ["a", "b", "c"]
    torch.testing.assert_close(union["weight"], first["weight"], equal_nan=True)


def test_rows_of_a_sample():
    first, other = torch.tensor([5, 6, 7, 8]), torch.tensor([9, 9])
    assert target_of_union([(first,), (other,)], [2, 1], {1, 2})[0].tolist() == [5, 6, 7, 8, 9, 9]
    with pytest.raises(LossError, match="not of samples and differs"):
        target_of_union([(first,), (other,)], [2, 1])


def test_integers_of_all_samples_are_equal_and_not_nearly():
    for first, other in ((100_000, 100_001), (2**24, 2**24 + 1)):
        with pytest.raises(LossError, match="not of samples and differs"):
            target_of_union([torch.tensor(first), torch.tensor(other)], [2, 1])
    assert target_of_union([torch.tensor(0.1), torch.tensor(0.1 + 1e-7)], [2, 1], own=1) == torch.tensor(0.1 + 1e-7)


def test_a_list_of_parts_that_may_be_of_samples_is_refused():
    first, other = [torch.ones(2), torch.zeros(2)], [torch.ones(2), torch.ones(2)]
    with pytest.raises(LossError, match="pass a tuple if these are rows of samples"):
        target_of_union([first, other], [2, 2])
    assert target_of_union([tuple(first), tuple(other)], [2, 2])[1].tolist() == [0, 0, 1, 1]
    assert target_of_union([[(x,) for x in first], [(x,) for x in other]], [2, 2])[2] == (other[0],)


@pytest.mark.parametrize("batches", [(4, 3), (2, 4), (1, 3)])
def test_numbers_of_samples_are_refused(batches):
    with pytest.raises(LossError, match="let loss_fn number them"):
        target_of_union([*map(torch.arange, batches)], batches)
    assert target_of_union([torch.arange(2), torch.arange(2)], [2, 2]).tolist() == [0, 1, 0, 1]  # may be classes
    with pytest.raises(LossError, match="different parts on different replicas"):
        target_of_union([{"a": 1}, {"b": 1}], [4, 3])
