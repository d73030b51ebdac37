"""Costs of nodes to stages: pure Python on plain numbers, which knows neither torch nor graphs.

`partition` is what the passes call; `block_partition` is the algorithm alone. The way through the files: `block.py`
(the algorithm, and why it ends), `nodes.py` (what is known of the nodes), `by_hand.py` (cuts that the user makes),
`cutting.py` (the whole),
`follow.py` (a later graph of the same model, cut like the first).
"""

from fxpipe.partitioning.block import block_partition
from fxpipe.partitioning.cutting import Partition, partition
from fxpipe.partitioning.follow import follow

__all__ = ["Partition", "block_partition", "follow", "partition"]
