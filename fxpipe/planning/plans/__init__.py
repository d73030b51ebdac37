"""Plans: all that is decided about a pipeline, as frozen data; and the same plan for other sizes, on other hardware.

`data.py` has the fields and what follows from them, `figures.py` the figures of its simulated step; a `Plan`
(`saved_plan.py`) also saves itself, and prints itself by `fxpipe.inspect.plan_text`. `retarget.py` computes the figures
for other sizes and other hardware; `simulate_plan.py` is `fxpipe.simulate`.
"""

from fxpipe.planning.plans.data import (
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
from fxpipe.planning.plans.saved_plan import Plan

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
