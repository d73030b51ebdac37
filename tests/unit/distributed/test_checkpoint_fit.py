"""A checkpoint that lacks what one rank needs is the same error on all ranks."""

import pytest
import torch

from fxpipe.distributed.checkpoint_loading import _check_fit
from fxpipe.errors import ArgumentError


class Reader:
    keys = frozenset({"first.weight"})

    def shape_of(self, key):
        return (2, 3)


class State:
    """As of the first of two ranks; the second one has told `other`."""

    def __init__(self, other):
        self.other, self.group = other, self

    def gather(self, value, what):
        return [value, self.other]


def check(other, strict=True):
    entries, keys = {"first.weight": torch.zeros(2, 3)}, ["first.weight", "last.weight"]
    _check_fit(State(other), Reader(), entries, keys, "", "saved", strict)


def test_what_another_rank_misses_is_told_here():
    check(((), ()))
    with pytest.raises(ArgumentError, match=r"'saved' does not fit the model: it lacks .*last\.weight"):
        check((("last.weight",), ()))
    check((("last.weight",), ()), strict=False)


def test_a_shape_that_another_rank_has_is_told_here():
    with pytest.raises(ArgumentError, match=r"shapes differ: 'last\.weight' \(\[4\]"):
        check(((), ("'last.weight' ([4], in the model [5])",)), strict=False)
