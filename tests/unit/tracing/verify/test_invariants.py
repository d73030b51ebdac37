"""Invariants of a graph: tracing checks them, and each is missed where it is broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.traced_models import x
from torch import fx, nn

import fxpipe
from fxpipe import trace
from fxpipe.errors import InternalError
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import update_info
from fxpipe.tracing.verify.effects import check_invariants, find_faults


class Everything(Layered, a=6, b=6, c=6, calls=lambda: torch.zeros(())):
    """Random numbers, sizes, a value that is read, memory that is written to, a combined loss, attributes, a mark."""

    def forward(self, x, mask, scale):
        self.calls += 1
        h = F.dropout(self.a(x), 0.25).contiguous()
        if mask[0, 0] > 0:
            h = h * scale
        fxpipe.cut()
        h = F.dropout(self.b(h), 0.25).view(x.shape[0], 2, 3)
        self.last = h.flatten(1)
        loss = (self.c(self.last).square() * mask).sum() / mask.sum()
        return loss, self.last, scale


def example() -> tuple[Any, ...]:
    return x(), torch.ones(4, 6), 2.0


@pytest.fixture
def traced() -> Traced:
    return trace(Everything().train(), example(), check=False)


def first_work(traced: Traced) -> fx.Node:
    return traced.nodes[0]


# -- they hold -------------------------------------------------------------------------------------------------------


def test_tracing_checks_invariants(monkeypatch):
    checked: list[Traced] = []
    monkeypatch.setattr("fxpipe.tracing.check_invariants", checked.append)
    traced = trace(nn.Linear(6, 6), (x(),))
    assert checked == [traced]


# -- they are missed where they are broken ----------------------------------------------------------------------------


def set_of(node_of: Callable[[Traced], fx.Node], **changes: Any) -> Callable[[Traced], None]:
    return lambda traced: update_info(node_of(traced), **changes)


def attribute_of(**changes: Any) -> Callable[[Traced], Traced]:
    return lambda traced: replace(traced, **changes)


def in_effects(change: Callable[[Any], Any]) -> Callable[[Traced], None]:
    def change_effects(traced: Traced) -> None:
        change(traced.effects)

    return change_effects


def used(traced: Traced) -> fx.Node:
    return next(node for node in traced.nodes if node.users)


def early_last_user(traced: Traced) -> None:
    assert traced.effects is not None
    traced.effects.last[used(traced)] = -1


def foreign_argument_returned(traced: Traced) -> None:
    assert traced.effects is not None
    traced.effects.same[traced.nodes[0]] = traced.nodes[-1]


# Each changes the graph, or returns another one.
BROKEN: dict[str, tuple[Callable[[Traced], Traced | None], str]] = {
    "no shapes": (set_of(first_work, known_shapes=None), "has no shapes"),
    "piece_dims of some": (attribute_of(piece_dims=()), r"and the pieces are \{\}"),
    "effects of others": (in_effects(lambda effects: effects.nodes.reverse()), "or of nodes in another order"),
    "last user too early": (early_last_user, "behind the place of its last user"),
    "writes of some": (
        in_effects(lambda effects: effects.written_classes.pop()),
        "the effects are those of other nodes",
    ),
    "writes to nothing": (
        in_effects(lambda effects: effects.written_classes[0].add(99)),
        r"changes the alias classes \[99\], in which no node is",
    ),
    "returns no argument": (foreign_argument_returned, "which is no argument of it in the same alias class"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_said(case, traced):
    break_it, message = BROKEN[case]
    assert not [*find_faults(traced)]
    broken = break_it(traced) or traced
    with pytest.raises(InternalError, match=message) as raised:
        check_invariants(broken)
    assert str(raised.value).startswith("the graph of Everything is broken, which is a bug of fxpipe")


def test_many_faults_are_not_all_said(traced):
    for node in traced.nodes:
        update_info(node, known_shapes=None)
    with pytest.raises(InternalError) as raised:
        check_invariants(traced)
    assert str(raised.value).count("\n- ") == 9
    assert str(raised.value).endswith("- ...")
