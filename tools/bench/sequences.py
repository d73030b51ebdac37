"""Rows of nodes with random costs, and large models with memory limits: what cutting is tried on without any model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ways_to_cut import Case

from fxpipe.cluster import Link
from fxpipe.errors import MemoryLimitError
from fxpipe.partitioning.chain import Chain, Flow, HeldStorage, ParameterUse, StageSite
from fxpipe.partitioning.optimal import optimal_partition

# ---- random sequences ----


def sequence(seconds: Sequence[float], parameters: Sequence[float], stages: int, sent: Sequence[float] = ()) -> Case:
    """Nodes that each use what the one before made; `sent` is what each takes to send, in seconds of a link."""
    flows = tuple(Flow(size, place, (place + 1,), True) for place, size in enumerate(sent[:-1]))
    chain = Chain((tuple(s / 3 for s in seconds),), (tuple(2 * s / 3 for s in seconds),), flows)
    link = Link(1.0) if sent else None
    return Case(chain, tuple(StageSite(link=link if j else None) for j in range(stages)), tuple(parameters))


def random_case(draw: Callable[[random.Random], float]) -> Callable[[random.Random, int, int], Case]:
    """Costs drawn one by one; parameters go with the costs, but for a factor that is as often 1/2 as 2."""

    def make(rng: random.Random, n: int, stages: int) -> Case:
        seconds = [draw(rng) for _ in range(n)]
        return sequence(seconds, [s * rng.lognormvariate(0, 0.7) for s in seconds], stages)

    return make


def transformer(rng: random.Random, n: int, stages: int) -> Case:
    """An embedding that takes no time, layers of eight nodes, a head as heavy as three layers; 2 % of noise."""
    seconds, parameters = _transformer(rng, n)
    return sequence(seconds, parameters, stages)


def transformer_with_links(rng: random.Random, n: int, stages: int) -> Case:
    """The same where sending takes a quarter of a layer's time between layers, and up to four times that within."""
    seconds, parameters = _transformer(rng, n)
    sent = [(2.0 if (place - 1) % 8 == 7 else rng.uniform(2.0, 8.0)) if place else 2.0 for place in range(n)]
    return sequence(seconds, parameters, stages, sent)


LAYER = (0.05, 3.0, 1.0, 1.0, 0.05, 1.9, 0.1, 0.9)  # norm, qkv, attention, projection, norm, up, activation, down
LAYER_PARAMETERS = (0.0, 3.0, 0.0, 1.0, 0.0, 4.0, 0.0, 4.0)


def _transformer(rng: random.Random, n: int) -> tuple[list[float], list[float]]:
    middle = range(n - 2)
    seconds = [0.01, *(LAYER[p % 8] * rng.uniform(0.98, 1.02) for p in middle), 3 * sum(LAYER)]
    return seconds, [24.0, *(LAYER_PARAMETERS[p % 8] for p in middle), 24.0]


SHAPES: dict[str, Callable[[random.Random, int, int], Case]] = {
    "uniform": random_case(lambda rng: rng.random()),
    "lognormal": random_case(lambda rng: rng.lognormvariate(0, 1)),
    "equal": random_case(lambda rng: 1.0),
    "transformer": transformer,
    "transformer, links": transformer_with_links,
}
SIZES = ((23, 8), (100, 8), (400, 8), (1000, 32), (10_000, 64))  # nodes, stages


def sequences(shapes: Sequence[str], sizes: Sequence[tuple[int, int]], seeds: int) -> Iterator[tuple[str, list[Case]]]:
    for shape in shapes:
        for n, stages in sizes:
            cases = [SHAPES[shape](random.Random(f"{shape} {n} {seed}"), n, stages) for seed in range(seeds)]
            yield f"{shape}, {n} over {stages}", cases


# ---- large models ----

LARGE_HEADERS = (
    "nodes, stages",
    "limits",
    "s to find the cut",
    "bottleneck over that of no limits",
    "stages that recompute",
)


def large_model(nodes: int) -> Chain:
    """Layers of 70 nodes, seven of them heavy: residuals, two values that all layers use, wide values in the middle."""
    rng, per_layer, size = random.Random(nodes), 70, 64e6
    forward, flows, held, weights, everywhere = [1e-3, 1e-5], [], [], [ParameterUse(2e9, (0,), True)], []
    for place in range(2, nodes):
        at = (place - 2) % per_layer
        heavy = at % 10 == 5
        forward.append(rng.uniform(5e-3, 8e-3) if heavy else rng.uniform(2e-5, 2e-4))
        weights += [ParameterUse(2.4e8, (place,), True)] if heavy else []
        everywhere += [place] if at in (20, 21, 22) else []
        residual = {0: place + 35, 35: place + 35}.get(at)
        users = {place + 1, residual} if residual else {place + 1}
        bytes_ = 3.5 * size if 50 <= at < 58 else size
        flows.append(Flow(bytes_, place, tuple(sorted(user for user in users if user <= nodes)), True))
        held += [HeldStorage(bytes_, place, (place + 1,))] if at % 2 == 0 and place + 1 < nodes else []
    flows.append(Flow(1e6, 1, tuple(everywhere), False))
    return Chain(
        (tuple(forward),), (tuple(2 * f for f in forward),), tuple(flows), tuple(held), tuple(weights), (size,) * nodes
    )


def large_models() -> Iterator[tuple[str, ...]]:
    """Links of 50 GB/s, as many micro-batches in flight as 1F1B has, and memory from ample to scarce."""
    for nodes, stages in ((5663, 8), (10_000, 64)):
        chain = large_model(nodes)
        parameters = sum(4 * w.bytes for w in chain.weights) / stages
        activations = sum(h.bytes for h in chain.held) / stages
        sites = [StageSite(link=Link(50e9, 1e-5) if j else None, in_flight=stages - j) for j in range(stages)]
        free = 0.0
        for label, share, recomputes in (
            ("no memory limit", None, False),
            ("memory for 0.6 of all in flight", 0.6, False),
            ("the same, may recompute", 0.6, True),
            ("memory for 0.3, may recompute", 0.3, True),
        ):
            memory = None if share is None else 1.05 * parameters + share * stages * activations
            begin = time.perf_counter()
            try:
                cut = optimal_partition(chain, [replace(s, memory=memory, may_recompute=recomputes) for s in sites])
            except MemoryLimitError:
                yield f"{nodes}, {stages}", label, f"{time.perf_counter() - begin:.1f}", "does not fit", ""
                continue
            took = time.perf_counter() - begin
            free = free or cut.bottleneck
            yield f"{nodes}, {stages}", label, f"{took:.1f}", f"{cut.bottleneck / free:.3f}", str(sum(cut.recompute))
