"""How good cuts are, how long they take, and whether a step takes as long as the plan says.

    python tools/bench/balance.py
    python tools/bench/balance.py --parts sequences --seeds 5 --shapes transformer
    python tools/bench/balance.py --parts steps --models gpt,t5 --rounds 20

What is compared, how, and what came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from prediction import HEADERS, Subject, load, measure_rounds, rows
from real_cuts import ETHERNET, profiled
from real_models import REAL_MODELS, RealModel
from sequences import LARGE_HEADERS, SHAPES, SIZES, large_models, sequences
from tabulate import tabulate
from tqdm import tqdm
from ways_to_cut import compare, report, ways

PARTS = ("sequences", "large", "models", "steps")
STAGES = (2, 4, 8)  # into which real models are cut
CHUNKS = (4, 8)  # of the steps that are timed
BATCH = 16


def cut_sequences(shapes: Sequence[str], most: int, seeds: int) -> None:
    known, found = ways(), []
    sizes = [size for size in SIZES if size[0] <= most]
    cases = list(sequences(shapes, sizes, seeds))
    for label, of_label in tqdm(cases, desc="sequences", disable=None):
        found.append(report(label, [compare(case, known) for case in of_label]))
    print_cuts("sequence", list(known), found)


def cut_models(names: Sequence[str]) -> None:
    known, found, planning = ways(), [], []
    for name in tqdm(names, desc="models", disable=None):
        real = make(name)
        model = profiled(real, max(CHUNKS), BATCH)
        nodes = len(model.traced.nodes)
        planning.append((name, str(nodes), f"{model.trace_seconds:.1f}", f"{model.profile_seconds:.1f}"))
        for link, label in ((None, ""), (ETHERNET, ", links")):
            for stages in STAGES:
                case = model.case(real.layer, stages, link)
                found.append(report(f"{name}{label}, {nodes} over {stages}", [compare(case, known)]))
    print_cuts("model", list(known), found)
    print(f"\ns before the cut\n\n{table_of(planning, ['model', 'nodes', 'to trace', 'to profile'])}")


def time_steps(names: Sequence[str], rounds: int) -> None:
    print(f"\nload before: {load()}")
    with ExitStack() as stack:
        subjects = {name: Subject(make(name), CHUNKS, BATCH, stack) for name in tqdm(names, desc="plans", disable=None)}
        measure_rounds(subjects, rounds)
    made = [row for name in names for row in rows(name, subjects[name])]
    print(f"load after: {load()}\n\na step of {BATCH} samples\n\n{table_of(made, HEADERS)}")


def make(name: str) -> RealModel:
    torch.manual_seed(0)
    return REAL_MODELS[name](BATCH)


def print_cuts(what: str, names: Sequence[str], found: Sequence[tuple[list[str], list[str]]]) -> None:
    ratios, times = zip(*found, strict=True)
    print(f"\nlargest stage over the least possible: median, worst\n\n{table_of(ratios, [what, *names])}")
    print(f"\nms to find the cut: median\n\n{table_of(times, [what, *names])}")


def table_of(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, with commas (default: all)")
    parser.add_argument("--seeds", type=int, default=10, help="sequences of each shape and size (default: 10)")
    parser.add_argument("--shapes", default=";".join(SHAPES), help=f"of {'; '.join(SHAPES)}, with semicolons")
    parser.add_argument("--most", type=int, default=10_000, help="the longest sequences (default: 10000)")
    parser.add_argument("--models", default=",".join(REAL_MODELS), help="of the real models, with commas")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of steps (default: 15)")
    options = parser.parse_args()

    parts, models = options.parts.split(","), options.models.split(",")
    if "sequences" in parts:
        cut_sequences(options.shapes.split(";"), options.most, options.seeds)
    if "large" in parts:
        print(f"\nlarge models, fxpipe, optimal\n\n{table_of(list(large_models()), LARGE_HEADERS)}")
    if "models" in parts:
        cut_models(models)
    if "steps" in parts:
        time_steps(models, options.rounds)


if __name__ == "__main__":
    main()
