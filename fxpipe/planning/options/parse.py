"""Checks and normalizes user arguments, each by itself."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware, parse_hardware
from fxpipe.profiling import Profile
from fxpipe.scheduling import CHECKPOINTS
from fxpipe.utils import accelerator
from fxpipe.utils.units import parse_count, parse_number, with_article

Devices: TypeAlias = int | Sequence[str | torch.device]  # a number of devices, or a list of them

CHUNKS_PER_WORKER = 4  # GPipe, section 2.3: the bubble is negligible from there on
PROFILE_BUDGET = 5.0  # seconds
BALANCES = ("auto", "block", "optimal", "pipedream")  # besides cuts by hand


def parse_switch(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r}: expected True or False")
    return value


def parse_stages_per_device(value: int | None) -> int | None:
    """Checks the number of stages of each worker; None: the number that the schedule needs."""
    return None if value is None else parse_count("stages_per_device", value)


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
    """Returns one device for each worker. None: all accelerators, or two CPU workers without an accelerator.

    `anywhere`: the devices need not exist on this machine.
    """
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


def parse_chunks(chunks: int | str, workers: int) -> int:
    if isinstance(chunks, str) and chunks == "auto":
        return CHUNKS_PER_WORKER * workers
    return parse_count("chunks", chunks, "'auto' or a whole number of micro-batches")


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
    by_name = all(isinstance(entry, str) for entry in entries) and (stages == 1 or bool(entries))
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
    """Maps names of nodes and modules to worker numbers."""
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


def parse_profile_budget(seconds: Any) -> float:
    """Checks the seconds for measuring; None: the default."""
    return PROFILE_BUDGET if seconds is None else parse_number("profile_budget", seconds, "seconds")


def parse_profile_option(profile: Any) -> Profile | None:
    """Returns a profile, loading it if a path is given."""
    if profile is None or isinstance(profile, Profile):
        return profile
    if isinstance(profile, (str, Path)):
        return Profile.load(profile)
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
    """Returns known names without duplicates; None: all of them."""
    if names is None:
        return tuple(known)
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
        torch.compile(_never_called, **value)
    except Exception as error:  # torch.compile raises various types for invalid keywords
        raise ArgumentError(f"compile={dict(value)!r}: torch.compile does not accept it: {error}") from error
    return dict(value)


def _never_called() -> None:
    """A function to pass to `torch.compile`; never called."""


# -- Memory limits: `"70GiB"`, a number of bytes, or a list of these for each device -----------------------------------

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
