"""From costs of nodes to stages: pure Python on plain numbers, independent of torch and of graphs.

By time alone: `block.py` (the algorithm and its proof), `manual_cuts.py` (the user's cuts and pins, and stages between
them).

With transfers, memory and unequal devices: `chain.py` (the graph in numbers, and the loads of a stage),
`optimal.py` (the best cut, and errors), `search.py` (the search), `intervals.py` (fast loads of any stage),
`partial_recompute.py` (stages that recompute only a part).

With replicas of stages: `pipedream.py`. `cut_least_misplaced` cuts a later graph of the same model like the first.
"""

from fxpipe.cluster import Link
from fxpipe.partitioning.block import block_partition
from fxpipe.partitioning.chain import Chain, Flow, HeldStorage, ParameterUse, StageLoad, StageSite, stage_loads
from fxpipe.partitioning.manual_cuts import cut_by_block, cut_least_misplaced
from fxpipe.partitioning.optimal import OptimalCut, optimal_partition
from fxpipe.partitioning.pipedream import BandwidthLevel, ReplicatedPartition, ReplicatedStage, pipedream_partition

__all__ = [
    "BandwidthLevel",
    "Chain",
    "Flow",
    "HeldStorage",
    "Link",
    "OptimalCut",
    "ParameterUse",
    "ReplicatedPartition",
    "ReplicatedStage",
    "StageLoad",
    "StageSite",
    "block_partition",
    "cut_by_block",
    "cut_least_misplaced",
    "optimal_partition",
    "pipedream_partition",
    "stage_loads",
]
