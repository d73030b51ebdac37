"""Fair timing of contestants that share a machine: in alternation, with stated threads, summarised without means.

A machine's speed drifts, so contestants take turns within a round, every round begins with another one, and two
contestants are compared by their ratio within a round. Seconds are summarised by median and quartiles; the interval of
a median comes from order statistics, which assume nothing about the distribution.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm

SETTLE_SECONDS = 0.02  # idle OpenMP threads spin for some milliseconds after the last parallel region


@dataclass(frozen=True)
class Contestant:
    """What is timed: `run`, after `prepare`, which is not; `threads` are those of the calling thread."""

    run: Callable[[], object]
    threads: int
    prepare: Callable[[], object] = lambda: None


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Sets the threads of an operation for the calling thread, and the default for threads that start meanwhile.

    Threads that run already keep their own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_thread() -> None:
    """Makes the calling thread, a new one, run operations alone.

    A thread asks for the default only at its first operation, and then forgets what it was told before (torch 2.13); to
    ask for the number counts as the first.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()


def run_once(contestant: Contestant, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run, by this clock."""
    with use_threads(contestant.threads):
        contestant.prepare()
        time.sleep(SETTLE_SECONDS)
        begin = clock()
        contestant.run()
        return clock() - begin


def run_rounds(
    contestants: Mapping[str, Contestant],
    rounds: int,
    name: str,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; round r starts with contestant r; the warm-up is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for r in tqdm(range(-warm_up, rounds), desc=name, disable=None):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            taken = run_once(contestants[name], clock)
            if r >= 0:
                seconds[name].append(taken)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio in each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


@dataclass(frozen=True)
class Summary:
    """A median, its 95 % interval, and the quartiles of what it is the median of."""

    median: float
    low: float
    high: float
    first_quartile: float
    third_quartile: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.first_quartile:.2f}–{self.third_quartile:.2f})"


def summarise(values: Sequence[float]) -> Summary:
    ordered = sorted(values)
    rank = interval_rank(len(ordered))
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Summary(statistics.median(ordered), ordered[rank], ordered[-1 - rank], quartiles[0], quartiles[2])


def interval_rank(number: int, confidence: float = 0.95) -> int:
    """The largest r such that the values r from below and from above (from 0) enclose the median with this confidence.

    A value lies below the median with probability 1/2, so the number of those that do is binomial. With fewer than six
    values no two of them enclose the median with 95 %; the smallest and the largest are then the best there is.
    """
    outside, rank = 0.0, 0
    while rank < number // 2:
        outside += 2 * math.comb(number, rank) / 2**number
        if outside > 1 - confidence:
            break
        rank += 1
    return max(rank - 1, 0)
