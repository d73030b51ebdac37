"""Equal graphs of autograd mean equal gradients: what differs in one of them is seen, and what is hidden is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.traced_models import Forward, x
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpipe import trace
from fxpipe.tracing.verify import equivalence
from fxpipe.tracing.verify.autograd_graph import are_equal, autograd_graph

WEIGHT, BIAS = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
INPUT = x()


def _graph_of(function: Callable[[], torch.Tensor], written: tuple[int, ...] = ()) -> Any:
    return autograd_graph([function()], {"weight": WEIGHT, "bias": BIAS}, written)


def _first() -> torch.Tensor:
    return (INPUT @ WEIGHT + BIAS).clamp(-1, 1).sum(0)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (INPUT @ WEIGHT + BIAS).clamp(-1, 1.5).sum(0),  # a number
        lambda: (INPUT @ WEIGHT + BIAS).clamp(-1, 1).sum(1),  # a dimension
        lambda: (INPUT.flip(0) @ WEIGHT + BIAS).clamp(-1, 1).sum(0),  # a saved value
        lambda: (INPUT @ WEIGHT + BIAS).relu().sum(0),  # a function
        lambda: (INPUT @ WEIGHT + BIAS).clamp(-1, 1).sum(0).unbind()[0],  # a result of several
        lambda: (INPUT @ WEIGHT + BIAS.detach()).clamp(-1, 1).sum(0),  # an edge
        lambda: (INPUT @ WEIGHT + WEIGHT[0]).clamp(-1, 1).sum(0),  # a leaf
        lambda: (INPUT @ WEIGHT + BIAS).double().clamp(-1, 1).sum(0),  # a type
        lambda: _first().detach(),
        lambda: BIAS,
    ],
)
def test_what_differs_in_a_graph_is_seen(other: Callable[[], torch.Tensor]) -> None:
    assert are_equal(_graph_of(_first), _graph_of(_first))
    assert not are_equal(_graph_of(_first), _graph_of(other))


def _overwritten() -> torch.Tensor:
    y = INPUT @ WEIGHT
    z = y * y
    y.detach().zero_()
    return z


def _written_slice() -> torch.Tensor:
    y = INPUT @ WEIGHT
    y[:, 0] *= 2
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda: checkpoint(torch.tanh, WEIGHT, use_reentrant=True),  # Python
        lambda: checkpoint(torch.tanh, WEIGHT, use_reentrant=False),  # reading a saved value calls Python
        _overwritten,  # its backward raises
        _written_slice,  # the function of the written part is inside another one
        lambda: WEIGHT.as_strided((3,), (2,)),  # where the elements are depends on the strides of the input
        lambda: BIAS * torch.ones(6, requires_grad=True),  # a leaf without a name
        lambda: torch.ones(6, requires_grad=True),
    ],
)
def test_a_graph_that_does_not_show_everything_has_no_value(function: Callable[[], torch.Tensor]) -> None:
    assert _graph_of(function) is None


def test_values_that_change_later_are_copied() -> None:
    buffer = torch.ones(6)
    graph = _graph_of(lambda: BIAS * buffer, (buffer.untyped_storage()._cdata,))
    buffer.zero_()
    assert are_equal(graph, _graph_of(lambda: BIAS * torch.ones(6)))


def test_gradients_are_computed_only_where_graphs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    summarize = equivalence._summarize_gradients
    monkeypatch.setattr(equivalence, "_summarize_gradients", lambda *a, **k: computed.append(1) or summarize(*a, **k))
    trace(Forward(lambda m, a: nn.functional.dropout(m.lin(a).tanh())), (x(),))
    assert not computed
    trace(Forward(lambda m, a: checkpoint(torch.tanh, m.lin(a), use_reentrant=False)), (x(),))
    trace(Forward(lambda m, a: m.lin(a)), (x(),), leaf_modules=[nn.Linear])  # it may put hooks on tensors
    assert len(computed) == 4
