"""Compares a graph with its model once more, for micro-batches that nobody had thought of when it was traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpipe.tracing.checking.check import agree_at, is_same_graph
from fxpipe.tracing.recording.fake import faked, is_faked
from fxpipe.tracing.recording.own_dice import standing_still
from fxpipe.tracing.traced import Traced
from fxpipe.trees import flatten
from fxpipe.turns import one_at_a_time


def agrees(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int]) -> bool:
    """Whether micro-batches of these sizes are the graph's, as far as inputs and model have values to see it by."""
    if not all(is_same_graph(traced, size) for size in sizes):
        return False
    with (
        one_at_a_time,
        torch.inference_mode(False),
        torch.set_grad_enabled(traced.state.grad),
        standing_still(traced.model),
        faked(traced.model, (args, kwargs)) as (args, kwargs),
    ):
        leaves = flatten((args, kwargs))[0]
        return is_faked() or all(agree_at(traced, leaves, size) for size in sizes)
