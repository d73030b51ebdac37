"""What a plan notes about its cut next to the figures of stages, and the cost of an action besides its operations."""

import inspect
from dataclasses import replace

import torch
from helpers.simulated_models import Skipping, skipping
from torch import nn

import fxpipe
from fxpipe.planning.plans.data import HeaviestNode, Portal, StageBytes, TiedParameter
from fxpipe.planning.plans.retarget import ACTION_SECONDS, resize_plan
from fxpipe.scheduling import ActionKind, make_schedule
from fxpipe.simulation import StageCost, simulate_schedule
from fxpipe.utils.polynomial import Polynomial


def line_of(text: str) -> str:
    """The place of a line of `Skipping.forward`."""
    lines, first = inspect.getsourcelines(Skipping.forward)
    (number,) = (first + k for k, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(Skipping)}:{number}"


def test_portals_say_how_large_they_are_and_where_they_are_made() -> None:
    size = Polynomial.in_b(0, 5 * 16 * 4)
    assert skipping().portals == (
        Portal("embed", 0, 3, size(2), size, line_of("self.embed(ids)")),
        Portal("relu", 1, 3, size(2), size, line_of("self.a(x)")),
    )
    assert [portal.bytes for portal in resize_plan(skipping(), 5).portals] == [size(5)] * 2


def test_what_is_sent_is_counted_by_values() -> None:
    ways = {(way.source, way.target): way for way in skipping().sendings}
    one = 5 * 16 * 4 * skipping().micro_batch
    assert {way: (sent.values, sent.bytes) for way, sent in ways.items()} == dict.fromkeys(
        [(0, 1), (0, 3), (1, 0), (1, 2), (1, 3), (2, 1), (2, 3), (3, 0), (3, 1), (3, 2)], (1, one)
    ) | {(1, 3): ways[1, 3].values * (1, one)}
    for sent in ways.values():
        assert sent.bytes == sent.size(skipping().micro_batch)


def test_tied_parameters() -> None:
    names = ("embed.weight", "head.weight")
    assert skipping().tied == (TiedParameter(names, (0, 3), 50 * 16 * 4),)


class Twice(nn.Module):
    """One layer that two stages use, under one name, and one that has two names in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.again = self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).relu()
        return self.again(self.layer(x))


def test_a_parameter_of_two_stages_and_one_of_two_names() -> None:
    plan = fxpipe.plan(Twice(), 2, example_args=(torch.randn(4, 4),), balance=[2, 2], hardware="h100")
    assert plan.tied == (
        TiedParameter(("layer.weight",), (0, 1), 64),
        TiedParameter(("layer.bias",), (0, 1), 16),
        TiedParameter(("last.weight", "again.weight"), (1,), 64),
    )


class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().sum()) > 1e30 else x + 1


def test_modules_kept_whole_say_why_and_where_they_are_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Whole(), nn.Linear(4, 4))
    plan = fxpipe.plan(model, 2, example_args=(torch.randn(4, 4),), leaf_modules=[Whole], hardware="h100")
    (found,) = plan.whole
    assert found.name == "1"
    assert found.why
    assert found.line.rpartition(":")[2].isdigit()
    assert skipping().whole == ()


def test_of_what_runs_on_values_only_other_hardware_is_known() -> None:
    """Its operations are recorded on values, where bytes are counted."""
    model = nn.Sequential(nn.Linear(4, 4), Whole(), nn.Linear(4, 4))
    plan = fxpipe.plan(model, 2, example_args=(torch.randn(4, 4),), leaf_modules=[Whole], profile_budget=0.01)
    assert fxpipe.simulate(plan, chunks=2).step_seconds > 0
    assert fxpipe.simulate(plan, hardware="h100").step_seconds > 0


def test_the_heaviest_node_bounds_the_balance() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8))
    plan = fxpipe.plan(model, 2, example_args=(torch.randn(512, 8),), chunks=1, balance=[1, 2], hardware="cpu")
    heaviest = plan.heaviest
    assert heaviest is not None
    assert heaviest.name in plan.stages[1].nodes
    stage = plan.stages[1]
    assert 0 < heaviest.seconds < stage.forward_seconds + stage.backward_seconds
    assert heaviest.seconds > plan.stages[0].forward_seconds + plan.stages[0].backward_seconds
    assert (heaviest.stage, heaviest.line.count(":")) == (1, 1)
    other = resize_plan(plan, 256).heaviest
    assert isinstance(other, HeaviestNode)
    assert float(heaviest.formula.value({"b": 0})) <= other.seconds < heaviest.seconds


def test_a_stage_that_recomputes_keeps_all_that_it_was_given() -> None:
    """Its backward needs a part of that; R needs the rest again."""
    sizes = StageBytes(received=Polynomial.in_b(1, 2), again=Polynomial.in_b(10), portals=Polynomial.in_b(1))
    assert sizes.kept(recomputes=False) == Polynomial.in_b(1, 2)
    assert sizes.kept(recomputes=True) == Polynomial.in_b(11, 2)
    sizes = StageBytes(portals=Polynomial.in_b(1), portals_again=Polynomial.in_b(0, 4))
    assert sizes.through_portals(recomputes=False) == Polynomial.in_b(1)
    assert sizes.through_portals(recomputes=True) == Polynomial.in_b(1, 4)


def test_the_memory_of_a_plan_has_what_only_a_recomputation_needs_for_each_micro_batch_in_flight() -> None:
    plan, more = skipping(), Polynomial.in_b(0, 100)
    stages = tuple(replace(one, bytes=replace(one.bytes, again=one.bytes.again + more)) for one in plan.stages)
    for mode, in_flight in (("never", [0, 0, 0, 0]), ("always", [4, 3, 2, 1])):
        before, after = replace(plan, checkpoint=mode), replace(plan, checkpoint=mode, stages=stages)
        assert [after.memory(j, b=2) - before.memory(j, b=2) for j in range(4)] == [200 * count for count in in_flight]


def test_bytes_without_a_formula_grow_in_proportion() -> None:
    """As in a plan that was made by hand."""
    plan = skipping()
    bare = replace(plan, portals=tuple(replace(portal, size=Polynomial.in_b()) for portal in plan.portals))
    for before, after in zip(bare.portals, resize_plan(bare, 3 * plan.micro_batch).portals, strict=True):
        assert after.bytes == 3 * before.bytes


def test_a_stage_that_recomputes_all_but_the_last_micro_batch_recomputes() -> None:
    plan = skipping()
    modes = {mode: replace(plan, checkpoint=mode).recomputes(0) for mode in ("never", "except_last", "always")}
    assert modes == {"never": False, "except_last": True, "always": True}


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


def test_a_plan_has_it_on_the_cpu_only() -> None:
    x = torch.randn(8, 4)
    plan = fxpipe.plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(x,), chunks=2, hardware="cpu")
    assert [stage.action_seconds for stage in plan.stages] == [ACTION_SECONDS] * 2
    assert [cost.action for cost in plan.costs()[0]] == [ACTION_SECONDS] * 2
    assert [stage.action_seconds for stage in resize_plan(plan, 1).stages] == [ACTION_SECONDS] * 2
    assert [cost.action for cost in fxpipe.simulate(plan, hardware="h100").stages] == [0.0] * 2
