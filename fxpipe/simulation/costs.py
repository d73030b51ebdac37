"""The costs that a simulation starts from: of stages and of transfers, for one micro-batch.

A transfer has one direction: a value goes from F to F of a later stage, a gradient from B to B of an earlier one. In
the runtime a gradient goes from each user of the value to the next earlier user, and from the first user to the maker:

    stage      0 (maker)      1 (user)       3 (user)
    value        ─────────────▶
                 ────────────────────────────▶
    gradient                   ◀──────────────
                 ◀─────────────

>>> [(transfer.source, transfer.target) for transfer in transfers_of(0, (1, 3), bytes=8)]
[(0, 1), (0, 3), (1, 0), (3, 1)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from fxpipe.errors import ArgumentError
from fxpipe.utils.polynomial import Polynomial

Bytes = TypeVar("Bytes", int, float, Polynomial)  # for one micro-batch size, or for any


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host seconds of the actions of a stage, for one micro-batch.

    An interpreter with a lock runs the Python of one worker at a time. Python queues F; autograd queues backward in
    C++, in the worker's thread but without the lock.
    """

    forward: float = 0.0  # F and R, with the lock
    backward: float = 0.0  # the full backward, without the lock
    weight: float = 0.0  # the part of `backward` that moves from B to W
    action: float = 0.0  # overhead of each F, R, B and W, with the lock
    runs_ahead: bool = False  # the device computes what the host has queued; else the host computes


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage in seconds and bytes, for one micro-batch and any schedule."""

    forward: float  # seconds of F
    backward: float  # seconds of the full backward: B or, if the schedule splits it, B and W
    recompute: float | None = None  # seconds of R; None: equal to `forward`
    weight: float | None = None  # the part of `backward` that moves from B to W; None: half
    parameter_bytes: float = 0  # static: parameters and buffers
    gradient_bytes: float = 0  # static: gradients of parameters
    optimizer_bytes: float = 0  # static: optimizer state
    version_bytes: float = 0  # static: weights of mini-batches in flight, except the newest weights
    saved_bytes: float = 0  # saved by autograd: from F (or R, if recomputed) to the last piece of backward
    input_bytes: float = 0  # inputs from the stage before: from F to the last piece of backward
    portal_bytes: float = 0  # inputs from other stages, through portals: equally long
    working_bytes: float = 0  # in addition, while an action runs
    update: float = 0.0  # seconds of the optimizer, once per step: U, if the schedule has it
    action: float = 0.0  # overhead of each F, R, B and W in seconds, to start the stage and pass its inputs
    loss: float = 0.0  # seconds of the loss in each F, in addition to `forward`: forward, and backward to the outputs
    joint: int = 1  # the number of micro-batches with one loss, in the last F of these
    host: HostCost | None = None  # None: no host cost
    reduction: float = 0.0  # seconds to reduce its gradients over replicas, once per step
    reduction_buckets: int = 1  # number of parts of equal size that are reduced one by one

    @property
    def static_bytes(self) -> float:
        """The bytes held at all times."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.version_bytes

    @property
    def received_bytes(self) -> float:
        """The bytes of inputs from other stages."""
        return self.input_bytes + self.portal_bytes

    def memory(self, in_flight: int, activations: int) -> float:
        """Returns the most bytes that the stage holds with these numbers of micro-batches; see `stage_memory`."""
        sizes = float(self.static_bytes), float(self.received_bytes), float(self.saved_bytes), float(self.working_bytes)
        return stage_memory(*sizes, in_flight, activations)


def stage_memory(
    static: Bytes, received: Bytes, saved: Bytes, working: Bytes, in_flight: int, activations: int
) -> Bytes:
    """Computes the peak memory of a stage, for the limits of a cut and `Plan.memory`. A simulation never holds more."""
    # `received` and `saved` are for each micro-batch: inputs from other stages, and what else is kept for backward.
    # `in_flight`: the most micro-batches between F and the end of backward. `activations`: with saved bytes.
    return static + received * in_flight + saved * activations + working


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer from one stage to another, for each micro-batch; see the module docstring."""

    source: int  # stage
    target: int  # stage
    bytes: float
    seconds: float = 0.0  # in transfer, if the two are on different devices
    over: tuple[str, ...] = ()  # names of resources that its link shares with other links
    handling: float = 0.0  # seconds in the actions before and after it, to pack and unpack it

    @property
    def is_gradient(self) -> bool:
        return self.target < self.source


def transfers_of(
    maker: int,
    users: Iterable[int],
    bytes: float,
    *,
    returns: bool = True,
    seconds: Callable[[int, int, float], float] | None = None,
) -> tuple[Transfer, ...]:
    """Returns all transfers of one boundary value, as the runtime makes them.

    Args:
        maker: the stage that makes the value.
        users: the later stages that use it. The loss is computed on the last stage.
        bytes: the size of the value, and of its gradient.
        returns: send its gradient back.
        seconds: (source, target, bytes) -> seconds between the devices of these stages. Default: 0.
    """
    ways = sorted(set(users) - {maker})
    pairs = [(maker, user) for user in ways]
    if returns:
        pairs += [(user, earlier) for earlier, user in zip((maker, *ways), ways, strict=False)]
    return tuple(Transfer(s, t, bytes, seconds(s, t, bytes) if seconds is not None else 0.0) for s, t in pairs)


_NO_NUMBERS = ("over", "host", "runs_ahead")


def check_costs(stages: Sequence[StageCost], transfers: Sequence[Transfer], count: int) -> None:
    """Raises `ArgumentError` unless each of `count` stages has a cost and all numbers are valid."""
    if len(stages) != count:
        raise ArgumentError(f"stages has {len(stages)} costs; give {count}, one for each stage of the schedule")
    named = [(f"stages[{j}]", StageCost, stage) for j, stage in enumerate(stages)]
    hosts = [(f"stages[{j}].host", HostCost, stage.host) for j, stage in enumerate(stages) if stage.host is not None]
    sent = [(f"transfers[{k}]", Transfer, transfer) for k, transfer in enumerate(transfers)]
    for name, kind, cost in (*named, *hosts, *sent):
        for field in fields(kind):  # costs of a plan have more
            value = getattr(cost, field.name)
            if field.name not in _NO_NUMBERS and value is not None and not (math.isfinite(value) and value >= 0):
                what = "size; give bytes" if field.name.endswith("bytes") else "time; give seconds"
                raise ArgumentError(f"{name}.{field.name}={value!r} is no {what}, 0 or more and finite")
    for j, stage in enumerate(stages):
        if stage.weight is not None and stage.weight > stage.backward:
            raise ArgumentError(
                f"stages[{j}].weight={stage.weight!r} is more than its backward={stage.backward!r}, of which it is a "
                "part: give in backward the seconds of inputs and weights together"
            )
    for k, transfer in enumerate(transfers):
        for name in ("source", "target"):
            if getattr(transfer, name) not in range(count):
                raise ArgumentError(
                    f"transfers[{k}].{name}={getattr(transfer, name)!r} is no stage; stages are 0 to {count - 1}"
                )
        if transfer.source == transfer.target:
            raise ArgumentError(f"transfers[{k}] goes from stage {transfer.source} to itself: leave it out")
