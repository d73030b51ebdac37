"""Checks and normalizes user arguments, each by itself."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware, parse_hardware
from fxpipe.partitioning.manual_cuts import is_by_names
from fxpipe.profiling import Profile
from fxpipe.scheduling import CHECKPOINTS, SCHEDULES, STREAM_POLICIES, ActionKind, Schedule, ScheduleLike, make_schedule
from fxpipe.scheduling.factory import as_schedule_like, check_placement, placement_of
from fxpipe.utils import accelerator
from fxpipe.utils.units import parse_count, with_article

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan

Devices: TypeAlias = int | Sequence[str | torch.device]  # a number of devices, or a list of them

CHUNKS_PER_WORKER = 4  # GPipe, section 2.3: the bubble is negligible from there on
PROFILE_BUDGET = 5.0  # seconds
BALANCES = ("auto", "block", "optimal", "pipedream")  # besides cuts by hand


def parse_switch(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r}: expected True or False")
    return value


def parse_leaf_modules(leaf_modules: Any) -> tuple[str | type[nn.Module], ...]:
    if isinstance(leaf_modules, (str, type)) or not isinstance(leaf_modules, Sequence):
        raise ArgumentTypeError(
            f"leaf_modules is {with_article(leaf_modules)}; expected a list of names and classes of modules"
        )
    for item in leaf_modules:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ArgumentTypeError(
                f"leaf_modules holds {item!r}; expected names of the model's modules, or classes of modules"
            )
    return tuple(leaf_modules)


def parse_devices(devices: Devices | None, anywhere: bool = False) -> tuple[torch.device, ...]:
    """Returns a device for each worker; None: all accelerators, or two CPU workers. `anywhere`: need not exist."""
    if devices is None or isinstance(devices, int):
        count = None if devices is None else parse_count("devices", devices, "a number of devices, or a list of them")
        present = accelerator.first_devices(count)
        if count is not None and count > len(present):
            raise ArgumentError(
                f"devices={count}: {present[0].type.upper()} has {len(present)} here; for workers on the CPU give "
                "devices=['cpu', 'cpu']; to plan for devices that are elsewhere, give fxpipe.plan their hardware"
            )
        return present
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise ArgumentTypeError(
            f"devices={devices!r}: expected a number of devices, or a list with one for each worker, as in "
            "['cpu', 'cpu']"
        )
    if not devices:
        raise ArgumentError("devices is empty: give one for each worker, as in ['cuda:0', 'cuda:1'] or ['cpu', 'cpu']")
    return tuple(accelerator.parse_device("devices", device, anywhere) for device in devices)


def parse_checkpoint(checkpoint: str | Sequence[str], stages: int | None) -> str | tuple[str, ...]:
    """Returns one mode for all stages, or one for each; planning resolves "auto". `stages`: None if not known yet."""
    if not isinstance(checkpoint, (tuple, list)):
        return check_one_of(
            "checkpoint", checkpoint, ("auto", *CHECKPOINTS), "or a list with one of the last three for each stage"
        )
    if stages is not None and len(checkpoint) != stages:
        raise ArgumentError(
            f"checkpoint={list(checkpoint)!r} has {len(checkpoint)} modes for {stages} stages: give one for each"
        )
    return tuple(check_one_of("checkpoint", mode, CHECKPOINTS) for mode in checkpoint)


def parse_balance(balance: Any, stages: int) -> str | tuple[int, ...] | tuple[str, ...]:
    """Returns a known name, or entries whose number fits `stages`. Only the graph can check the entries themselves."""
    if isinstance(balance, str):
        if balance in BALANCES:
            return balance
        raise ArgumentError(
            f"balance={balance!r} is unknown; accepted are {', '.join(map(repr, BALANCES))}, or by hand a list: the "
            "number of nodes of each stage, or the names of the nodes or modules after which a stage ends; or a dict "
            "from modules to devices"
        )
    try:
        entries: tuple[Any, ...] = tuple(balance)
    except TypeError:
        raise ArgumentTypeError(
            f"balance={balance!r}: expected {', '.join(map(repr, BALANCES))}, or a list of numbers of nodes or of "
            "names of nodes or modules, or a dict from modules to devices"
        ) from None
    by_name = is_by_names(entries, stages)
    if by_name and len(entries) > stages - 1:
        raise ArgumentError(
            f"balance={list(entries)} has {len(entries)} names for {stages} stages: give {stages - 1} or fewer, "
            "behind each of which a stage ends"
        )
    if not by_name and len(entries) != stages:
        raise ArgumentError(
            f"balance={list(entries)} has {len(entries)} entries for {stages} stages: give {stages} numbers of nodes, "
            "one for each stage"
        )
    return entries


def parse_pins(argument: str, pins: Any, workers: Sequence[torch.device]) -> dict[str, int]:
    if not isinstance(pins, Mapping) or not all(isinstance(name, str) for name in pins):
        raise ArgumentTypeError(
            f"{argument}={pins!r}: expected a dict from names of modules or nodes to devices, as in {{'lm_head': 0}}"
        )
    return {name: _parse_worker(argument, name, worker, workers) for name, worker in pins.items()}


def _parse_worker(argument: str, name: str, value: Any, workers: Sequence[torch.device]) -> int:
    listed = ", ".join(map(str, workers))
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(workers):
            raise ArgumentError(
                f"{argument}[{name!r}]={value}: there are {len(workers)} devices ({listed}), 0 to {len(workers) - 1}"
            )
        return value
    if not isinstance(value, (str, torch.device)):
        raise ArgumentTypeError(
            f"{argument}[{name!r}]={value!r} is {with_article(value)}; expected the number of a device among "
            f"devices ({listed}), or its name"
        )
    device = accelerator.parse_device(f"{argument}[{name!r}]", value, anywhere=True)
    places = [k for k, worker in enumerate(workers) if worker == device]
    if len(places) != 1:
        times = "not" if not places else f"{len(places)} times"
        raise ArgumentError(
            f"{argument}[{name!r}]={str(value)!r} stands {times} in devices ({listed}); give the number of one of them"
        )
    return places[0]


def parse_profile_option(profile: Any) -> Profile | None:
    if isinstance(profile, (str, Path)):
        return Profile.load(profile)
    if profile is None or isinstance(profile, Profile):
        return profile
    raise ArgumentTypeError(
        f"profile={profile!r} is {with_article(profile)}; expected what fxpipe.profile returns, or the path of a "
        "file that its save(path) wrote"
    )


def parse_hardware_option(hardware: Any) -> Hardware | None:
    """Parses hardware given by name or figures; None: the local devices."""
    return None if hardware is None else parse_hardware(hardware)


def check_one_of(argument: str, value: Any, known: Sequence[str], others: str = "") -> str:
    """Returns `value` if it is known. `others`: other accepted values, for the error."""
    if value not in known:
        also = f", {others}" if others else ""
        raise ArgumentError(f"{argument}={value!r} is unknown; accepted are {', '.join(map(repr, known))}{also}")
    name: str = value
    return name


def parse_choices(argument: str, names: Any, known: Sequence[str]) -> tuple[str, ...]:
    """Returns known names without duplicates."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ArgumentTypeError(f"{argument}={names!r}: expected a list with some of {', '.join(map(repr, known))}")
    if not names:
        raise ArgumentError(f"{argument} is empty: give some of {', '.join(map(repr, known))}, or leave it out")
    return tuple(dict.fromkeys(check_one_of(argument, name, known) for name in names))


