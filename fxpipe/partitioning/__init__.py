"""Costs of nodes to stages: pure Python on plain numbers, which knows neither torch nor graphs.

By time alone: `block.py` (the algorithm, and why it ends), `nodes.py` (what is known of the nodes), `by_hand.py` and
`pins.py` (what the user says), `cutting.py` (all of it together: `partition`).

By time, transfers and memory: `chain.py` (the graph in plain numbers), `loads.py` (what a stage comes to), `optimal.py`
(the least bottleneck), with `search.py` and `ranges.py` under it.

`follow.py` cuts a later graph of the same model like the first.
"""

from fxpipe.partitioning.block import block_partition
from fxpipe.partitioning.cutting import Partition, cut_by_block, partition
from fxpipe.partitioning.follow import follow
from fxpipe.partitioning.loads import stage_loads
from fxpipe.partitioning.optimal import optimal_partition

__all__ = [
    "Partition",
    "block_partition",
    "cut_by_block",
    "follow",
    "optimal_partition",
    "partition",
    "stage_loads",
]
