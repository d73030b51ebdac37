"""Compares a graph with its model once more, for micro-batches that nobody had thought of when it was traced."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from fxpipe.tracing.checking.check import agree_at, is_same_graph
from fxpipe.tracing.checking.micro_batches import holds_for_parts, refuse_uneven
from fxpipe.tracing.print_calls import printing_once
from fxpipe.tracing.recording.fake import faked, is_faked
from fxpipe.tracing.recording.own_dice import standing_still
from fxpipe.tracing.traced import Traced
from fxpipe.trees import flatten
from fxpipe.turns import one_at_a_time


def agrees(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int]) -> bool:
    """Whether micro-batches of these sizes are the graph's, as far as inputs and model have values to see it by."""
    if not all(is_same_graph(traced, size) for size in sizes):
        return False
    with _as_when_traced(traced, args, kwargs) as leaves:
        return is_faked() or all(agree_at(traced, leaves, size) for size in sizes)


def holds_again(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Collection[int], is_told: bool
) -> bool:
    """Whether the graph holds for these inputs in micro-batches of these sizes; see `holds_for_parts`.

    Raises:
        ArgumentError: the micro-batches do not make as many rows as the mini-batch.
    """
    with _as_when_traced(traced, args, kwargs) as leaves:
        if traced.holds_for(traced.batch_of(leaves)):
            refuse_uneven(traced, leaves, sizes)
        return holds_for_parts(traced, leaves, sizes, is_told)


@contextlib.contextmanager
def _as_when_traced(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[list[Any]]:
    """A block in which graph and model may be compared. Yields the flattened inputs."""
    with (
        one_at_a_time,
        printing_once(is_first_run=False),
        torch.inference_mode(False),
        torch.set_grad_enabled(traced.state.grad),
        standing_still(traced.model),
        faked(traced.model, (args, kwargs)) as (args, kwargs),
    ):
        yield flatten((args, kwargs))[0]
