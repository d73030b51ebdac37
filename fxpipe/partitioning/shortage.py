"""Says why no cut fits into memory, and what would: a table of the best attempt, the part at fault, remedies tried.

The best attempt is the cut of which the worst stage is over its limit by the fewest bytes, to within one part in 1024.

A remedy is not guessed: it is a list of *trials*, each another chain or other sites with words that say what they
stand for, and it is offered only if a cut of one of them fits; the first that does is the one that is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxpipe.errors import MemoryLimitError
from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.loads import StageLoad, stage_loads
from fxpipe.partitioning.search import Search
from fxpipe.units import human_bytes

PRECISION = 1024  # the best attempt is found to within this fraction
HEADERS = (
    "stage",
    "nodes",
    "parameters",
    "gradients, optimizer",
    "activations",
    "working",
    "needs",
    "limit",
    "over by",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """Something else to do."""

    words: str  # "use 4 devices"
    chain: Chain
    sites: Sequence[Site]

    def fits(self) -> bool:
        return Search(self.chain, self.sites).fits()


def recomputing(chain: Chain, sites: Sequence[Site]) -> Iterator[Trial]:
    """That stages may recompute, where some may not."""
    if not all(site.may_recompute or site.must_recompute for site in sites):
        yield Trial("let stages recompute", chain, [replace(site, may_recompute=True) for site in sites])


def first_that_fits(trials: Iterable[Trial]) -> Trial | None:
    return next((trial for trial in trials if trial.fits()), None)


def no_cut_fits(stages: int) -> str:
    return f"no cut into {'1 stage' if stages == 1 else f'{stages} stages'} fits into memory"


def shortage(
    chain: Chain, sites: Sequence[Site], names: Sequence[str] = (), remedies: Iterable[Iterable[Trial]] = ()
) -> MemoryLimitError:
    """The error where no cut fits: the table, the part at fault, and of each remedy the first trial that fits.

    Args:
        names: of the nodes, or none.
        remedies: each a list of trials, the mildest first.
    """
    starts, loads = best_attempt(chain, sites)
    over = [
        load.memory - site.memory if site.memory is not None else 0.0 for load, site in zip(loads, sites, strict=True)
    ]
    ends = [*starts[1:], len(chain)]
    rows = [_row(j, *row) for j, row in enumerate(zip(pairwise([*starts, len(chain)]), loads, sites, strict=True))]
    worst = over.index(max(over))
    head = f"{no_cut_fits(len(sites))}; the best one is over by {human_bytes(max(over))} in stage {worst}"
    found = [f"The problem: {_problem(chain, sites, names, loads[worst], worst, (starts[worst], ends[worst]))}."]
    tried = [first_that_fits(trials) for trials in remedies]
    words = [trial.words for trial in tried if trial is not None]
    if words:
        found.append(f"What would fit: {'; or '.join(words)}.")
    elif tried:
        found.append("Nothing that was tried would fit: the model needs devices with more memory.")
    message = "\n".join([f"{head}:", *_table([HEADERS, *rows]), *found])
    return MemoryLimitError(message, " ".join([f"{head}.", *found]), max(over))


def best_attempt(chain: Chain, sites: Sequence[Site]) -> tuple[tuple[int, ...], tuple[StageLoad, ...]]:
    """The starts and loads of the cut that is over its limits by the least; there must be a cut but for memory."""
    search = Search(chain, sites)
    low, high = 0.0, max(1.0, *(site.memory / PRECISION for site in sites if site.memory is not None))
    while not (fitting := search.with_spare(high)).fits():
        low, high = high, 2 * high
    while high - low > high / PRECISION:
        middle = (low + high) / 2
        if (other := search.with_spare(middle)).fits():
            high, fitting = middle, other
        else:
            low = middle
    starts, recompute = fitting.cut(None)
    return starts, stage_loads(chain, sites, starts, recompute)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def _row(stage: int, places: tuple[int, int], load: StageLoad, site: Site) -> tuple[str, ...]:
    each, times = load.received_bytes + load.held_bytes, site.in_flight
    if load.recompute:
        held = human_bytes(load.held_bytes) + (f" x {site.recomputed}" if site.recomputed > 1 else "")
        activations = f"{human_bytes(load.received_bytes)} x {times} + {held}, recomputed"
    else:
        activations = f"{human_bytes(each)} x {times}"
    limit, over = ("none", "") if site.memory is None else (human_bytes(site.memory), _over(load, site.memory))
    return (
        str(stage),
        f"{places[0]}-{places[1] - 1}",
        human_bytes(load.parameter_bytes),
        human_bytes(load.state_bytes),
        activations,
        human_bytes(load.working_bytes),
        human_bytes(load.memory),
        limit,
        over,
    )


def _over(load: StageLoad, limit: float) -> str:
    return human_bytes(load.memory - limit) if load.memory > limit else "-"


def _problem(
    chain: Chain,
    sites: Sequence[Site],
    names: Sequence[str],
    load: StageLoad,
    stage: int,
    places: tuple[int, int],
) -> str:
    """Which part is at fault, of what needs most of all down to what just adds up."""
    single = _single_node(chain, sites, names)
    if single:
        return single
    state = min(site.state for site in sites)
    everything = sum(w.bytes * (1 + state if w.trained else 1) for w in chain.weights)
    together = sum(math.inf if site.memory is None else site.memory for site in sites)
    if everything > together:
        return (
            f"the parameters: with gradients and optimizer state they take {human_bytes(everything)}, and all devices "
            f"together have {human_bytes(together)}"
        )
    lasting = load.parameter_bytes + load.state_bytes
    activations, in_flight = load.memory - lasting - load.working_bytes, sites[stage].in_flight
    momentary = _largest_working(chain, names, places)
    size, words = max(
        (lasting, "the parameters: with gradients and optimizer state they take"),
        (activations, f"the activations: with {in_flight} micro-batches in flight they take"),
        (load.working_bytes, f"working memory: {momentary} for a moment takes"),
    )
    return f"{words} {human_bytes(size)} of the {human_bytes(load.memory)} of stage {stage}"


def _single_node(chain: Chain, sites: Sequence[Site], names: Sequence[str]) -> str:
    """Of the nodes that cannot be separated and fit nowhere, even alone, those that need most; or nothing."""
    search = Search(chain, sites)
    stages = list({site: j for j, site in enumerate(sites)}.values())
    largest, found = 0.0, ""
    items = [place for place in range(len(chain)) if place not in chain.forbidden]
    for start, end in pairwise([*items, len(chain)]):
        needs = [(search.memory(j, start, end), sites[j].memory) for j in stages]
        least = min(need for need, _ in needs)
        if least > largest and all(limit is not None and need > limit for need, limit in needs):
            largest = least
            alone = _label(start, names) if end == start + 1 else f"{_label(start, names)} to {_label(end - 1, names)}"
            found = f"{alone} alone needs {human_bytes(largest)}, more than any stage may take"
    return found


def _largest_working(chain: Chain, names: Sequence[str], places: tuple[int, int]) -> str:
    return _label(max(range(*places), key=lambda place: chain.working[place] if chain.working else 0.0), names)


def _label(place: int, names: Sequence[str]) -> str:
    return f"node {names[place]!r}" if names else f"the node at place {place}"
