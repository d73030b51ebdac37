"""The invariants of a graph: what every pass may rely on, and no pass may break.

`check_invariants` says what is broken. It looks at the graph as far as it is made: at the structure always, at shapes
and at how outputs go together once the batch is found, at effects and guards once they are there. Each function here
yields the faults of one kind; a new invariant is a new function, or another `yield`.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.errors import InternalError
from fxpipe.tracing.node_info import NodeInfo, info
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor
from fxpipe.tracing.verify.effects import Effects

_OPS = frozenset((*CALL_OPS, "placeholder", "get_attr", "output"))
_REDUCTIONS = ("mean", "sum", "stack", "combined", None)
_SHOWN_FAULTS = 8  # of one graph


def check_invariants(traced: Traced) -> None:
    """Checks all invariants of a graph.

    Raises:
        InternalError: a pass has broken some; names the nodes.
    """
    faults = list(itertools.islice(find_faults(traced), _SHOWN_FAULTS + 1))
    if faults:
        lines = [*faults[:_SHOWN_FAULTS], *(["..."] if len(faults) > _SHOWN_FAULTS else [])]
        raise InternalError(
            f"the graph of {type(traced.model).__name__} is broken, which is a bug of fxpipe; please report it:\n"
            + "\n".join(f"- {line}" for line in lines)
        )


def find_faults(traced: Traced) -> Iterator[str]:
    """Yields what is broken, in words. Where the structure is, nothing else can be looked at."""
    structure = [*_structure_faults(traced.graph)] or [*_output_structure_faults(traced)]
    yield from structure
    if structure:
        return
    yield from _input_faults(traced)
    yield from _attribute_faults(traced)
    for node in traced.graph.nodes:
        if node.op in CALL_OPS:
            yield from _work_faults(traced, node, info(node))
    yield from _ordinal_faults(traced)
    if traced.in_dims:
        yield from _batch_faults(traced)
        for node in traced.graph.nodes:
            if node.op != "output":
                yield from _size_faults(traced, node, info(node))
        out_dims = [*_out_dim_faults(traced)]
        yield from out_dims or _combination_faults(traced)
    if traced.guards is not None:
        yield from _guard_faults(traced)
    if traced.effects is not None:
        yield from _effect_faults(traced, traced.effects)


# -- the graph -------------------------------------------------------------------------------------------------------


def _structure_faults(graph: fx.Graph) -> Iterator[str]:
    """Every argument is a node before, every user a node that uses it, and names are names of one node."""
    users: dict[fx.Node, list[fx.Node]] = {}
    nodes = list(graph.nodes)
    for node in nodes:
        if node.op not in _OPS:
            yield f"{node.name} is a {node.op}, which no pass knows"
        for source in node.all_input_nodes:
            if source in users:
                users[source].append(node)
            else:
                yield f"{node.name} uses {source.name}, which is no node of the graph before it"
        users[node] = []
    for node in nodes:
        if len(node.users) != len(users[node]) or any(user not in node.users for user in users[node]):
            yield (
                f"{node.name} has the users {_names(node.users)}, while {_names(users[node]) or 'none'} of the graph "
                "use it"
            )
    if [node for node in nodes if node.op == "output"] != nodes[-1:]:
        yield "the last node is not the only output"
    if len({node.name for node in nodes}) < len(nodes):
        repeated = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
        yield f"several nodes are called {', '.join(repeated)}"


def _names(nodes: Any) -> str:
    return ", ".join(node.name for node in nodes)


def _output_structure_faults(traced: Traced) -> Iterator[str]:
    (output,) = traced.graph.output_node().args
    if not (isinstance(output, tuple) and len(output) in (2, 3) and isinstance(output[1], dict)):
        yield "the output is not (leaves, {name of a buffer: node}, pieces)"
    elif not all(isinstance(value, fx.Node) for value in (*traced.assigned.values(), *traced.pieces)):
        yield "the graph assigns a value, or hands out a piece, that is no node"
    elif len(traced.outputs) != traced.out_spec.num_leaves:
        yield f"the graph has {len(traced.outputs)} outputs, and the model's output {traced.out_spec.num_leaves} leaves"


def _input_faults(traced: Traced) -> Iterator[str]:
    """There is a placeholder for each tensor among the input leaves, and for nothing else."""
    placeholders = traced.placeholders
    tensors = [place for place, leaf in enumerate(traced.leaves) if leaf.is_tensor]
    if sorted(placeholders) != tensors:
        yield f"the placeholders stand for the input leaves {sorted(placeholders)}, and tensors are {tensors}"
        return
    for place, node in placeholders.items():
        leaf, rank = traced.leaves[place], info(node).recorded_rank
        if rank != len(leaf.shape):
            yield f"{node.name} was recorded with {rank} dimensions, and the input {leaf.path} has {len(leaf.shape)}"


def _attribute_faults(traced: Traced) -> Iterator[str]:
    for node in traced.graph.nodes:
        if node.op == "get_attr" and not isinstance(_attribute(traced, node), torch.Tensor):
            yield f"{node.name} reads {node.target!r}, which is no tensor of the model and no constant of the graph"
    assigned = traced.assigned.keys()
    if unknown := (traced.left_attribute_dims.keys() | traced.tied) - assigned:
        yield f"the graph says of {sorted(unknown)} how forward sets it, and forward does not set it"


def _attribute(traced: Traced, node: fx.Node) -> Any:
    try:
        return attribute_tensor(traced, node)
    except AttributeError:
        return None


# -- what is known of working nodes ----------------------------------------------------------------------------------


def _work_faults(traced: Traced, node: fx.Node, known: NodeInfo) -> Iterator[str]:
    if known.state is None:
        yield f"{node.name} does not say in which state of the thread it runs"
    if not known.source:
        yield f"{node.name} does not say on which line it was made"
    place = known.recorded_at
    if place.cut_marks > len(traced.marks) or place.ended_modules > len(traced.ended_modules):
        yield (
            f"{node.name} was recorded behind {place.cut_marks} cut marks and the ends of {place.ended_modules} "
            f"modules, and forward has {len(traced.marks)} and {len(traced.ended_modules)}"
        )
    if known.opaque is not None and known.opaque.module is None and known.is_graph_break:
        yield f"{node.name} is the rest of a forward, and does not say of which module"


def _ordinal_faults(traced: Traced) -> Iterator[str]:
    """Random nodes in another order than the recorded one say, all of them, which number they had."""
    draws = {node.name: known.rng for node in traced.graph.nodes if (known := info(node)).rng is not None}
    ordinals = [rng.ordinal for rng in draws.values() if rng is not None and rng.ordinal is not None]
    if ordinals and sorted(ordinals) != list(range(len(draws))):
        yield f"the random nodes {', '.join(draws)} have the ordinals {ordinals}"


# -- sizes -----------------------------------------------------------------------------------------------------------


def _batch_faults(traced: Traced) -> Iterator[str]:
    if len(traced.in_dims) != len(traced.leaves):
        yield f"there are {len(traced.leaves)} input leaves, and in_dims for {len(traced.in_dims)}"
        return
    for leaf, dim in zip(traced.leaves, traced.in_dims, strict=True):
        if dim is not None and not (leaf.is_tensor and 0 <= dim < len(leaf.shape)):
            yield f"the input {leaf.path} has no dimension {dim}, which in_dims says"
    if not traced.is_whole and all(dim is None for dim in traced.in_dims):
        yield "no input holds the batch"


def _size_faults(traced: Traced, node: fx.Node, known: NodeInfo) -> Iterator[str]:
    """All shapes are known, sizes are formulas in the batch size, and a size is that of the tensor it is of."""
    if known.known_shapes is None:
        if not known.is_guarded_read:  # it is taken out of the graph with the guards
            yield f"{node.name} has no shapes"
        return
    if node.op == "placeholder" and [shape.dtype for shape in known.shapes] != [_dtype(traced, node)]:
        yield f"{node.name} has the shapes {_shapes(known)}, and is the input {_path(traced, node)}"
    number = known.number
    if number is None:
        return
    if known.shapes:
        yield f"{node.name} is the number {number} and has the shapes {_shapes(known)}"
    if not known.is_data_dependent and number.free_symbols - {traced.batch}:
        yield f"{node.name} is {number}, which depends on more than the batch size {traced.batch}"
    size = _size_read(node)
    if size is not None and size != number:
        yield f"{node.name} is {number}, and the dimension it is of {size}"


def _size_read(node: fx.Node) -> Any:
    """The size of the dimension that a node reads, by the shape of the tensor that it is of."""
    if node.target != "size" or len(node.args) != 2 or not isinstance(node.args[1], int):
        return None
    shapes = info(node.args[0]).shapes  # type: ignore[arg-type]
    return shapes[0].shape[node.args[1]] if len(shapes) == 1 else None


def _dtype(traced: Traced, placeholder: fx.Node) -> torch.dtype | None:
    return traced.leaves[traced.place_of(placeholder)].dtype


def _path(traced: Traced, placeholder: fx.Node) -> str:
    leaf = traced.leaves[traced.place_of(placeholder)]
    return f"{leaf.path} ({leaf.dtype})"


def _shapes(known: NodeInfo) -> str:
    return ", ".join(map(str, known.shapes)) or "none"


# -- how results go together -----------------------------------------------------------------------------------------


def _out_dim_faults(traced: Traced) -> Iterator[str]:
    """For each result there is a way in which those of micro-batches go together."""
    outputs, pieces = traced.outputs, traced.pieces
    if len(traced.out_dims) != len(outputs):
        yield f"there are {len(outputs)} outputs, and out_dims for {len(traced.out_dims)}"
        return
    if len(traced.piece_dims) != len(pieces):
        yield f"there are {len(pieces)} pieces of outputs, and piece_dims for {len(traced.piece_dims)}"
    left = [(traced.assigned.get(name), dim) for name, dim in traced.left_attribute_dims.items()]
    for value, dim in (*zip(outputs, traced.out_dims, strict=True), *left):
        if isinstance(dim, int):
            shapes = info(value).shapes if isinstance(value, fx.Node) else ()
            if len(shapes) != 1 or not 0 <= dim < len(shapes[0].shape):
                yield f"the output {value} has no dimension {dim}, along which it would be put together"
        elif dim not in _REDUCTIONS:
            yield f"the output {value} goes together by {dim!r}, which is no way"
    places = {*traced.told, *(one.place for one in traced.untold)}
    if beyond := [place for place in places if not 0 <= place < len(outputs)]:
        yield f"there are {len(outputs)} outputs, and something is said of those at {beyond}"


def _combination_faults(traced: Traced) -> Iterator[str]:
    """Each combined output has one combination, of pieces that micro-batches hand out."""
    combined = [place for place, dim in enumerate(traced.out_dims) if dim == "combined"]
    if combined != [combination.output for combination in traced.combinations]:
        yield (
            f"the outputs at {combined} are combined, and there are combinations for those at "
            f"{[combination.output for combination in traced.combinations]}"
        )
    first, end = len(traced.outputs), len(traced.outputs) + len(traced.pieces)
    for combination in traced.combinations:
        lengths = {len(one) for one in (combination.pieces, combination.reductions, combination.is_known)}
        if len(lengths) > 1 or not all(first <= place < end for place in combination.pieces):
            yield f"{combination.where} is combined from the pieces at {combination.pieces}, which are not all there"
        elif any(
            traced.piece_dims[place - first] != how
            for place, how in zip(combination.pieces, combination.reductions, strict=True)
        ):
            yield f"{combination.where} is combined from pieces that go together in another way than it says"


# -- guards and effects ----------------------------------------------------------------------------------------------


def _guard_faults(traced: Traced) -> Iterator[str]:
    """Values that were read are asked for by guards, and by nothing in the graph."""
    assert traced.guards is not None
    for node in traced.graph.nodes:
        if info(node).is_guarded_read:
            yield f"{node.name} reads a value that a guard asks for, and is still in the graph"
    program = set(traced.guards.program)
    for guard in traced.guards.guards:
        if guard.node not in program or info(guard.node).read is None:
            yield f"the guard {guard.node.name} is no read of its program"


def _effect_faults(traced: Traced, effects: Effects) -> Iterator[str]:
    """Effects are those of the nodes of this graph, in its order."""
    nodes, every = traced.nodes, list(traced.graph.nodes)
    placeholders = [node for node in every if node.op == "placeholder"]
    if effects.nodes != nodes:
        yield "the effects are those of other nodes, or of nodes in another order"
        return
    if effects.place != {**dict.fromkeys(placeholders, -1), **{node: place for place, node in enumerate(nodes)}}:
        yield "the places of nodes in the effects are not those in the graph"
        return
    for table, what in ((effects.alias, "alias class"), (effects.last, "last user")):
        if missing := [node.name for node in every if node not in table and node.op != "output"]:
            yield f"the effects give no {what} for {', '.join(missing[:3])}"
            return
    yield from _alias_faults(effects)
    for node in every:
        after = [user.name for user in node.users if effects.place.get(user, -1) > effects.last[node]]
        if after:
            yield f"{node.name} is used by {after[0]} behind the place of its last user"


def _alias_faults(effects: Effects) -> Iterator[str]:
    if len(effects.written_classes) != len(effects.nodes):
        known = len(effects.written_classes)
        yield f"there are {len(effects.nodes)} nodes, and {known} of which it is known what they change"
        return
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node, alias in effects.alias.items():
        if alias is not None:
            members[alias].append(node)
    for node, written in zip(effects.nodes, effects.written_classes, strict=True):
        if not written <= members.keys():
            yield f"{node.name} changes the alias classes {_unknown(written, members)}, in which no node is"
    for node, source in effects.same.items():
        if source not in node.all_input_nodes or effects.alias[source] != effects.alias[node]:
            yield f"{node.name} returns {source.name}, which is no argument of it in the same alias class"


def _unknown(written: set[int], members: dict[int, Any]) -> Sequence[int]:
    return sorted(written - members.keys())
