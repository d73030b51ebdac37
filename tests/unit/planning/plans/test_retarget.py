"""What an action costs beside the operations of its stage: each has it, on the CPU only, however short it is."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.planning.plans.host_time import ACTION_SECONDS
from fxpipe.planning.plans.retarget import action_seconds, resize_plan
from fxpipe.scheduling import ActionKind, make_schedule
from fxpipe.simulation import StageCost, simulate_schedule


@pytest.mark.parametrize(
    ("device", "seconds"), [("cpu", ACTION_SECONDS), ("cpu:0", ACTION_SECONDS), ("cuda", 0.0), ("cuda:1", 0.0)]
)
def test_the_host_is_waited_for_on_the_cpu_only(device: str, seconds: float) -> None:
    assert action_seconds(device) == seconds


def test_each_action_has_it() -> None:
    cost = StageCost(forward=4, backward=8, weight=3, recompute=2, update=7, action=1)
    spans = [
        *simulate_schedule(make_schedule("zero_bubble", 2, 4), [cost] * 2).spans,
        *simulate_schedule(make_schedule("1f1b", 2, 4, "always"), [cost] * 2).spans,
    ]
    found = {kind: {span.seconds for span in spans if span.action.kind is kind} for kind in ActionKind}
    assert found[ActionKind.FORWARD] == {5}
    assert found[ActionKind.RECOMPUTE] == {3}
    assert found[ActionKind.WEIGHT] == {4}
    assert found[ActionKind.BACKWARD] == {6, 9}  # without W, and with it


def test_a_plan_has_it_where_its_stages_run() -> None:
    x = torch.randn(8, 4)
    plan = fxpipe.plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(x,), chunks=2, hardware="cpu")
    assert [stage.action_seconds for stage in plan.stages] == [ACTION_SECONDS] * 2
    assert [cost.action for cost in plan.costs()[0]] == [ACTION_SECONDS] * 2
    assert [stage.action_seconds for stage in resize_plan(plan, 1).stages] == [ACTION_SECONDS] * 2


def test_on_gpus_it_has_none() -> None:
    x = torch.randn(8, 4)
    plan = fxpipe.plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(x,), chunks=2, hardware="cpu")
    simulated = {name: fxpipe.simulate(plan, hardware=name) for name in ("cpu", "h100")}
    assert [cost.action for cost in simulated["cpu"].stages] == [ACTION_SECONDS] * 2
    assert [cost.action for cost in simulated["h100"].stages] == [0.0] * 2
