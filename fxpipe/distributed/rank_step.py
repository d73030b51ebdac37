"""A step of which only the stages of this rank are here, as the engine of `torch.distributed.pipelining` runs it.

What each action does is the one-process step's (`runtime.step`). Around it stands the exchange of packets: who is to
receive begins early and waits when the action needs it. A packet that was sent is given back when it was taken:
for values their gradients say so, for gradients a number that goes with later values. (gloo does not tell, but by
waiting.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from fxpipe.distributed.packets import Mailbox
from fxpipe.distributed.rank_exchange import RankExchange
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.executors import raise_failure
from fxpipe.runtime.losses import MicroBatchLosses
from fxpipe.runtime.stage_instance import StageInstance
from fxpipe.runtime.step import Step
from fxpipe.runtime.step_inputs import StepInputs
from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule


class AbsentStage:
    """Stands for a stage that is on another rank."""


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
        rank: int,
        losses: MicroBatchLosses | None = None,
        keep_outputs: bool = False,
        look_at_elements: bool = False,
        first_micro_batch: int = 0,
    ):
        """`routes`: by micro-batch."""
        self.routes, self.rank, self.first_micro_batch = routes[0], rank, first_micro_batch
        self._routes_of = routes
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
        self.rank_exchange = RankExchange(inputs, self.transport, self.grad, self._routes_of, self.rank)
        return self.rank_exchange

    def _open_stage(self, bound: BoundProgram, j: int, tensors: ModelTensors, is_split: bool) -> StageInstance:
        if self.routes.is_here(j, self.rank):
            return super()._open_stage(bound, j, tensors, is_split)
        return AbsentStage()  # type: ignore[return-value]


class RankRow:
    """The row of this rank: its actions, and the packets around them. The `RowActions` of the engine."""

    def __init__(
        self,
        step: RankStep,
        rows: Rows,
        mailbox: Mailbox,
        group: RankGroup,
        packet_key: tuple[Any, ...],
        when_final: Callable[[str, int], None] | None = None,
    ):
        """Makes the row.

        Args:
            packet_key: the same for steps whose packets are the same, as a rule: graph and sizes of inputs.
            when_final: told of each parameter, and stage here, whose gradient is complete.
        """
        self._step, self._mailbox, self._group, self._packet_key = step, mailbox, group, packet_key
        self._exchange, self._routes, self._count = step.rank_exchange, step.routes, step.micro_batches
        # By stage, the micro-batches in the order in which they go back.
        self._orders = {
            j: [a.micro_batch for row in rows for a in row if a.kind is ActionKind.BACKWARD and a.stage == j]
            for j in range(len(step.devices))
        }
        self._when_final = when_final
        self._last = _last_backwards(rows, step.split)
        self._taken: Counter[int] = Counter()  # by cut, the packets of gradients that this rank has taken
        self._given_back: Counter[int] = Counter()  # by cut, those it has sent, and whose memory it has given back

    def forward(self, j: int, i: int) -> None:
        if j and self._routes.crosses(j - 1):
            what = _words(ActionKind.FORWARD, j - 1, i)
            values = self._mailbox.receive(*self._values(j - 1, i), self._routes.rank(j - 1), what)
            self._exchange.enter_values(j - 1, i, values)
            self._give_back(j - 1, self._mailbox.note)
        self._perform(ActionKind.FORWARD, j, i)

    def backward(self, j: int, i: int) -> None:
        if j < len(self._step.devices) - 1 and self._routes.crosses(j):
            what = _words(ActionKind.BACKWARD, j + 1, i)
            gradients = self._mailbox.receive(*self._gradients(j, i), self._routes.rank(j + 1), what)
            self._exchange.enter_gradients_of_cut(j, i, gradients)
            self._taken[j] += 1
            key, _ = self._values(j, i)
            self._mailbox.finish_send(key, what)  # what has come back depends on it: it was taken
        if (ActionKind.RECOMPUTE, j, i) in self._step.recomputed:
            self._perform(ActionKind.RECOMPUTE, j, i)  # the engine has no word for it: as late as can be
        self._perform(ActionKind.BACKWARD, j, i)

    def weight_gradients(self, j: int, i: int) -> None:
        self._perform(ActionKind.WEIGHT, j, i)

    def send_values(self, j: int, i: int) -> None:
        values = self._exchange.values_of_cut(j, i)
        self._mailbox.send(*self._values(j, i), self._routes.rank(j + 1), values, self._taken[j])

    def expect_values(self, j: int, i: int) -> None:
        self._mailbox.expect(*self._values(j - 1, i), self._routes.rank(j - 1))

    def send_gradients(self, j: int, i: int) -> None:
        values = self._exchange.gradients_of_cut(j - 1, i)
        self._mailbox.send(*self._gradients(j - 1, i), self._routes.rank(j - 1), values)

    def expect_gradients(self, j: int, i: int) -> None:
        self._mailbox.expect(*self._gradients(j, i), self._routes.rank(j + 1))

    def _give_back(self, cut: int, taken: int) -> None:
        """Gives back the memory of so many packets of gradients, which the other side has taken in its order."""
        for i in self._orders[cut][self._given_back[cut] : taken]:
            key, _ = self._gradients(cut, i)
            self._mailbox.finish_send(key, "its gradients to be taken")
        self._given_back[cut] = max(taken, self._given_back[cut])

    def _values(self, cut: int, i: int) -> tuple[Any, int]:
        """Returns the key and the tag of a packet that goes down through a cut."""
        return (*self._packet_key, "values", cut, i), 2 * (cut * self._count + i)

    def _gradients(self, cut: int, i: int) -> tuple[Any, int]:
        return (*self._packet_key, "gradients", cut, i), 2 * (cut * self._count + i) + 1

    def _told_of(self, j: int) -> Callable[[str], None]:
        when_final = self._when_final
        assert when_final is not None
        return lambda name: when_final(name, j)

    def _perform(self, kind: ActionKind, j: int, i: int) -> None:
        action = Action(kind, j, i)
        self._group.doing = str(action)
        if self._when_final is not None:
            self._step.totals[j].when_final = self._told_of(j) if action in self._last else None
        self._step.perform(action)
        raise_failure(self._step)


def _last_backwards(rows: Rows, split: Collection[tuple[int, int]]) -> set[Action]:
    """Returns the actions in which each gradient that they make is complete."""
    last: set[Action] = set()
    backwards = [a for row in rows for a in row if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)]
    for j in {action.stage for action in backwards}:
        *_, end = own = [action for action in backwards if action.stage == j]
        last.add(end)
        if end.kind is ActionKind.WEIGHT:
            *_, last_b = (action for action in own if action.kind is ActionKind.BACKWARD)
            if (j, last_b.micro_batch) in split:  # else it runs its tape itself, and W adds to what that makes
                last.add(last_b)
    return last


def first_free_tag(schedule: Schedule) -> int:
    """Returns the first tag that no packet of a cut has."""
    return 2 * schedule.stages * schedule.micro_batches


def _words(kind: ActionKind, j: int, i: int) -> str:
    return f"the result of {Action(kind, j, i)} (stage {j}, micro-batch {i})"
