"""What the user asks for, checked and in one form, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.arguments import (
    one_of,
    parse_balance,
    parse_checkpoint,
    parse_chunks,
    parse_compile,
    parse_devices,
    parse_given_hardware,
    parse_given_profile,
    parse_leaf_modules,
    parse_number,
    parse_pins,
    parse_profile_budget,
    parse_stages_per_device,
)
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware
from fxpipe.limits import parse_memory_limit
from fxpipe.plans import Plan
from fxpipe.profiling import Profile
from fxpipe.scheduling import SCHEDULES
from fxpipe.tracing.ways import Tracer, check_tracer

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "inference")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to make a pipeline. Of what is left to planning, `placement` may grow and `checkpoint` become a mode."""

    workers: tuple[torch.device, ...]  # for each worker its device
    placement: tuple[int, ...]  # for each stage its worker
    chunks: int
    schedule: str
    checkpoint: str | tuple[str, ...]  # "auto", a mode, or one for each stage
    balance: str | tuple[int, ...] | tuple[str, ...]
    tracer: Tracer
    in_dims: Any = None
    out_dims: Any = None
    leaf_modules: tuple[str | type[nn.Module], ...] = ()
    check: bool = True
    pins: Mapping[str, int] = field(default_factory=dict)  # names of modules or nodes -> worker
    memory_limits: tuple[int | None, ...] | None = None  # bytes, by worker; None: what the devices have
    optimizer_state: float = 2.0  # bytes for each byte of a trained parameter
    hardware: Hardware | None = None  # to plan for; None: what is at hand
    profile: Profile | None = None  # measured before
    profile_budget: float = 5.0  # seconds
    compile: Mapping[str, Any] | None = None  # keywords of torch.compile; None: stages run as they are

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """For each stage its device."""
        return tuple(self.workers[k] for k in self.placement)


def make_settings(
    *,
    devices: Sequence[str | torch.device] | None,
    chunks: int | str,
    schedule: str,
    checkpoint: str | tuple[str, ...],
    balance: Any,
    tracer: Tracer,
    in_dims: Any,
    out_dims: Any,
    leaf_modules: Sequence[str | type[nn.Module]],
    check: bool,
    stages_per_device: int,
    pin: Mapping[str, Any] | None,
    memory_limit: Any,
    optimizer_state: float,
    hardware: str | Hardware | None,
    profile: Any,
    profile_budget: float | None,
    compile: bool | Mapping[str, Any] = False,
    plan: Plan | None = None,
    anywhere: bool = False,
) -> Settings:
    """Checks each argument by itself. With a plan, what is left to it is the plan's.

    `anywhere`: the devices need not be here, for nothing will run.

    Raises:
        ArgumentError, ArgumentTypeError: names the argument, what was given, what is accepted.
    """
    per_device = parse_stages_per_device(stages_per_device)
    if plan is not None:
        devices, chunks, checkpoint = _left_to_plan(plan, devices, chunks, checkpoint, balance, pin)
    workers = parse_devices(devices, anywhere)
    placement = _placed(len(workers), per_device, plan)
    pins, balance = _pins(pin, balance, workers)
    return Settings(
        workers=workers,
        placement=placement,
        chunks=parse_chunks(chunks, len(workers)),
        schedule=one_of("schedule", schedule, TRAINING_SCHEDULES),
        checkpoint=parse_checkpoint(checkpoint, None if pins else len(placement)),  # pins may take other stages
        balance=parse_balance(balance, len(placement)),
        tracer=check_tracer(tracer),
        in_dims=in_dims,
        out_dims=out_dims,
        leaf_modules=parse_leaf_modules(leaf_modules),
        check=check,
        pins=pins,
        memory_limits=parse_memory_limit(memory_limit, len(workers)),
        optimizer_state=parse_number("optimizer_state", optimizer_state, "bytes for each byte of a parameter"),
        hardware=parse_given_hardware(hardware),
        profile=parse_given_profile(profile),
        profile_budget=parse_profile_budget(profile_budget),
        compile=parse_compile(compile),
    )


def _pins(pin: Mapping[str, Any] | None, balance: Any, workers: Sequence[torch.device]) -> tuple[dict[str, int], Any]:
    """The pins, and the balance beside them: a map of modules to devices is nothing but pins."""
    pins = {} if pin is None else parse_pins("pin", pin, workers)
    if isinstance(balance, Mapping):
        pins = parse_pins("balance", balance, workers) | pins
        balance = "auto"
    if pins and not isinstance(balance, str):
        raise ArgumentError(
            f"balance={list(balance)!r} and pins of {', '.join(map(repr, pins))}: cut by names or "
            "numbers, or pin; give one of them"
        )
    return pins, balance


def _placed(workers: int, per_device: int, plan: Plan | None) -> tuple[int, ...]:
    """For each stage its worker: stage after stage in loops over the workers, or as the plan has it."""
    if plan is not None and per_device == 1:
        placement, accepted = plan.placement, max(plan.placement) + 1
        if workers != accepted:
            shared = f" on {accepted} devices" if accepted < len(placement) else ""
            raise ArgumentError(
                f"plan has {len(placement)} stages{shared}, but devices has {workers} entries; give {accepted}"
            )
        return placement
    placement = tuple(range(workers)) * per_device
    if plan is not None and len(plan.stages) != len(placement):
        raise ArgumentError(
            f"plan has {len(plan.stages)} stages, but devices has {workers} entries and "
            f"stages_per_device={per_device}, which makes {len(placement)}; leave stages_per_device to the plan"
        )
    return placement


def _left_to_plan(
    plan: Plan,
    devices: Sequence[str | torch.device] | None,
    chunks: int | str,
    checkpoint: str | tuple[str, ...],
    balance: Any,
    pin: Any,
) -> tuple[Sequence[str | torch.device], int | str, str | tuple[str, ...]]:
    """Devices, chunks and checkpoint: the plan's, where they were not given."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"plan is a {type(plan).__name__}; expected a fxpipe.Plan, as from fxpipe.Plan.load(path)"
        )
    if not isinstance(balance, str) or balance != "auto":
        raise ArgumentError(f"balance={balance!r} and a plan, which has its stages already: give one of them")
    if pin:
        raise ArgumentError(f"pin={pin!r} and a plan, which has its stages already: give one of them")
    return (
        plan.workers if devices is None else devices,
        plan.chunks if isinstance(chunks, str) and chunks == "auto" else chunks,
        plan.checkpoint if checkpoint == "auto" else checkpoint,
    )
