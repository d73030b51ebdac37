"""Hooks that forward puts on nodes of autograd: kept with their module, or refused; a recording would lose them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graph_functions import exporting
from helpers.oracle import assert_same_gradients
from torch import nn

import fxpipe
from fxpipe.errors import TraceError


def on_its_node(y: torch.Tensor) -> None:
    y.grad_fn.register_hook(lambda into, out: tuple(None if g is None else g * 2 for g in into))


def before_its_node(y: torch.Tensor) -> None:
    y.grad_fn.register_prehook(lambda out: tuple(None if g is None else g * 2 for g in out))


def on_the_node_before(y: torch.Tensor) -> None:
    y.exp().grad_fn.next_functions[0][0].register_prehook(lambda out: None)
    before_its_node(y)


HOOKS = [on_its_node, before_its_node, on_the_node_before]


class Hooking(nn.Module):
    def __init__(self, hook: Callable[[torch.Tensor], None]):
        super().__init__()
        self.layer, self.hook = nn.Linear(4, 4), hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.requires_grad:
            self.hook(y)
        return torch.tanh(y)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_module_that_hooks_nodes_is_kept_whole_and_its_hooks_are_called(hook: Callable[..., None]) -> None:
    """Gradients came out without what the hook does to them."""
    plain = nn.Sequential(nn.Linear(4, 4), Hooking(hook), nn.Linear(4, 4))
    x, t = torch.randn(6, 4), torch.randn(6, 4)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
        F.mse_loss(plain(x), t).backward()
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
        assert pipe._fxpipe.first.traced.whole.keys() == {"1"}


@pytest.mark.parametrize("tracer", ["record", exporting(torch.randn(4, 4))])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_that_hooks_nodes_itself_is_refused(hook: Callable[..., None], tracer: Any) -> None:
    with pytest.raises(
        TraceError, match=r"looks at a node of autograd \(grad_fn\) at .*test_autograd_nodes.py:\d+; do so"
    ):
        fxpipe.trace(Hooking(hook), (torch.randn(4, 4),), tracer=tracer)
