"""Plans: all that is decided about a pipeline, as frozen data; and the same plan for other sizes, on other hardware.

`data.py` has the fields and what follows from them, `figures.py` what a plan comes to when it is simulated; `text.py`
and `html.py` show that, and a `Plan` (`plan.py`) shows itself by them. `simulating.py` is `fxpipe.simulate`.
"""

from fxpipe.plans.parts import (
    Bottleneck,
    HeavyNode,
    Portal,
    Sending,
    StageBytes,
    StagePlan,
    StageSeconds,
    StageWork,
    Tied,
    Whole,
)
from fxpipe.plans.plan import Plan

__all__ = [
    "Bottleneck",
    "HeavyNode",
    "Plan",
    "Portal",
    "Sending",
    "StageBytes",
    "StagePlan",
    "StageSeconds",
    "StageWork",
    "Tied",
    "Whole",
]
