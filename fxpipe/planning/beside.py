"""Another graph of a planned model, for evaluation say, cut so that nodes stay with their parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxpipe.planning.preparing import Prepared
from fxpipe.planning.studying import traced_batch
from fxpipe.turns import planning

if TYPE_CHECKING:
    from fxpipe.settings import Settings
    from fxpipe.tracing import Traced


@planning()
def prepare_beside(
    first: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int = 0
) -> Prepared:
    """Another graph of a planned model (for evaluation, say), cut so that nodes stay with their parameters."""
    from fxpipe.partitioning import follow
    from fxpipe.rewriting import forbidden_cuts, split
    from fxpipe.rewriting.ordering import ordered
    from fxpipe.tracing.placement import moved, on_one_device

    model = first.traced.model
    with on_one_device(model) as device:
        args, kwargs = moved((args, kwargs), device)
        traced, _ = traced_batch(model, args, kwargs, settings, seed)
    if first.is_reordered:
        traced = ordered(traced)
    starts = follow(_misplaced(first, traced), forbidden_cuts(traced))
    program = split(traced, starts, settings.devices, deferred_batch_norm=settings.deferred_batch_norm)
    return replace(first, traced=traced, program=program)


def _misplaced(first: Prepared, traced: Traced) -> list[list[float]]:
    """For each node and stage: bytes of parameters that would be elsewhere; least of all, a node with a known name."""
    from fxpipe.tracing.containers import bytes_in
    from fxpipe.tracing.traced import lookup

    homes: dict[str, int] = {}
    for j, stage in enumerate(first.program.stages):
        for name in stage.attributes:
            homes.setdefault(name, j)
    known = {name: stage.index for stage in first.plan.stages for name in stage.nodes}
    stages = range(len(first.plan.stages))
    table = []
    for node in traced.nodes:
        row = [0.0] * len(stages)
        for source in node.all_input_nodes:
            home = homes.get(str(source.target)) if source.op == "get_attr" else None
            if home is not None:
                size = 1.0 + bytes_in(lookup(traced, source))
                row = [cost + (size if j != home else 0.0) for j, cost in enumerate(row)]
        if node.name in known:
            row = [cost + (0.5 * abs(j - known[node.name])) for j, cost in enumerate(row)]
        table.append(row)
    return table
