"""Symbolic sizes: what running a graph on fake tensors with symbols needs besides `ShapeEnv` itself.

All of it is required, and has been the same from torch 2.11 to 2.14. To import it imports much of torch, so only what
makes a symbolic run does.
"""

from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import LocalSource

require_attributes(ShapeEnv, "_get_user_frame")

__all__ = ["LocalSource", "QuietShapeEnv", "enable_python_dispatcher"]


class QuietShapeEnv(ShapeEnv):
    """A `ShapeEnv` that asks for nobody's line: to know which lines are the user's, torch would import its compiler."""

    def _get_user_frame(self) -> None:
        return None
