"""The plan of a pipeline as frozen data, independent of torch; `Plan` (`saved_plan.py`) also prints and saves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from fxpipe.cluster import Cluster
from fxpipe.errors import ArgumentError
from fxpipe.hardware import Operation
from fxpipe.scheduling import Schedule, activations_in_flight, make_schedule, micro_batches_in_flight
from fxpipe.scheduling.factory import steady_schedule
from fxpipe.scheduling.streams import weight_versions
from fxpipe.simulation.costs import HostCost, StageCost, Transfer, stage_memory
from fxpipe.utils.polynomial import ZERO, Polynomial
from fxpipe.utils.units import parse_count

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of a stage besides its parameters, for a micro-batch of `b` samples and any dynamic sizes.

    A stage that recomputes keeps everything it receives; any other stage keeps only what its backward needs.
    """

    received: Polynomial = ZERO  # received values that backward needs; for each micro-batch in flight
    held: Polynomial = ZERO  # other values saved for backward; if the stage recomputes, from the recomputation on
    working: Polynomial = ZERO  # temporary memory of a node
    portals: Polynomial = ZERO  # part of `received` that arrived through portals
    again: Polynomial = ZERO  # further received values, kept only if the stage recomputes
    portals_again: Polynomial = ZERO  # part of `again` that arrived through portals
    working_elsewhere: tuple[Polynomial, ...] = ()  # nodes that need more than `working` at other sizes

    def kept(self, recomputes: bool) -> Polynomial:
        """Returns the bytes of the received values that the stage keeps."""
        return self.received + self.again if recomputes else self.received

    def through_portals(self, recomputes: bool) -> Polynomial:
        """Returns the bytes that arrived through portals, a part of `kept`."""
        return self.portals + self.portals_again if recomputes else self.portals


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage for one micro-batch of any size. Zero: in proportion to the samples."""

    forward: Polynomial = ZERO
    backward: Polynomial = ZERO
    weight: Polynomial = ZERO  # the part of backward that computes gradients of parameters
    loss: Polynomial = ZERO


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """A dynamic size of the inputs, other than the batch; formulas use it by its name."""

    name: str
    size: int  # for which seconds and bytes are given
    largest: int  # announced, planned or observed; must fit within the memory limits
    least: int = 1  # bounds of the sizes for which the graph is valid
    most: int | None = None
    dims: tuple[str, ...] = ()  # descriptions of the input dimensions that have this size

    @property
    def usual_sizes(self) -> tuple[int, ...]:
        """Typical sizes: half of the planned size, the planned size, twice it, and the largest, within the bounds."""
        wanted = max(self.largest, 2 * self.size)
        most = max(self.size, wanted if self.most is None else min(wanted, self.most))
        return max(self.least, self.size // 2), self.size, min(2 * self.size, most), min(self.largest, most)

    @property
    def bounds(self) -> str:
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class StageWork:
    """The operations of a stage for one micro-batch: pairs of (index in `Plan.operations`, count)."""

    forward: tuple[tuple[int, int], ...] = ()
    backward: tuple[tuple[int, int], ...] = ()
    to_inputs: tuple[tuple[int, int], ...] = ()  # backward if no parameter needs a gradient
    loss: tuple[tuple[int, int], ...] = ()  # forward and backward


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A block of graph nodes that runs on one device. Seconds and bytes are for one micro-batch."""

    index: int
    device: str
    nodes: tuple[str, ...]  # in execution order
    code: str  # printed source, for reading
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int  # all parameters that the stage uses; a weight used by two stages counts in both
    activation_bytes: int  # kept for backward
    sent_bytes: int  # to the next stage, without portals (`Plan.portals`)
    weight_seconds: float = 0.0  # the part of backward that computes gradients of parameters
    action_seconds: float = 0.0  # constant overhead of an action, in addition to the seconds above
    state_bytes: int = 0  # gradients of parameters, and optimizer state
    gradient_bytes: int = 0  # the gradients within `state_bytes`
    memory_limit: int | None = None  # bytes that the stage may use; None: unknown
    bytes: StageBytes = field(default_factory=StageBytes)
    flops: Polynomial = ZERO  # forward and backward of one micro-batch, without recomputation
    formulas: StageSeconds = field(default_factory=StageSeconds)  # its seconds for any size
    sent: Polynomial = ZERO  # `sent_bytes` for any size
    work: StageWork = field(default_factory=StageWork)
    update_seconds: float = 0.0  # one optimizer step on known hardware: reads and writes of its memory
    modules: tuple[str, ...] = ()  # for each node, the path of the module that created it
    shares: tuple[float, ...] = ()  # for each node, its share of the stage's seconds, 0 to 1
    loss_seconds: float = 0.0  # forward and backward of the loss, on the last stage
    host: HostCost | None = None  # host time of its actions; None: unknown

    @property
    def seconds(self) -> float:
        """Seconds of all computation for one micro-batch, without recomputation."""
        return self.forward_seconds + self.loss_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Portal:
    """The direct transfer of a value that skips stages."""

    name: str
    source: int
    target: int  # stage that uses it
    bytes: int  # for one micro-batch
    size: Polynomial = ZERO  # `bytes` for any size
    line: str = ""  # the user's line that computes it: `path/unet.py:31`


