"""`torch.distributed.pipelining` on the same model and schedule: a process for each stage, which talk by gloo.

It has no cut of its own: the model is cut in front of the module that fxpipe's profile says is best.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing as mp
from models import Workload

import fxpipe
from fxpipe.tracing.node_info import info

STAGES = 2


@dataclass(frozen=True)
class Task:
    """What a process needs; `workload` is the same in all."""

    workload: Workload
    split: str
    schedule: str
    chunks: int
    port: int


class DistributedPipe:
    """Processes that run a step when they are told to."""

    def __init__(self, workload: Workload, schedule: str, chunks: int):
        self.split = best_split(workload, chunks)
        task = Task(workload, self.split, schedule, chunks, _free_port())
        context = mp.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(STAGES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, task, theirs), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)
        self._answers()

    def step(self) -> float:
        """Forward and backward of the mini-batch; returns the loss."""
        return self._ask("step")

    def clear_gradients(self) -> None:
        self._ask("clear")

    def _ask(self, what: str) -> float:
        for end in self._ends:
            end.send(what)
        return self._answers()

    def _answers(self) -> float:
        """What the last rank says, when all have said something."""
        found = [end.recv() for end in self._ends]
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return float(found[-1])

    def __enter__(self) -> DistributedPipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(rank: int, task: Task, end: Connection) -> None:
    try:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port)}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=STAGES)
        step, clear = _stage(rank, task)
        end.send(0.0)
    except Exception as error:
        end.send(error)
        return
    while True:
        try:
            what = end.recv()
        except EOFError:
            break
        end.send(step() if what == "step" else clear())
    torch.distributed.destroy_process_group()


def _stage(rank: int, task: Task) -> tuple[Callable[[], float], Callable[[], float]]:
    """The step of a rank, and what clears its gradients."""
    from torch.distributed import pipelining

    workload, schedules = task.workload, {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    sample = workload.input.tensor_split(task.chunks)[0]
    pipe = pipelining.pipeline(workload.model, (sample,), split_spec={task.split: pipelining.SplitPoint.BEGINNING})
    stage: Any = pipe.build_stage(rank, torch.device("cpu"))
    schedule = schedules[task.schedule](stage, task.chunks, loss_fn=workload.loss_fn)

    def step() -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(workload.input)
        else:
            schedule.step(target=workload.target, losses=losses)
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    def clear() -> float:
        stage.submod.zero_grad(set_to_none=True)
        return 0.0

    return step, clear


def best_split(workload: Workload, chunks: int) -> str:
    """The module in front of which the larger half is smallest, by the seconds that fxpipe measures."""
    samples = -(-len(workload.input) // chunks)
    traced = fxpipe.trace(workload.model, (workload.input,), chunks=chunks)
    profile = fxpipe.profile(traced, (workload.input,), micro_batch=samples, threads=1)
    seconds = [cost.forward.at(samples) + cost.backward.at(samples) for cost in profile.nodes]
    modules = [info(node).module for node in traced.nodes]
    first = {path: modules.index(path) for path in modules if path and modules.index(path)}
    return min(first, key=lambda path: max(sum(seconds[: first[path]]), sum(seconds[first[path] :])))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
