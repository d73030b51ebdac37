"""From options to an executable plan. This file imports nothing, so a plan as data needs neither torch nor sympy.

`options/` has the options and the settings made from them, `plans/` a plan as data, `tuning/` compares many plans.
Here: costs of nodes (`cost_model.py`), cuts (`choose.py`, `replication.py`), the plan of a cut (`describe_cut.py`), all
passes in order (`passes.py`), and `fxpipe.plan` (`entry.py`).
"""
