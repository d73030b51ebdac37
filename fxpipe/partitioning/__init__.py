"""Costs of nodes to stages: pure Python on plain numbers, which knows neither torch nor graphs.

`partition` is what the passes call; `block_partition` is the algorithm alone. The way through the files: `block.py`
(the algorithm, and why it ends), `nodes.py` (what is known of the nodes), `by_hand.py` (cuts that the user makes),
`partition.py` (the whole).
"""

from fxpipe.partitioning.block import block_partition
from fxpipe.partitioning.partition import Partition, partition

__all__ = ["Partition", "block_partition", "partition"]
