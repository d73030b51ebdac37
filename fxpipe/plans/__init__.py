"""Plans: all that is decided about a pipeline, as frozen data; and the same plan for other sizes, on other hardware.

`data.py` has the fields and what follows from them, `step_figures.py` what a plan comes to when it is simulated;
`text.py` and `html.py` show that, and a `Plan` (`saved_plan.py`) shows itself by them. `simulate_plan.py` is
`fxpipe.simulate`.
"""

from fxpipe.plans.data import (
    Bottleneck,
    HeaviestNode,
    OpaqueNode,
    PlannedSize,
    PlannedTransfer,
    Portal,
    StageBytes,
    StageGrowth,
    StagePlan,
    StageSeconds,
    StageWork,
    TiedParameter,
)
from fxpipe.plans.saved_plan import Plan

__all__ = [
    "Bottleneck",
    "HeaviestNode",
    "OpaqueNode",
    "Plan",
    "PlannedSize",
    "PlannedTransfer",
    "Portal",
    "StageBytes",
    "StageGrowth",
    "StagePlan",
    "StageSeconds",
    "StageWork",
    "TiedParameter",
]
