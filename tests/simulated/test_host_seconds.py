"""What it takes the host to queue a node is measured where the nodes are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe

pytestmark = pytest.mark.simulated


def test_seconds_of_the_host_are_measured_on_an_accelerator_and_kept(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 4)
    traced = fxpipe.trace(model, (x,))
    profile = fxpipe.profile(traced, (x,), device="sim:0")
    assert all(cost.host is not None and cost.host.forward > 0 for cost in profile.nodes)
    assert all(cost.host.backward > 0 for cost in profile.nodes)
    assert [cost.host.weight > 0 for cost in profile.nodes] == [True, False, True]  # the input needs no gradient
    profile.save(tmp_path / "profile.json")
    assert fxpipe.Profile.load(tmp_path / "profile.json") == profile

    plan = fxpipe.plan(model, devices=["sim:0", "sim:1"], chunks=2, example_args=(x,), profile=profile)
    costs = {cost.name: cost.host for cost in profile.nodes}
    for stage in plan.stages:
        assert stage.host.runs_ahead
        assert stage.host.forward == pytest.approx(sum(costs[name].forward for name in stage.nodes))
    assert fxpipe.profile(traced, (x,)).nodes[0].host is None  # a CPU computes in the thread that calls
