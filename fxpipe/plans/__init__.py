"""Plans: all that is decided about a pipeline, as frozen data; and the same plan for other sizes, on other hardware."""

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
