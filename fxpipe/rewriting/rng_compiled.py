"""Code for `torch.compile`, with what it cannot have in it taken out of its sight.

Random nodes: it refuses generators.

Dropout, the commonest, multiplies by noise that an operator of our own makes when the code runs. The compiler looks
into neither seed nor generator, so its graph neither breaks nor changes from step to step, and on a CPU the numbers are
those of code that is not compiled. All other random nodes run as they are, between two compiled graphs.

The operator's tag keeps the compiler from making the noise once more in backward, when another micro-batch may be
running.

A forward that goes on as Python (`record.graph_break`) runs as it is: calls of modules have results in their place
there, by a way that the compiler does not heed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxpipe.rewriting.rng import RandomCall, seeded_generator
from fxpipe.tracing.node_info import info


@torch.library.custom_op("fxpipe::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _dropout_noise(like: Tensor, p: float, ordinal: int) -> Tensor:
    """Draws the factors by which dropout multiplies `like`, for the running micro-batch and node `ordinal`."""
    generator = seeded_generator(like.device, ordinal)
    return torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)


@_dropout_noise.register_fake
def _(like: Tensor, p: float, ordinal: int) -> Tensor:
    return torch.empty_like(like)


def with_compilable_rng(run: fx.GraphModule) -> fx.GraphModule:
    """The code with nodes that a compiler can have in it; the same code if there are no others."""
    drawing = [node for node in run.graph.nodes if isinstance(_random_call_of(node), RandomCall)]
    continued = [node for node in run.graph.nodes if info(node).is_graph_break and node not in drawing]
    if not drawing and not continued:
        return run
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(run.graph, copies))
    for node in drawing:
        copies[node].target = _compilable_function(node.target)
    for node in continued:
        copies[node].target = torch.compiler.disable(node.target)
    return fx.GraphModule({}, graph, class_name=type(run).__name__)


def _random_call_of(node: fx.Node) -> Any:
    return getattr(node.target, "drawing", None)


def _compilable_function(target: Any) -> Callable[..., Any]:
    drawing: RandomCall = target.drawing
    if drawing.function is not F.dropout:
        disabled: Callable[..., Any] = torch.compiler.disable(target)
        return disabled
    ordinal = drawing.ordinal

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1 or input.numel() == 0:
            return F.dropout(input, p, training, inplace)  # draws nothing
        noise: Tensor = torch.ops.fxpipe.dropout_noise(input.detach(), p, ordinal)
        return input.mul_(noise) if inplace else input.mul(noise)

    return dropout
