"""Runs a zoo of models as pipelines and says which are right; beside it, what other ways to take a model apart do.

    python tools/coverage.py                        # all; `make coverage` makes the environment first
    python tools/coverage.py --models 'gpt*' monai  # by name, by pattern, by package
    python tools/coverage.py --no-others --stages 3 --json coverage.json
    python tools/coverage.py --sizes-only           # inputs of several sizes, and how many graphs they take
    python tools/coverage.py --kinds                # models that are hard to cut, by kind
    python tools/coverage.py --drawn 7 --count 40   # of transformers that the zoo does not name, drawn by a seed

Every model trains and evaluates; what is right, and how exactly, says `tests/zoo/reference.py`. Models run in
processes of their own, so that one that crashes or hangs is one row of the table.

Columns: what is special about the tracing, nodes of the graph, the largest leaf's share of the parameters, whether
outputs, gradients and buffers equal the plain model's, seconds to plan, and how many graphs a pipe takes for batches
of several sizes, where the model takes such (`tests/zoo/sizes.py`); then what `torch.fx.symbolic_trace` and
`torch.distributed.pipelining.pipeline` do with the same model. Below it stands why, where more than two graphs were
taken for several sizes. The exit status is 1 if any result of fxpipe is wrong.

Kinds and drawn models train with two micro-batches, with one, and with micro-batches that are handed over.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the zoo is there

from drawn_models import drawn, entry_of
from zoo import KINDS, Entry, select
from zoo.entry import AT_SIZES, HANDED_OVER, IN_ONE, MODES, WAYS, Row
from zoo.processes import rows_of
from zoo.sizes import MANY_GRAPHS

HEADERS = (
    "model mode stages remarks nodes leaf outputs gradients buffers seconds graphs symbolic_trace pipelining".split()
)
CUTS = ("fxpipe", IN_ONE, HANDED_OVER)
OWN_WAYS = (*CUTS, AT_SIZES)
WIDTH = 46  # of a verdict with its exception


def main() -> int:
    options = _options()
    entries = list(KINDS) if options.kinds else select(options.models)
    if options.drawn is not None:
        entries = [entry_of(name) for name in itertools.islice(drawn(options.drawn), options.count)]
    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, found in enumerate(pool.map(lambda entry: _rows(entry, options), entries), 1):
            rows += found
            for row in found:
                if row.way in OWN_WAYS:
                    what = f"at sizes, {row.graphs} graphs" if row.way == AT_SIZES else f"{row.way} {row.stages}"
                    print(f"{number:3}/{len(entries)} {row.model} {row.mode} {what}: {_verdict(row)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.kinds or options.drawn is not None:
        print("\n" + tabulate(_cuts(rows), ["kind", "model", *CUTS]) + "\n")
    else:
        print("\n" + tabulate(_table(rows), HEADERS, floatfmt=".1f") + "\n")
    print(tabulate(_summary(rows), ["", "models and modes", "right", "refused", "wrong", "fails"]) + "\n")
    _print_troubles(rows)
    _print_reasons(rows)
    return int(any(row.is_wrong for row in rows if row.way in OWN_WAYS))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["*"], help="names, patterns or packages (default: all)")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], help="numbers of stages (default: 2 3)")
    parser.add_argument("--no-others", action="store_true", help="fxpipe alone")
    parser.add_argument("--sizes-only", action="store_true", help="fxpipe alone, with inputs of several sizes")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: 1)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for a row (default: 180)")
    parser.add_argument("--json", type=Path, help="file for all rows, written as they come")
    parser.add_argument("--kinds", action="store_true", help="models that are hard to cut, not the zoo")
    parser.add_argument("--drawn", type=int, metavar="SEED", help="models drawn by a seed, not the zoo")
    parser.add_argument("--count", type=int, default=40, help="how many of them (default: 40)")
    options = parser.parse_args()
    if options.sizes_only:
        options.no_others, options.stages = True, [max(options.stages)]
    return options


def _rows(entry: Entry, options: argparse.Namespace) -> list[Row]:
    if options.kinds or options.drawn is not None:
        return rows_of(entry, [(way, "train", 2) for way in CUTS], options.limit)
    tasks = [("fxpipe", mode, stages) for mode in MODES for stages in options.stages if not options.sizes_only]
    tasks += [(AT_SIZES, mode, max(options.stages)) for mode in MODES]
    if not options.no_others:
        tasks += [(way, mode, max(options.stages)) for way in WAYS[1:] for mode in MODES]
    return rows_of(entry, tasks, options.limit)


# -- telling ---------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> list[list[object]]:
    others = {(row.model, row.mode, row.way): row for row in rows if row.way != "fxpipe"}
    table: list[list[object]] = []
    for row in rows:
        if row.way != "fxpipe":
            continue
        at_sizes = others.get((row.model, row.mode, AT_SIZES))
        beside = [others.get((row.model, row.mode, way)) for way in WAYS[1:]]
        table.append(
            [
                row.model,
                row.mode,
                row.stages,
                row.remarks,
                row.nodes,
                f"{row.largest_leaf:.0%}",
                *_parts(row),
                row.plan_seconds,
                _graphs(at_sizes) if at_sizes is not None else "",
                *(_verdict(other) if other is not None else "" for other in beside),
            ]
        )
    return table


def _cuts(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each model, with the verdict of each way to cut a mini-batch."""
    verdicts: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        verdicts.setdefault((row.family, row.model), {})[row.way] = _verdict(row)
    return [[*of_model, *(ways.get(way, "") for way in CUTS)] for of_model, ways in verdicts.items()]


