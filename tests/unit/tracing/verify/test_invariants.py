"""Invariants of a graph: they hold after every pass, and each is missed where it is broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.traced_models import Forward, x
from torch import fx, nn

import fxpipe
from fxpipe import trace
from fxpipe.errors import InternalError
from fxpipe.tracing import Traced
from fxpipe.tracing.guards import extract_guards, refuse_unguardable
from fxpipe.tracing.node_info import update_info
from fxpipe.tracing.record.other_sizes import read_untracked_sizes
from fxpipe.tracing.record.record_model import input_leaves, record
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes
from fxpipe.tracing.verify.effects import check_invariants, effects_of, find_faults, observe_run


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

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "everything": (Everything, example),
    "module kept whole": (
        lambda: nn.Sequential(nn.Linear(6, 6), Forward(lambda self, x: self.lin(x) * x.detach().numpy().max().item())),
        lambda: (x(),),
    ),
    "tuples and branches": (
        lambda: Forward(lambda self, x: sum((self.lin(part) for part in x.split(3, 1)), x.sin()[:, :1])),
        lambda: (torch.randn(4, 6, 6),),
    ),
    "running statistics": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout()), lambda: (x(),)),
}


@pytest.mark.parametrize("case", MODELS)
def test_invariants_hold_after_every_pass(case):
    make, inputs = MODELS[case]
    model, args = make().train(), inputs()
    traced = record(model, args, {}) if case != "module kept whole" else trace(model, args, out_dims=0, check=False)
    check_invariants(traced)
    if traced.effects is None:
        leaves = input_leaves(model, args, {})[2]
        for find in (
            lambda traced: add_shapes(traced, leaves),
            read_untracked_sizes,
            lambda traced: replace(traced, guards=extract_guards(traced)),
            lambda traced: replace(traced, effects=effects_of(traced, [observe_run(traced, leaves).effects])),
        ):
            refuse_unguardable(traced)
            traced = find(traced)
            check_invariants(traced)


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
