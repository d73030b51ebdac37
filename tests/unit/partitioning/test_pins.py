"""Pins: what they say of stages, by themselves. How they go through planning: test_manual_cuts.py."""

import pytest

from fxpipe.errors import PartitionError
from fxpipe.partitioning.manual_cuts import NodeSequence, placements_for_pins

NODES = NodeSequence(
    costs=(1.0,) * 6,
    names=("embed", "blocks_0_linear", "blocks_0_relu", "blocks_1_linear", "blocks_1_relu", "head"),
    modules=("embed", "blocks.0.linear", "blocks.0", "blocks.1.linear", "blocks.1", "head"),
    forbidden_cuts={},
)


@pytest.mark.parametrize(
    ("pins", "devices", "placement", "first_stages", "last_stages"),
    [  # a pin bounds the nodes before and after it; the inner pin counts; an earlier device again takes a stage more
        ({"blocks.0": 1}, (0, 1, 2), (0, 1, 2), (0, 1, 1, 1, 1, 1), (1, 1, 1, 2, 2, 2)),
        ({"blocks": 0, "blocks.1": 1}, (0, 1), (0, 1), (0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1)),
        ({"embed": 0, "blocks.0": 1, "head": 0}, (0, 1), (0, 1, 0), (0, 1, 1, 1, 1, 2), (0, 1, 1, 2, 2, 2)),
        # A head on the first device leaves room for the others, or all that is before it would have to be there, too.
        ({"head": 0}, (0, 1), (0, 1, 0), (0, 0, 0, 0, 0, 2), (2,) * 6),
    ],
)
def test_pins_bound_the_stages_of_nodes(pins, devices, placement, first_stages, last_stages) -> None:
    found, *_ = placements_for_pins(pins, devices, NODES)
    assert (found.placement, found.first_stages, found.last_stages) == (placement, first_stages, last_stages)


def test_a_stage_more_is_another_way() -> None:
    """To be compared: the head may share a stage of its device with all that is before it, or have one behind."""
    ways = placements_for_pins({"blocks.1": 0, "head": 1}, (0, 1), NODES)
    assert [way.placement for way in ways] == [(0, 1), (0, 1, 0, 1)]
    assert ways[0].last_stages == (0, 0, 0, 0, 0, 1)
    assert ways[1].first_stages == (0, 0, 0, 2, 2, 3)


def test_pins_that_need_more_stages_than_nodes_are_refused() -> None:
    few = NodeSequence((1.0,) * 3, ("a", "b", "c"), ("a", "b", "c"), {})
    with pytest.raises(PartitionError, match="the 3 nodes are too few for the stages that this takes"):
        placements_for_pins({"a": 0, "c": 0}, (0, 1, 2), few)


def test_a_module_that_computes_nothing_needs_no_place() -> None:
    nodes = NodeSequence(NODES.costs, NODES.names, NODES.modules, {}, {"drop": 3, "unused": None}, {"head.lin": "head"})
    assert placements_for_pins({"drop": 1, "unused": 0}, (0, 1), nodes) == placements_for_pins({}, (0, 1), nodes)
    assert placements_for_pins({"head": 1, "head.lin": 1}, (0, 1), nodes) == placements_for_pins(
        {"head": 1}, (0, 1), nodes
    )
    with pytest.raises(PartitionError, match=r"the module 'head\.lin' runs in 'head', which is one node: name that"):
        placements_for_pins({"head.lin": 1}, (0, 1), nodes)


def test_two_pins_on_one_device_leave_room_for_another_between_them() -> None:
    found, *_ = placements_for_pins({"embed": 0, "head": 0}, (0, 1), NODES)
    assert found.placement == (0, 1, 0)
    assert (found.first_stages[0], found.last_stages[0]) == (0, 0)
    assert (found.first_stages[-1], found.last_stages[-1]) == (2, 2)
