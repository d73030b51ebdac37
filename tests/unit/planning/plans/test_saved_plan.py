"""Plans as data: their formulas and values, and their files, whole or damaged."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.plan_hardware import Causal, estimated, hardware, ids
from helpers.plan_models import needs, planned
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.cluster import Link
from fxpipe.errors import ArgumentError
from fxpipe.planning.plans.data import OpaqueNode, PlannedSize, Portal, TiedParameter
from fxpipe.utils.files import dataclass_to_json
from fxpipe.utils.polynomial import Polynomial


@functools.cache
def full() -> fxpipe.Plan:
    """With something in every field but `why` and `guards`."""
    link = Link(1e9, 5e-6)
    free = estimated(Causal(), 3, ids(), hardware=hardware(link))
    limit = int(max(needs(free)) * 0.6)
    plan = estimated(Causal(), 3, ids(), hardware=hardware(link), memory_limit=limit)
    return dataclasses.replace(
        plan,
        cluster=dataclasses.replace(plan.cluster, replicas=(2, 1, 1)),
        replica_devices=(("cuda:0", "cuda:1"), ("cuda:2",), ("cuda:3",)),
        why=("it was so",),
        guards=("x > 0",),
        evaluating=("layers.0",),
        portals=(Portal("skip", 0, 2, 64, Polynomial.in_b(0, 32), "net.py:3"),),
        tied=(TiedParameter(("first.weight", "last.weight"), (0, 2), 64),),
        whole=(OpaqueNode("layers.1", "draws numbers of its own", "net.py:4"),),
        sizes=(PlannedSize("s", 8, 32, 2, 64, ("dimension 1 of ids",)),),
        processes=True,
        is_joint=True,
    )


def test_the_full_plan_is_full() -> None:
    plan = full()
    empty = {field.name for field in dataclasses.fields(plan) if not getattr(plan, field.name)}
    assert not empty
    assert isinstance(plan.checkpoint, tuple)
    assert all(stage.memory_limit and stage.state_bytes and stage.flops for stage in plan.stages)
    assert all(way.seconds > 0 for way in plan.sendings)


def test_a_plan_is_what_was_saved(tmp_path: Path) -> None:
    for plan in (full(), planned(), planned(4, stages_per_device=2, pin={"layers.2": 1})):
        plan.save(tmp_path / "plan.json")
        found = fxpipe.Plan.load(tmp_path / "plan.json")
        assert found == plan
        assert str(found) == str(plan)
        for stage in plan.stages:
            assert found.memory(stage.index) == plan.memory(stage.index)
            assert found.flops(stage.index, b=3) == plan.flops(stage.index, b=3)


def test_flops_are_those_of_the_layers() -> None:
    """Of a linear layer 2 * 8 * 8 for each of 4 rows forward, and twice that back; of the first one, whose input has no
    gradient, once."""
    plan = planned(balance=[8, 8, 8])
    layer = 2 * 8 * 8 * 4
    assert [plan.flops(j, b=1) for j in range(3)] == [layer * (2 + 3), layer * 6, layer * 6]


def test_memory_of_a_stage_is_what_was_counted_for_the_planned_size() -> None:
    """`activation_bytes` of as many micro-batches as are in flight, and what is there beside them."""
    for stage in (plan := planned()).stages:
        beside = stage.parameter_bytes + stage.state_bytes + stage.bytes.working(2)
        assert plan.memory(stage.index, b=2) == beside + plan.in_flight(stage.index) * stage.activation_bytes


@pytest.mark.parametrize("stage", [-1, 3])
def test_a_stage_that_is_not_there(stage: int) -> None:
    for ask in (planned().memory, planned().flops, planned().in_flight):
        with pytest.raises(ArgumentError, match=rf"stage={stage}: the plan has 3 stages, 0 to 2"):
            ask(stage)


@functools.cache
def document() -> Any:
    return json.loads(json.dumps(dataclass_to_json(full())))


def places(value: Any) -> list[tuple[Any, ...]]:
    """The ways to all that is in a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in entries for found in ((key,), *((key, *rest) for rest in places(item)))]


OTHERS: list[Any] = [None, True, -1, 0, 3, 10**30, 0.5, -0.5, "", "x", [], [1], ["x"], {}, {"a": 1}]


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_plan_is_a_plan_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """And a plan that is taken can be asked for all that a plan says."""
    found = copy.deepcopy(document())
    for _ in range(data.draw(st.integers(1, 2))):
        *way, last = data.draw(st.sampled_from(places(found)))
        parent = functools.reduce(lambda value, key: value[key], way, found)
        if data.draw(st.booleans()):
            del parent[last]
        else:
            parent[last] = data.draw(st.sampled_from(OTHERS))
    path = tmp_path_factory.mktemp("damaged") / "plan.json"
    path.write_text(json.dumps(found))
    try:
        plan = fxpipe.Plan.load(path)
    except ArgumentError:
        return
    for stage in range(len(plan.stages)):
        assert plan.memory(stage, b=2) is not None
    assert plan.workers
    assert str(plan)


@pytest.mark.parametrize(
    ("field", "number", "why"),
    [
        ("forward_seconds", "-1", r"stages\[0\]\.forward=-1 is no time"),
        ("weight_seconds", "1e9", r"stages\[0\]\.weight=1000000000\.0 is more than its backward"),
        ("forward_seconds", "NaN", r"the plan\.stages\[0\]\.forward_seconds is nan: expected a finite number"),
        ("forward_seconds", "1e999", r"the plan\.stages\[0\]\.forward_seconds is inf: expected a finite number"),
    ],
)
def test_seconds_that_cannot_be_are_refused(tmp_path: Path, field: str, number: str, why: str) -> None:
    """They were taken, and printing the plan failed."""
    changed = copy.deepcopy(document())
    changed["stages"][0][field] = "HERE"
    (tmp_path / "plan.json").write_text(json.dumps(changed).replace('"HERE"', number))
    with pytest.raises(ArgumentError, match=rf"plan\.json is no plan of fxpipe: {why}"):
        fxpipe.Plan.load(tmp_path / "plan.json")
