"""Nodes of which nobody reads a value: nothing that follows from it comes to code that runs as it is.

A function of torch is asked for a result, and a dispatch mode sees what it does. A hook, a module kept whole or an
opaque function is Python, and may look at the values it is given in ways that no mode sees.
"""

from __future__ import annotations

from torch import fx

from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.traced import is_python


def unread(effects: Effects) -> frozenset[fx.Node]:
    """Found in one walk from the end: what a node that is read was given is read as well, and so is its memory."""
    found: set[fx.Node] = set()
    read: set[fx.Node] = set()
    memory: set[int | None] = set()  # alias classes
    for node, written in zip(reversed(effects.nodes), reversed(effects.writes), strict=True):
        is_read = node in read or effects.alias[node] in memory or not memory.isdisjoint(written)
        if is_read or is_python(node):
            read.update(node.all_input_nodes)
            memory.update(alias for n in node.all_input_nodes if (alias := effects.alias[n]) is not None)
        else:
            found.add(node)
    return frozenset(found)