@dataclass(frozen=True, slots=True)
class PlannedTransfer(Transfer):
    """All values, or all gradients, that one stage sends to another, with their bytes for any size."""

    bytes: int
    fixed_seconds: float = 0.0  # part of `seconds` that does not depend on the sizes
    size: Polynomial = ZERO  # `bytes` for any size
    values: int = 1
    relayed: Polynomial = ZERO  # the part of `size` that the target only forwards


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The slowest stage of a candidate balance."""

    balance: str
    seconds: float  # for one micro-batch: forward, backward, and transfers to the stage
    fits: bool = True  # True if the stages fit into the memory of the devices


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that has several names or is used by several stages."""

    names: tuple[str, ...]  # in the order of the model
    stages: tuple[int, ...]  # stages that use it: the first owns it, the others copy it in each step
    bytes: int


@dataclass(frozen=True, slots=True)
class OpaqueNode:
    """A module, or the part of a forward after some line, that is a single node of the graph."""

    name: str  # the module's name, or a description of its start in forward
    why: str
    line: str  # the user's line that calls it; empty if unknown


@dataclass(frozen=True, slots=True)
class HeaviestNode:
    """The slowest node."""

    name: str
    stage: int
    seconds: float  # for one micro-batch, forward and backward
    line: str  # the user's line; empty if unknown
    formula: Polynomial = ZERO  # `seconds` for any size


