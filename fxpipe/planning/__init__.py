"""From options to an executable plan. This file imports nothing, so a plan as data needs neither torch nor sympy.

- `options/`: the options, and the settings made from them (`Settings`)
- `plans/`: a plan as data, for other sizes or other hardware
- here: costs of nodes (`cost_model.py`), cuts (`choose.py`, `replication.py`), the plan of a cut
  (`describe_cut.py`), all passes in order (`passes.py`)
- `tuning/`: simulates and compares many plans
- `entry.py`: `fxpipe.plan`, and the planning of a pipe
"""
