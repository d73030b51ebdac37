"""The plan of a pipeline as frozen data, and the passes that make one, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A block of graph nodes that runs on one device. Seconds and bytes are those of one micro-batch."""

    index: int
    device: str
    nodes: tuple[str, ...]  # in the order in which they run
    code: str  # for people
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    activation_bytes: int  # of all that the nodes make
    sent_bytes: int  # to the next stage; portals are counted in `Plan.portals`


@dataclass(frozen=True, slots=True)
class Portal:
    """The direct way of a value that skips stages."""

    name: str
    source: int  # stage that makes it
    target: int  # stage that uses it
    bytes: int  # for one micro-batch


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is decided about a pipeline: JSON and nothing else."""

    stages: tuple[StagePlan, ...]
    portals: tuple[Portal, ...]
    devices: tuple[str, ...]
    schedule: str
    chunks: int
    micro_batch: int  # samples in the largest micro-batch, for which seconds and bytes are given
    checkpoint: str
    balance: str
    tracer: str
    fingerprint: str  # of the graph that was planned
