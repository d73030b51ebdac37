"""Pieces of a tensor, one for each sample, that forward concatenates again.

    features.split([2, 1, 3]) ──▶ reshape, reshape, reshape ──▶ cat         is         features ──▶ reshape ──▶ cat

A graph of pieces would hold for one number of samples. If the functions between only rearrange elements or convert
them, they do the same to the full tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fxpipe._torch.functions import SPLIT_FUNCTIONS, opname
from fxpipe.tracing.node_info import RecordingPlace, ValueRead, container_of, info, set_info, update_info
from fxpipe.tracing.traced import Traced

_VIEWS = frozenset(("reshape", "view"))  # to [-1, ...]
_CONVERSIONS = frozenset("to type contiguous float double half bfloat16".split())


def join_pieces(traced: Traced) -> None:
    """Lets each `cat` of all pieces, in order, take the full tensor. Pieces used elsewhere become rows of it."""
    needed = {n for read in traced.size_reads for n in read.operands if isinstance(n, fx.Node)}
    needed |= {read.tensor for read in traced.layout_reads}
    changed = frozenset[int]().union(*(info(node).written_storages for node in traced.graph.nodes))
    for node in [n for n in traced.graph.nodes if n.target in (torch.cat, torch.concat, torch.concatenate)]:
        arguments: list[Any] = [*node.args, *node.kwargs.values()]
        chains = [_chain_to(piece) for piece in arguments[0]] if isinstance(arguments[0], (tuple, list)) else []
        if not all(chains) or not chains or arguments[1:] not in ([], [0]) or not {*node.kwargs} <= {"dim"}:
            continue
        split, forms = chains[0][0].all_input_nodes[0], [_form_of(chain) for chain in chains]
        memory = frozenset[int]().union(*(info(n).storages for chain in chains for n in chain))
        is_all = [*split.users] == [chain[0] for chain in chains]
        sizes: Any = next((a for a in (*split.args, *split.kwargs.values()) if isinstance(a, (tuple, list))), ())
        is_all &= all(type(size) is int for size in sizes)
        if not is_all or forms != forms[:1] * len(forms) or None in forms or not memory.isdisjoint(changed):
            continue
        with traced.graph.inserting_before(split):
            if sizes:
                rows = traced.graph.call_method("size", (split.all_input_nodes[0], 0))
                set_info(rows, info(split).beside())
                read = traced.graph.call_function(has_rows, (rows, sum(sizes)))
                set_info(read, info(split).beside(read=ValueRead(True, "rows")))
        with traced.graph.inserting_before(node):
            node.args, node.kwargs = ([_on_full_tensor(chains[0], info(node).recorded_at, memory)],), {}
        for chain in chains:
            _erase_unused(chain, needed)
        for item in [*split.users] if sizes else ():  # used elsewhere
            i: Any = item.args[1]
            item.op, item.target, item.args = "call_method", "narrow", (split.args[0], 0, sum(sizes[:i]), sizes[i])
        if not split.users:
            split.graph.erase_node(split)


def has_rows(rows: int, total: int) -> bool:
    """Returns whether the mini-batch has as many rows as its pieces; otherwise `split` raises."""
    return bool(rows == total)


def _chain_to(piece: Any) -> list[fx.Node]:
    """Returns the nodes from an item of a split along dimension 0 to this node; empty if there is no such split."""
    chain: list[fx.Node] = []
    while isinstance(piece, fx.Node):
        chain.insert(0, piece)
        if (split := container_of(piece)) is not None:
            name = opname(split.target)
            dim = split.kwargs.get("dim", (*split.args, 0, 0)[SPLIT_FUNCTIONS.get(name, 0)])
            return chain if name in SPLIT_FUNCTIONS and dim == 0 else []
        if opname(piece.target) not in _VIEWS | _CONVERSIONS or not piece.args:
            return []
        piece = piece.args[0]
    return []


def _form_of(chain: list[fx.Node]) -> list[Any] | None:
    """Returns what the functions do, equal if they do the same to each piece; None if they may mix rows of pieces."""

    def described(source: fx.Node) -> Any:
        is_size = source.target == "size" and source.args[0] in chain and source.args[1] != 0
        return f"size {source.args[1]} of {chain.index(source.args[0])}" if is_size else source  # type: ignore[arg-type]

    form: list[Any] = []
    for node in chain[1:]:
        arguments: Any = fx.map_arg((node.args[1:], node.kwargs), described)
        sizes = arguments[0][0] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else arguments[0]
        if opname(node.target) in _VIEWS and (node.kwargs or len(sizes) < 2 or sizes[0] != -1):
            return None
        form.append((node.op, node.target, arguments))
    return form


def _on_full_tensor(chain: list[fx.Node], place: RecordingPlace, memory: frozenset[int]) -> fx.Node:
    """Adds the functions of a chain, applied to the tensor that is split, and their sizes."""
    split = chain[0].all_input_nodes[0]
    full = {chain[0]: split.all_input_nodes[0]}
    if opname(split.target) in ("unbind", "__iter__"):
        full[chain[0]] = split.graph.call_method("flatten", (split.args[0], 0, 1))
        set_info(full[chain[0]], info(split).beside(storages=memory, recorded_at=place))

    def of_full(node: fx.Node) -> fx.Node:
        if node not in full and (node in chain or (node.target == "size" and node.args[0] in full)):
            full[node] = split.graph.node_copy(node, of_full)
            update_info(full[node], storages=memory, recorded_at=place)
        return full.get(node, node)

    return of_full(chain[-1])


def _erase_unused(chain: list[fx.Node], needed: Collection[fx.Node]) -> None:
    for node in reversed(chain):
        for user in (*node.users, node):
            if not user.users and user not in needed and (user is node or user.target == "size"):
                user.graph.erase_node(user)
