"""Symbolic sizes: what runs of a graph on fake tensors with symbols need in addition to `ShapeEnv`.

Required, and unchanged from torch 2.11 to 2.14. Importing it imports much of torch, so only symbolic runs do.
"""

from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
    from torch._dynamo.source import LocalSource as LocalSource

require_attributes(ShapeEnv, "_get_user_frame")


class QuietShapeEnv(ShapeEnv):
    """A `ShapeEnv` that does not look up the user's lines, for which torch would import its compiler."""

    def _get_user_frame(self) -> None:
        return None
