"""The schedule engine of `torch.distributed.pipelining`, without its stages.

The engine (`_PipelineScheduleRuntime`) runs the row of one process: it puts sends and receives between the actions of a
schedule so that all rows come to their end, and performs them one after the other. Its own stages have fixed shapes,
run a metadata pass that changes batch norm, and scale accumulated gradients; so it is told of no shapes, no inputs and
no loss here, and each action goes to a `RowActions` instead. `torch.distributed.pipelining` is a prototype, and all of
this is private. It is required, with torch 2.11 to 2.14, where a pipe runs over processes, and imported only there.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import _PipelineStageBase

require_attributes(_PipelineScheduleRuntime, "_step_microbatches", "_initialize_stages", "_simulate")
require_attributes(_PipelineStageBase, "has_backward", "is_first", "is_last")

_SCHEDULES_LOGGER = "torch.distributed.pipelining.schedules"


class RowActions(Protocol):
    """The process's part of a step, an action at a time: `j` is a stage of its own, `i` a micro-batch."""

    def forward(self, j: int, i: int) -> None: ...
    def backward(self, j: int, i: int) -> None: ...
    def weight_gradients(self, j: int, i: int) -> None: ...
    def send_values(self, j: int, i: int) -> None:
        """Sends what stage j + 1, on another process, receives."""

    def expect_values(self, j: int, i: int) -> None:
        """Begins to receive what stage j - 1, on another process, sends; `forward` waits for it."""

    def send_gradients(self, j: int, i: int) -> None:
        """Sends what stage j - 1, on another process, receives."""

    def expect_gradients(self, j: int, i: int) -> None:
        """Begins to receive what stage j + 1, on another process, sends; `backward` waits for it."""


class _EngineStage(_PipelineStageBase):
    """The engine's view of a stage. Neighbours on one process share its tables, and hand each other nothing here."""

    actions: RowActions

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    # The transfers are begun here and not by the engine, which would keep each tensor that is sent to the step's end.

    def get_fwd_send_ops(self, i: int) -> list[Any]:
        self.actions.send_values(self.stage_index, i)
        return []

    def get_fwd_recv_ops(self, i: int) -> list[Any]:
        self.actions.expect_values(self.stage_index, i)
        return []

    def get_bwd_send_ops(self, i: int) -> list[Any]:
        self.actions.send_gradients(self.stage_index, i)
        return []

    def get_bwd_recv_ops(self, i: int) -> list[Any]:
        self.actions.expect_gradients(self.stage_index, i)
        return []

    def set_local_fwd_input(self, *args: Any, **kwargs: Any) -> None: ...

    def set_local_bwd_input(self, *args: Any, **kwargs: Any) -> None: ...

    def get_local_bwd_output(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def forward_one_chunk(self, i: int, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.actions.forward(self.stage_index, i)

    def backward_one_chunk(self, i: int, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.actions.backward(self.stage_index, i)

    def backward_weight_one_chunk(self, i: int, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.actions.weight_gradients(self.stage_index, i)


class _Engine(_PipelineScheduleRuntime):
    """The engine with stages that need no preparation."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None: ...


class ScheduleEngine:
    """Runs this process's row of one schedule.

    engine = ScheduleEngine({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}, group, device)
    engine.run(actions)
    """

    def __init__(self, rows: Mapping[int, Sequence[str]], group: dist.ProcessGroup, device: torch.device):
        """`rows`: by rank the actions in the engine's words: F, B, and I and W where backward is split.

        Raises:
            ValueError: the rows, with sends and receives, would wait for each other.
        """
        actions = {rank: [_Action.from_str(text) for text in row] for rank, row in rows.items()}
        rank_of = {int(action.stage_index): rank for rank, row in actions.items() for action in row}
        micro_batches = 1 + max(int(action.microbatch_index or 0) for row in actions.values() for action in row)
        own = [
            _EngineStage(nn.Identity(), j, len(rank_of), device, group)
            for j in sorted(rank_of)
            if rank_of[j] == group.rank()
        ]
        self._stages = own
        self._engine = _Engine(own, micro_batches, loss_fn=None, scale_grads=False)
        self._engine.stage_index_to_group_rank = rank_of
        for stage in own:
            stage.stage_index_to_group_rank = rank_of
        self._engine.pipeline_order_with_comms = _add_send_recv(actions, rank_of.__getitem__, len(rank_of))
        self._engine._simulate()  # raises where a row would wait for ever
        check_order_of_messages(
            {rank: [str(action) for action in row] for rank, row in self._engine.pipeline_order_with_comms.items()},
            rank_of,
        )

    def run(self, actions: RowActions) -> None:
        """Performs the row. What an action raises comes out as it is."""
        for stage in self._stages:
            stage.actions = actions
        try:
            with _failures_unlogged():
                self._engine._step_microbatches()
        finally:
            for stage in self._stages:
                del stage.actions  # with the tensors of the step
            # Left behind by a failure: receives of which no forward has come.
            self._engine.fwd_recv_ops.clear()
            self._engine.bwd_recv_ops.clear()


_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def check_order_of_messages(rows: Mapping[int, Sequence[str]], rank_of: Mapping[int, int]) -> None:
    """Checks that each rank receives in the order in which another one sends to it, values and gradients together.

    Communicators of devices match messages by nothing else.

    Args:
        rows: with sends and receives, in the engine's words: "0SEND_F1" is what stage 0 sends of micro-batch 1.

    Raises:
        ValueError: one does not.
    """
    orders: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for rank, row in rows.items():
        for stage, way, kind, i in (match.groups() for match in map(_MESSAGE.fullmatch, row) if match is not None):
            is_send, step = way == "SEND", 1 if kind == "F" else -1
            sender = int(stage) if is_send else int(stage) - step
            pair = (rank, rank_of[sender + step]) if is_send else (rank_of[sender], rank)
            orders.setdefault(pair, ([], []))[not is_send].append(f"{sender}{kind}{i}")
    for (source, target), (sent, received) in orders.items():
        if sent != received:
            raise ValueError(f"rank {source} sends {' '.join(sent)}, and rank {target} receives {' '.join(received)}")


@contextlib.contextmanager
def _failures_unlogged() -> Iterator[None]:
    """A block in which the engine does not log the whole schedule for a failure: the exception says where it was."""
    logger = logging.getLogger(_SCHEDULES_LOGGER)

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger.addFilter(is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(is_no_error)
