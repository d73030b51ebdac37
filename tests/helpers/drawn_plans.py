"""Plans for pictures and pages, made by hand: as many stages, nodes and portals as a test wants, without a model."""

import random
from collections.abc import Sequence

from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import PlannedTransfer, Portal, StageBytes, StagePlan, StageSeconds
from fxpipe.utils.polynomial import Polynomial

MIB = 2**20


def drawn_plan(
    stages: int,
    *,
    blocks: int = 2,
    portals: Sequence[Portal] = (),
    placement: Sequence[int] = (),
    schedule: str = "1f1b",
    chunks: int = 8,
    batch: int = 32,
    seed: int = 0,
) -> Plan:
    """Of `blocks` transformer blocks in each stage, which take unequal times."""
    draw = random.Random(seed)
    placed = tuple(placement) or tuple(range(stages))
    samples = -(-batch // chunks)
    devices = tuple(f"cuda:{worker}" for worker in placed)
    found = [_stage(j, devices[j], blocks, samples, draw, is_last=j == stages - 1) for j in range(stages)]
    ways = [(j, j + 1) for j in range(stages - 1)] + [(j + 1, j) for j in range(stages - 1)]
    return Plan(
        stages=tuple(found),
        portals=tuple(portals),
        devices=devices,
        schedule=schedule,
        chunks=chunks,
        micro_batch=samples,
        checkpoint="never",
        balance="block",
        fingerprint="0123456789abcdef",
        placement=placed,
        sendings=tuple(PlannedTransfer(source, target, MIB * samples, 0.0) for source, target in ways),
        batch=batch,
    )


def _stage(j: int, device: str, blocks: int, samples: int, draw: random.Random, *, is_last: bool) -> StagePlan:
    parts = ("ln_1", "attn.c_attn", "attn", "attn", "attn.c_proj", "", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj", "")
    modules = tuple(
        f"transformer.h.{j * blocks + k}.{part}".rstrip(".") if part else "transformer"
        for k in range(blocks)
        for part in parts
    )
    weights = [draw.uniform(0.05, 3.0) ** 2 for _ in modules]
    seconds = sum(weights) * 1e-3
    return StagePlan(
        index=j,
        device=device,
        nodes=tuple(f"node_{j}_{k}" for k in range(len(modules))),
        code=f"def stage_{j}(x):\n    return x",
        forward_seconds=seconds / 3,
        backward_seconds=2 * seconds / 3,
        parameter_bytes=7 * MIB * blocks,
        activation_bytes=5 * MIB * samples,
        sent_bytes=0 if is_last else MIB * samples,
        weight_seconds=seconds / 3,
        state_bytes=21 * MIB * blocks,
        gradient_bytes=7 * MIB * blocks,
        memory_limit=200 * MIB,
        bytes=StageBytes(held=Polynomial.in_b(0, 5 * MIB), working=Polynomial.in_b(0, MIB)),
        flops=Polynomial.in_b(0, 10**9),
        formulas=StageSeconds(
            *(
                Polynomial.in_b(seconds / 9, (part - seconds / 9) / samples)
                for part in (seconds / 3, 2 * seconds / 3, seconds / 3)
            )
        ),
        sent=Polynomial() if is_last else Polynomial.in_b(0, MIB),
        modules=modules,
        shares=tuple(weight / sum(weights) for weight in weights),
    )


def portals_between(stages: int, number: int, *, seed: int = 0) -> tuple[Portal, ...]:
    """Drawn at random, with sizes of four orders of magnitude."""
    draw = random.Random(seed)
    found = []
    for k in range(number):
        source, target = sorted(draw.sample(range(stages), 2))
        while target - source < 2:
            source, target = sorted(draw.sample(range(stages), 2))
        size = Polynomial.in_b(0, int(10 ** draw.uniform(3, 7)))
        found.append(Portal(f"features_{k}_norm", source, target, size(4), size, f"model.py:{k}"))
    return tuple(found)


def dense_portals(stages: int) -> tuple[Portal, ...]:
    """As in a DenseNet: every stage uses what all before it made."""
    return tuple(
        Portal(f"layer_{source}", source, target, MIB, Polynomial.in_b(0, MIB // 4), "dense.py:7")
        for source in range(stages)
        for target in range(source + 2, stages)
    )
