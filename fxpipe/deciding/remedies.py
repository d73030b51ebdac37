"""What would fit where nothing does: other cuts, more recomputing, more devices, smaller micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fxpipe.deciding.cases import Case, costs_of
from fxpipe.deciding.chains import chain_of
from fxpipe.deciding.sites import sites_of
from fxpipe.partitioning import cut_by_block
from fxpipe.partitioning.chain import Chain
from fxpipe.partitioning.shortage import Trial, recomputing
from fxpipe.settings import Settings

MOST_DEVICES = 8  # times those that are given, of which one tries whether the model would fit


def remedies(case: Case) -> list[Iterable[Trial]]:
    """What is tried where nothing fits into memory."""
    settings = case.settings
    found: list[Iterable[Trial]] = [recomputing(_as_asked(case, case.chain, case.settings), case.sites)]
    if settings.balance == "block":
        found.insert(0, [Trial("use balance='optimal'", case.chain, case.sites)])
    if not isinstance(settings.schedule, str):
        return found  # it is for these sizes
    if not (settings.pins or case.chain.required or len(settings.placement) > len(settings.workers)):
        found.append(_more_devices(case))
    found.append(_smaller_micro_batches(case))
    return found


def _as_asked(case: Case, chain: Chain, settings: Settings) -> Chain:
    """With the cuts of `balance="block"`, if that is what was asked for."""
    if settings.balance != "block":
        return chain
    nodes = replace(case.nodes, costs=costs_of(chain))
    return replace(chain, required=cut_by_block(nodes, len(settings.placement), case.chain.required)[1:])


def _more_devices(case: Case) -> Iterator[Trial]:
    count = len(case.settings.workers)
    for more in range(count + 1, min(MOST_DEVICES * count, len(case.nodes.items())) + 1):
        settings = _on_more(case.settings, more)
        yield Trial(f"use {more} devices", _as_asked(case, case.chain, settings), sites_of(settings, case.batch))


def _on_more(settings: Settings, count: int) -> Settings:
    """With so many devices, the further ones like the last one."""
    workers, limits = settings.workers, settings.memory_limits
    more = count - len(workers)
    return replace(
        settings,
        workers=(*workers, *workers[-1:] * more),
        placement=tuple(range(count)),
        checkpoint=settings.checkpoint if isinstance(settings.checkpoint, str) else "auto",
        memory_limits=None if limits is None else (*limits, *limits[-1:] * more),
    )


def _smaller_micro_batches(case: Case) -> Iterator[Trial]:
    """Half the micro-batch, a quarter, and so on."""
    settings, batch = case.settings, case.batch
    while settings.largest_micro_batch(batch) > 1:
        settings = replace(settings, chunks=2 * settings.chunks)
        samples = settings.largest_micro_batch(batch)
        smaller = chain_of(case.traced, case.profiles, samples, case.chain.forbidden)
        bounded = replace(smaller, low=case.chain.low, high=case.chain.high, required=case.chain.required)
        words = f"use chunks={settings.chunks} (micro-batches of {samples})"
        yield Trial(words, _as_asked(case, bounded, settings), sites_of(settings, batch))
