"""The passes that look at a model and take seconds: trace and profile. One study serves many plans.

studied = study(model, args, kwargs, settings)
for chunks in (2, 4, 8):
    print(planned(studied, replace(settings, chunks=chunks)).plan)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fxpipe.hardware import Hardware
    from fxpipe.profiling import Profile
    from fxpipe.settings import Settings
    from fxpipe.tracing import Traced


@dataclass(frozen=True, slots=True)
class Studied:
    """A model that was looked at: its graph, and what the nodes cost, for any number of samples."""

    traced: Traced
    orders: tuple[Traced, ...]  # the graph as traced and, where there is one, in an order that sends less
    profiles: tuple[Profile, ...]  # one for each kind of device
    kinds: tuple[str, ...]  # of devices that were measured
    threads: int | None  # of torch while a CPU was measured, a worker's share of the cores; None: none was
    hardware: Hardware | None  # that the profiles were estimated for
    batch: int  # samples of the mini-batch
    fingerprint: str  # of the graph

    def holds_for(self, settings: Settings) -> bool:
        """Are the seconds those of the workers that the settings ask for? See `studied_again`."""
        from fxpipe.deciding.sites import kind_of

        if settings.hardware != self.hardware:
            return False
        if self.hardware is not None:
            return True
        names = {kind_of(device) for device in settings.workers}
        threads = self.threads if "cpu" in names else None
        return names <= {*self.kinds} and threads in (None, _worker_threads(settings.workers))

    def profiles_for(self, settings: Settings) -> list[Profile]:
        """One for each kind among the settings' workers, in order."""
        from fxpipe.deciding.sites import kind_of, kinds_of

        if self.hardware is not None:
            return [self.profiles[0]]
        return [self.profiles[self.kinds.index(kind_of(device))] for device in kinds_of(settings.workers)]


def study(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int = 0
) -> Studied:
    """Traces and profiles, as training will run the model.

    Of the settings it heeds what they say of tracing, profiling and devices, and `chunks`: graph and model are compared
    for micro-batches of that size, and there nodes are measured. The line through what was measured there and at
    another size says what others take.
    """
    from fxpipe.rewriting.ordering import ordered
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device
    from fxpipe.tracing.print_calls import printing_once

    with printing_once(), on_one_device(model) as device, in_mode(model, None):
        args, kwargs = moved((args, kwargs), device)
        traced, batch = traced_batch(model, args, kwargs, settings, seed)
        kinds, threads, profiles = _profiles(traced, args, kwargs, batch, settings)
    in_order = ordered(traced)
    orders = (traced,) if in_order is traced else (traced, in_order)
    return Studied(traced, orders, profiles, kinds, threads, settings.hardware, batch, traced.fingerprint())


def studied_again(studied: Studied, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Studied:
    """The study for the settings' workers: the same graph, profiled again where the seconds are not theirs.

    They are not on another kind of device, nor on a CPU for another number of workers, who have other shares of its
    cores. Costs that were given, in `settings.profile`, are taken as they are for any.
    """
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device

    if studied.holds_for(settings):
        return studied
    model = studied.traced.model
    with on_one_device(model) as device, in_mode(model, None):
        args, kwargs = moved((args, kwargs), device)
        kinds, threads, profiles = _profiles(studied.traced, args, kwargs, studied.batch, settings)
    return replace(studied, profiles=profiles, kinds=kinds, threads=threads, hardware=settings.hardware)


def is_the_model(
    traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, settings: Settings
) -> bool:
    """Whether the model takes micro-batches of a `chunks`-th of the batch, and its graph does the same there."""
    from fxpipe.tracing.checking.again import agrees
    from fxpipe.tracing.modes import in_mode
    from fxpipe.tracing.placement import moved, on_one_device

    parts = min(chunks, batch)
    sizes = {batch // parts, -(-batch // parts)}
    with on_one_device(traced.model) as device, in_mode(traced.model, None):
        args, kwargs = moved((args, kwargs), device)
        return not settings.check or agrees(traced, args, kwargs, sorted(sizes))


def holds_for(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Collection[int], settings: Settings
) -> bool:
    """Whether the graph is that of these inputs in micro-batches of these sizes, in the mode that the model is in."""
    from fxpipe.tracing.checking.again import holds_again
    from fxpipe.tracing.placement import moved, on_one_device

    with on_one_device(traced.model) as device:
        args, kwargs = moved((args, kwargs), device)
        return holds_again(traced, args, kwargs, sizes, settings.out_dims is not None)


def traced_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, seed: int
) -> tuple[Traced, int]:
    """The graph, and the number of samples. Where `chunks` is left to planning, the usual number need not do."""
    from fxpipe.tracing import trace
    from fxpipe.tracing.checking.micro_batches import OtherMicroBatchesError
    from fxpipe.trees import flatten

    def traced_for(chunks: int) -> Traced:
        return trace(
            model,
            args,
            kwargs,
            in_dims=settings.in_dims,
            out_dims=settings.out_dims,
            chunks=chunks,
            tracer=settings.tracer,
            leaf_modules=settings.leaf_modules,
            check=settings.check,
            seed=seed,
        )

    try:
        traced = traced_for(settings.chunks)
    except OtherMicroBatchesError:
        if "chunks" not in settings.left:
            raise
        traced = traced_for(1)
    return traced, traced.batch_of(flatten((args, kwargs))[0])


def _worker_threads(workers: Sequence[torch.device]) -> int:
    """A worker's share of the cores: what is measured must be what will run."""
    import torch

    return max(1, torch.get_num_threads() // len(workers))


def _profiles(
    traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, settings: Settings
) -> tuple[tuple[str, ...], int | None, tuple[Profile, ...]]:
    """The kinds of devices, the threads that a CPU was measured with, and a profile for each kind."""
    from fxpipe.deciding.sites import kind_of, kinds_of
    from fxpipe.profiling import profile
    from fxpipe.profiling.storing import profile_for
    from fxpipe.tracing.snapshot import undone

    kinds = kinds_of(settings.workers) if settings.hardware is None else list(settings.workers[:1])
    names = tuple(map(kind_of, kinds))
    if settings.profile is not None:
        return names, None, (profile_for(traced, settings.profile),) * len(kinds)
    threads = _worker_threads(settings.workers)
    with undone(traced.model):  # hooks, and modules kept whole, run as they are
        profiles = tuple(
            profile(
                traced,
                args,
                kwargs,
                micro_batch=_samples_to_measure(traced, batch, settings),
                second=1 if settings.largest_micro_batch(batch) == 1 else None,  # what will run, where two are measured
                budget=settings.profile_budget / len(kinds),
                threads=threads,
                hardware=settings.hardware,
                device=device if settings.hardware is None else None,
                operations=settings.operations,
            )
            for device in kinds
        )
    is_measured = settings.hardware is None and not profiles[0].estimated_for
    return names, threads if is_measured and "cpu" in names else None, profiles


def _samples_to_measure(traced: Traced, batch: int, settings: Settings) -> int:
    """Those of a micro-batch. Where these are to be chosen yet not a single one, which not every model takes."""
    from fxpipe.tracing.checking.check import is_same_graph

    samples = settings.largest_micro_batch(batch)
    if "chunks" not in settings.left or (samples > 1 and is_same_graph(traced, samples)):
        return samples
    others = (size for size in (2, -(-batch // 2), batch) if samples < size <= batch and is_same_graph(traced, size))
    return next(others, samples)
