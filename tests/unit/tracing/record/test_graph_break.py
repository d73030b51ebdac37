"""A forward that is continued as Python: its segments end at the same call, whoever runs them."""

from __future__ import annotations

import torch
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import attribute_tensor, call_node


class Taught(Layered, blocks=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4))):
    """Calls a module without gradients, behind a value that only a stage knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](x)
        if h.abs().max() > 3:
            h = h * 0.5
        with torch.no_grad():
            teacher = self.blocks[1](h)
        return self.blocks[3](self.blocks[2](h)) + teacher


def test_a_segment_that_ends_without_gradients_runs_in_a_thread_without_gradients() -> None:
    """As where a profiler needs the values of a node, and has timed it often enough."""
    model, x = Taught(), torch.randn(4, 8)
    traced = fxpipe.trace(model, (x,))
    assert any(info(node).is_graph_break for node in traced.nodes)
    values = {traced.placeholders[0]: x}
    with torch.no_grad():
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                values[node] = attribute_tensor(traced, node)
            elif node.op != "placeholder" and node.op != "output":
                values[node] = call_node(node, values.__getitem__)
        torch.testing.assert_close(values[traced.outputs[0]], model(x))
