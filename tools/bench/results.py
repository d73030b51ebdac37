"""Runs throughput and the published experiments, and writes tools/bench/RESULTS.md, with pictures in tools/bench/plots.

    python tools/bench/results.py                              everything, into RESULTS.md
    python tools/bench/results.py --only unet_ablation         some of it, shown and not written
    python tools/bench/results.py --only zero_bubble --output build/results.md

Each runs in a process of its own, so that none finds another's memory or threads. Without GPUs measurements are small;
what the simulator says of the papers' hardware is at the papers' sizes everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from tables import Table, draw
from throughput import find_environment
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"


@dataclass(frozen=True)
class Script:
    """A script that writes its tables with --json."""

    path: Path
    options: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.path.read_text(encoding="utf-8").splitlines()[0].strip('".')


PUBLISHED = ("unet_ablation", "speed_over_devices", "gpipe_table_2", "memory_over_depth", "tutorial_resnet50")
PUBLISHED += ("zero_bubble", "pipedream_flush")
SCRIPTS = {name: Script(HERE / "published" / f"{name}.py") for name in PUBLISHED}
SCRIPTS["throughput"] = Script(HERE / "throughput.py", ("--rounds", "5"))


@dataclass(frozen=True)
class Result:
    """What a script came to."""

    tables: tuple[Table, ...]
    seconds: float
    failure: str = ""  # the end of what it wrote, where it failed


def run(script: Script) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tables.json"
        command = [sys.executable, str(script.path), *script.options, "--json", str(file)]
        start = time.perf_counter()
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        if process.returncode:
            return Result((), seconds, "\n".join(process.stderr.splitlines()[-8:]))
        return Result(tuple(map(Table.from_json, json.loads(file.read_text())["tables"])), seconds)


def environment_lines(load: float) -> list[str]:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True).stdout.strip()

    changes = ", with changes that are not committed" if git("status", "--porcelain", "--untracked-files=no") else ""
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    lines = {
        "commit": f"{git('rev-parse', '--short=12', 'HEAD') or 'unknown'}{changes}",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        **find_environment(),
        "GPUs": ", ".join(gpus) or "none",
        "load average at the start": f"{load:.2f}",
    }
    if load > 0.5:
        lines["note"] = "other programs ran beside: what is measured here is too slow, and by how much is not known"
    return [f"- {name}: {text}" for name, text in lines.items()]


def section(name: str, result: Result, plots: Path) -> list[str]:
    lines = [f"## {SCRIPTS[name].summary}", ""]
    path = SCRIPTS[name].path.relative_to(HERE.parents[1])
    lines += [f"`python {' '.join([str(path), *SCRIPTS[name].options])}`, {result.seconds:.0f} s", ""]
    if result.failure:
        return [*lines, "It failed:", "", "```", result.failure, "```", ""]
    for number, table in enumerate(result.tables):
        lines.append(table.markdown())
        if table.plot is not None:
            plots.mkdir(parents=True, exist_ok=True)
            picture = plots / f"{name}_{number}.svg"
            draw(table, picture)
            lines += [f"![{table.title}](plots/{picture.name})", ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"of {', '.join(SCRIPTS)}, with commas (default: all)")
    parser.add_argument("--output", type=Path, help=f"the file (default: {RESULTS.name} of all, none of some)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SCRIPTS)
    if unknown := [name for name in names if name not in SCRIPTS]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(SCRIPTS)}")
    output = options.output or (None if options.only else RESULTS)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)

    head = ["# Results of the benchmarks", "", "Written by `make bench`; what each one is, is in `README.md`.", ""]
    lines = [*head, *environment_lines(os.getloadavg()[0]), ""]
    failed = []
    for name in tqdm(names, desc="benchmarks", disable=None):
        result = run(SCRIPTS[name])
        failed += [name] if result.failure else []
        print(f"\n{SCRIPTS[name].summary}\n", *result.tables, result.failure, sep="\n", flush=True)
        if output is not None:  # after each, so that what has run is there if it is stopped
            lines += section(name, result, output.parent / "plots")
            output.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    if output is not None:
        print(f"written: {output}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
