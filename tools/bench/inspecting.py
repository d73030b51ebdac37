"""How long a person waits for `python -m fxpipe.inspect`, from the shell and back.

    python tools/bench/inspecting.py
    python tools/bench/inspecting.py --rounds 9 --cases "hf:gpt2"

Each round runs every case once, as a process of its own, so that a disturbance meets all of them. What came out is in
tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

from tabulate import tabulate
from tqdm import tqdm

CASES = {
    "import fxpipe": ("-c", "import fxpipe"),
    "--help": ("-m", "fxpipe.inspect", "--help"),
    "hf:gpt2": ("-m", "fxpipe.inspect", "hf:gpt2"),
    "hf:gpt2, for an H100": ("-m", "fxpipe.inspect", "hf:gpt2", "--hardware", "h100"),
    "hf:gpt2, no weights": ("-m", "fxpipe.inspect", "hf:gpt2", "--hardware", "h100", "--meta"),
    "hf:bert": ("-m", "fxpipe.inspect", "hf:bert"),
    "hf:vit": ("-m", "fxpipe.inspect", "hf:vit"),
}
COLUMNS = ("seconds", "least", "most", "user", "system", "MiB at most")


@dataclass(frozen=True)
class Ran:
    """One process."""

    seconds: float
    user: float
    system: float
    mebibytes: float  # at its peak


def run(arguments: tuple[str, ...]) -> Ran:
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(arguments)} ended with status {os.waitstatus_to_exitcode(status)}")
    return Ran(
        seconds, usage.ru_utime, usage.ru_stime, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    )


def row(name: str, runs: list[Ran]) -> list[str]:
    seconds = [ran.seconds for ran in runs]
    figures = [
        median(seconds),
        min(seconds),
        max(seconds),
        *(median(getattr(r, k) for r in runs) for k in ("user", "system")),
    ]
    return [name, *(f"{figure:.2f}" for figure in figures), f"{median(ran.mebibytes for ran in runs):,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runs: dict[str, list[Ran]] = {name: [] for name in options.cases}
    for _ in tqdm(range(options.rounds), disable=None):
        for name in options.cases:
            runs[name].append(run(CASES[name]))
    rows = [row(*one) for one in runs.items()]
    print(tabulate(rows, headers=["", *COLUMNS], disable_numparse=True, colalign=["left"] + ["right"] * len(COLUMNS)))


if __name__ == "__main__":
    main()
