"""Processes with simulated devices, one for each rank: `helpers.ranks` with an accelerator and a backend for it.

They are forks of a process without devices that has run nothing: autograd makes its threads for devices at the first
backward, which the process of the tests may have had.
"""

import multiprocessing
from typing import Any

import torch
from helpers import devices
from helpers.ranks import Ranks, serve

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
