"""A mini-batch on one rank: values and gradients that leave the rank, and when gradients are complete.

Actions run as in one process (`runtime.run`). An arriving value is entered for all stages of this rank and for the cuts
that it still has to cross. `packets` sends and receives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from fxpipe._torch.autograd import takes_gradient
from fxpipe.distributed.packets import PacketValue, cut_of
from fxpipe.distributed.replicas import GradientReduction
from fxpipe.errors import InternalError
from fxpipe.rewriting.program import PIPE_INPUT, ValueKey
from fxpipe.rewriting.relay_routes import GradientKey, RelayRoutes
from fxpipe.runtime.exchange import BoundaryValue, Exchange
from fxpipe.runtime.run import End, Run
from fxpipe.runtime.stage_instance import StageTotals
from fxpipe.runtime.wiring import ValueLink
from fxpipe.scheduling.actions import Action, ActionKind


class RankExchange(Exchange):
    """The values and gradients of one step on this rank."""

    def __init__(self, *arguments: Any, routes: Sequence[RelayRoutes], rank: int):
        """`routes`: by micro-batch."""
        self._routes, self._rank = routes, rank
        self._leaving: dict[tuple[int, int], dict[ValueKey, PacketValue]] = {}  # by cut and micro-batch
        self._returning: dict[tuple[GradientKey, int], torch.Tensor] = {}
        super().__init__(*arguments)

    def _is_here(self, stage: int) -> bool:
        return self._routes[0].is_here(stage, self._rank)  # equal for all micro-batches

    def _enter(self, name: str, i: int, part: Any, wants: bool) -> None:
        if self._is_here(0):  # else parts are placeholders
            part = part.detach() if isinstance(part, torch.Tensor) else part
            self._arrived((PIPE_INPUT, name), i, part, wants)
            if wants:
                self._parts[name, i] = part

    def _arrived(self, key: ValueKey, i: int, value: Any, requires_grad: bool) -> None:
        """Enters a value for the stages of this rank that use it, and for the cuts that it crosses."""
        for user in self.bounds[i].wiring.users.get(key, ()):
            if self._is_here(user):
                target = self._devices[i][user]
                own = self.transport.start_copy(value, target) if self._may_move else value
                self._values[user, *key, i] = BoundaryValue(own, requires_grad)
        routes = self._routes[i]
        for cut, at in enumerate(routes.placement[:-1]):
            if at == self._rank and routes.crosses(cut) and key in routes.down[cut]:
                self._leaving.setdefault((cut, i), {})[key] = PacketValue(value, requires_grad)

    def send(self, maker: int, name: str, i: int, value: Any) -> None:
        wants = False
        if isinstance(value, torch.Tensor):
            wants, value = takes_gradient(value), value.detach()
        self._arrived((maker, name), i, value, wants)

    def send_gradient(self, link: ValueLink, i: int, gradient: torch.Tensor | None) -> None:
        if gradient is None or self._is_here(link.gradient_target):
            super().send_gradient(link, i, gradient)
        else:
            self._returning[(link.value.source, link.value.name, link.gradient_target), i] = gradient

    def take_packet(self, maker: Action) -> list[PacketValue]:
        """Removes and returns what an action sends through its cut: values of F, or gradients (or None) of B."""
        cut, i = cut_of(maker), maker.micro_batch
        if maker.kind is ActionKind.FORWARD:
            leaving = self._leaving.pop((cut, i), {})
            return [leaving[key] for key in self._routes[i].down[cut]]
        return [PacketValue(self._returning.pop((key, i), None)) for key in self._routes[i].up[cut]]

    def enter_packet(self, maker: Action, values: Sequence[PacketValue]) -> Sequence[PacketValue]:
        """Enters the values of F, or the gradients of B, that a packet begins with; returns the rest."""
        cut, i = cut_of(maker), maker.micro_batch
        if maker.kind is ActionKind.FORWARD:
            for key, one in zip(self._routes[i].down[cut], values, strict=True):
                self._arrived(key, i, one.value, one.requires_grad)
            return ()
        keys = self._routes[i].up[cut]
        for gradient_key, one in zip(keys, values[: len(keys)], strict=True):
            if one.value is None:
                continue
            _, name, target = gradient_key
            if self._is_here(target):
                if (target, name, i) in self._gradients:
                    raise InternalError(f"two gradients for {name} at stage {target}, micro-batch {i}")
                self._gradients[target, name, i] = one.value
            else:
                self._returning[gradient_key, i] = one.value
        return values[len(keys) :]

    def check_empty(self) -> None:
        """Raises `InternalError` if values or gradients are left that no packet has taken."""
        if left := [*self._leaving, *self._returning]:
            raise InternalError(f"left behind at the end of a step: {left[:4]}")


class RankStepEnd(End):
    """Gives each gradient to the sum over replicas as soon as it is complete."""

    def __init__(self, reduction: GradientReduction, row: tuple[Action, ...]):
        """`row`: of this rank."""
        super().__init__()
        self._reduction, self._last = reduction, _last_backwards(row)

    def before(self, run: Run, t: int, action: Action) -> None:
        if action in self._last:
            run.mini_batches[t].totals[action.stage].when_final = partial(self._give, action.stage)

    def after(self, run: Run, t: int, action: Action) -> None:
        run.mini_batches[t].totals[action.stage].when_final = None

    def _give(self, stage: int, totals: StageTotals, name: str) -> None:
        if (name, stage) in self._reduction.like and not totals.sums[name].is_sparse:
            self._reduction.give((name, stage), totals.sums.pop(name))


@lru_cache(maxsize=32)
def _last_backwards(row: tuple[Action, ...]) -> Collection[Action]:
    """Returns the actions after which every gradient that they add to is complete."""
    last: set[Action] = set()
    backwards = [action for action in row if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)]
    split = {(action.stage, action.micro_batch) for action in row if action.kind is ActionKind.WEIGHT}
    for j in {action.stage for action in backwards}:
        *_, end = own = [action for action in backwards if action.stage == j]
        last.add(end)
        if end.kind is ActionKind.WEIGHT:
            *_, last_b = (action for action in own if action.kind is ActionKind.BACKWARD)
            if (j, last_b.micro_batch) in split:  # otherwise B computes weight gradients, to which W adds
                last.add(last_b)
    return frozenset(last)
