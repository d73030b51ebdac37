"""What the user asks for, checked and in one form, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.plans import Plan
from fxpipe.scheduling import CHECKPOINTS, SCHEDULES
from fxpipe.tracing.ways import Tracer, check_tracer

CHUNKS_PER_WORKER = 4  # GPipe, section 2.3: the bubble is negligible from there on
BALANCES = ("block",)  # besides those by hand
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "inference")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to make a pipeline. `chunks` is a number and `checkpoint` a mode: what was "auto" is decided."""

    workers: tuple[torch.device, ...]  # for each worker its device
    placement: tuple[int, ...]  # for each stage its worker
    chunks: int
    schedule: str
    checkpoint: str | tuple[str, ...]  # or one for each stage
    balance: str | tuple[int, ...] | tuple[str, ...]
    tracer: Tracer
    in_dims: Any
    out_dims: Any
    leaf_modules: tuple[str | type[nn.Module], ...] = ()
    check: bool = True

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """For each stage its device."""
        return tuple(self.workers[k] for k in self.placement)


def make_settings(
    devices: Sequence[str | torch.device] | None,
    chunks: int | str,
    schedule: str,
    checkpoint: str | tuple[str, ...],
    balance: str | Sequence[int] | Sequence[str],
    tracer: Tracer,
    in_dims: Any,
    out_dims: Any,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    check: bool = True,
    plan: Plan | None = None,
    stages_per_device: int = 1,
) -> Settings:
    """Checks each argument by itself. With a plan, what is left to it is the plan's.

    Raises:
        ArgumentError, ArgumentTypeError: names the argument, what was given, what is accepted.
    """
    per_device = parse_stages_per_device(stages_per_device)
    if plan is not None:
        devices, chunks, checkpoint = _left_to_plan(plan, devices, chunks, checkpoint, balance)
    workers = parse_devices(devices)
    placement = _placed(len(workers), per_device, plan)
    return Settings(
        workers,
        placement,
        parse_chunks(chunks, len(workers)),
        _one_of("schedule", schedule, TRAINING_SCHEDULES),
        parse_checkpoint(checkpoint, len(placement)),
        parse_balance(balance, len(placement)),
        check_tracer(tracer),
        in_dims,
        out_dims,
        parse_leaf_modules(leaf_modules),
        check,
    )


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


def parse_stages_per_device(given: int) -> int:
    """How many stages each worker has."""
    try:
        count = operator.index(given)
    except TypeError:
        count = None
    if count is None or isinstance(given, bool):
        raise ArgumentTypeError(f"stages_per_device={given!r}: expected a whole number, at least 1")
    if count < 1:
        raise ArgumentError(f"stages_per_device={given!r}: a device has at least 1 stage; give 1 or more")
    return count


def _left_to_plan(
    plan: Plan,
    devices: Sequence[str | torch.device] | None,
    chunks: int | str,
    checkpoint: str | tuple[str, ...],
    balance: str | Sequence[int] | Sequence[str],
) -> tuple[Sequence[str | torch.device], int | str, str | tuple[str, ...]]:
    """Devices, chunks and checkpoint: the plan's, where they were not given."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"plan is a {type(plan).__name__}; expected a fxpipe.Plan, as from fxpipe.Plan.load(path)"
        )
    if not isinstance(balance, str) or balance != "block":
        raise ArgumentError(f"balance={balance!r} and a plan, which has its stages already: give one of them")
    return (
        plan.workers if devices is None else devices,
        plan.chunks if isinstance(chunks, str) and chunks == "auto" else chunks,
        plan.checkpoint if checkpoint == "auto" else checkpoint,
    )


def parse_leaf_modules(leaf_modules: Any) -> tuple[str | type[nn.Module], ...]:
    """Names and classes of modules."""
    if isinstance(leaf_modules, (str, type)) or not isinstance(leaf_modules, Sequence):
        raise ArgumentTypeError(
            f"leaf_modules is a {type(leaf_modules).__name__}; expected a list of names and classes of modules"
        )
    for item in leaf_modules:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ArgumentTypeError(
                f"leaf_modules holds {item!r}; expected names of the model's modules, or classes of modules"
            )
    return tuple(leaf_modules)


def parse_devices(devices: Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    """One device for each worker. None: all CUDA devices, or two CPU workers where there is none."""
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(torch.device("cuda", k) for k in range(count)) or (torch.device("cpu"),) * 2
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise ArgumentTypeError(
            f"devices={devices!r}: expected a list of devices, one for each worker, as in ['cpu', 'cpu']"
        )
    if not devices:
        raise ArgumentError("devices is empty: give one for each worker, as in ['cuda:0', 'cuda:1'] or ['cpu', 'cpu']")
    return tuple(_parse_device(device) for device in devices)


def _parse_device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"devices: {given!r} is no device of torch's; 'cpu' and 'cuda:0' are") from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"devices: {given!r} is not supported; stages run on 'cpu' and 'cuda:0', 'cuda:1', ...")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise ArgumentError(
            f"devices: {given!r} is not available: there are {count} CUDA devices here; 'cpu' always works"
        )
    return torch.device("cuda", index)


def parse_chunks(chunks: int | str, workers: int) -> int:
    """The number of micro-batches."""
    if isinstance(chunks, str) and chunks == "auto":
        return CHUNKS_PER_WORKER * workers
    try:
        count = operator.index(chunks)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or isinstance(chunks, bool):
        raise ArgumentTypeError(f"chunks={chunks!r}: expected 'auto' or a whole number of micro-batches, at least 1")
    if count < 1:
        raise ArgumentError(
            f"chunks={chunks!r}: a mini-batch is cut into at least 1 micro-batch; give 1 or more, or 'auto'"
        )
    return count


def parse_checkpoint(checkpoint: str | tuple[str, ...], stages: int) -> str | tuple[str, ...]:
    """A mode for all stages, or one for each."""
    if not isinstance(checkpoint, tuple):
        mode = _one_of("checkpoint", checkpoint, ("auto", *CHECKPOINTS))
        return "never" if mode == "auto" else mode
    if len(checkpoint) != stages:
        raise ArgumentError(f"checkpoint has {len(checkpoint)} modes for {stages} stages: give one for each")
    return tuple(_one_of("checkpoint", mode, CHECKPOINTS) for mode in checkpoint)


def parse_balance(balance: str | Sequence[int] | Sequence[str], stages: int) -> str | tuple[int, ...] | tuple[str, ...]:
    """A name that is known, or as many entries as the stages need. What they say is checked against the graph."""
    if isinstance(balance, str):
        if balance in BALANCES:
            return balance
        raise ArgumentError(
            f"balance={balance!r} is unknown; accepted are {', '.join(map(repr, BALANCES))}, or by hand a list: the "
            "number of nodes of each stage, or the names of the nodes or modules at which the later stages begin"
        )
    try:
        entries: tuple[Any, ...] = tuple(balance)
    except TypeError:
        raise ArgumentTypeError(
            f"balance={balance!r}: expected 'block', or a list of numbers of nodes or of names of nodes or modules"
        ) from None
    by_name = all(isinstance(entry, str) for entry in entries) and (stages == 1 or bool(entries))
    wanted = stages - 1 if by_name else stages
    if len(entries) != wanted:
        kind = "names, one for each stage but the first" if by_name else "numbers of nodes, one for each stage"
        raise ArgumentError(
            f"balance={list(entries)} has {len(entries)} entries for {stages} stages: give {wanted} {kind}"
        )
    return entries


def _one_of(argument: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ArgumentError(f"{argument}={given!r} is unknown; accepted are {', '.join(map(repr, known))}")
    return given
