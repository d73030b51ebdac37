"""The costs that a simulation starts from: of stages and of transfers, in plain numbers, for one micro-batch.

A transfer goes one way. From an earlier to a later stage goes a value, after F of the one and before F of the other;
from a later to an earlier stage goes a gradient, after B of the one and before B of the other. So any wiring can be
written, also the runtime's, in which a gradient goes from a user of the value to the next earlier user, and from the
first user to the maker:

    stage      0 (maker)      1 (user)       3 (user)
    value        ─────────────▶
                 ────────────────────────────▶
    gradient                   ◀──────────────
                 ◀─────────────

>>> for transfer in transfers_of(0, (1, 3), bytes=8): print(transfer)
0 -> 1: 8 bytes
0 -> 3: 8 bytes
1 -> 0: 8 bytes
3 -> 1: 8 bytes
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
    """Seconds of the host for the actions of a stage and one micro-batch.

    An interpreter with a lock runs the Python of one worker at a time. F is queued from Python; backward is queued by
    autograd in C++, in the worker's thread but without the lock.
    """

    forward: float = 0.0  # of F and of R, under the lock
    backward: float = 0.0  # of the whole backward, without it
    weight: float = 0.0  # the part of `backward` that W takes and B then does not
    action: float = 0.0  # of each F, R, B and W in addition, under the lock
    runs_ahead: bool = False  # the device computes what the host has queued; else the host computes


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of a stage: seconds and bytes of one micro-batch, whatever the schedule."""

    forward: float  # seconds of F
    backward: float  # of the whole backward: of B or, where the schedule splits it, of B and W
    recompute: float | None = None  # of R; None: as long as F
    weight: float | None = None  # the part of `backward` that W takes and B then does not; None: half of it
    parameter_bytes: float = 0  # always there: parameters and buffers
    gradient_bytes: float = 0  # always there: of parameters
    optimizer_bytes: float = 0  # always there: its state
    version_bytes: float = 0  # always there: weights of mini-batches in flight, without the newest ones
    saved_bytes: float = 0  # what autograd keeps: from F, or R where there is one, to the last piece of backward
    input_bytes: float = 0  # what F was given by the stage before: from F to the last piece of backward
    portal_bytes: float = 0  # what F was given by other stages, through portals: as long
    working_bytes: float = 0  # in addition, while an action runs
    update: float = 0.0  # seconds of the optimizer, once for a step: of U, where the schedule has it
    action: float = 0.0  # seconds of each F, R, B and W in addition, to start the stage and pass its inputs
    loss: float = 0.0  # seconds of F in addition to `forward`: of the loss, forward and back to the outputs
    host: HostCost | None = None  # what its actions take of the interpreter; None: nothing
    contention: float = 1.0  # times as long as F, R, B and W take while all devices of such stages are at work
    reduction: float = 0.0  # seconds in which its gradients are reduced over replicas, once for a step
    reduction_buckets: int = 1  # parts of equal size in which they are

    @property
    def static_bytes(self) -> float:
        """The bytes that are held all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.version_bytes

    @property
    def received_bytes(self) -> float:
        """The bytes kept of what F was given by other stages."""
        return self.input_bytes + self.portal_bytes

    def memory(self, in_flight: int, activations: int) -> float:
        """The bytes that the stage holds at most, with these numbers of micro-batches; see `stage_memory`."""
        sizes = float(self.static_bytes), float(self.received_bytes), float(self.saved_bytes), float(self.working_bytes)
        return stage_memory(*sizes, in_flight, activations)


def stage_memory(
    static: Bytes, received: Bytes, saved: Bytes, working: Bytes, in_flight: int, activations: int
) -> Bytes:
    """Computes the memory of a stage: the one formula of the limits of a cut, of `Plan.memory`, and of what is shown.

    A simulation follows the same bytes from action to action, and so never holds more.

    Args:
        static: always there.
        received: kept of what other stages made, for each micro-batch.
        saved: kept for backward in addition, for each micro-batch.
        working: held for a moment.
        in_flight: micro-batches that have gone forward and not yet back, at most.
        activations: of those, how many have their saved bytes at one time: with recomputation, few.
    """
    return static + received * in_flight + saved * activations + working


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer from one stage to another, for each micro-batch; see the docstring of this module."""

    source: int  # stage
    target: int  # stage
    bytes: float
    seconds: float = 0.0  # on its way, where the two are on different devices
    over: tuple[str, ...] = ()  # names of what it takes in addition to its link, and shares with other links
    handling: float = 0.0  # seconds of the actions before and after it, to pack and to unpack it

    @property
    def is_gradient(self) -> bool:
        return self.target < self.source

    def __str__(self) -> str:
        time = f", {self.seconds:.4g} s" if self.seconds else ""
        return f"{self.source} -> {self.target}: {self.bytes:g} bytes{time}"


