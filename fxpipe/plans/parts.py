"""The parts of a plan, as frozen data: its stages, what goes between them, and what is worth knowing about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpipe.polynomials import ZERO, Polynomial


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds in memory beside its parameters, of one micro-batch of `b` samples.

    What other stages made comes from the stage before or, through portals, from those before that. A stage that
    recomputes keeps all of it, any other only what its backward needs.
    """

    received: Polynomial = ZERO  # kept for backward of what other stages made; for each micro-batch in flight
    held: Polynomial = ZERO  # kept for backward beside that; of one that is to be recomputed, from then on
    working: Polynomial = ZERO  # held for a moment
    portals: Polynomial = ZERO  # of `received`, what came through portals
    again: Polynomial = ZERO  # received, and kept beside `received` where the stage recomputes
    portals_again: Polynomial = ZERO  # of `again`, what came through portals

    def kept(self, recomputes: bool) -> Polynomial:
        """Of what other stages made."""
        return self.received + self.again if recomputes else self.received

    def through_portals(self, recomputes: bool) -> Polynomial:
        """Of what is `kept`."""
        return self.portals + self.portals_again if recomputes else self.portals


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """How long a stage takes for one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0  # the part of backward that makes gradients of parameters


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage runs for one micro-batch: pairs of (place in `Plan.operations`, how often)."""

    forward: tuple[tuple[int, int], ...] = ()
    backward: tuple[tuple[int, int], ...] = ()
    to_inputs: tuple[tuple[int, int], ...] = ()  # what backward would run, had no parameter a gradient


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A block of graph nodes that runs on one device. Seconds and bytes are those of one micro-batch."""

    index: int
    device: str
    nodes: tuple[str, ...]  # in the order in which they run
    code: str  # for people
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int  # of all that the stage uses: a weight that two stages use counts in both
    activation_bytes: int  # kept for backward
    sent_bytes: int  # to the next stage; portals are counted in `Plan.portals`
    weight_seconds: float = 0.0  # the part of backward that makes gradients of parameters
    action_seconds: float = 0.0  # what an action costs beside all of these, whatever its size
    copies: tuple[str, ...] = ()  # nodes that it computes for itself, though another stage does so too
    state_bytes: int = 0  # gradients of parameters, and the optimizer's state
    gradient_bytes: int = 0  # of `state_bytes`, those of gradients
    memory_limit: int | None = None  # bytes that it may take; None: no limit is known
    bytes: StageBytes = field(default_factory=StageBytes)
    flops: Polynomial = ZERO  # forward and backward of one micro-batch; recomputation not counted
    fixed: StageSeconds = field(default_factory=StageSeconds)  # of the seconds, what they are for any size
    sent: Polynomial = ZERO  # `sent_bytes` for any size
    work: StageWork = field(default_factory=StageWork)
    update_seconds: float = 0.0  # of the optimizer, once for a step, on known hardware: to read and write what it needs
    modules: tuple[str, ...] = ()  # for each node the path of the module whose forward made it
    shares: tuple[float, ...] = ()  # for each node the part of the stage's seconds, 0 to 1, that it takes


@dataclass(frozen=True, slots=True)
class Portal:
    """The direct way of a value that skips stages."""

    name: str
    source: int  # stage that makes it
    target: int  # stage that uses it
    bytes: int  # for one micro-batch
    size: Polynomial = ZERO  # `bytes` for any size
    line: str = ""  # of the user's code, where it is made: `path/unet.py:31`


@dataclass(frozen=True, slots=True)
class Sending:
    """All that goes from a stage to another for one micro-batch: to a later one values, to an earlier one gradients."""

    source: int
    target: int
    bytes: int
    seconds: float  # on its way, where the link is known
    fixed_seconds: float = 0.0  # of that, what it is for any size
    size: Polynomial = ZERO  # `bytes` for any size
    values: int = 1  # how many, each of which is a transfer
    over: tuple[str, ...] = ()  # names of what the way shares with others: network adapters


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage that a step waits for, had it been cut so."""

    balance: str
    seconds: float  # of one micro-batch: forward, backward, and what the stage receives
    fits: bool = True  # into the memory of the devices


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that has several names, or that several stages use."""

    names: tuple[str, ...]  # of the model, in its order
    stages: tuple[int, ...]  # that use it: the first one owns it, the others copy it for each step
    bytes: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A module that was not looked into, or forward behind some line: it is one node of the graph."""

    name: str  # of the module; or a text that says where in forward it begins
    why: str
    line: str  # of the user's code that calls it; empty where it is not known


@dataclass(frozen=True, slots=True)
class HeavyNode:
    """The node that takes the longest."""

    name: str
    stage: int
    seconds: float  # of one micro-batch, forward and backward
    line: str  # of the user's code; empty where it is not known
    fixed_seconds: float = 0.0  # of that, what it is for any size
