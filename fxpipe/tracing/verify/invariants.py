"""The invariants of a graph, which every pass may rely on and must preserve.

They cover results of several passes; tests cover the result of a single function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fxpipe.errors import InternalError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import Traced

_SHOWN_FAULTS = 8


def check_invariants(traced: Traced) -> None:
    """Raises `InternalError`, with the names of the nodes, if a pass broke an invariant."""
    faults = list(itertools.islice(find_faults(traced), _SHOWN_FAULTS + 1))
    if faults:
        lines = [*faults[:_SHOWN_FAULTS], *(["..."] if len(faults) > _SHOWN_FAULTS else [])]
        raise InternalError(
            f"the graph of {type(traced.model).__name__} is broken, which is a bug of fxpipe; please report it:\n"
            + "\n".join(f"- {line}" for line in lines)
        )


def find_faults(traced: Traced) -> Iterator[str]:
    """Yields descriptions of broken invariants whose loss would go unnoticed. Others raise where a graph runs."""
    if traced.in_dims:
        for node in traced.nodes:
            if info(node).known_shapes is None and not info(node).is_guarded_read:
                yield f"{node.name} has no shapes"
        combined = [p for p, dim in enumerate(traced.out_dims) if dim == "combined"]
        outputs = [one.output for one in traced.combinations]
        if combined != outputs:
            yield f"the outputs {combined} are combined, and there are combinations for {outputs}"
        pieces = dict(enumerate(traced.piece_dims, len(traced.outputs)))
        for one in traced.combinations:
            if [pieces.get(place, "missing") for place in one.pieces] != [*one.reductions]:
                yield f"{one.where} is combined of {one.pieces} by {one.reductions}, and the pieces are {pieces}"
    if (effects := traced.effects) is None:
        return
    if effects.nodes != traced.nodes or len(effects.written_classes) != len(effects.nodes):
        yield "the effects are those of other nodes, or of nodes in another order"
        return
    for node in traced.graph.nodes:
        after = [user.name for user in node.users if effects.place.get(user, -1) > effects.last.get(node, -1)]
        if after:
            yield f"{node.name} is used by {after[0]} behind the place of its last user"
    known = {*effects.alias.values()}
    for node, written in zip(effects.nodes, effects.written_classes, strict=True):
        if not written <= known:
            yield f"{node.name} changes the alias classes {sorted(written - known)}, in which no node is"
    for node, source in effects.same.items():
        if source not in node.all_input_nodes or effects.alias[source] != effects.alias[node]:
            yield f"{node.name} returns {source.name}, which is no argument of it in the same alias class"
