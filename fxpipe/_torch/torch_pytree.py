"""Torch's pytrees, from `torch.utils._pytree`, to which torch's documentation of `torch.func` and export refers.

Required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

from fxpipe._torch.versions import required_names

with required_names():
    from torch.utils import _pytree
    from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
    from torch.utils._pytree import GetAttrKey as GetAttrKey
    from torch.utils._pytree import KeyEntry as KeyEntry
    from torch.utils._pytree import MappingKey as MappingKey
    from torch.utils._pytree import SequenceKey as SequenceKey
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import register_pytree_node as register_pytree_node
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_structure as tree_structure
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    # The type under which a value may be registered; one type for all named tuples.
    node_type = _pytree._get_node_type


# The function that registers a class as a pytree, for messages.
REGISTRATION = "torch.utils._pytree.register_pytree_node"
