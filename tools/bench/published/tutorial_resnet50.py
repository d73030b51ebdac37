"""The figures of PyTorch's model-parallel tutorial: ResNet-50 on two devices, over split sizes.

    python tools/bench/published/tutorial_resnet50.py             two GPUs; without them small, on CPU workers

S. Li, Single-Machine Model Parallel Best Practices, pytorch.org/tutorials/intermediate/model_parallel_tutorial.html:
three mini-batches of 120 images of 128 x 128. The sweep is that of `examples/tutorial_split_size.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiment import Setting, main, over, plan_for, simulate
from paper_hardware import V100
from paper_models import load_script
from tables import Cell, Plot, Table

SINGLE, MODEL_PARALLEL = "a single device", "model parallel"
PUBLISHED = {SINGLE: 3.75, MODEL_PARALLEL: 4.02, "split 20": 2.51, "split 12": 2.43}  # seconds of three mini-batches
ON_COMPUTE_STREAMS, ON_COPY_STREAMS = "s, copies as in the tutorial", "s, copies as in fxpipe"
SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)


def rows_of(seconds: dict[str, dict[str, float]]) -> tuple[dict[str, Cell], ...]:
    """The ways by name; `seconds`: of each way, by column."""
    columns = list(dict.fromkeys(column for of_way in seconds.values() for column in of_way))
    base = seconds[SINGLE][columns[0]]
    rows = []
    for way, of_way in seconds.items():
        row: dict[str, Cell] = {"way": way}
        for column in columns:
            row[column] = of_way.get(column)
        for column in columns:
            row[f"speed, {column}"] = over(base, of_way.get(column))
        row["published s, of three"] = PUBLISHED.get(way)
        row["published speed"] = over(PUBLISHED[SINGLE], PUBLISHED.get(way))
        rows.append(row)
    return tuple(rows)


def measured(setting: Setting) -> Table:
    example = load_script("examples/tutorial_split_size.py")
    batch, image, splits = (8, 32, (2, 4)) if setting.is_small else (120, 128, SPLITS)
    devices = list(setting.devices[:2]) if len(setting.devices) > 1 else list(setting.devices) * 2
    sweep = example.run_sweep(devices, batch, image, sorted(splits), "gpipe", setting.rounds)
    ways = {way: {"s": seconds} for way, seconds in sweep.lines.items()}
    for size, by_hand, fxpipe, simulated in sweep.table:
        ways[f"split {size}"] = {"s": fxpipe, "s by hand": by_hand, "s simulated": simulated}
    note = f"fxpipe.tune chose split {sweep.chosen} before any was run; by hand: the tutorial's own pipeline."
    return Table(f"PyTorch's tutorial, {setting.where}", rows_of(ways), (note,))


def simulated() -> dict[str, dict[str, float]]:
    """Where the tutorial cuts, with all forwards before all backwards, as autograd has it."""
    model, shape = load_script("examples/tutorial_split_size.py").make_model, (120, 3, 128, 128)
    single = simulate(plan_for(model, shape, 1, V100, chunks=1)).seconds
    ways = {SINGLE: {ON_COMPUTE_STREAMS: single, ON_COPY_STREAMS: single}}
    chunks = {MODEL_PARALLEL: 1} | {f"split {split}": 120 // split for split in SPLITS}
    for way, count in chunks.items():
        plan = plan_for(model, shape, 2, V100, chunks=count, checkpoint="never", balance=["layer2"])
        ways[way] = {
            ON_COMPUTE_STREAMS: simulate(plan, overlaps=False).seconds,
            ON_COPY_STREAMS: simulate(plan).seconds,
        }
    return ways


def tables(setting: Setting) -> Iterator[Table]:
    yield measured(setting)
    yield Table(
        "PyTorch's tutorial, ResNet-50, simulated for two Tesla V100",
        rows_of(simulated()),
        (
            "The tutorial does not name its GPUs, and its steps make their random data: compare the speeds. In the "
            "tutorial copies hold up computation, as they do on default streams; fxpipe has streams of their own for "
            "them, which gains little here. For splits of 12 fxpipe cuts where the tutorial does.",
        ),
        Plot("way", (f"speed, {ON_COMPUTE_STREAMS}", f"speed, {ON_COPY_STREAMS}", "published speed"), "speed"),
    )


if __name__ == "__main__":
    main(tables, __doc__)
