"""Processes of one gloo group, started once for a test file: functions run on all of them at once.

    def test_all_ranks_come(two_ranks):
        assert two_ranks.run(worker, 3) == [...]  # of worker(mesh, 3), on each rank

A function stands at the top of its file. It returns what can be pickled; what it raises is raised here, with the rank.
Processes are forked: torch is loaded already.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SECONDS = 180.0  # that a function may take, on a busy machine
_context = multiprocessing.get_context("fork")


@functools.cache
def _warm_up() -> None:
    """Imports before the fork what the ranks would each import by themselves."""
    import fxpipe
    import fxpipe.distributed

    x = torch.ones(4, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), hardware="cpu", progress=False) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=torch.nn.functional.mse_loss)


@functools.cache
def square_mesh() -> DeviceMesh:
    """Two replicas of two stages; called on each of four ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))


def raised(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[type[BaseException], str, float]:
    """The exception of a call, its text with its notes, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function(*arguments, **named)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    return type(caught.value), f"{caught.value}\n{notes}", time.monotonic() - start


class RankFailedError(Exception):
    """What a function has raised on a rank, as text."""


def serve(rank: int, size: int, folder: str, calls: Any, backend: str = "gloo", kind: str = "cpu") -> None:
    """Runs the functions that come. The mesh is of devices of a kind, and the process group has a backend for them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("pipe",))
    while (call := calls.recv()) is not None:
        function, arguments = call
        torch.manual_seed(0)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fxpipe.planning.options.parse.PROFILE_BUDGET", 0.05)
                answer = True, function(mesh, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        calls.send_bytes(pickle.dumps(answer))  # by value: no memory is shared
    os._exit(0)  # whatever a test has left: no other rank waits any more


class Ranks:
    """So many processes. A call that takes too long ends all of them."""

    def __init__(self, size: int, context: Any = None, serve: Callable[..., None] = serve):
        """`context`: of multiprocessing, in the place of forks; `serve`: runs in each process, with its rank."""
        self.size = size
        if context is None:
            _warm_up()
        context = context or _context
        self._folder = tempfile.mkdtemp()
        pipes = [context.Pipe() for _ in range(size)]
        self._calls = [here for here, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(rank, size, self._folder, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(mesh, *arguments)`, by rank."""
        answers = self.try_run(function, *arguments)
        for rank, (is_good, answer) in enumerate(answers):
            if not is_good:
                raise RankFailedError(f"rank {rank} of {self.size}:\n{answer}")
        return [answer for _, answer in answers]

    def try_run(self, function: Callable[..., Any], *arguments: Any, but: tuple[int, ...] = ()) -> list[Any]:
        """By rank (True, result) or (False, traceback). `but`: ranks that give no answer, since they end."""
        for rank, calls in enumerate(self._calls):
            calls.send((function, arguments)) if self.processes[rank].is_alive() else None
        answers: list[Any] = []
        for rank, calls in enumerate(self._calls):
            if rank in but:
                answers.append((False, ""))
                continue
            if not calls.poll(SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} has not answered for {SECONDS:.0f} s")
            answers.append(pickle.loads(calls.recv_bytes()))
        return answers

    def close(self) -> None:
        for process, calls in zip(self.processes, self._calls, strict=True):
            with contextlib.suppress(OSError):
                calls.send(None)
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