def transfers_of(
    maker: int,
    users: Iterable[int],
    bytes: float,
    *,
    returns: bool = True,
    seconds: Callable[[int, int, float], float] | None = None,
) -> tuple[Transfer, ...]:
    """All transfers of one boundary value, as the runtime makes them.

    Args:
        maker: the stage that makes it.
        users: the later stages that use it. The loss is taken on the last stage.
        bytes: of the value, and of its gradient.
        returns: does its gradient go back.
        seconds: (source, target, bytes) -> seconds on the way between the devices of these stages; none if not given.
    """
    ways = sorted(set(users) - {maker})
    pairs = [(maker, user) for user in ways]
    if returns:
        pairs += [(user, earlier) for earlier, user in zip((maker, *ways), ways, strict=False)]
    return tuple(Transfer(s, t, bytes, seconds(s, t, bytes) if seconds is not None else 0.0) for s, t in pairs)


def check_costs(stages: Sequence[StageCost], transfers: Sequence[Transfer], count: int) -> None:
    """Raises `ArgumentError` unless there is a cost for each of `count` stages, and every number can be one."""
    if len(stages) != count:
        raise ArgumentError(f"stages has {len(stages)} costs; give {count}, one for each stage of the schedule")
    for j, stage in enumerate(stages):
        _check_numbers(f"stages[{j}]", StageCost, stage)
        if stage.host is not None:
            _check_numbers(f"stages[{j}].host", HostCost, stage.host)
        if stage.contention < 1:
            raise ArgumentError(f"stages[{j}].contention={stage.contention!r} is no factor; give 1 or more")
        if stage.weight is not None and stage.weight > stage.backward:
            raise ArgumentError(
                f"stages[{j}].weight={stage.weight!r} is more than its backward={stage.backward!r}, of which it is a "
                "part: give in backward the seconds of inputs and weights together"
            )
    for k, transfer in enumerate(transfers):
        _check_numbers(f"transfers[{k}]", Transfer, transfer)
        for name in ("source", "target"):
            if getattr(transfer, name) not in range(count):
                raise ArgumentError(
                    f"transfers[{k}].{name}={getattr(transfer, name)!r} is no stage; stages are 0 to {count - 1}"
                )
        if transfer.source == transfer.target:
            raise ArgumentError(f"transfers[{k}] goes from stage {transfer.source} to itself: leave it out")


_NO_NUMBERS = ("over", "host", "runs_ahead")


def _check_numbers(
    name: str, kind: type[StageCost | Transfer | HostCost], figures: StageCost | Transfer | HostCost
) -> None:
    for field in fields(kind):
        value = getattr(figures, field.name)
        if field.name not in _NO_NUMBERS and value is not None and not (math.isfinite(value) and value >= 0):
            what = "size; give bytes" if field.name.endswith("bytes") else "time; give seconds"
            raise ArgumentError(f"{name}.{field.name}={value!r} is no {what}, 0 or more and finite")
