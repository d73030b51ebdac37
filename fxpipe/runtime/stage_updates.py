"""Updates of the weights, stage by stage, in the workers: action U.

After a step, the caller's `optimizer.step()` steps the parameters of all stages in parallel, in their workers. With an
optimizer that overlaps, a stage is updated within the step, after the backwards of its row, while other stages run. It
waits for other stages that use its parameters, and for the last loss, whose weight may divide gradients:

    device 0   0F0 0F1 0F2 0B0 ...         0B2 0U2
    device 1       1F0 1B0 1F1 ... 1B2 1U2
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.errors import StateError
from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule
from fxpipe.scheduling.replicas import rows_of_replicas


class StagewiseOptimizer(torch.optim.Optimizer):
    """The interface of an optimizer that can step a part of its parameters."""

    pipe: Any  # whose stages step it
    overlap: bool  # steps within a step of the pipe

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def options_now(self) -> list[dict[str, Any]]:
        return [
            {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key != "params"}
            for group in self.param_groups
        ]

    def check_parts(self, parts: Sequence[Collection[torch.Tensor]]) -> None:
        """Raises `StateError` unless separate steps of these parts are a step of all parameters."""

    def begin_updates(self, in_stream: bool) -> None:
        """Begins a step or a stream in which stages are updated while others run; raises if hooks expect all."""

    def step_parameters(
        self, parameters: Collection[torch.Tensor], options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Steps only these parameters; threads may step others. `options`: of groups in a stream; None: the current."""

    def count_step(self) -> None:
        """Counts a step in which the stages were updated, for hooks and learning rate schedulers."""


@dataclass(frozen=True, slots=True)
class OverlappedUpdates:
    """An optimizer that steps within one step of a pipe."""

    optimizer: StagewiseOptimizer
    parameters: Mapping[int, Sequence[torch.Tensor]]  # by updating stage
    begun: list[int] = field(default_factory=list)  # stages whose weights have changed, or are about to
    options: Sequence[Mapping[str, Any]] | None = None  # for the groups in this step; None: the current ones

    @property
    def identities(self) -> set[int]:
        return {id(parameter) for of_stage in self.parameters.values() for parameter in of_stage}

    def step(self, stage: int, trained: Collection[torch.Tensor] = ()) -> None:
        """Steps a stage; drops gradients even on failure: the next batch would add to them. `trained`: with one."""
        parameters = self.parameters.get(stage, ())
        self.begun.append(stage)
        try:
            self._check_gradients(trained)
            if parameters:
                stepped = [parameter for parameter in parameters if parameter.grad is not None]
                self.optimizer.step_parameters(parameters, self.options)
                self._check_gradients(stepped)
        finally:
            for parameter in parameters:
                parameter.grad = None

    @staticmethod
    def _check_gradients(parameters: Collection[torch.Tensor]) -> None:
        """Raises `StateError` if other code has removed the gradients of a stage during its update."""
        if any(parameter.grad is None for parameter in parameters):
            raise StateError(
                "the gradients of a stage were taken away while it updates (zero_grad, grad = None, in a loop over "
                "train_stream or in another thread), so that an update may be missing: leave that out, each stage "
                "takes away its gradients itself"
            )


@contextmanager
def noting_updates(updates: OverlappedUpdates | None) -> Iterator[None]:
    """A block that runs a step; if it fails, its exception names the stages that were updated."""
    try:
        yield
    except BaseException as error:
        if updates is not None and updates.begun:
            stages = ", ".join(map(str, sorted(updates.begun)))
            error.add_note(
                f"fxpipe: the optimizer overlaps with the step (overlap=True), and had updated the weights of stage"
                f"{'s' if len(updates.begun) > 1 else ''} {stages} by then; those of others are as before the step"
            )
        raise


def actions_before_updates(
    schedule: Schedule, parameters: Mapping[int, Sequence[torch.Tensor]], users: Mapping[int, Collection[int]]
) -> dict[int, tuple[Action, ...]]:
    """Returns for each stage the actions of other rows that must end before its weights change."""
    # `parameters`: by updating stage. `users`: by identity of a parameter, the stages that use it.
    kinds = (ActionKind.BACKWARD, ActionKind.WEIGHT)
    back: dict[int, list[Action]] = {j: [] for j in range(schedule.stages)}
    for action in (action for row in schedule.rows for action in row if action.kind in kinds):
        back[action.stage].append(action)
    losses = [Action(ActionKind.FORWARD, schedule.stages - 1, i) for i in range(schedule.micro_batches)]
    row_of = schedule.row_of
    before = {}
    for j in back:
        sharing = {k for parameter in parameters.get(j, ()) for k in users.get(id(parameter), ())}
        if len({row_of[j, i] for i in range(schedule.micro_batches)}) == 1:
            sharing -= {j}  # else its replicas are included
        else:
            sharing |= {j}
        before[j] = (*losses, *(action for k in sorted(sharing) for action in back[k]))
    return before


def update_rows(
    stages: Collection[int], placement: Sequence[int], micro_batch: int, replicas: Sequence[int] = ()
) -> Rows:
    """Returns rows of U only: the stages of each device, in order; for replicas, in the row whose turn it is."""
    rows = tuple(
        tuple(Action(ActionKind.UPDATE, j, micro_batch) for j in sorted(stages) if placement[j] == d)
        for d in range(max(placement) + 1)
    )
    return rows_of_replicas(rows, replicas or (1,) * len(rows))
