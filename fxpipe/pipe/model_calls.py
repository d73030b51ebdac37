"""Parses the micro-batches of `forward_backward` and the mini-batches of `train_stream`, each a call of the model.

    (args, kwargs, target)    a tuple of inputs by position, a dict of inputs by name, and the target or None
    (inputs, target)          inputs: a tensor, a tuple or list of inputs by position, or a dict of inputs by name
    tensor, or dict           inputs without a target

Outer pairs and triples may be lists, as data loaders return them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from fxpipe._torch.autograd import version_of
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.utils.pytree import flatten
from fxpipe.utils.units import with_article

MOST_MICRO_BATCHES = 4096  # in a step; an iterator with more may never end
FORMS = (
    "(args, kwargs, target) with a tuple and a dict, (inputs, target) with inputs a tensor, a tuple or a dict, or a "
    "tensor or dict alone, without a target"
)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A micro-batch, as arguments of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]  # () or (target,)


def check_iterable(argument: str, batches: Any) -> None:
    """Raises `ArgumentTypeError` if the argument is not an iterable of calls."""
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        kind = {"batches": "mini-batches", "micro_batches": "micro-batches"}[argument]
        raise ArgumentTypeError(f"{argument} is {with_article(batches)}; expected an iterable of {kind}, each {FORMS}")


def parse_micro_batches(micro_batches: Any) -> list[ModelCall]:
    """Parses all micro-batches of a step. Raises `ArgumentError` for none, too many, or only some with a target."""
    check_iterable("micro_batches", micro_batches)
    items, versions = [], []
    for item in islice(micro_batches, MOST_MICRO_BATCHES + 1):
        items.append(item)
        versions.append(tensor_versions(item))
    if not items:
        raise ArgumentError("micro_batches is empty: give at least one micro-batch, or skip the step")
    if len(items) > MOST_MICRO_BATCHES:
        raise ArgumentError(
            f"micro_batches goes on after {MOST_MICRO_BATCHES} of them; give those of one step: "
            "itertools.islice(iterator, 8) takes the next 8"
        )
    for i, one in enumerate(versions):
        refuse_written(one, f"micro-batch {i}", "forward_backward(micro_batches=...)")
    calls = [parse_call(item, f"micro-batch {i}") for i, item in enumerate(items)]
    with_target = [i for i, call in enumerate(calls) if call.target]
    if with_target and len(with_target) < len(calls):
        without = next(i for i, call in enumerate(calls) if not call.target)
        raise ArgumentError(
            f"micro-batch {without} has no target, and micro-batch {with_target[0]} has one; give all of them one, or "
            "none"
        )
    return calls


def tensor_versions(item: Any) -> list[tuple[torch.Tensor, int]]:
    """Returns the tensors of a micro-batch or mini-batch, with their version counters."""
    tensors = (leaf for leaf in flatten(item)[0] if isinstance(leaf, torch.Tensor) and not leaf.is_inference())
    return [(tensor, version_of(tensor)) for tensor in tensors]


def refuse_written(versions: Iterable[tuple[torch.Tensor, int]], what: str, reader: str) -> None:
    """Raises `ArgumentError` if a tensor was written to after these versions."""
    for tensor, version in versions:
        if version_of(tensor) != version:
            raise ArgumentError(
                f"a tensor {tuple(tensor.shape)} of {what} was written to after it was read: {reader} reads ahead, and "
                "the iterable fills the same tensor again; let it give a new one each time (x.clone())"
            )


def parse_call(item: Any, what: str) -> ModelCall:
    """Parses one call. `what`: its name in messages, such as "micro-batch 3"."""
    is_sequence = type(item) in (tuple, list)
    inputs: Any = item
    by_name, target = {}, None
    if is_sequence and len(item) == 3 and type(item[0]) in (tuple, list) and _is_dict(item[1]):
        inputs, by_name, target = item
    elif is_sequence and len(item) == 2:
        inputs, target = item
    elif not isinstance(item, (torch.Tensor, Mapping)):
        raise ArgumentTypeError(f"{what} is {_described(item)}; expected {FORMS}")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    elif _is_dict(inputs):
        inputs, by_name = (), inputs
    elif type(inputs) not in (tuple, list):
        raise ArgumentTypeError(
            f"the inputs of {what} are {_described(inputs)}; expected a tensor, a tuple or list of inputs by "
            "position, or a dict by name; any other input goes into the tuple: (args, kwargs, target)"
        )
    return ModelCall(tuple(inputs), dict(by_name), () if target is None else (target,))


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _described(value: Any) -> str:
    if type(value) in (tuple, list):
        return f"{with_article(value)} of {len(value)} ({', '.join(type(part).__name__ for part in value)})"
    return with_article(value)


@contextlib.contextmanager
def note_of_micro_batch(i: int, count: int | None) -> Iterator[None]:
    """A block for one of `count` micro-batches of the caller, which exceptions name; None: for a mini-batch."""
    try:
        yield
    except Exception as error:
        if count is not None:
            error.add_note(f"fxpipe: raised for micro-batch {i} of the {count} in micro_batches")
        raise
