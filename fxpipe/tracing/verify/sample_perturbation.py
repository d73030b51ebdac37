"""The check that samples do not act on each other where they meet, for other values than those of the example batch.

    h = self.first(x) * (ids > 0)[..., None]      # zeros: the example batch is padding only
    return Penalty.apply(h - h.mean(0))           # zeros as well, whatever the batch is cut into

Of the example batch the parts agree with the whole, and `shapes.batch_mixing` knows the mean, but not the function
behind it. So the graph runs again with another value for one sample of `h`: one sample of the output may differ then,
whichever it is, and no second one. Nothing is assumed of what stands in between: where a mean is taken out again, where
samples are put into another order, the other samples are what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import Traced

MAX_PLACES = 8  # where samples meet, asked one by one; a run of the graph each

OutputValues = Mapping[int, torch.Tensor]  # by place among the results of a graph
Change = Callable[[fx.Node, Any], Any]


def node_that_mixes(
    traced: Traced, sources: Mapping[fx.Node, fx.Node], run: Callable[[Change | None], OutputValues | None]
) -> tuple[int, fx.Node] | None:
    """Finds a place of an output of which several samples depend on one sample of a value, and where samples meet.

    Args:
        sources: values of which some function goes over the samples, and that function.
        run: computes outputs; gives every value of the graph to a function that may put another one in its place. None:
            the values are none that the graph can run with.
    """
    before = run(None) if sources else None
    if before is None or _mixed_output(traced, before, run(_one_sample_of(sources))) is None:
        return None
    # Sample 0 of one value may be another sample than sample 0 of the next.
    for source, node in [*sources.items()][:MAX_PLACES]:
        place = _mixed_output(traced, before, run(_one_sample_of({source})))
        if place is not None:
            return place, node
    return None


def _one_sample_of(sources: Collection[fx.Node]) -> Change:
    return functools.partial(_changed, sources=sources)


def _changed(node: fx.Node, value: Any, sources: Collection[fx.Node]) -> Any:
    if node not in sources:
        return value
    dim = next(d for d, size in enumerate(info(node).shapes[0].shape) if size.free_symbols)
    first = value.select(dim, 0)
    noise = 0.5 + torch.arange(first.numel(), device=value.device).remainder(7).view_as(first).to(value.dtype) / 5
    return value.index_copy(dim, torch.zeros(1, dtype=torch.long, device=value.device), (first + noise).unsqueeze(dim))


def _mixed_output(traced: Traced, before: OutputValues, after: OutputValues | None) -> int | None:
    """The first output of which more than one sample has changed."""
    for place, left in before.items() if after is not None else ():
        assert after is not None
        dim, right = traced.results[place][1], after[place]
        if not isinstance(dim, int) or left.shape != right.shape:
            continue
        if info(traced.results[place][0]).shapes[0].shape[dim] != traced.batch:
            continue
        scale = left.abs().max() * torch.finfo(left.dtype).eps ** 0.5
        is_other = ((left - right).abs() > scale).movedim(dim, 0).unsqueeze(1).flatten(1).any(1)
        if int(is_other.sum()) > 1:
            return place
    return None