def _parts(row: Row) -> list[str]:
    """Equal, different or never compared: outputs, gradients, buffers. The first difference ends the comparison."""
    names = ["outputs", "gradients", "buffers"]
    if row.verdict == "right":
        return ["equal"] * 3
    if not row.is_wrong:
        return [row.verdict, "", ""]
    wrong = names.index(row.verdict.removeprefix("wrong "))
    return [*["equal"] * wrong, "WRONG", *[""] * (2 - wrong)]


def _graphs(row: Row) -> str:
    """How many graphs inputs of several sizes take; none where no size may vary."""
    return f"{row.graphs or '-'}" if row.verdict == "right" else _verdict(row)


def _verdict(row: Row) -> str:
    text = f"{row.verdict}: {row.message}" if row.message else row.verdict
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _summary(rows: Sequence[Row]) -> list[list[object]]:
    """How many models and modes each way gets right: of fxpipe, by number of stages, and at several sizes."""
    groups: dict[str, collections.Counter[str]] = {}
    for row in (row for row in rows if row.verdict != "not built"):
        name = f"fxpipe, {row.stages} stages" if row.way == "fxpipe" else row.way
        if row.way == AT_SIZES:
            few = f"at most {MANY_GRAPHS} graphs" if row.graphs <= MANY_GRAPHS else "more graphs"
            name = f"fxpipe at several sizes, {few}" if row.sizes else "fxpipe, inputs of one size only"
        kind = "wrong" if row.is_wrong else "fails" if row.verdict in ("hangs", "crashes") else row.verdict
        groups.setdefault(name, collections.Counter())[kind] += 1
    return [
        [name, sum(counts.values()), *(counts[kind] for kind in ("right", "refused", "wrong", "fails"))]
        for name, counts in groups.items()
    ]


def _print_troubles(rows: Sequence[Row]) -> None:
    """What fxpipe did not get right, each message once."""
    where: dict[str, list[str]] = {}
    for row in rows:
        if row.way in OWN_WAYS and row.verdict not in ("right", "not built"):
            what = f"at sizes {row.sizes}" if row.way == AT_SIZES else f"{row.way} {row.stages}"
            where.setdefault(f"{row.verdict}: {row.message}", []).append(f"{row.model} {row.mode} {what}")
    for text, places in where.items():
        print(f"{', '.join(places)}\n    {text}")


def _print_reasons(rows: Sequence[Row]) -> None:
    """Why inputs of several sizes take more graphs than two."""
    for row in rows:
        if row.way == AT_SIZES and row.verdict == "right" and row.graphs > MANY_GRAPHS:
            print(f"{row.model} {row.mode}: {row.graphs} graphs of sizes {row.sizes}\n    {row.message}")


if __name__ == "__main__":
    sys.exit(main())
