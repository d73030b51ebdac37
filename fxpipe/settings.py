"""What the user asks for, checked and in one form, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.scheduling import CHECKPOINTS, SCHEDULES

CHUNKS_PER_STAGE = 4  # GPipe, section 2.3: the bubble is negligible from there on
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "inference")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to make a pipeline. `chunks` is a number and `checkpoint` a mode: what was "auto" is decided."""

    devices: tuple[torch.device, ...]  # one for each stage
    chunks: int
    schedule: str
    checkpoint: str
    balance: str | tuple[int, ...] | tuple[str, ...]
    tracer: str
    in_dims: Any
    out_dims: Any


def make_settings(
    devices: Sequence[str | torch.device] | None,
    chunks: int | str,
    schedule: str,
    checkpoint: str,
    balance: str | Sequence[int] | Sequence[str],
    tracer: str,
    in_dims: Any,
    out_dims: Any,
) -> Settings:
    """Checks each argument by itself.

    Raises:
        ArgumentError, ArgumentTypeError: names the argument, what was given, what is accepted.
    """
    places = parse_devices(devices)
    if tracer not in ("auto", "record"):
        raise ArgumentError(f"tracer={tracer!r} is unknown; accepted are 'auto' and 'record'")
    return Settings(
        places,
        parse_chunks(chunks, len(places)),
        _one_of("schedule", schedule, TRAINING_SCHEDULES),
        "never" if checkpoint == "auto" else _one_of("checkpoint", checkpoint, ("auto", *CHECKPOINTS)),
        balance if isinstance(balance, str) else tuple(balance),  # type: ignore[arg-type]
        tracer,
        in_dims,
        out_dims,
    )


def parse_devices(devices: Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    """One device for each stage. None: all CUDA devices, or two CPU workers where there is none."""
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(torch.device("cuda", k) for k in range(count)) or (torch.device("cpu"),) * 2
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise ArgumentTypeError(f"devices={devices!r}: expected a list with a device for each stage, as in ['cpu', 'cpu']")
    if not devices:
        raise ArgumentError("devices is empty: give a device for each stage, as in ['cuda:0', 'cuda:1'] or ['cpu', 'cpu']")
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
        raise ArgumentError(f"devices: {given!r} is not available: there are {count} CUDA devices here; 'cpu' always works")
    return torch.device("cuda", index)


def parse_chunks(chunks: int | str, stages: int) -> int:
    """The number of micro-batches."""
    if chunks == "auto":
        return CHUNKS_PER_STAGE * stages
    try:
        count = operator.index(chunks)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or isinstance(chunks, bool):
        raise ArgumentTypeError(f"chunks={chunks!r}: expected 'auto' or a whole number of micro-batches, at least 1")
    if count < 1:
        raise ArgumentError(f"chunks={chunks!r}: a mini-batch is cut into at least 1 micro-batch; give 1 or more, or 'auto'")
    return count


def _one_of(argument: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ArgumentError(f"{argument}={given!r} is unknown; accepted are {', '.join(map(repr, known))}")
    return given
