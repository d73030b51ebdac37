"""What a pipeline is asked for: the options of `fxpipe.pipeline`, `fxpipe.plan` and `fxpipe.tune`, as they were given.

Each of the three has those that it takes in its signature, for `help`, editors and type checkers to show. Names, order
and defaults are the ones here (tests/test_options.py holds them to it), and so each takes them all at once:

    options = Options.among(locals())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware
from fxpipe.plans import Plan
from fxpipe.profiling import Profile
from fxpipe.scheduling import ScheduleLike
from fxpipe.tracing.ways import Tracer

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Not checked yet; what they mean says `fxpipe.pipeline`."""

    devices: Sequence[str | torch.device] | None = None
    chunks: int | str = AUTO
    balance: str | Sequence[int] | Sequence[str] | Mapping[str, Any] = AUTO
    pin: Mapping[str, Any] | None = None
    stages_per_device: int | None = None
    schedule: ScheduleLike = "1f1b"
    checkpoint: str | Sequence[str] = AUTO
    memory_limit: Any = None
    optimizer_state: float = 2.0
    hardware: str | Hardware | None = None
    profile: Profile | str | Path | None = None
    profile_budget: float | None = None
    tracer: Tracer = AUTO
    in_dims: Any = None
    out_dims: Any = None
    leaf_modules: Sequence[str | type[nn.Module]] = ()
    check: bool = True
    progress: bool = True
    deferred_batch_norm: bool = False
    compile: bool | Mapping[str, Any] = False

    @classmethod
    def among(cls, arguments: Mapping[str, Any], but: Sequence[str] = ()) -> Options:
        """Those among the arguments of a function; `but` for some, which mean something else there."""
        return cls(**{name: arguments[name] for name in DEFAULTS if name in arguments and name not in but})


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Options)}
FOR_TRACING = ("tracer", "in_dims", "out_dims", "leaf_modules", "check")
# What planning alone asks for: beside a plan nobody would heed it.
FOR_PLANNING = ("balance", "pin", "memory_limit", "optimizer_state", "hardware", "profile", "profile_budget")


def is_left_out(given: Any, default: Any) -> bool:
    """Was an argument left out, or given as it would be then? Tensors and the like are never compared."""
    if isinstance(given, (str, float, int)):
        return bool(given == default)
    return given is default or (isinstance(given, (tuple, list, dict)) and not given and not default)


def with_plan(options: Options, plan: Plan) -> Options:
    """Devices, chunks and checkpoint are the plan's, where they were left out. What is for planning has to be.

    Raises:
        ArgumentError, ArgumentTypeError: it was not; `plan` is none.
    """
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"plan is a {type(plan).__name__}; expected a fxpipe.Plan, as from fxpipe.Plan.load(path)"
        )
    for name in FOR_PLANNING:
        given = getattr(options, name)
        if not is_left_out(given, DEFAULTS[name]):
            shown = repr(given) if isinstance(given, (str, float, int, Sequence, Mapping)) else type(given).__name__
            raise ArgumentError(
                f"{name}={shown} and a plan, which is made already: leave {name} out, or make a new plan with "
                f"fxpipe.plan(model, ..., {name}=...)"
            )
    return replace(
        options,
        devices=plan.workers if options.devices is None else options.devices,
        chunks=plan.chunks if isinstance(options.chunks, str) and options.chunks == AUTO else options.chunks,
        checkpoint=plan.checkpoint if options.checkpoint == AUTO else options.checkpoint,
    )
