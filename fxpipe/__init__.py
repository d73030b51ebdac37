"""fxpipe: a pipeline of any `nn.Module`, over several devices in one process.

    pipe = fxpipe.pipeline(model, devices=["cuda:0", "cuda:1"], chunks=8)
    loss_fn(pipe(x), target).backward()

Names are imported when they are first used, so that `import fxpipe` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpipe.api import pipeline
    from fxpipe.hardware import Hardware
    from fxpipe.partitioning import partition
    from fxpipe.pipes import Pipeline
    from fxpipe.planning import plan
    from fxpipe.plans import Plan
    from fxpipe.plans.simulating import simulate
    from fxpipe.profiling import Profile, profile
    from fxpipe.recomputing import is_recomputing
    from fxpipe.tracing import trace
    from fxpipe.tracing.recording.marks import cut
    from fxpipe.tracing.recording.one_node import leaf
    from fxpipe.tuning.result import Tuning
    from fxpipe.tuning.tuner import tune

__version__ = "0.1.0"

_HOMES = {
    "Hardware": "fxpipe.hardware",
    "Pipeline": "fxpipe.pipes",
    "Plan": "fxpipe.plans",
    "Tuning": "fxpipe.tuning.result",
    "Profile": "fxpipe.profiling",
    "cut": "fxpipe.tracing.recording.marks",
    "is_recomputing": "fxpipe.recomputing",
    "leaf": "fxpipe.tracing.recording.one_node",
    "partition": "fxpipe.partitioning",
    "pipeline": "fxpipe.api",
    "plan": "fxpipe.planning",
    "profile": "fxpipe.profiling",
    "simulate": "fxpipe.plans.simulating",
    "trace": "fxpipe.tracing",
    "tune": "fxpipe.tuning.tuner",
}

__all__ = [
    "Hardware",
    "Pipeline",
    "Plan",
    "Profile",
    "Tuning",
    "cut",
    "is_recomputing",
    "leaf",
    "partition",
    "pipeline",
    "plan",
    "profile",
    "simulate",
    "trace",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
