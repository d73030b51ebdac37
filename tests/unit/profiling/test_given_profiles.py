"""Profiles that were made before, given to planning."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.plan_models import CHUNKS, Deep, deep_profile, planned, rows
from torch import nn

import fxpipe
from fxpipe.hardware import HARDWARE
from fxpipe.profiling import Profile, Seconds


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    deep_profile()  # made once for all tests: if not yet, now

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a node is run to be measured")

    for name in ("measure", "record_operations", "count_flops_and_bytes"):
        monkeypatch.setattr(f"fxpipe.profiling.{name}", refuse)


def profile_of(model: nn.Module, x: torch.Tensor, **options: Any) -> Profile:
    return fxpipe.profile(fxpipe.trace(model, (x,), chunks=CHUNKS), (x,), micro_batch=2, **options)


def test_a_profile_made_before_is_used_and_nothing_is_run(request: pytest.FixtureRequest, tmp_path: Any) -> None:
    model, x = Deep(), rows()
    profile = profile_of(model, x, budget=0.05)
    profile.save(tmp_path / "profile.json")
    request.getfixturevalue("nothing_is_measured")
    of_file = [tmp_path / "profile.json", str(tmp_path / "profile.json"), Profile.load(tmp_path / "profile.json")]
    for given in (profile, *of_file):
        plan = fxpipe.plan(model, 3, example_args=(x,), chunks=CHUNKS, profile=given)
        costs = {cost.name: cost for cost in profile.nodes}
        for stage in plan.stages:
            assert stage.forward_seconds == pytest.approx(sum(costs[name].forward.at(2) for name in stage.nodes))
            assert stage.backward_seconds == pytest.approx(sum(costs[name].backward.at(2) for name in stage.nodes))
        assert plan.estimated_for == ""
    with fxpipe.pipeline(model, ["cpu"] * 3, CHUNKS, example_args=(x,), profile=profile) as pipe:
        assert [stage.nodes for stage in pipe.plan.stages] == [stage.nodes for stage in plan.stages]


def test_one_profile_serves_every_number_of_chunks(nothing_is_measured: None) -> None:
    fixed, grows = Seconds(3e-3, 0.0), Seconds(0.0, 1e-3)
    profile = deep_profile()
    half = len(profile.nodes) // 2
    nodes = [
        replace(cost, forward=fixed if k < half else grows, backward=Seconds()) for k, cost in enumerate(profile.nodes)
    ]
    profile = replace(profile, nodes=tuple(nodes))
    for chunks, micro_batch in ((1, 8), (2, 4), (8, 1)):
        plan = planned(2, chunks=chunks, profile=profile)
        assert plan.micro_batch == micro_batch
        total = sum(stage.forward_seconds for stage in plan.stages)
        assert total == pytest.approx(half * (3e-3 + micro_batch * 1e-3))
        # With more samples the part that grows is the larger one, and the cut moves into it.
        assert (len(plan.stages[0].nodes) > half) == (micro_batch > 3)


def test_a_profile_of_hardware_says_so_in_the_plan() -> None:
    assert planned().estimated_for == HARDWARE["cpu"].name
