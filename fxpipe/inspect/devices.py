"""Devices as the command line names them, and those that are here."""

from __future__ import annotations

import re
from typing import TypeAlias

from fxpipe.errors import ArgumentError

Devices: TypeAlias = "int | tuple[str, ...]"  # how many, or the name of each


def parse_devices(text: str) -> Devices:
    """`4` -> 4; `cuda:0,cuda:1` -> ("cuda:0", "cuda:1")."""
    names = tuple(name.strip() for name in text.split(","))
    if len(names) == 1 and re.fullmatch(r"0*[1-9]\d{0,3}", text.strip()):
        return int(text)
    if not all(re.fullmatch(r"[a-z]+(:\d+)?", name) for name in names):
        raise ArgumentError(f"{text!r}: expected a number (4) or a list of devices (cpu,cpu or cuda:0,cuda:1)")
    return names


def resolve_devices(devices: Devices | None) -> tuple[str, ...]:
    """The name of each device; a number means so many CUDA devices, or shares of the CPU where CUDA is absent."""
    import torch

    if isinstance(devices, tuple):
        for name in devices:
            try:
                torch.device(name)
            except RuntimeError:
                raise ArgumentError(f"--devices: {name!r} is no device of torch's; cpu and cuda:0 are") from None
        return devices
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not present:
        return ("cpu",) * (2 if devices is None else devices)
    if devices is not None and devices > present:
        shares = "cpu" if devices == 1 else "cpu,cpu" if devices == 2 else "cpu,cpu,..."
        raise ArgumentError(
            f"--devices {devices}: CUDA has {present} here; for shares of the CPU give a list: {shares}; to plan for "
            "GPUs that are elsewhere, --hardware"
        )
    return tuple(f"cuda:{index}" for index in range(present if devices is None else devices))


def planned_devices(devices: Devices | None, hardware: str) -> tuple[str, ...]:
    """Names of devices that need not be here."""
    if isinstance(devices, tuple):
        return devices
    count = 2 if devices is None else devices
    return ("cpu",) * count if hardware == "cpu" else tuple(f"cuda:{index}" for index in range(count))


def more_like(devices: tuple[str, ...], count: int, hardware: str | None) -> tuple[str, ...]:
    """So many devices, the first of those given; beyond them, more of their kind, which need not be here."""
    if count <= len(devices):
        return devices[:count]
    return ("cpu",) * count if hardware is None else planned_devices(count, hardware)


def most_like(devices: tuple[str, ...], usual: int, hardware: str | None) -> int:
    """Up to how many there can be: as many as one likes where they are shares of the CPU, or elsewhere."""
    are_here = hardware is None and any(name != "cpu" for name in devices)
    return len(devices) if are_here else max(len(devices), usual)
