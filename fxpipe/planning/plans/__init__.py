"""Plans: all decisions about a pipeline as frozen data, and their figures for other sizes or other hardware.

`data.py` has the fields and derived values, `figures.py` the figures of the simulated step. `Plan` (`saved_plan.py`)
also saves and prints itself. `retarget.py` computes the figures for other sizes and other hardware; `simulate_plan.py`
is `fxpipe.simulate`.
"""

from fxpipe.planning.plans.saved_plan import Plan

__all__ = ["Plan"]
