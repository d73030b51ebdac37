"""Nodes that the user pins to devices: the stages that they may be in, and the number of stages needed.

Stages are placed on the devices in order. A node pinned to an earlier device than a preceding node needs another stage:

    devices    0, 1                    pins {"embedding": 0, "head": 0}
    stages     0 on 0, 1 on 1, 2 on 0  since the head is after nodes that are on 1

    place         0          1      2      3      4
    node          embedding  ...    ...    ...    head
    first stage   0          0      0      0      2
    last stage    0          2      2      2      2

Between pins the solver decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from fxpipe.errors import PartitionError
from fxpipe.partitioning.manual_cuts import NodeSequence, places_of_name, unknown_name_message

MAX_WAYS = 16  # maximum number of placements to compare


@dataclass(frozen=True, slots=True)
class PinnedPlacement:
    """A placement and the bounds that follow from pins."""

    placement: tuple[int, ...]  # by stage: the device
    first_stages: tuple[int, ...]  # by place: the first stage that may have the node
    last_stages: tuple[int, ...]  # by place: the last stage that may have the node


def placements_for_pins(
    pins: Mapping[str, int], placement: Sequence[int], nodes: NodeSequence
) -> tuple[PinnedPlacement, ...]:
    """Returns the placements that satisfy `pins` (node name or module path -> device), the fewest stages first.

    A pinned node can be in an existing stage or in a new one. A module's pin holds for its submodules unless they have
    their own pins. A module that computes nothing needs no place.

    Raises:
        PartitionError: a name that no node or module has; or there are too few nodes for the stages.
    """
    device_of: dict[int, int] = {}
    for name in sorted(pins, key=len):  # longer paths are inner modules, and override
        places = places_of_name(name, nodes) if name else list(range(len(nodes.costs)))
        is_elsewhere = name in nodes.inside and pins.get(nodes.inside[name]) != pins[name]
        if not places and (is_elsewhere or not (name in nodes.inside or name in nodes.empty)):
            raise PartitionError(unknown_name_message(name, nodes))
        device_of |= dict.fromkeys(places, pins[name])
    ways = [_StagesForPins(_first_placement(device_of, placement, len(nodes.costs)), ())]
    for place, device in sorted(device_of.items()):
        ways = [longer for way in ways for longer in way.with_pin(place, device)][:MAX_WAYS]
    placements = (_stage_bounds(way, len(nodes.costs)) for way in sorted(ways, key=lambda way: len(way.placement)))
    possible = tuple(way for way in placements if _leaves_a_node_for_each(way))
    if not possible:
        raise PartitionError(
            f"pin={dict(pins)!r}: the {len(nodes.costs)} nodes are too few for the stages that this takes; use fewer "
            "devices, or pin less"
        )
    return possible


def _first_placement(device_of: Mapping[int, int], placement: Sequence[int], n: int) -> tuple[int, ...]:
    """Returns the initial placement: as given, but first the device of the first node; no device without nodes."""
    if len(device_of) == n:  # a map of all modules: one stage per run, unless the given placement matches
        runs = tuple(device for device, _ in groupby(device_of[place] for place in range(n)))
        return tuple(placement) if tuple(device for device, _ in groupby(placement)) == runs else runs
    first = device_of.get(0, placement[0])
    rest = [*placement]
    if first in rest:
        rest.remove(first)
    return (first, *rest)


@dataclass(frozen=True, slots=True)
class _StagesForPins:
    """Stages for the first pinned places."""

    placement: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]  # (place, first stage, last stage), ascending; the stages are on one device

    def with_pin(self, place: int, device: int) -> list[_StagesForPins]:
        before, first, last = self.spans[-1] if self.spans else (-2, 0, 0)
        if before == place - 1 and self.placement[first] == device:
            return [_StagesForPins(self.placement, (*self.spans, (place, first, last)))]  # the same span continues
        ways = []
        for _, run in groupby(range(len(self.placement)), self.placement.__getitem__):
            stages = [stage for stage in run if self.placement[stage] == device and stage >= first]
            if stages:  # adjacent stages on one device: the solver chooses among them
                ways.append(_StagesForPins(self.placement, (*self.spans, (place, stages[0], stages[-1]))))
        if self.placement[-1] != device:
            stage = len(self.placement)
            ways.append(_StagesForPins((*self.placement, device), (*self.spans, (place, stage, stage))))
        return ways


def _stage_bounds(way: _StagesForPins, n: int) -> PinnedPlacement:
    end = len(way.placement) - 1
    firsts = {place: first for place, first, _ in way.spans}
    lasts = {place: last for place, _, last in way.spans}
    low = accumulate((firsts.get(place, 0) for place in range(n)), max)
    high = accumulate((lasts.get(place, end) for place in reversed(range(n))), min)
    return PinnedPlacement(way.placement, tuple(low), tuple(high)[::-1])


def _leaves_a_node_for_each(way: PinnedPlacement) -> bool:
    stage = -1
    for low, high in zip(way.first_stages, way.last_stages, strict=True):
        stage = min(stage + 1, high)  # the earliest stage possible
        if stage < low:
            return False
    return stage == len(way.placement) - 1
