"""Torch's pytrees: what `torch.utils._pytree` has, which torch's own documentation of `torch.func` and export use.

All of it is required, and has been the same from torch 2.11 to 2.14.
"""

from __future__ import annotations

from fxpipe._torch.versions import required_names

with required_names():
    from torch.utils._pytree import (
        SUPPORTED_NODES,
        GetAttrKey,
        KeyEntry,
        MappingKey,
        SequenceKey,
        TreeSpec,
        register_pytree_node,
        tree_flatten,
        tree_leaves,
        tree_map_only,
        tree_structure,
        tree_unflatten,
    )
    from torch.utils._pytree import (
        _get_node_type as node_type,  # the type under which a value is registered, if it is: named tuples are one
    )

__all__ = [
    "REGISTRATION",
    "SUPPORTED_NODES",
    "GetAttrKey",
    "KeyEntry",
    "MappingKey",
    "SequenceKey",
    "TreeSpec",
    "node_type",
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]

# How a user makes a class a pytree, for messages.
REGISTRATION = "torch.utils._pytree.register_pytree_node"
