"""Where stages run, in plain numbers: what a device does in a second, what it holds, and how far it is to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.hardware import MARGIN, link_at_hand, link_between, memory_at_hand
from fxpipe.partitioning.chain import Link, Site
from fxpipe.scheduling import activations_in_flight, make_schedule, micro_batches_in_flight

if TYPE_CHECKING:
    import torch

    from fxpipe.settings import Settings


@dataclass(frozen=True, slots=True)
class Worker:
    """A device of the pipe, as planning sees it."""

    kind: int  # devices of one kind take the same time for the same work
    memory: float | None  # bytes that stages on it may take; None: not limited


def kinds_of(devices: Sequence[torch.device]) -> list[torch.device]:
    """One device of each kind among these, in order of appearance: what has to be profiled."""
    found: dict[str, torch.device] = {}
    for device in devices:
        found.setdefault(kind_of(device), device)
    return list(found.values())


def kinds_left(before: Settings, now: Settings) -> tuple[int, ...]:
    """Of the kinds of devices that were profiled, those that some worker still is of: kind there -> kind before."""
    if before.hardware is not None:
        return (0,)
    names = [kind_of(device) for device in kinds_of(before.workers)]
    return tuple(names.index(kind_of(device)) for device in kinds_of(now.workers))


def workers_of(settings: Settings) -> tuple[Worker, ...]:
    """The settings' workers."""
    names = [kind_of(device) for device in kinds_of(settings.workers)]
    limits = settings.memory_limits
    if limits is None:
        limits = tuple(_memory(settings, device) for device in settings.workers)
    return tuple(
        Worker(0 if settings.hardware else names.index(kind_of(device)), limit)
        for device, limit in zip(settings.workers, limits, strict=True)
    )


def sites_of(settings: Settings, batch: int) -> tuple[Site, ...]:
    """A site for each stage, for mini-batches of so many samples; stages on one worker share its memory alike."""
    workers, placement = workers_of(settings), settings.placement
    modes = (settings.checkpoint,) * len(placement) if isinstance(settings.checkpoint, str) else settings.checkpoint
    again = [mode if mode == "except_last" else "always" for mode in modes]  # where a stage recomputes
    schedule = make_schedule(settings.schedule, len(placement), settings.micro_batches(batch), again, placement)
    flights, recomputed = micro_batches_in_flight(schedule), activations_in_flight(schedule)
    sites = []
    for j, k in enumerate(placement):
        memory = workers[k].memory
        sites.append(
            Site(
                kind=workers[k].kind,
                memory=None if memory is None else memory / placement.count(k),
                link=link_of(settings, placement[j - 1], k) if j else None,
                in_flight=flights[j],
                may_recompute=modes[j] == "auto" and memory is not None,
                must_recompute=modes[j] in ("always", "except_last"),
                recomputed=recomputed[j],
                state=1.0 + settings.optimizer_state,
            )
        )
    return tuple(sites)


def pools_of(settings: Settings) -> tuple[int, ...]:
    """For each stage the number of the memory that is its: its worker's, or its device's where no limit was given."""
    workers = settings.workers
    if settings.memory_limits is not None or settings.hardware is not None:
        return settings.placement
    return tuple(workers.index(workers[k]) for k in settings.placement)


def kind_of(device: torch.device) -> str:
    """Its name. Two GPUs of one make are of one kind."""
    if device.type != "cuda":
        return device.type
    import torch

    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else str(device)


def _memory(settings: Settings, device: torch.device) -> int | None:
    """What a worker may take of a device, which several may share."""
    if settings.hardware is not None:
        return settings.hardware.usable_memory
    memory = memory_at_hand(device)
    return None if memory is None else int(memory * (1 - MARGIN)) // settings.workers.count(device)


def link_of(settings: Settings, one: int, other: int) -> Link | None:
    """The way between two workers; None where a value is handed over."""
    if one == other:
        return None
    if settings.hardware is not None:
        return link_between(settings.hardware, one, other)
    return link_at_hand(settings.workers[one], settings.workers[other])
