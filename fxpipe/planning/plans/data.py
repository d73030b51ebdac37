"""The plan of a pipeline as frozen data, without torch: what was decided, and what it costs.

`PlanData` has the fields and what follows from them; `Plan` (`saved_plan.py`) also prints and saves itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from fxpipe.cluster import Cluster
from fxpipe.errors import ArgumentError
from fxpipe.hardware import Operation
from fxpipe.scheduling import (
    Schedule,
    activations_in_flight,
    make_schedule,
    micro_batches_in_flight,
    steady_micro_batches,
    weight_versions,
)
from fxpipe.simulation.costs import HostCost, StageCost, Transfer, stage_memory
from fxpipe.utils.polynomial import ZERO, Polynomial
from fxpipe.utils.units import parse_count

if TYPE_CHECKING:
    import sympy


# The parts of a plan, as frozen data: its stages, what goes between them, and what is worth knowing about them.


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of a stage besides its parameters, for one micro-batch of `b` samples and any dynamic sizes.

    A stage that recomputes keeps all that other stages sent it; any other only what its backward needs.
    """

    received: Polynomial = ZERO  # kept for backward of what other stages made; for each micro-batch in flight
    held: Polynomial = ZERO  # kept for backward beside that; of one that is to be recomputed, from then on
    working: Polynomial = ZERO  # held for a moment
    portals: Polynomial = ZERO  # of `received`, what came through portals
    again: Polynomial = ZERO  # received, and kept beside `received` where the stage recomputes
    portals_again: Polynomial = ZERO  # of `again`, what came through portals
    working_elsewhere: tuple[Polynomial, ...] = ()  # of other nodes, which hold more than `working` at other sizes

    def working_at(self, sizes: Mapping[str, int]) -> int:
        """Computes the bytes held for a moment by the node that holds most, for sizes by name."""
        return max(one.at(sizes) for one in (self.working, *self.working_elsewhere))

    def kept(self, recomputes: bool) -> Polynomial:
        """Returns the bytes kept of what other stages made."""
        return self.received + self.again if recomputes else self.received

    def through_portals(self, recomputes: bool) -> Polynomial:
        """Returns the bytes that came through portals, of what is `kept`."""
        return self.portals + self.portals_again if recomputes else self.portals


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage for one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0  # the part of backward that makes gradients of parameters
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class StageGrowth:
    """Of the seconds of a stage, what grows with the batch and the dynamic sizes; 0 where there are none of these."""

    forward: Polynomial = ZERO
    backward: Polynomial = ZERO
    weight: Polynomial = ZERO
    loss: Polynomial = ZERO


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """A size of inputs, besides the batch, that may differ from batch to batch; formulas have it by its name."""

    name: str
    size: int  # for which seconds and bytes are given
    largest: int  # that is announced, or was planned or looked at: of this memory limits are asked
    least: int = 1  # that the graph holds for
    most: int | None = None
    dims: tuple[str, ...] = ()  # of inputs that have this size, for people

    @property
    def usual_sizes(self) -> tuple[int, ...]:
        """Sizes to look at: half of the planned one, that, twice it, and the largest, within the bounds."""
        wanted = max(self.largest, 2 * self.size)
        most = max(self.size, wanted if self.most is None else min(wanted, self.most))
        return max(self.least, self.size // 2), self.size, min(2 * self.size, most), min(self.largest, most)

    @property
    def bounds(self) -> str:
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class StageWork:
    """The operations of a stage for one micro-batch: pairs of (place in `Plan.operations`, how often)."""

    forward: tuple[tuple[int, int], ...] = ()
    backward: tuple[tuple[int, int], ...] = ()
    to_inputs: tuple[tuple[int, int], ...] = ()  # what backward would run, had no parameter a gradient
    loss: tuple[tuple[int, int], ...] = ()  # forward and back


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
    loss_seconds: float = 0.0  # of the loss, which follows forward on the last stage, forward and back to the outputs
    growing: StageGrowth = field(default_factory=StageGrowth)  # of the seconds, what grows with the dynamic sizes
    host: HostCost | None = None  # what its actions take of the host; None: not known

    @property
    def seconds(self) -> float:
        """All that it computes for one micro-batch; recomputation not counted."""
        return self.forward_seconds + self.loss_seconds + self.backward_seconds


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
class PlannedTransfer(Transfer):
    """All values, or all gradients, that go from one stage to another, and what they come to for any size."""

    bytes: int
    fixed_seconds: float = 0.0  # of `seconds`, what they are for any size
    size: Polynomial = ZERO  # `bytes` for any size
    values: int = 1  # how many, each of which is a transfer
    relayed: Polynomial = ZERO  # of `size`, what is of no use where it comes to, but goes on from there


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage that a step waits for, had it been cut so."""

    balance: str
    seconds: float  # of one micro-batch: forward, backward, and what the stage receives
    fits: bool = True  # into the memory of the devices


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that has several names, or that several stages use."""

    names: tuple[str, ...]  # of the model, in its order
    stages: tuple[int, ...]  # that use it: the first one owns it, the others copy it for each step
    bytes: int


@dataclass(frozen=True, slots=True)
class OpaqueNode:
    """A module that was not looked into, or forward behind some line: it is one node of the graph."""

    name: str  # of the module; or a text that says where in forward it begins
    why: str
    line: str  # of the user's code that calls it; empty where it is not known


@dataclass(frozen=True, slots=True)
class HeaviestNode:
    """The node that takes the longest."""

    name: str
    stage: int
    seconds: float  # of one micro-batch, forward and backward
    line: str  # of the user's code; empty where it is not known
    fixed_seconds: float = 0.0  # of that, what it is for any size
    growing: Polynomial = ZERO  # of that, what grows with the dynamic sizes


@dataclass(frozen=True, slots=True)
class PlanData:
    """All that is decided about a pipeline."""

    stages: tuple[StagePlan, ...]
    portals: tuple[Portal, ...]
    devices: tuple[str, ...]  # by stage
    schedule: str  # a name or, of the user's own, a table as text
    chunks: int  # as asked for; see `micro_batches`
    micro_batch: int  # samples in the largest micro-batch, for which seconds and bytes are given
    checkpoint: str | tuple[str, ...]  # or one for each stage
    balance: str
    tracer: str
    fingerprint: str  # of the graph that was planned
    why: tuple[str, ...] = ()  # how the tracer came to this graph, where that is not plain recording
    guards: tuple[str, ...] = ()  # values that forward read; with other ones another graph runs
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty where they were measured
    placement: tuple[int, ...] = ()  # for each stage its worker; each has its own if not given
    bottlenecks: tuple[Bottleneck, ...] = ()  # of the ways of balancing that were compared
    sendings: tuple[PlannedTransfer, ...] = ()
    # Over processes: between neighbouring stages, each with all that crosses the cut. None: not known.
    packets: tuple[PlannedTransfer, ...] | None = None
    batch: int | None = None  # samples of the mini-batch, of one replica, that it was made for; None: not known
    evaluating: tuple[str, ...] | None = None  # modules in evaluation mode when it was made; None: not known
    tied: tuple[TiedParameter, ...] = ()
    whole: tuple[OpaqueNode, ...] = ()
    heaviest: HeaviestNode | None = None  # what bounds the balance: no stage is faster than its slowest node
    operations: tuple[Operation, ...] = ()  # that stages run (`StagePlan.work`); none: not known
    sizes: tuple[PlannedSize, ...] = ()  # dynamic ones, for which seconds and bytes are given; none: all are fixed
    contention: float = 1.0  # times as long as measured that stages on CPUs take while all of these are at work
    processes: bool = False  # each device has a process of its own; else one interpreter queues for all
    cluster: Cluster | None = None  # its devices and those of its replicas; None: those at hand
    # By worker the devices of its replicas, where they take micro-batches in turn (`Cluster.replicas`); none: no worker
    # has such.
    replica_devices: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.stages))))

    @property
    def workers(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(self.devices[self.placement.index(k)] for k in range(max(self.placement) + 1))

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step: fewer than `chunks` where the mini-batch has fewer samples."""
        return self.chunks if self.batch is None else min(self.chunks, self.batch)

    @property
    def is_over_processes(self) -> bool:
        """Returns True if each device has a process of its own: as planned, or since devices stand in several nodes."""
        return self.processes or (self.cluster is not None and self.cluster.needs_processes)

    @property
    def data_parallel(self) -> int:
        """The number of replicas, each of which has such stages and its part of the mini-batch."""
        return 1 if self.cluster is None else self.cluster.data

    @property
    def modes(self) -> tuple[str, ...]:
        """The checkpoint mode of each stage."""
        return (self.checkpoint,) * len(self.stages) if isinstance(self.checkpoint, str) else self.checkpoint

    def recomputes(self, stage: int) -> bool:
        """Returns True if a stage runs forward again before its backward, for all micro-batches or all but the last."""
        return self.modes[stage] != "never"

    def in_flight(self, stage: int) -> int:
        """Micro-batches that have gone forward in a stage and not yet back, at most."""
        return micro_batches_in_flight(self._steady_schedule())[self._stage(stage).index]

    def weight_versions(self, stage: int) -> int:
        """Versions of its weights that a stage holds, at most: one, unless mini-batches stream through the stages."""
        number = self._stage(stage).index
        return weight_versions(self.schedule, len(self.stages), number, self.micro_batches, self.stage_turns)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices that have each stage: by replicas of the pipeline, or of the stage alone."""
        of_workers = self.turns or (self.data_parallel,) * len(self.workers)
        return tuple(of_workers[k] for k in self.placement)

    @property
    def turns(self) -> tuple[int, ...]:
        """By worker the replicas that take micro-batches in turn; empty if no worker has such."""
        return tuple(map(len, self.replica_devices)) or (() if self.cluster is None else self.cluster.replicas)

    @property
    def stage_turns(self) -> tuple[int, ...]:
        """By stage the replicas that take micro-batches in turn; empty if none has such."""
        return tuple(self.turns[k] for k in self.placement) if self.turns else ()

    @property
    def row_devices(self) -> tuple[str, ...]:
        """The device of each row of its schedule: of each worker or, where they take turns, of each replica."""
        if not self.replica_devices and self.turns:  # read from a file that knows the first ones only
            return tuple(name for name, count in zip(self.workers, self.turns, strict=True) for _ in range(count))
        return tuple(name for names in self.replica_devices for name in names) or self.workers

    @property
    def stage_rows(self) -> tuple[tuple[int, ...], ...]:
        """By stage the rows of the schedule, and so the devices, that have it: one or, if they take turns, several."""
        ends = [0, *accumulate(self.turns or (1,) * len(self.workers))]
        return tuple(tuple(range(ends[k], ends[k + 1])) for k in self.placement)

    @property
    def memory_limits(self) -> tuple[int | None, ...]:
        """By row the bytes that its stages may take together; None: not known."""
        of_rows = [
            [stage.memory_limit for stage, rows in zip(self.stages, self.stage_rows, strict=True) if d in rows]
            for d in range(len(self.row_devices))
        ]
        return tuple(None if None in limits else sum(filter(None, limits)) for limits in of_rows)

    def costs(self) -> tuple[list[StageCost], list[Transfer]]:
        """Returns the input of the simulator: the costs of each stage, and all transfers between stages.

        Raises:
            ArgumentError: devices are in processes of their own, and the plan does not know what these hand each other.
        """
        transfers = self.sendings
        if self.is_over_processes and (self.sendings or self.packets):
            if self.packets is None:
                raise ArgumentError(
                    "the plan does not know what its stages hand each other over processes: it was made by an older "
                    "version, or by hand; plan the model again"
                )
            transfers = self.packets
        return [self._cost(stage) for stage in self.stages], list(transfers)

    def _cost(self, stage: StagePlan) -> StageCost:
        here, sizes, recomputes = self.here, stage.bytes, self.recomputes(stage.index)
        reduction, buckets = self._reduction(stage)
        portals = sizes.through_portals(recomputes).at(here)
        return StageCost(
            stage.forward_seconds,
            stage.backward_seconds,
            weight=stage.weight_seconds,
            action=stage.action_seconds,
            parameter_bytes=stage.parameter_bytes,
            gradient_bytes=stage.gradient_bytes,
            optimizer_bytes=stage.state_bytes - stage.gradient_bytes,
            version_bytes=self._version_bytes(stage),
            saved_bytes=sizes.held.at(here),
            input_bytes=sizes.kept(recomputes).at(here) - portals,
            portal_bytes=portals,
            working_bytes=sizes.working_at(here),
            update=stage.update_seconds,
            loss=stage.loss_seconds,
            contention=self.contention if stage.device.partition(":")[0] == "cpu" else 1.0,
            host=self._host(stage),
            reduction=reduction,
            reduction_buckets=buckets,
        )

    def _version_bytes(self, stage: StagePlan) -> int:
        """Bytes of the versions of its weights beside the newest; a weight is as large as its gradient."""
        return (self.weight_versions(stage.index) - 1) * stage.gradient_bytes

    def _host(self, stage: StagePlan) -> HostCost | None:
        """Returns what actions take of the host; between processes it hands values over, and waits for its device."""
        if stage.host is None or not self.is_over_processes:
            return stage.host
        return replace(stage.host, runs_ahead=False)

    def _reduction(self, stage: StagePlan) -> tuple[float, int]:
        """Computes the seconds in which the gradients of a stage are reduced over the replicas, and the buckets."""
        if self.cluster is None:
            return 0.0, 1
        return self.cluster.reduction(self.placement[stage.index], stage.gradient_bytes)

    def as_schedule(self) -> Schedule:
        """Its schedule as a table: which device does what, in what order."""
        return self._schedule_of(self.micro_batches)

    def _schedule_of(self, micro_batches: int) -> Schedule:
        n = len(self.stages)
        return make_schedule(self.schedule, n, micro_batches, self.checkpoint, self.placement, self.turns)

    def _steady_schedule(self) -> Schedule:
        """Its schedule with as many micro-batches as are in flight at any time: of a stream, those of several steps."""
        n = len(self.stages)
        return self._schedule_of(steady_micro_batches(self.schedule, n, self.micro_batches, self.stage_turns))

    # -- Formulas in the micro-batch size and the dynamic sizes --------------------------------------------------------

    def memory(self, stage: int, b: int | None = None, **sizes: int) -> sympy.Expr:
        """Bytes that a stage needs at most: parameters, in all versions, gradients, optimizer, activations in flight.

            print(plan.memory(1))       # 802816*b + 1048576
            plan.memory(1, b=8)         # 7471104
            plan.memory(1, b=8, s=512)  # of a plan with a dynamic size: 6272*b*s + 1048576

        Args:
            stage: its index.
            b: samples of a micro-batch. None: the formula, in the symbol `b`.
            sizes: dynamic sizes, by name. Others are as planned or, without `b`, symbols of the formula.

        Raises:
            ArgumentError: there is no such stage or size, or the graph does not hold for this size.
        """
        own = self._stage(stage).bytes
        return self._evaluate(self._memory(self._stage(stage)), b, sizes, (own.working, *own.working_elsewhere))

    def flops(self, stage: int, b: int | None = None, **sizes: int) -> sympy.Expr:
        """Floating-point operations of a stage for one micro-batch, forward and backward, as for `memory`."""
        return self._evaluate(self._stage(stage).flops, b, sizes)

    @property
    def here(self) -> dict[str, int]:
        """The sizes for which seconds and bytes are given, by name: the samples `b` of a micro-batch, dynamic ones."""
        return {"b": self.micro_batch} | {one.name: one.size for one in self.sizes}

    @property
    def largest_sizes(self) -> dict[str, int]:
        """The dynamic sizes of which memory limits are asked, by name."""
        return {one.name: one.largest for one in self.sizes}

    def check_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns dynamic sizes by name.

        Raises:
            ArgumentError: the plan has no such size, or its graph is none for this size.
        """
        known = {one.name: one for one in self.sizes}
        for name, size in sizes.items():
            if name not in known:
                names = ", ".join(map(repr, known))
                has = f"the plan has {names}" if names else "all sizes of the plan are fixed (see dynamic_shapes)"
                raise ArgumentError(f"{name}={size!r} is no size of the plan, nor another argument: {has}")
            one = known[name]
            parse_count(name, size, f"a whole number, the size of {', '.join(one.dims) or 'a dimension'}")
            if size < one.least or (one.most is not None and size > one.most):
                raise ArgumentError(f"{name}={size}: the graph of the plan is one for sizes of {one.bounds}")
        return dict(sizes)

    def _evaluate(
        self, polynomial: Polynomial, b: int | None, sizes: Mapping[str, int], parts: Sequence[Polynomial] = (ZERO,)
    ) -> sympy.Expr:
        """The value or the formula of a polynomial and the largest of these parts."""
        import sympy

        sizes = self.check_sizes(sizes)
        sums = [polynomial + part for part in parts]
        if b is not None:
            b = parse_count("b", b, "a whole number of samples")
            return sympy.Integer(max(one.at({**self.here, **sizes, "b": b}) for one in sums))
        several = polynomial.formula + sympy.Max(*(part.formula for part in parts))
        formula = sums[0].formula if len(sums) == 1 else several
        return formula.subs({s: sizes[s.name] for s in formula.free_symbols if s.name in sizes})

    def _memory(self, stage: StagePlan) -> Polynomial:
        """Computes all but what is held for a moment."""
        schedule, j, sizes = self._steady_schedule(), stage.index, stage.bytes
        static = Polynomial.in_b(stage.parameter_bytes + stage.state_bytes + self._version_bytes(stage))
        counts = micro_batches_in_flight(schedule)[j], activations_in_flight(schedule)[j]
        return stage_memory(static, sizes.kept(self.recomputes(j)), sizes.held, ZERO, *counts)

    def _stage(self, stage: int) -> StagePlan:
        if not 0 <= stage < len(self.stages):
            raise ArgumentError(f"stage={stage}: the plan has {len(self.stages)} stages, 0 to {len(self.stages) - 1}")
        return self.stages[stage]
