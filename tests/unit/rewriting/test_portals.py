"""Skips: found for the values that skip a stage and for no others, sent once, straight, and freed after use."""

from collections import Counter

import pytest
import torch
from helpers.every_cut import EveryCut
from torch import nn

import fxpipe
from fxpipe.rewriting.program import PIPE_INPUT
from fxpipe.runtime.exchange import Exchange


class Net(nn.Module):
    """A U-Net of linear layers: what goes down comes up again, and a mask is used all along."""

    def __init__(self, depth=3):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x):
        mask, skips = x > 0, []
        for layer in self.down:
            x = layer(x) * mask
            skips.append(x)
            x = torch.relu(x)
        for layer in self.up:
            x = layer(x) + skips.pop() * mask
        return x


def skips_of(traced, starts):
    """Read off the graph: name, stage that makes it, stage that uses it. (For graphs without in-place operations.)"""
    stage = {n: sum(s <= place for s in starts) - 1 for place, n in enumerate(traced.nodes)}
    uses = {(n.name, stage[n], stage[user]) for n in traced.nodes for user in n.users if user in stage}
    return {use for use in uses if use[2] - use[1] > 1}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_skips_are_the_values_whose_user_is_not_in_the_next_stage(stages):
    model = EveryCut(Net(), torch.randn(4, 4))
    found = 0
    for starts in model.cuts(stages, every=1 if stages < 4 else 17):
        program = model.program(starts)
        skips = [(s.name, s.source, s.target) for s in program.skips]
        assert len(skips) == len(set(skips))
        assert set(skips) == skips_of(model.traced, starts)
        found += len(skips)
    assert (found > 0) == (stages > 2)


def test_inputs_come_from_the_caller_and_not_through_stages():
    model = EveryCut(Net(), torch.randn(4, 4))
    program = model.program((0, 1, 3, 9))
    assert [r.source for stage in program.stages for r in stage.receives if r.name == "in_0"] == [
        PIPE_INPUT,
        PIPE_INPUT,
    ]
    assert "in_0" not in {skip.name for skip in program.skips}


def cut_in_four(model, x, **options):
    count = len(fxpipe.trace(model, (x,)).nodes)
    balance = [3, 3, 3, count - 9]
    return fxpipe.pipeline(model, ["cpu"] * 4, 3, example_args=(x,), balance=balance, **options)


@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "never"), ("gpipe", "always")])
def test_each_value_crosses_once_for_a_micro_batch_and_user(monkeypatch, schedule, checkpoint):
    x, taken = torch.randn(6, 4), Counter()
    take = Exchange.take

    def counting(self, user, link, i):
        taken[user, link.value.name, i] += 1
        return take(self, user, link, i)

    with cut_in_four(Net(), x, schedule=schedule, checkpoint=checkpoint) as pipe:
        program = pipe._fxpipe.first.program
        monkeypatch.setattr(Exchange, "take", counting)
        pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
    rows = [*(stage.receives for stage in program.stages), program.outputs]
    assert taken == Counter((user, r.name, i) for user, row in enumerate(rows) for r in row for i in range(3))
