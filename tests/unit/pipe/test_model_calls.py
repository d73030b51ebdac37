"""The forms of a micro-batch that `forward_backward(micro_batches=...)` takes, and the graphs that inputs select."""

import itertools
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.pipe.model_calls import MOST_MICRO_BATCHES, ModelCall, parse_micro_batches
from fxpipe.pipe.programs import GraphInputs

X, M, T = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("item", "call"),
    [
        (((X, M), {}, T), ModelCall((X, M), {}, (T,))),
        (((X,), {"mask": M}, None), ModelCall((X,), {"mask": M}, ())),
        ([[X], {"mask": M}, T], ModelCall((X,), {"mask": M}, (T,))),
        ((X, T), ModelCall((X,), {}, (T,))),
        ((X, None), ModelCall((X,), {}, ())),
        (((X, M), T), ModelCall((X, M), {}, (T,))),
        ([[X, M], T], ModelCall((X, M), {}, (T,))),
        (({"x": X}, {"labels": T}), ModelCall((), {"x": X}, ({"labels": T},))),
        (X, ModelCall((X,), {}, ())),
        ({"x": X, "mask": M}, ModelCall((), {"x": X, "mask": M}, ())),
        (UserDict(x=X), ModelCall((), {"x": X}, ())),
    ],
)
def test_a_micro_batch_is_a_call_and_a_target(item: Any, call: ModelCall) -> None:
    (parsed,) = parse_micro_batches([item])
    assert (len(parsed.args), parsed.kwargs.keys(), len(parsed.target)) == (
        len(call.args),
        call.kwargs.keys(),
        len(call.target),
    )
    pairs = zip((*parsed.args, *parsed.kwargs.values()), (*call.args, *call.kwargs.values()), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    if call.target and isinstance(call.target[0], torch.Tensor):
        assert parsed.target[0] is call.target[0]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((X, M, T), r"micro-batch 1 is a tuple of 3 \(Tensor, Tensor, Tensor\); expected \(args, kwargs, target\)"),
        ((X,), r"a tuple of 1 \(Tensor\)"),
        (((X,), {3: M}, T), "a tuple of 3"),
        ((3, T), "the inputs of micro-batch 1 are an int; expected a tensor"),
        (({3: X}, T), "the inputs of micro-batch 1 are a dict"),
        (namedtuple("Batch", "x t")(X, T), "micro-batch 1 is a Batch"),
        (7, "micro-batch 1 is an int"),
        (None, "micro-batch 1 is None"),
    ],
)
def test_any_other_form_is_refused_by_name(item: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        parse_micro_batches([(X, T), item])


@pytest.mark.parametrize(
    ("micro_batches", "kind"), [(X, "a Tensor"), ({"x": X}, "a dict"), (3, "an int"), ("ab", "a str")]
)
def test_what_is_no_iterable_of_micro_batches_is_refused(micro_batches: Any, kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"micro_batches is {kind}; expected an iterable"):
        parse_micro_batches(micro_batches)


def test_an_iterator_without_end_is_refused() -> None:
    with pytest.raises(ArgumentError, match=f"goes on after {MOST_MICRO_BATCHES} of them; .*islice"):
        parse_micro_batches(itertools.repeat(X))


class Graph:
    key = "key"

    def __init__(self, is_of_model):
        self.is_of_model = is_of_model

    def holds_for_model(self):
        return self.is_of_model

    def holds_for_values(self, *given):
        return True


def test_an_answer_does_not_outlive_its_graph():
    """Python puts the next object where a dropped one was, with its id."""
    inputs = GraphInputs(ModelCall((), {}, ()), (), "key", 0, {})
    wanted = [False, True] * 4
    assert [inputs.match(Graph(is_of_model)) for is_of_model in wanted] == wanted
