"""Invariants of a graph: tracing checks them, and each is missed where it is broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.traced_models import Forward, x
from torch import nn

from fxpipe import trace
from fxpipe.errors import InternalError
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import update_info
from fxpipe.tracing.verify.effects import check_invariants, find_faults


def loss(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Writes to memory, and is combined of two sums."""
    for _ in range(6):
        x = m.lin(x).relu_()
    return (x * mask).sum() / mask.sum()


@pytest.fixture
def traced() -> Traced:
    return trace(Forward(loss), (x(), torch.ones(4, 6)), check=False)


def test_tracing_checks_invariants(monkeypatch):
    checked: list[Traced] = []
    monkeypatch.setattr("fxpipe.tracing.check_invariants", checked.append)
    traced = trace(nn.Linear(6, 6), (x(),))
    assert checked == [traced]


# Each changes the graph, or returns another one.
BROKEN: dict[str, tuple[Callable[[Traced], Any], str]] = {
    "no shapes": (lambda traced: update_info(traced.nodes[0], known_shapes=None), "has no shapes"),
    "piece_dims of some": (lambda traced: replace(traced, piece_dims=()), r"and the pieces are \{\}"),
    "effects of others": (lambda traced: traced.effects.nodes.reverse(), "or of nodes in another order"),
    "last user too early": (
        lambda traced: traced.effects.last.update({traced.nodes[0]: -1}),
        "behind the place of its last user",
    ),
    "writes of none": (lambda traced: traced.effects.written_classes.clear(), "the effects are those of other nodes"),
    "writes to nothing": (
        lambda traced: traced.effects.written_classes[0].add(99),
        r"changes the alias classes \[99\], in which no node is",
    ),
    "returns no argument": (
        lambda traced: traced.effects.same.update({traced.nodes[0]: traced.nodes[-1]}),
        "which is no argument of it in the same alias class",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_said(case, traced):
    break_it, message = BROKEN[case]
    assert not [*find_faults(traced)]
    broken = break_it(traced) or traced
    with pytest.raises(InternalError, match=message) as raised:
        check_invariants(broken)
    assert str(raised.value).startswith("the graph of Forward is broken, which is a bug of fxpipe")


def test_many_faults_are_not_all_said(traced):
    for node in traced.nodes:
        update_info(node, known_shapes=None)
    with pytest.raises(InternalError) as raised:
        check_invariants(traced)
    assert str(raised.value).count("\n- ") == 9
    assert str(raised.value).endswith("- ...")
