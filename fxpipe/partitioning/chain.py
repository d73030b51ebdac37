"""The graph as a chain of plain numbers: all that a cut can be judged by, for one micro-batch.

Nodes are known by their *place*, 0 to n - 1, in the order in which they run; stage j holds the places starts[j] to
starts[j + 1] - 1. Seconds hang on the kind of device; bytes do not. What several nodes share is listed with all its
places, and so counts once in each stage that has one of them:

    place          0    1    2    3    4    5
    flow          make      use            use      a value, 8 bytes
    cut                   |              |          stage 1 receives 8 bytes, stage 2 receives 8 bytes; where a gradient
                                                    comes back, stage 2 sends it to stage 1, and stage 1 to stage 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that one node makes and others use."""

    bytes: float
    maker: int  # place; -1: an input of the model, which reaches each stage by itself and is sent by none
    users: tuple[int, ...]  # places, ascending, all behind the maker; the number of nodes stands for the model's output
    returns: bool  # does its gradient go back


@dataclass(frozen=True, slots=True)
class Held:
    """A storage that autograd keeps from forward to backward in each stage that has one of these nodes."""

    bytes: float
    maker: int  # place; -1: an input of the model
    savers: tuple[int, ...]  # places, ascending


@dataclass(frozen=True, slots=True)
class Weights:
    """A parameter or a buffer: each stage that uses it has it in memory."""

    bytes: float
    users: tuple[int, ...]  # places, ascending
    trained: bool  # has a gradient and a state of the optimizer


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes in order, in plain numbers."""

    forward: tuple[tuple[float, ...], ...]  # by kind of device, then by place: seconds
    backward: tuple[tuple[float, ...], ...]
    flows: tuple[Flow, ...] = ()
    held: tuple[Held, ...] = ()
    weights: tuple[Weights, ...] = ()
    working: tuple[float, ...] = ()  # by place: bytes held for a moment beside all of the above; none: no memory known
    forbidden: Mapping[int, str] = field(default_factory=dict)  # place -> why no cut may stand before it
    low: tuple[int, ...] = ()  # by place: the first stage that may have the node; none: all are free
    high: tuple[int, ...] = ()  # by place: the last one
    required: tuple[int, ...] = ()  # places before which a cut must stand

    def __len__(self) -> int:
        return len(self.forward[0])


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two devices."""

    bytes_per_second: float
    latency: float = 0.0  # seconds for each transfer


@dataclass(frozen=True, slots=True)
class Site:
    """Where a stage runs, and how."""

    kind: int = 0  # of device: which of the chain's seconds hold
    memory: float | None = None  # bytes that the stage may take; None: no limit
    link: Link | None = None  # from the device of the stage before; None: a value is handed over and costs nothing
    in_flight: int = 1  # micro-batches that are held at most at one time
    may_recompute: bool = False  # may the stage recompute where it does not fit otherwise
    must_recompute: bool = False
    recomputed: int = 1  # micro-batches of which a stage that recomputes has all activations at one time, at most
    overlaps: bool = False  # do transfers run beside computation
    state: float = 3.0  # bytes of gradient and optimizer state for each byte of a trained parameter
