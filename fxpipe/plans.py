"""The plan of a pipeline as frozen data: what was decided, what it costs, and nothing of torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from fxpipe.errors import ArgumentError
from fxpipe.polynomials import Polynomial

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds in memory, of one micro-batch of `b` samples."""

    trained: int = 0  # of the stage's parameters those that have a gradient and a state of the optimizer
    received: Polynomial = Polynomial()  # kept for backward of what other stages made; for each micro-batch in flight
    held: Polynomial = Polynomial()  # kept for backward beside that; where the stage recomputes, for one in flight
    working: Polynomial = Polynomial()  # held for a moment


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
    recompute: bool = False  # does it run its forward again before its backward, rather than keep what that needs
    copies: tuple[str, ...] = ()  # nodes that it computes for itself, though another stage does so too
    in_flight: int = 1  # micro-batches that have gone forward and not yet back, at most
    bytes: StageBytes = StageBytes()
    flops: Polynomial = Polynomial()  # forward and backward of one micro-batch, recomputation not counted


@dataclass(frozen=True, slots=True)
class Portal:
    """The direct way of a value that skips stages."""

    name: str
    source: int  # stage that makes it
    target: int  # stage that uses it
    bytes: int  # for one micro-batch


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is decided about a pipeline: JSON and nothing else. `print` shows it as a table."""

    stages: tuple[StagePlan, ...]
    portals: tuple[Portal, ...]
    devices: tuple[str, ...]  # by stage
    schedule: str
    chunks: int
    micro_batch: int  # samples in the largest micro-batch, for which seconds and bytes are given
    checkpoint: str | tuple[str, ...]  # or one for each stage
    balance: str
    tracer: str
    fingerprint: str  # of the graph that was planned
    why: tuple[str, ...] = ()  # how the tracer came to this graph, where that is not plain recording
    guards: tuple[str, ...] = ()  # values that forward read; with other ones another graph runs
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty where they were measured
    placement: tuple[int, ...] = ()  # for each stage its worker; each has its own if not given

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.stages))))

    @property
    def workers(self) -> tuple[str, ...]:
        """For each worker its device."""
        return tuple(self.devices[self.placement.index(k)] for k in range(max(self.placement) + 1))

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what `save` wrote.

        Raises:
            ArgumentError: the file is no plan.
        """
        try:
            fields = json.loads(Path(path).read_text())
            stages = tuple(StagePlan(**stage | {"nodes": tuple(stage["nodes"])}) for stage in fields.pop("stages"))
            portals = tuple(Portal(**portal) for portal in fields.pop("portals"))
            fields |= {key: tuple(fields.get(key, ())) for key in ("why", "guards", "placement")}
            if isinstance(fields["checkpoint"], list):
                fields["checkpoint"] = tuple(fields["checkpoint"])
            return cls(stages, portals, tuple(fields.pop("devices")), **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(
                f"{path} is no plan of fxpipe ({type(error).__name__}: {error}); write one with plan.save(path)"
            ) from None

    def __str__(self) -> str:
        from fxpipe.inspect.tables import plan_table

        return plan_table(self)
