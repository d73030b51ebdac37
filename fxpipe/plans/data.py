"""The plan of a pipeline as frozen data: what was decided, what it costs, and nothing of torch.

`PlanData` has the fields and what follows from them; a `Plan`, in `plan.py`, is one that prints and keeps itself in a
file. So all that reads a plan, its text among it, needs the data only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.errors import ArgumentError
from fxpipe.plans.parts import (
    Bottleneck,
    HeavyNode,
    Portal,
    Sending,
    StagePlan,
    Tied,
    Whole,
)
from fxpipe.polynomials import Polynomial
from fxpipe.stage_costs import StageCost, Transfer
from fxpipe.work import Operation

if TYPE_CHECKING:
    import sympy

    from fxpipe.scheduling import Demand, Schedule


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
    sendings: tuple[Sending, ...] = ()
    batch: int | None = None  # samples of the mini-batch that it was made for; None: not known
    evaluating: tuple[str, ...] | None = None  # modules in evaluation mode when it was made; None: not known
    tied: tuple[Tied, ...] = ()
    whole: tuple[Whole, ...] = ()
    heaviest: HeavyNode | None = None  # what bounds the balance: no stage is faster than its slowest node
    operations: tuple[Operation, ...] = ()  # that stages run (`StagePlan.work`); none: not known

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.stages))))

    @property
    def workers(self) -> tuple[str, ...]:
        """For each worker its device."""
        return tuple(self.devices[self.placement.index(k)] for k in range(max(self.placement) + 1))

    @property
    def micro_batches(self) -> int:
        """Of a step: fewer than `chunks` where the mini-batch has fewer samples."""
        return self.chunks if self.batch is None else min(self.chunks, self.batch)

    @property
    def modes(self) -> tuple[str, ...]:
        """For each stage its checkpoint mode."""
        return (self.checkpoint,) * len(self.stages) if isinstance(self.checkpoint, str) else self.checkpoint

    def recomputes(self, stage: int) -> bool:
        """Does a stage run forward again before its backward, for all micro-batches or all but the last?"""
        return self.modes[stage] != "never"

    def in_flight(self, stage: int) -> int:
        """Micro-batches that have gone forward in a stage and not yet back, at most."""
        from fxpipe.scheduling import micro_batches_in_flight

        return micro_batches_in_flight(self.as_schedule())[self._stage(stage).index]

    def costs(self) -> tuple[list[StageCost], list[Transfer]]:
        """What the simulator is told: of each stage, and of all that goes between stages."""
        stages = [self._cost(stage) for stage in self.stages]
        return stages, [Transfer(s.source, s.target, s.bytes, s.seconds, s.over) for s in self.sendings]

    def _cost(self, stage: StagePlan) -> StageCost:
        b, sizes, recomputes = self.micro_batch, stage.bytes, self.recomputes(stage.index)
        portals = sizes.through_portals(recomputes)(b)
        return StageCost(
            stage.forward_seconds,
            stage.backward_seconds,
            weight=stage.weight_seconds,
            action=stage.action_seconds,
            parameter_bytes=stage.parameter_bytes,
            gradient_bytes=stage.gradient_bytes,
            optimizer_bytes=stage.state_bytes - stage.gradient_bytes,
            saved_bytes=sizes.held(b),
            input_bytes=sizes.kept(recomputes)(b) - portals,
            portal_bytes=portals,
            working_bytes=sizes.working(b),
            update=stage.update_seconds,
        )

    def as_schedule(self) -> Schedule:
        """Its schedule as a table: which device does what, in what order."""
        from fxpipe.scheduling import is_searched, make_schedule

        n, demands = len(self.stages), self.demands() if is_searched(self.schedule) else None
        return make_schedule(self.schedule, n, self.micro_batches, self.checkpoint, self.placement, demands)

    def demands(self) -> tuple[Demand, ...]:
        """What a schedule that is searched is told of the stages: so the same plan has the same order, always."""
        from fxpipe.demands import demands_of

        return demands_of(*self.costs(), self.modes, [stage.memory_limit for stage in self.stages])

    # -- formulas in the micro-batch size ------------------------------------------------------------------------------

    def memory(self, stage: int, b: int | None = None) -> sympy.Expr:
        """Bytes that a stage needs at most: parameters, gradients, optimizer, activations of all in flight.

            print(plan.memory(1))       # 802816*b + 1048576
            plan.memory(1, b=8)         # 7471104

        Args:
            stage: its index.
            b: samples of a micro-batch. None: the formula, in the symbol `b`.
        """
        return _at(self._memory(self._stage(stage)), b)

    def flops(self, stage: int, b: int | None = None) -> sympy.Expr:
        """Floating-point operations of a stage for one micro-batch, forward and backward, as for `memory`."""
        return _at(self._stage(stage).flops, b)

    def _memory(self, stage: StagePlan) -> Polynomial:
        from fxpipe.scheduling import activations_in_flight

        fixed = Polynomial((stage.parameter_bytes + stage.state_bytes,))
        received = stage.bytes.kept(self.recomputes(stage.index)).times(self.in_flight(stage.index))
        held = stage.bytes.held.times(activations_in_flight(self.as_schedule())[stage.index])
        return fixed + received + held + stage.bytes.working

    def _stage(self, stage: int) -> StagePlan:
        if not 0 <= stage < len(self.stages):
            raise ArgumentError(f"stage={stage}: the plan has {len(self.stages)} stages, 0 to {len(self.stages) - 1}")
        return self.stages[stage]


def _at(polynomial: Polynomial, b: int | None) -> sympy.Expr:
    import sympy

    return polynomial.formula if b is None else sympy.Integer(polynomial(b))