@dataclass(frozen=True, slots=True)
class PlanData:
    """All decisions about a pipeline."""

    stages: tuple[StagePlan, ...]
    portals: tuple[Portal, ...]
    devices: tuple[str, ...]  # by stage
    schedule: str  # a name, or a user's table as text
    chunks: int  # as requested; see `micro_batches`
    micro_batch: int  # samples in the largest micro-batch, for which seconds and bytes are given
    checkpoint: str | tuple[str, ...]  # one mode, or one for each stage
    balance: str
    fingerprint: str
    why: tuple[str, ...] = ()  # why the graph is not a plain recording
    guards: tuple[str, ...] = ()  # values that forward read; other values need another graph
    estimated_for: str = ""  # hardware for which seconds were estimated; empty if measured
    placement: tuple[int, ...] = ()  # for each stage, its worker; default: one worker per stage
    bottlenecks: tuple[Bottleneck, ...] = ()
    sendings: tuple[PlannedTransfer, ...] = ()
    packets: tuple[PlannedTransfer, ...] = ()  # with processes: between adjacent stages, all values that cross the cut
    batch: int | None = None  # samples of the planned mini-batch of one replica; None: unknown
    is_joint: bool = False  # an output needs all samples: all F of a mini-batch run before its first B
    evaluating: tuple[str, ...] | None = None  # modules that were in evaluation mode; None: unknown
    tied: tuple[TiedParameter, ...] = ()
    whole: tuple[OpaqueNode, ...] = ()
    heaviest: HeaviestNode | None = None  # bounds the balance: no stage is faster than its slowest node
    operations: tuple[Operation, ...] = ()  # operations of the stages (`StagePlan.work`); empty: unknown
    sizes: tuple[PlannedSize, ...] = ()  # dynamic sizes for which figures are given; empty: all sizes are fixed
    processes: bool = False  # True: each device has its own process; False: one interpreter queues for all
    cluster: Cluster | None = None  # devices of the pipeline and its replicas; None: local devices
    # By worker, the devices of replicas that take micro-batches in turn (`Cluster.replicas`); empty: no such replicas.
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
        """The number of micro-batches of a step: `chunks`, or fewer if the mini-batch has fewer samples."""
        return self.chunks if self.batch is None else min(self.chunks, self.batch)

    @property
    def is_over_processes(self) -> bool:
        """True if each device has its own process: as planned, or because devices are in several nodes."""
        return self.processes or (self.cluster is not None and self.cluster.needs_processes)

    @property
    def data_parallel(self) -> int:
        """The number of replicas of the pipeline; each runs all stages on its part of the mini-batch."""
        return 1 if self.cluster is None else self.cluster.data

    @property
    def modes(self) -> tuple[str, ...]:
        """The checkpoint mode of each stage."""
        return (self.checkpoint,) * len(self.stages) if isinstance(self.checkpoint, str) else self.checkpoint

    def recomputes(self, stage: int) -> bool:
        """Returns True if the stage recomputes all micro-batches, or all but the last."""
        return self.modes[stage] != "never"

    def in_flight(self, stage: int) -> int:
        """Returns the maximum number of micro-batches whose forward on a stage has run and whose backward has not."""
        return micro_batches_in_flight(self._steady_schedule())[self._stage(stage).index]

    def weight_versions(self, stage: int) -> int:
        """Returns the maximum number of weight versions of a stage: 1, unless mini-batches stream through it."""
        number = self._stage(stage).index
        how = self.micro_batches, self.stage_turns, self.is_joint
        return weight_versions(self.schedule, len(self.stages), number, *how)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices of each stage: replicas of the pipeline, or of the stage alone."""
        of_workers = self.turns or (self.data_parallel,) * len(self.workers)
        return tuple(of_workers[k] for k in self.placement)

    @property
    def turns(self) -> tuple[int, ...]:
        """By worker, the number of replicas that take micro-batches in turn; empty if there are none."""
        return tuple(map(len, self.replica_devices)) or (() if self.cluster is None else self.cluster.replicas)

    @property
    def stage_turns(self) -> tuple[int, ...]:
        """By stage, the number of replicas that take micro-batches in turn; empty if there are none."""
        return tuple(self.turns[k] for k in self.placement) if self.turns else ()

    @property
    def row_devices(self) -> tuple[str, ...]:
        """The device of each row of the schedule: of each worker or, if replicas take turns, of each replica."""
        if not self.replica_devices and self.turns:  # read from a file that has only the first devices
            return tuple(name for name, count in zip(self.workers, self.turns, strict=True) for _ in range(count))
        return tuple(name for names in self.replica_devices for name in names) or self.workers

    @property
    def stage_rows(self) -> tuple[tuple[int, ...], ...]:
        """By stage, its rows of the schedule: one, or several if replicas take turns."""
        ends = [0, *accumulate(self.turns or (1,) * len(self.workers))]
        return tuple(tuple(range(ends[k], ends[k + 1])) for k in self.placement)

    @property
    def memory_limits(self) -> tuple[int | None, ...]:
        """By row, the bytes that its stages can use together; None: unknown."""
        of_rows = [
            [stage.memory_limit for stage, rows in zip(self.stages, self.stage_rows, strict=True) if d in rows]
            for d in range(len(self.row_devices))
        ]
        return tuple(None if None in limits else sum(filter(None, limits)) for limits in of_rows)

    def costs(self) -> tuple[list[StageCost], list[Transfer]]:
        """Returns the input of the simulator: the costs of each stage, and all transfers between stages.

        Raises:
            ArgumentError: devices have their own processes, and the plan has no packets between them.
        """
        if self.is_over_processes and self.sendings and not self.packets and len(self.workers) > 1:
            raise ArgumentError(
                "the plan does not know what its stages hand each other over processes: it was made by hand; plan the "
                "model again"
            )
        transfers = self.packets if self.is_over_processes else self.sendings
        return [self._cost(stage) for stage in self.stages], list(transfers)

    def _cost(self, stage: StagePlan) -> StageCost:
        here, sizes, recomputes = self.here, stage.bytes, self.recomputes(stage.index)
        reduction, buckets, host = 0.0, 1, stage.host
        if self.cluster is not None:
            reduction, buckets = self.cluster.reduction(self.placement[stage.index], stage.gradient_bytes)
        if host is not None and self.is_over_processes:
            host = replace(host, runs_ahead=False)  # waits for its device to pass values
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
            working_bytes=max(one.at(here) for one in (sizes.working, *sizes.working_elsewhere)),
            update=stage.update_seconds,
            loss=stage.loss_seconds,
            joint=self.micro_batches if self.is_joint else 1,
            host=host,
            reduction=reduction,
            reduction_buckets=buckets,
        )

    def _version_bytes(self, stage: StagePlan) -> int:
        """Computes the bytes of all weight versions but the newest; a weight is as large as its gradient."""
        return (self.weight_versions(stage.index) - 1) * stage.gradient_bytes

    def as_schedule(self, micro_batches: int | None = None) -> Schedule:
        """Returns the schedule as a table: the actions of each device, in order. `micro_batches` None: as planned."""
        m = self.micro_batches if micro_batches is None else micro_batches
        return make_schedule(self.schedule, len(self.stages), m, self.checkpoint, self.placement, self.turns)

    def _steady_schedule(self) -> Schedule:
        """Returns the schedule with enough micro-batches for the steady state, in a stream of several steps."""
        return steady_schedule(self.schedule, self.micro_batches, self.modes, self.placement, self.turns, self.is_joint)

    def memory(self, stage: int, b: int | None = None, **sizes: int) -> sympy.Expr:
        """Computes the peak bytes of a stage: all weight versions, gradients, optimizer, activations in flight.

            print(plan.memory(1))       # 802816*b + 1048576
            plan.memory(1, b=8)         # 7471104
            plan.memory(1, b=8, s=512)  # of a plan with a dynamic size: 6272*b*s + 1048576

        Args:
            stage: its index.
            b: samples of a micro-batch. None: the formula, in the symbol `b`.
            sizes: dynamic sizes, by name. Others are as planned or, without `b`, symbols of the formula.

        Raises:
            ArgumentError: the plan has no such stage or size, or the graph is not valid for this size.
        """
        own, schedule = self._stage(stage), self._steady_schedule()
        static = Polynomial.in_b(own.parameter_bytes + own.state_bytes + self._version_bytes(own))
        counts = micro_batches_in_flight(schedule)[stage], activations_in_flight(schedule)[stage]
        kept = stage_memory(static, own.bytes.kept(self.recomputes(stage)), own.bytes.held, ZERO, *counts)
        return self._evaluate(kept, b, sizes, (own.bytes.working, *own.bytes.working_elsewhere))

    def flops(self, stage: int, b: int | None = None, **sizes: int) -> sympy.Expr:
        """Computes the floating-point operations of a stage for one micro-batch, forward and backward; see `memory`."""
        return self._evaluate(self._stage(stage).flops, b, sizes)

    @property
    def here(self) -> dict[str, int]:
        """The sizes for which seconds and bytes are given, by name: samples `b` of a micro-batch, dynamic sizes."""
        return {"b": self.micro_batch} | {one.name: one.size for one in self.sizes}

    def check_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns dynamic sizes by name; raises `ArgumentError` for an unknown or invalid size."""
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
        """Computes the value or the formula of the polynomial plus the largest of `parts`."""
        import sympy

        sizes = self.check_sizes(sizes)
        sums = [polynomial + part for part in parts]
        if b is not None:
            b = parse_count("b", b, "a whole number of samples")
            return sympy.Integer(max(one.at({**self.here, **sizes, "b": b}) for one in sums))
        several = polynomial.formula + sympy.Max(*(part.formula for part in parts))
        formula = sums[0].formula if len(sums) == 1 else several
        return formula.subs({s: sizes[s.name] for s in formula.free_symbols if s.name in sizes})

    def _stage(self, stage: int) -> StagePlan:
        if not 0 <= stage < len(self.stages):
            raise ArgumentError(f"stage={stage}: the plan has {len(self.stages)} stages, 0 to {len(self.stages) - 1}")
        return self.stages[stage]
