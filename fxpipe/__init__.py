"""fxpipe: a pipeline of any `nn.Module`, over several devices in one process.

    pipe = fxpipe.pipeline(model, devices=["cuda:0", "cuda:1"], chunks=8)
    loss_fn(pipe(x), target).backward()

Names are imported at first use, so that `import fxpipe` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpipe import distributed, errors, optim
    from fxpipe.api import pipeline
    from fxpipe.hardware import Hardware
    from fxpipe.pipe.pipeline_module import Pipeline, unwrap
    from fxpipe.pipe.verification import Verification, verify
    from fxpipe.planning.entry import plan
    from fxpipe.planning.plans import Plan
    from fxpipe.planning.plans.simulate_plan import simulate
    from fxpipe.planning.tuning.candidates import Tuning
    from fxpipe.planning.tuning.tuner import tune
    from fxpipe.profiling import Profile, profile
    from fxpipe.rewriting.program import is_recomputing
    from fxpipe.tracing import trace
    from fxpipe.tracing.record.opaque_call import cut, leaf
    from fxpipe.utils.locks import is_planning

__version__ = "0.1.0"

_MODULES = {"distributed", "errors", "optim"}
_HOMES = {
    "Hardware": "fxpipe.hardware",
    "Pipeline": "fxpipe.pipe.pipeline_module",
    "Plan": "fxpipe.planning.plans",
    "Tuning": "fxpipe.planning.tuning.candidates",
    "Profile": "fxpipe.profiling",
    "cut": "fxpipe.tracing.record.opaque_call",
    "is_planning": "fxpipe.utils.locks",
    "is_recomputing": "fxpipe.rewriting.program",
    "leaf": "fxpipe.tracing.record.opaque_call",
    "pipeline": "fxpipe.api",
    "plan": "fxpipe.planning.entry",
    "profile": "fxpipe.profiling",
    "simulate": "fxpipe.planning.plans.simulate_plan",
    "trace": "fxpipe.tracing",
    "tune": "fxpipe.planning.tuning.tuner",
    "Verification": "fxpipe.pipe.verification",
    "unwrap": "fxpipe.pipe.pipeline_module",
    "verify": "fxpipe.pipe.verification",
}

__all__ = [
    "Hardware",
    "Pipeline",
    "Plan",
    "Profile",
    "Tuning",
    "Verification",
    "cut",
    "distributed",
    "errors",
    "is_planning",
    "is_recomputing",
    "leaf",
    "optim",
    "pipeline",
    "plan",
    "profile",
    "simulate",
    "trace",
    "tune",
    "unwrap",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fxpipe.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
