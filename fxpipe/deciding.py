"""From costs to a cut: in which order nodes run, where stages begin, where they run, and which of them recompute.

Several cuts are made and compared where there is a choice that no solver makes: the order of the graph (as traced, or
with side branches next to their use), and the stages that pins allow. The simulator has the last word; where it says
the same, the traced order and fewer stages win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from fxpipe.chains import chain_of
from fxpipe.errors import PartitionError
from fxpipe.partitioning import MemoryLimitError, Nodes, optimal_partition, partition, stage_loads
from fxpipe.partitioning.by_hand import cuts_by_names, is_by_names, starts_by_counts
from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.loads import StageLoad
from fxpipe.partitioning.pins import pinned
from fxpipe.profiling import Profile
from fxpipe.rewriting import forbidden_cuts
from fxpipe.settings import Settings
from fxpipe.simulation import simulate_schedule
from fxpipe.sites import sites_of
from fxpipe.tracing import Traced

ROUNDS = 4  # in which stages that share a device are balanced against each other


@dataclass(frozen=True, slots=True)
class Cut:
    """What was decided."""

    traced: Traced  # in the order in which its nodes will run
    starts: tuple[int, ...]  # the place of the first node of each stage
    placement: tuple[int, ...]  # by stage: its worker
    recompute: tuple[bool, ...]
    loads: tuple[StageLoad, ...]
    balance: str  # "block", "optimal", "counts", "names"
    bottlenecks: Mapping[str, float]  # by balance: the largest seconds of a stage, sending counted
    step_seconds: float  # by the simulator
