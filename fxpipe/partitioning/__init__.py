"""From costs of nodes to stages: pure Python on plain numbers, independent of torch and of graphs.

By time alone: `block.py` (the algorithm and its proof), `manual_cuts.py` (the user's cuts and pins, and stages between
them).

With transfers, memory and unequal devices: `chain.py` (the graph in numbers, and the loads of a stage),
`optimal.py` (the best cut, its search, and errors), `intervals.py` (fast loads of any stage), `partial_recompute.py`
(stages that recompute only a part).

With replicas of stages: `pipedream.py`. `cut_least_misplaced` cuts a later graph of the same model like the first.
"""
