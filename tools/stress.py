"""Runs random models as random pipelines, as long as one likes, and holds every step against the plain model.

    python tools/stress.py                          # 200 cases; `make stress` makes the environment first
    python tools/stress.py --minutes 60 --jobs 4    # as many as there are in an hour
    python tools/stress.py --cases 5000 --seed 7    # cases 7, 8, 9, ...
    python tools/stress.py --one 123                # prints a case and its verdict
    python tools/stress.py --case '{"program": ...  # one that was printed

A case is a model made of operations (`tests/random_models`: reads of values, memory banks, routed experts, writes to
inputs, lazily made state, autograd Functions, losses taken by the model ...), most with kinds of hidden state (gates at
zero, Python values that change between steps, hooks, seeds, subclasses, criteria that change, tensors filled again);
stages, micro-batches, a schedule and recomputing; planned on one mini-batch and run on others, of other sizes and
values, in training and evaluation.
Outputs, gradients, buffers, parameters, inputs and attributes are those of the plain model, or the case is refused: all
else is a fault, which is made as small as it can be and printed as a program. The exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from random_models.case import Case, draw_with_kinds, source
from random_models.kinds import KINDS, TWISTS
from random_models.shrinking import manner, shrunk
from random_models.worker import Worker

FAULTS = ("wrong", "crashes", "hangs")
Verdict = Mapping[str, object]


def main() -> int:
    options = _options()
    if options.one is not None or options.case is not None:
        case = Case.from_json(options.case) if options.case is not None else draw_with_kinds(options.one)
        return _one(case, options.limit)
    tally = Tally(options.shrink)
    start = time.monotonic()
    seeds = _Seeds(options.seed, options.cases, start + 60 * options.minutes if options.minutes else None)

    def work() -> None:
        worker = Worker(options.limit)
        try:
            for seed in seeds:
                case = draw_with_kinds(seed)
                tally.add(case, worker.judge(case), worker)
        finally:
            worker.close()

    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(work) for _ in range(options.jobs)]:
            future.result()
    print(tally.summary(time.monotonic() - start))
    return int(tally.faults > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="how many (default: 200, or as many as the minutes allow)")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a case (default: 60)")
    parser.add_argument("--shrink", type=int, default=80, help="tries to make a fault smaller (default: 80)")
    parser.add_argument("--one", type=int, help="the seed of the only case")
    parser.add_argument("--case", help="the only case, as it was printed")
    return parser.parse_args()


def _one(case: Case, limit: float) -> int:
    worker = Worker(limit)
    verdict = worker.judge(case)
    worker.close()
    print(_program(case) + f"\n\n{_verdict(verdict)}")
    for reason in verdict["refused_steps"]:  # type: ignore[attr-defined]
        print(f"a step is refused: {reason}")
    return int(verdict["kind"] in FAULTS)


class _Seeds:
    """The seeds of cases, for several threads, until there are enough or time is over."""

    def __init__(self, first: int, cases: int | None, end: float | None):
        count = cases if cases is not None else 200 if end is None else None
        self.numbers = itertools.count(first) if count is None else iter(range(first, first + count))
        self.end, self.lock = end, threading.Lock()

    def __iter__(self) -> Iterator[int]:
        while self.end is None or time.monotonic() < self.end:
            with self.lock:
                seed = next(self.numbers, None)
            if seed is None:
                return
            yield seed


class Tally:
    """Counts verdicts; prints faults as they come, in each manner and of each set of operations once in full."""

    def __init__(self, attempts: int):
        self.attempts, self.lock = attempts, threading.Lock()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.refused_steps: collections.Counter[str] = collections.Counter()
        self.told: collections.Counter[tuple[str, ...]] = collections.Counter()
        self.drawn = {kind: collections.Counter[str]() for kind in (*KINDS, *TWISTS)}  # verdicts of each kind

    @property
    def faults(self) -> int:
        return sum(self.kinds[kind] for kind in FAULTS)

    def add(self, case: Case, verdict: Verdict, worker: Worker) -> None:
        kind = str(verdict["kind"])
        with self.lock:
            self.kinds[kind] += 1
            for name in case.kinds:
                self.drawn[name][kind] += 1
            if kind == "refused":
                self.refused[_reason(str(verdict["detail"]))] += 1
            self.refused_steps.update(_reason(text) for text in verdict["refused_steps"])  # type: ignore[attr-defined]
        if kind in FAULTS:
            # Each try that hangs as well takes as long as a case may.
            attempts = self.attempts if kind != "hangs" else min(self.attempts, 10)
            small = shrunk(case, verdict, worker.judge, attempts)
            final = worker.judge(small)
            with self.lock:
                self._print(case, small, final if final["kind"] in FAULTS else verdict)

    def _print(self, case: Case, small: Case, verdict: Verdict) -> None:
        names = (manner(verdict), *sorted(line.name for line in small.program))
        self.told[names] += 1
        print(f"seed {case.seed}: {' '.join(names)}", flush=True)
        if self.told[names] == 1:
            print(f"{_program(small)}\n\n{_verdict(verdict)}\n{'-' * 120}", flush=True)

    def summary(self, seconds: float) -> str:
        total = sum(self.kinds.values())
        rows = [[kind, number] for kind, number in self.kinds.most_common()]
        texts = [f"{total} cases in {seconds:.0f} s", tabulate(rows, ["verdict", "cases"])]
        verdicts = [*self.kinds]
        kinds = [[name, counts.total(), *(counts[one] for one in verdicts)] for name, counts in self.drawn.items()]
        texts.append(tabulate(kinds, ["kind of hidden state", "cases", *verdicts]))
        for title, counts in (("refused", self.refused), ("refused in a step", self.refused_steps)):
            if counts:
                texts.append(tabulate([[n, reason] for reason, n in counts.most_common()], ["", title]))
        if self.told:
            texts.append(tabulate([[n, " ".join(names)] for names, n in self.told.most_common()], ["", "faults"]))
        return "\n\n".join(texts)


def _program(case: Case) -> str:
    batches = "\n".join(f"#   {batch}" for batch in case.batches)
    return (
        f"{source(case)}\n# {case.stages} stages, {case.chunks} chunks, {case.schedule}, checkpoint {case.checkpoint}, "
        f"ends {list(case.by_hand)}, deferred {case.deferred}, gradient of inputs {case.input_gradient}; planned on "
        f"the first of\n{batches}\n# python tools/stress.py --case '{case.to_json()}'"
    )


def _verdict(verdict: Verdict) -> str:
    return f"{verdict['kind']}: {verdict['detail']}"


def _reason(text: str) -> str:
    """A refusal without what differs from model to model."""
    text = " ".join(text.split())
    if found := re.search(r"recording: (.*?)(; and further on|; keep|; use |$| - torch\.export)", text):
        text = found[1]
    text = re.sub(r"'[^']*'", "'…'", re.sub(r"/\S*/", "", text))
    return re.sub(r"\d+", "N", text)[:150]


if __name__ == "__main__":
    sys.exit(main())
