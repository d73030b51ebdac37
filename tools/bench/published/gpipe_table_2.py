"""GPipe's table 2: throughput over partitions K and micro-batches M, of AmoebaNet-D (18, 256) and a transformer.

    python tools/bench/published/gpipe_table_2.py                 as many GPUs as there are; small, on CPU workers

Y. Huang et al., GPipe, arXiv 1811.06965, table 2, on TPUs; and the same of AmoebaNet-D on Tesla P40, torchgpipe 0.0.7,
docs/benchmarks.rst. All is relative to K = 2, M = 1. GPipe's mini-batches are not published: here they are torchgpipe's
of images, and 32 sequences of 1024 tokens, as in GPipe's table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from experiment import Setting, TrainingStep, Workload, main, measure, over, plan_for, simulate
from models import GPT, sequence_loss
from paper_hardware import P40, TPU_V3
from paper_models import AmoebaNetD
from tables import Cell, Plot, Table

from fxpipe.hardware import Hardware

Place = tuple[int, int]  # partitions K, micro-batches M

PLACES: tuple[Place, ...] = tuple((k, m) for k in (2, 4, 8) for m in (1, 4, 32))
GPIPE_AMOEBANET = dict(zip(PLACES, (1.0, 1.07, 1.21, 1.13, 1.26, 1.84, 1.38, 1.72, 3.48), strict=True))
GPIPE_TRANSFORMER = dict(zip(PLACES, (1.0, 1.7, 1.8, 1.07, 3.2, 3.4, 1.3, 4.8, 6.3), strict=True))
TORCHGPIPE = dict(
    zip(PLACES, (26.733, 41.133, 47.386, 26.827, 44.543, 72.412, 24.918, 70.065, 132.413), strict=True)
)  # samples in a second
TORCHGPIPE_BATCH = dict(zip(PLACES, (96, 256, 1280, 160, 360, 1152, 196, 480, 1280), strict=True))
TRANSFORMER_BATCH = dict.fromkeys(PLACES, 32)
SMALL_BATCH = 16

make_transformer = partial(GPT, tokens=32_000, length=1024, width=2048, depth=48, heads=32)


def options(m: int) -> dict[str, object]:
    return {"chunks": m, "checkpoint": "always" if m == 1 else "except_last", "schedule": "gpipe"}


# ---- measured ----


def amoebanet_workload(setting: Setting, batch: int) -> Workload:
    model, size, batch = (AmoebaNetD(3, 32, 10), 64, SMALL_BATCH) if setting.is_small else (AmoebaNetD(), 224, batch)
    return Workload(model, torch.rand(batch, 3, size, size), torch.randint(10, (batch,)), F.cross_entropy)


def transformer_workload(setting: Setting, batch: int) -> Workload:
    model, length, batch = (
        (GPT(128, 32, 32, 4, 4), 32, SMALL_BATCH) if setting.is_small else (make_transformer(), 1024, batch)
    )
    tokens = torch.randint(128, (batch, length + 1))
    return Workload(model, tokens[:, :-1], tokens[:, 1:], sequence_loss)


def measured(
    make_workload: Callable[[Setting, int], Workload], batches: Mapping[Place, int], setting: Setting
) -> dict[Place, float]:
    """Samples in a second. A small mini-batch is cut into no more micro-batches than it has samples."""

    def make(k: int, m: int) -> TrainingStep:
        return TrainingStep(make_workload(setting, batches[k, m]), setting.first(k) or [], options(m))

    samples = {
        place: SMALL_BATCH if setting.is_small else batches[place] for place in PLACES if setting.first(place[0])
    }
    places = [(k, m) for (k, m), count in samples.items() if m <= count]
    figures = measure({f"{k} {m}": partial(make, k, m) for k, m in places}, setting, "GPipe, table 2")
    return {(k, m): samples[k, m] / step.seconds for k, m in places if (step := figures[f"{k} {m}"])}


# ---- simulated ----


def simulated(
    make_model: Callable[[], torch.nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    batches: Mapping[Place, int],
    hardware: Hardware,
) -> dict[Place, float]:
    """Samples in a second. One cut for each K, for the most micro-batches."""
    throughput = {}
    for k in (2, 4, 8):
        plan = plan_for(make_model, (batches[k, 32], *shape), k, hardware, dtype, **options(32))
        for m in (1, 4, 32):
            throughput[k, m] = batches[k, m] / simulate(plan, batch=batches[k, m], **options(m)).seconds
    return throughput


# ---- tables ----


def rows_of(ours: Mapping[Place, float], published: Mapping[str, Mapping[Place, float]]) -> tuple[dict[str, Cell], ...]:
    rows = []
    for k, m in PLACES:
        relative = over(ours.get((k, m)), ours.get((2, 1)))
        row: dict[str, Cell] = {"K": k, "M": m, "samples/s": ours.get((k, m)), "relative, ours": relative}
        for name, figures in published.items():
            row[f"published, {name}"] = figures[k, m]
            row[f"over {name}"] = over(relative, figures[k, m])
        rows.append(row)
    return tuple(rows)


def tables(setting: Setting) -> Iterator[Table]:
    gpipe, transformer = {"GPipe": GPIPE_AMOEBANET}, {"GPipe": GPIPE_TRANSFORMER}
    torchgpipe = {"torchgpipe": {place: value / TORCHGPIPE[2, 1] for place, value in TORCHGPIPE.items()}}
    notes = ("As many partitions as there are devices.",)
    ours = measured(amoebanet_workload, TORCHGPIPE_BATCH, setting)
    yield Table(f"AmoebaNet-D over K and M, {setting.where}", rows_of(ours, torchgpipe | gpipe), notes)
    ours = measured(transformer_workload, TRANSFORMER_BATCH, setting)
    yield Table(f"Transformer over K and M, {setting.where}", rows_of(ours, transformer), notes)

    images, tokens = (3, 224, 224), (1024,)
    bars = "relative, ours", "published, torchgpipe"
    yield Table(
        "AmoebaNet-D (18, 256) over K and M, simulated for Tesla P40",
        rows_of(simulated(AmoebaNetD, images, torch.float32, TORCHGPIPE_BATCH, P40), torchgpipe),
        (
            "fxpipe cuts between any two operations, torchgpipe between cells, by hand, which tells at K = 4. In "
            "samples a second ours is 1.6 to 2.2 times as fast, since AmoebaNet's many small and thin convolutions "
            "reach less of the peak than the simulator takes.",
        ),
        Plot("K,M", bars, "throughput over K = 2, M = 1"),
    )
    yield Table(
        "AmoebaNet-D (18, 256) over K and M, simulated for Cloud TPU v3",
        rows_of(simulated(AmoebaNetD, images, torch.float32, TORCHGPIPE_BATCH, TPU_V3), gpipe),
        (
            "Uneven partitions are what holds AmoebaNet up in GPipe, as the paper says: it cuts between cells, by an "
            "estimate of their costs. The cut that fxpipe finds is even, so M = 32 gains more than GPipe's did.",
        ),
        Plot("K,M", ("relative, ours", "published, GPipe"), "throughput over K = 2, M = 1"),
    )
    yield Table(
        "Transformer-48 over K and M, simulated for Cloud TPU v3",
        rows_of(simulated(make_transformer, tokens, torch.long, TRANSFORMER_BATCH, TPU_V3), transformer),
        (
            "With M = 32 ours is 4 to 6 % lower. With M = 4 GPipe is above what four micro-batches of one size allow: "
            "8 x 4 / (4 + 8 - 1) = 2.9 times one device for K = 8. Its mini-batches were fitted to the memory, larger "
            "ones to more devices; ours are all the same.",
        ),
        Plot("K,M", ("relative, ours", "published, GPipe"), "throughput over K = 2, M = 1"),
    )


if __name__ == "__main__":
    main(tables, __doc__)
