"""Nodes that the user pins to devices: what that says of stages, and how many stages it takes.

Stages go over the devices in order. A node that is pinned to an earlier device than one before it needs a stage more,
on that device, behind the others:

    devices    0, 1                    pins {"embedding": 0, "head": 0}
    stages     0 on 0, 1 on 1, 2 on 0  since the head stands behind nodes that are on 1

    place         0          1      2      3      4
    node          embedding  ...    ...    ...    head
    first stage   0          0      0      0      2
    last stage    0          2      2      2      2

Between pins every place is free, as far as the order of stages allows, and the solver decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fxpipe.errors import PartitionError
from fxpipe.partitioning.by_hand import find, unknown
from fxpipe.partitioning.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Pinned:
    """What pins come to."""

    placement: tuple[int, ...]  # by stage: the device
    low: tuple[int, ...]  # by place: the first stage that may have the node
    high: tuple[int, ...]  # by place: the last one


def pinned(pins: Mapping[str, int], placement: Sequence[int], nodes: Nodes) -> Pinned:
    """The bounds that `pins` (name of a node, or path of a module -> device) set; `placement` grows where it must.

    A module's pin holds for the modules in it, unless they have one of their own.

    Raises:
        PartitionError: a name that no node or module has.
    """
    device_of: dict[int, int] = {}
    for name in sorted(pins, key=len):  # longer paths are further inside, and come later
        places = find(name, nodes) if name else list(range(len(nodes.costs)))
        if not places:
            raise PartitionError(unknown(name, nodes))
        device_of |= dict.fromkeys(places, pins[name])
    grown, stage_of, stage = [*placement], {}, 0
    for place, device in sorted(device_of.items()):
        later = (j for j in range(stage, len(grown)) if grown[j] == device)
        stage = next(later, len(grown))
        if stage == len(grown):
            grown.append(device)
        stage_of[place] = stage
    n = len(nodes.costs)
    low = accumulate((stage_of.get(place, 0) for place in range(n)), max)
    high = accumulate((stage_of.get(place, len(grown) - 1) for place in reversed(range(n))), min)
    return Pinned(tuple(grown), tuple(low), tuple(high)[::-1])
