"""Processes with simulated devices, one for each rank: `helpers.ranks` with an accelerator and a backend for it.

They are forks of a process without devices that has run nothing: autograd makes its threads for devices at the first
backward, which the process of the tests may have had.
"""

import inspect
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import devices
from helpers.ranks import Ranks, serve
from torch.nn import functional as F

from fxpipe.errors import DistributedError
from fxpipe.utils import accelerator
from simulated import communicator


class SimulatedRanks(Ranks):
    """So many processes, rank r on the device sim:r."""

    def __init__(self, size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fxpipe", "fxpipe.distributed", __name__])
        super().__init__(size, context, _serve_on_devices)


def _serve_on_devices(rank: int, size: int, folder: str, calls: Any) -> None:
    torch.set_num_threads(1)
    devices.simulate()
    torch.accelerator.set_device_index(rank)
    communicator.register()
    serve(rank, size, folder, calls, f"cpu:gloo,sim:{communicator.NAME}", "sim")


class NeverPassed:
    """An event of what hangs."""

    def query(self) -> bool:
        return False


def steps_around_a_hang(pipe: Any, hangs: bool, is_hung: Callable[[Any], bool]) -> tuple[list[float], str]:
    """Losses of the steps before and after the one in which an event never passes, and the error of that.

    `hangs`: on this rank; `is_hung`: whether the event is such a one that is recorded in these frames.
    """
    x, record_event = torch.linspace(-1, 1, 32).reshape(8, 4), accelerator.record_event

    def record(stream: torch.Stream, timing: bool = False) -> Any:
        is_one = not timing and is_hung(inspect.stack()[:3])
        return NeverPassed() if is_one else record_event(stream, timing)

    with pipe:
        losses = [pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item() for _ in range(2)]
        before = [p.grad.clone() for p in pipe.parameters()]
        with pytest.MonkeyPatch.context() as patch:
            if hangs:
                patch.setattr(accelerator, "record_event", record)
            with pytest.raises(DistributedError) as caught:
                pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        assert all(map(torch.equal, before, [p.grad for p in pipe.parameters()]))
        losses.append(pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item())
        return losses, str(caught.value)
