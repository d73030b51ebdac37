"""Plans: all decisions about a pipeline as frozen data, and their figures for other sizes or other hardware.

`data.py` has the fields and derived values, `figures.py` the figures of the simulated step, `saved_plan.py` the `Plan`,
which saves and prints itself, `retarget.py` other sizes and hardware, `simulate_plan.py` `fxpipe.simulate`.
"""

from fxpipe.planning.plans.saved_plan import Plan

__all__ = ["Plan"]
