"""Updates of the weights, stage by stage, in the workers: action U.

Behind a step each stage's parameters are stepped in the worker of the stage, all of them side by side, when the caller
calls `optimizer.step()`. Nobody waits for anybody: the gradients of all stages are there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

from fxpipe._torch.thread_state import ThreadState
from fxpipe.runtime.action_performer import ActionPerformer
from fxpipe.runtime.caller_context import CallerContext, thread_defaults
from fxpipe.runtime.transport import Transport
from fxpipe.scheduling.actions import Action, ActionKind, Rows


class StagewiseOptimizer(ABC):
    """The runtime's view of an optimizer that can step some of its parameters by themselves."""

    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters of all groups, in order."""

    @abstractmethod
    def step_parameters(self, parameters: Collection[torch.Tensor]) -> None:
        """Steps these and no others. Several threads may do so at once, each for parameters of its own."""


def by_stage(
    parameters: Sequence[torch.Tensor], stage_of: Callable[[torch.Tensor], int]
) -> dict[int, list[torch.Tensor]]:
    """Groups parameters by the stage that updates them, in order of the stages."""
    groups: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(stage_of(parameter), []).append(parameter)
    return dict(sorted(groups.items()))


def update_rows(stages: Collection[int], placement: Sequence[int], micro_batch: int) -> Rows:
    """Returns rows of U alone: for each device those of its stages, in order."""
    return tuple(
        tuple(Action(ActionKind.UPDATE, j, micro_batch) for j in sorted(stages) if placement[j] == d)
        for d in range(max(placement) + 1)
    )


class UpdateStep(ActionPerformer):
    """The updates of all stages behind a step. `updates`: by stage, what U does."""

    def __init__(
        self, updates: Mapping[int, Callable[[], None]], devices: Sequence[torch.device], context: CallerContext
    ):
        super().__init__(devices, Transport(devices), context)
        self._updates = updates
        self._state = ThreadState.now()

    def in_row(self) -> AbstractContextManager[None]:
        return thread_defaults(self._state)

    def is_ready(self, action: Action) -> bool:
        return True

    def wait(self, action: Action) -> None: ...

    def pass_on(self, action: Action) -> None: ...

    def open_all(self) -> None: ...

    def run_action(self, action: Action) -> None:
        with on_all_streams(self.transport, self.devices, self.devices[action.stage]):
            self._updates[action.stage]()


def on_all_streams(
    transport: Transport, devices: Sequence[torch.device], device: torch.device
) -> AbstractContextManager[ExitStack]:
    """A block on the step's streams of all devices, of which `device` is the current one.

    What an optimizer reads of another device (a learning rate that is a tensor, the scale of a `GradScaler`) torch
    copies on the current streams of both.
    """
    with ExitStack() as stack:
        for one in dict.fromkeys(devices):
            if one != device:
                stack.enter_context(transport.at(one))
        stack.enter_context(transport.at(device))
        return stack.pop_all()