def parse_compile(value: Any) -> dict[str, Any] | None:
    """Returns keywords of `torch.compile`; None if stages are not compiled."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"compile={value!r}: expected True, False or a dict of keywords of torch.compile, as in "
            "{'mode': 'max-autotune-no-cudagraphs'}"
        )
    known = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")]
    for name in value:
        if name not in known:
            raise ArgumentError(f"compile: torch.compile has no keyword {name!r}; it has {', '.join(known)}")
    graphs = (value.get("options") or {}).get("triton.cudagraphs")
    if value.get("mode") in ("reduce-overhead", "max-autotune") or graphs:
        asked = f"mode={value['mode']!r}" if value.get("mode") else "options={'triton.cudagraphs': True}"
        raise ArgumentError(
            f"compile: {asked} runs CUDA graphs, whose values are gone with the next micro-batch, while a pipeline has "
            "several in flight; take mode='default' or mode='max-autotune-no-cudagraphs'"
        )
    try:
        torch.compile(lambda: None, **value)  # compiles when called, so never
    except Exception as error:  # torch.compile raises various types for invalid keywords
        raise ArgumentError(f"compile={dict(value)!r}: torch.compile does not accept it: {error}") from error
    return dict(value)


# GB and GiB are taken literally: an "80GB" card may have 80e9 bytes or 80 GiB, so the user must choose.
_BYTE_UNITS = {"B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_ACCEPTED_LIMITS = "'70GiB', '80GB', a number of bytes, None for no limit, or a list with one of these for each device"


def parse_memory_limit(value: Any, devices: int) -> tuple[int | None, ...] | None:
    """Returns bytes for each device, None for no limit. Returns None if `value` is None.

    >>> parse_memory_limit("1.5GiB", devices=2)
    (1610612736, 1610612736)
    >>> parse_memory_limit([10**9, None], devices=2)
    (1000000000, None)
    """
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != devices:
            raise ArgumentError(
                f"memory_limit={list(value)!r} has {len(value)} entries for {devices} devices: give one for each, or "
                "one for all"
            )
        return tuple(None if limit is None else _parse_bytes(limit) for limit in value)
    return (_parse_bytes(value),) * devices


def _parse_bytes(value: Any) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", value.upper())
        if match is None:
            raise ArgumentError(f"memory_limit={value!r} is no number of bytes; expected {_ACCEPTED_LIMITS}")
        number, unit = float(match[1]), _BYTE_UNITS[match[2] or "B"]
    elif isinstance(value, Real) and not isinstance(value, bool):
        number, unit = float(value), 1
    else:
        raise ArgumentTypeError(f"memory_limit={value!r} is {with_article(value)}; expected {_ACCEPTED_LIMITS}")
    if not 1 <= number * unit < math.inf:  # also rejects nan
        raise ArgumentError(f"memory_limit={value!r}: expected at least 1 byte: {_ACCEPTED_LIMITS}")
    return int(number * unit)


# -- The requested schedule, and the placement of stages on workers that follows from it -------------------------------
#
# A named schedule defines the number of stages of each worker and their placement; a table has them in its rows.

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "inference")
# Schedules whose steps are compared: a step of a stream is a step of 1F1B.
COMPARED_SCHEDULES = tuple(name for name in TRAINING_SCHEDULES if name not in STREAM_POLICIES)
# The order of a call and its backward, and of a step whose loss needs all samples: every F before the first B.
DROP_IN_SCHEDULE = "gpipe"


def parse_training_schedule(value: Any) -> ScheduleLike:
    """Checks a name, a table or a function that `forward_backward` can run."""
    if value == "inference":
        raise ArgumentError(
            f"schedule={value!r} is unknown for training; accepted are {', '.join(map(repr, TRAINING_SCHEDULES))}; "
            "to evaluate, call the pipe under torch.no_grad()"
        )
    schedule = as_schedule_like(value, TRAINING_SCHEDULES)
    if isinstance(schedule, Schedule):
        _check_for_training(schedule)
    return schedule


def _check_for_training(schedule: Schedule) -> None:
    actions = [action for row in schedule.rows for action in row]
    update = next((action for action in actions if action.kind is ActionKind.UPDATE), None)
    if update is not None:
        raise ArgumentError(
            f"schedule {schedule.name!r} holds {update}, but weights are updated by your optimizer, when the step has "
            "ended: take all U out"
        )
    if not any(action.kind is ActionKind.BACKWARD for action in actions):
        raise ArgumentError(f"schedule {schedule.name!r} has no B, and so trains nothing: add every B")
    if not all(schedule.rows):
        raise ArgumentError(
            f"schedule {schedule.name!r} leaves device {schedule.rows.index(())} idle: give it a stage, or take its "
            "row out and leave it out of devices"
        )


def worker_count_for(stages: int, schedule: ScheduleLike, per_device: int | None) -> int:
    if isinstance(schedule, Schedule):
        return len(schedule.rows)
    each = per_device or (SCHEDULES[schedule].stages_per_device if isinstance(schedule, str) else 1)
    if stages % each:
        by = "" if per_device else f", as {schedule!r} has it"
        raise ArgumentError(
            f"stages={stages} cannot be shared out with stages_per_device={each}{by}; give a multiple of it"
        )
    return stages // each


def chunks_of_schedule(schedule: ScheduleLike, chunks: int | str, plan: Plan | None = None) -> int | str:
    """Returns the number of micro-batches if `chunks` is "auto": a table's or the plan's; 1 for PipeDream."""
    # The result of a stream depends on the number, so a plan's number is used even if it was made for another schedule.
    if schedule == "pipedream" and chunks == "auto":
        return plan.chunks if plan is not None and plan.schedule == schedule else 1
    if not isinstance(schedule, Schedule):
        return chunks
    if chunks not in ("auto", schedule.micro_batches):
        raise ArgumentError(
            f"chunks={chunks!r}, but schedule {schedule.name!r} is a table for {schedule.micro_batches} micro-batches: "
            "leave chunks out, or give a function (micro_batches, stages) -> table"
        )
    return schedule.micro_batches


def place_stages(
    workers: int, per_device: int | None, schedule: ScheduleLike, chunks: int, plan: Plan | None
) -> tuple[int, ...]:
    if plan is not None and per_device is None:
        placement, accepted = plan.placement, max(plan.placement) + 1
        if workers != accepted:
            shared = f" on {accepted} devices" if accepted < len(placement) else ""
            raise ArgumentError(
                f"plan has {len(placement)} stages{shared}, but devices has {workers} entries; give {accepted}"
            )
    elif isinstance(schedule, str):
        placement = SCHEDULES[schedule].placement(workers, per_device or SCHEDULES[schedule].stages_per_device)
    else:
        table = schedule
        if not isinstance(table, Schedule):
            table = make_schedule(schedule, workers * (per_device or 1), chunks)
        if len(table.rows) != workers:
            raise ArgumentError(
                f"schedule {table.name!r} has rows for {len(table.rows)} devices, but devices has {workers} entries: "
                f"give {len(table.rows)}"
            )
        if per_device is not None and table.stages != workers * per_device:
            raise ArgumentError(
                f"schedule {table.name!r} has {table.stages} stages, but with stages_per_device={per_device} there are "
                f"{workers * per_device}: leave stages_per_device out"
            )
        placement = placement_of(table)
    if plan is not None and len(plan.stages) != len(placement):
        raise ArgumentError(
            f"plan has {len(plan.stages)} stages, but devices has {workers} entries and "
            f"stages_per_device={per_device}, which makes {len(placement)}; leave stages_per_device to the plan"
        )
    if isinstance(schedule, str):  # named schedules run on any placement that they support
        check_placement(schedule, placement)
        return placement
    rows = make_schedule(schedule, len(placement), chunks, placement=placement)
    if callable(schedule):
        _check_for_training(rows)
    return placement
