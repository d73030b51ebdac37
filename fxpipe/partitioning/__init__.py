"""Costs of nodes to stages: pure Python on plain numbers, which knows neither torch nor graphs.

By time alone: `block.py` (the algorithm, and why it ends), `nodes.py` (what is known of the nodes), `by_hand.py` and
`pins.py` (what the user says), `cutting.py` (all of it together: `partition`).

With transfers, memory and unequal devices: `chain.py` (the graph in numbers), `loads.py` (what a stage comes to),
`optimal.py` (what the best cut is, and the way to it), `search.py` (the way itself), `ranges.py` (loads of any stage,
quickly), `shortage.py` (why nothing fits, and what would).

`follow.py` cuts a later graph of the same model like the first.
"""

from fxpipe.partitioning.block import block_partition
from fxpipe.partitioning.chain import Chain, Flow, Held, Link, Site, Weights
from fxpipe.partitioning.cutting import Partition, cut_by_block, partition
from fxpipe.partitioning.follow import follow
from fxpipe.partitioning.loads import StageLoad, stage_loads
from fxpipe.partitioning.optimal import Optimal, optimal_partition

__all__ = [
    "Chain",
    "Flow",
    "Held",
    "Link",
    "Optimal",
    "Partition",
    "Site",
    "StageLoad",
    "Weights",
    "block_partition",
    "cut_by_block",
    "follow",
    "optimal_partition",
    "partition",
    "stage_loads",
]
