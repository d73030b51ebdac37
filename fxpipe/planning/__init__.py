"""From options to a plan, and to what runs it. Nothing is imported here: a plan as data needs neither torch nor sympy.

- `options/`: the options as given, and the settings that come of them (`Settings`)
- `plans/`: a plan as data; the same plan for other sizes, on other hardware; how it prints
- the files of this folder: what nodes cost (`cost_model.py`), where stages begin (`choose.py`, `cut_problem.py`,
  `replication.py`), the plan of a cut (`describe_cut.py`), all passes in order (`passes.py`)
- `tuning/`: many plans, simulated and compared
- `entry.py`, on top of these: `fxpipe.plan`, and what a pipe runs to be planned
"""
