"""Graphs of `torch.fx` from other tracers.

The attributes are required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

from torch import fx

from fxpipe._torch.versions import require_attributes

require_attributes(fx.Graph(), "_codegen")


def takes_input_leaves(graph: fx.Graph) -> bool:
    """Returns True for a graph of export, whose placeholders are the leaves of the model's arguments."""
    return getattr(graph._codegen, "pytree_info", None) is not None
