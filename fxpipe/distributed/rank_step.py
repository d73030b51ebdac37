"""A step of which only the stages of this rank are here.

What each action does is the one-process step's (`runtime.step`); `packet_link` brings what it needs of other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, partial

from torch import nn

from fxpipe.distributed.gradient_reduction import GradientReduction
from fxpipe.distributed.packet_link import PacketLink
from fxpipe.distributed.rank_exchange import RankExchange
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.losses import MicroBatchLosses
from fxpipe.runtime.step import OpenProgram, Step
from fxpipe.runtime.step_inputs import StepInputs
from fxpipe.scheduling.actions import Action, ActionKind, Schedule


class RankStep(Step):
    """One mini-batch on one rank. The loss is there where the last stage is."""

    def __init__(
        self,
        inputs: StepInputs,
        model: nn.Module,
        seed: int,
        schedule: Schedule,
        ambient: CallerContext,
        routes: Sequence[RelayRoutes],
        group: RankGroup,
        link: PacketLink,
        losses: MicroBatchLosses | None = None,
        keep_outputs: bool = False,
        look_at_elements: bool = False,
        first_micro_batch: int = 0,
        reduction: GradientReduction | None = None,
    ):
        """Makes the step.

        Args:
            routes: by micro-batch.
            reduction: gets each gradient as soon as it is complete.
        """
        self.first_micro_batch = first_micro_batch
        self._routes, self._group, self._link, self._reduction = routes, group, link, reduction
        self._last = _last_backwards(schedule.rows[group.rank]) if reduction is not None else frozenset()
        actions = [action for row in schedule.rows for action in row]
        super().__init__(
            inputs,
            model,
            seed,
            frozenset(action for action in actions if action.kind is ActionKind.RECOMPUTE),
            ambient,
            losses,
            keep_outputs,
            schedule.split_backwards,
            look_at_elements,
        )

    def _open_exchange(self, inputs: StepInputs) -> Exchange:
        self.rank_exchange = RankExchange(inputs, self.transport, self.grad, self._routes, self._group.rank)
        return self.rank_exchange

    def _open(self, bound: BoundProgram, tensors: ModelTensors, split_stages: set[int]) -> OpenProgram:
        here = [j for j in range(len(self.devices)) if self._routes[0].is_here(j, self._group.rank)]
        return OpenProgram(
            bound, tensors, {j: self._open_replica(bound, j, 0, tensors, j in split_stages) for j in here}
        )

    def wait(self, action: Action) -> None:
        if self.failure is not None:
            return
        maker = self._link.maker_before(action)
        if maker is not None:
            self.rank_exchange.enter_packet(maker, self._link.receive(maker))
        self._group.doing = str(action)

    def perform(self, action: Action) -> None:
        totals = self.totals[action.stage]
        if action in self._last:
            totals.when_final = partial(self._give, action.stage)
        super().perform(action)
        totals.when_final = None  # which refers to this step

    def _give(self, j: int, name: str) -> None:
        """Gives a gradient that is complete to the reduction, if that sums it."""
        sums, reduction = self.totals[j].sums, self._reduction
        if reduction is not None and reduction.has((name, j)) and not sums[name].is_sparse:
            reduction.give((name, j), sums.pop(name))

    def pass_on(self, action: Action) -> None:
        if self._link.is_sent(action):
            self._link.send(action, self.rank_exchange.take_packet(action))
        super().pass_on(action)


@lru_cache(maxsize=32)
def _last_backwards(row: tuple[Action, ...]) -> Collection[Action]:
    """Returns the actions in which each gradient that they make is complete."""
    last: set[Action] = set()
    backwards = [action for action in row if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)]
    split = {(action.stage, action.micro_batch) for action in row if action.kind is ActionKind.WEIGHT}
    for j in {action.stage for action in backwards}:
        *_, end = own = [action for action in backwards if action.stage == j]
        last.add(end)
        if end.kind is ActionKind.WEIGHT:
            *_, last_b = (action for action in own if action.kind is ActionKind.BACKWARD)
            if (j, last_b.micro_batch) in split:  # else it runs its tape itself, and W adds to what that makes
                last.add(last_b)
    return frozenset(last)
