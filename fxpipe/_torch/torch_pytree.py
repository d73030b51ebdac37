"""Torch's pytrees, from `torch.utils._pytree`, to which torch's documentation of `torch.func` and export refers.

Required, and unchanged from torch 2.11 to 2.14.
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
        tree_map,
        tree_map_only,
        tree_structure,
        tree_unflatten,
    )
    from torch.utils._pytree import (
        _get_node_type as node_type,  # the type under which a value may be registered; one type for all named tuples
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
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]

# The function that registers a class as a pytree, for messages.
REGISTRATION = "torch.utils._pytree.register_pytree_node"
