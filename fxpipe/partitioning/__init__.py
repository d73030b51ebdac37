"""From costs of nodes to stages: pure Python on plain numbers, independent of torch and of graphs.

By time alone: `block.py` (the algorithm and its proof), `manual_cuts.py` (the user's cuts and pins). With transfers,
memory and unequal devices: `chain.py` (the graph in numbers), `optimal.py` (the best cut), `intervals.py` (fast loads
of any stage), `partial_recompute.py` (stages that recompute only a part). With replicas of stages: `pipedream.py`.
"""
