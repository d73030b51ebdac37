"""Plans as lanes: what stands where in the picture, asked of the data."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.drawn_plans import dense_portals, drawn_plan, portals_between
from helpers.drawn_steps import bounds, check_scene

from fxpipe.inspect.plan_text import portals_table
from fxpipe.inspect.stage_graph import (
    ARC_COLOURS,
    BAND,
    DEVICE_COLOURS,
    MAX_GROUPS,
    bundles_of,
    draw_stage_graph,
    node_groups_of,
)
from fxpipe.inspect.svg import Curve, Rect, Scene, Text
from fxpipe.planning.plans import Plan

PLANS = {
    "one": drawn_plan(1),
    "two": drawn_plan(2, blocks=6),
    "zbv": drawn_plan(4, placement=(0, 1, 1, 0), schedule="zbv"),
    "hundreds of nodes": drawn_plan(3, blocks=40),
    "unet": drawn_plan(8, portals=portals_between(8, 6)),
    "many": drawn_plan(64, blocks=1),
    "many portals": drawn_plan(64, portals=portals_between(64, 300)),
    "dense": drawn_plan(12, portals=dense_portals(12)),
    "dense and many": drawn_plan(40, portals=dense_portals(40)),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS.keys())
def plan(request) -> Plan:
    return request.param


def boxes_of(scene: Scene) -> list[Rect]:
    fills = {fill for worker in DEVICE_COLOURS for fill in worker[:2]}
    return [item for item in scene.items if isinstance(item, Rect) and item.fill in fills]


def lanes_of(scene: Scene) -> list[Rect]:
    return [item for item in scene.items if isinstance(item, Rect) and item.fill == BAND]


def arcs_of(scene: Scene) -> list[Curve]:
    return [item for item in scene.items if isinstance(item, Curve) and item.stroke in ARC_COLOURS]


def test_boxes_lie_in_their_lane_and_next_to_each_other(plan: Plan):
    scene = draw_stage_graph(plan)
    bands, boxes = lanes_of(scene), boxes_of(scene)
    assert len(bands) == len(plan.stages)
    for one, other in pairwise(bands):
        assert one.y + one.height < other.y
    for stage, band in zip(plan.stages, bands, strict=True):
        own = [box for box in boxes if band.y <= box.y and box.y + box.height <= band.y + band.height]
        assert 1 <= len(own) <= MAX_GROUPS
        assert all(band.x <= box.x and box.x + box.width <= band.x + band.width for box in own)
        for one, other in pairwise(own):
            assert one.x + one.width <= other.x + 0.01
        assert all(f"of stage {stage.index}" in box.title for box in own)


def test_every_node_is_in_one_group(plan: Plan):
    for stage in plan.stages:
        for most, least in ((MAX_GROUPS, 0.04), (3, 0.2), (1, 0.0), (1000, 0.0)):
            groups = node_groups_of(stage, most, least)
            assert len(groups) <= most
            assert tuple(node for group in groups for node in group.nodes) == stage.nodes
            assert sum(group.share for group in groups) == pytest.approx(1)


def test_nothing_is_written_over_something_else_nor_beyond_the_picture(plan: Plan):
    scene = draw_stage_graph(plan)
    check_scene(replace(scene, items=[item for item in scene.items if not isinstance(item, Curve)]))


def test_names_of_modules_fit_into_their_boxes(plan: Plan):
    scene = draw_stage_graph(plan)
    boxes = boxes_of(scene)
    for text in (item for item in scene.items if isinstance(item, Text)):
        left, top, right, bottom = bounds(text)
        for box in boxes:
            if box.x < left < box.x + box.width and box.y < text.y < box.y + box.height:
                assert right <= box.x + box.width
                assert box.y <= top
                assert bottom <= box.y + box.height


def test_every_portal_is_an_arc_from_lane_to_lane_within_the_picture(plan: Plan):
    scene, bundles = draw_stage_graph(plan), bundles_of(plan.portals)
    assert sum(len(bundle.portals) for bundle in bundles) == len(plan.portals)
    assert len(arcs_of(scene)) == len(bundles)
    bands = lanes_of(scene)
    ends = {(bundle.source, bundle.target) for bundle in bundles}
    for arc in arcs_of(scene):
        source = next(j for j, band in enumerate(bands) if band.y <= arc.start[1] <= band.y + band.height)
        target = next(j for j, band in enumerate(bands) if band.y <= arc.end[1] <= band.y + band.height)
        assert (source, target) in ends
        assert arc.start[0] >= bands[0].x + bands[0].width  # nothing is written there
        assert arc.start[0] + 0.75 * (arc.control[0][0] - arc.start[0]) + arc.width <= scene.width


def test_groups_are_opened_while_there_is_room_and_small_ones_put_together():
    stage = drawn_plan(1, blocks=2).stages[0]
    thirds = [0.1, 0.5, 0.4]
    plain = replace(stage, nodes=("a", "b", "c"), modules=("x.a", "y.b", "x.c"), shares=tuple(thirds))
    assert [group.name for group in node_groups_of(plain, 3, 0.0)] == ["x.a", "y.b", "x.c"]
    assert [group.name for group in node_groups_of(plain, 3, 0.2)] == ["x.a", "y.b", "x.c"]
    assert [group.name for group in node_groups_of(plain, 2, 0.0)] == ["x.a – x.c"]
    small = replace(plain, modules=("x.a", "x.b", "y.c"), shares=(0.05, 0.05, 0.9))
    assert [(group.name, group.is_elided) for group in node_groups_of(small, 9, 0.2)] == [("x", False), ("y.c", False)]
    apart = replace(plain, modules=("x.a", "z.b", "y.c"), shares=(0.05, 0.05, 0.9))
    assert [(group.name, group.is_elided) for group in node_groups_of(apart, 9, 0.2)] == [
        ("x.a – z.b", True),
        ("y.c", False),
    ]


def test_the_largest_portals_are_listed_and_the_others_counted():
    portals = portals_between(6, 9)
    table, left_out = portals_table(portals, 3)
    rows = sorted({(one.name, one.source, one.bytes) for one in portals}, key=lambda row: -row[-1])
    assert [(row[0].name, row[0].source, row[0].bytes) for row in table.rows] == rows[:3]
    assert re.fullmatch(r"and \d+ smaller portals, .* together", left_out)
    assert portals_table(portals)[1] == ""
