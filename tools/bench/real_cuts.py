"""Real models as something to cut: their graphs with measured seconds, as planning has them before it cuts."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch
from real_models import RealModel
from ways_to_cut import Case

import fxpipe
from fxpipe.cluster import Link
from fxpipe.partitioning.chain import Chain, StageSite
from fxpipe.planning.cost_model import chain_of
from fxpipe.profiling import Profile
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import info

ETHERNET = Link(bytes_per_second=0.125e9, latency=50e-6)  # 1 Gbit/s


@dataclass(frozen=True)
class Profiled:
    """A real model, traced and profiled for micro-batches of so many samples."""

    traced: Traced
    profile: Profile
    samples: int
    trace_seconds: float
    profile_seconds: float

    def case(self, layer: str, stages: int, link: Link | None) -> Case:
        """To be cut for so many CPU workers, with a link to each from the one before."""
        chain = chain_of(self.traced, [self.profile], self.samples, forbidden_cuts(self.traced))
        sites = tuple(StageSite(link=link if j else None) for j in range(stages))
        return Case(chain, sites, _parameters(chain), _layers(self.traced, layer))


def profiled(real: RealModel, chunks: int, batch: int) -> Profiled:
    """As planning does it: one thread, the largest micro-batch."""
    begin = time.perf_counter()
    traced = fxpipe.trace(real.model, real.args, real.kwargs, chunks=chunks)
    middle = time.perf_counter()
    samples = -(-batch // chunks)
    profile = fxpipe.profile(traced, real.args, real.kwargs, micro_batch=samples, threads=1, device=torch.device("cpu"))
    return Profiled(traced, profile, samples, middle - begin, time.perf_counter() - middle)


def _parameters(chain: Chain) -> tuple[float, ...]:
    """By node: bytes of the parameters that it is the first to use."""
    found = [0.0] * len(chain)
    for weights in chain.weights:
        found[weights.users[0]] += weights.bytes if weights.is_trained else 0.0
    return tuple(found)


def _layers(traced: Traced, pattern: str) -> tuple[int, ...]:
    """The first node of each layer; nodes that are in none go with the layer before."""
    starts, current = [], ""
    for place, node in enumerate(traced.nodes):
        match = re.search(pattern, info(node).module)
        if match and match.group() != current:
            starts.append(place)
            current = match.group()
    return tuple(starts)
