"""The accelerators on which tests run that need some: those of CUDA, or in a session of its own the simulated ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree


@dataclass
class Session:
    """How this process has its devices."""

    is_simulated: bool = False
    machine: Any = None
    reason: str = ""  # why there is no machine though it should be simulated


_session = Session()


def simulate() -> None:
    """Makes this process one with simulated accelerators, for good."""
    from simulated import build, device_module, host_order

    from fxpipe.runtime.run import Fences

    _session.is_simulated = True
    try:
        machine = _session.machine = device_module.machine()
    except build.CompilerMissingError as error:
        _session.reason = str(error)
    else:
        host_order.follow_fences(Fences, machine.tell, machine.hear)


def is_simulated() -> bool:
    return _session.is_simulated


def why_not_simulated() -> str:
    return _session.reason


def simulated_machine() -> Any:
    """Returns the machine; None in a session without one."""
    return _session.machine


def accelerator() -> str:
    """Returns the type of the devices."""
    return "sim" if _session.machine is not None else "cuda"


def on_accelerators(pattern: str, id: str) -> Any:
    """Makes a parameter of tests: devices as in "cpu 0", where a number is an accelerator."""
    devices = [device if device == "cpu" else f"{accelerator()}:{device}" for device in pattern.split()]
    count = len({device for device in devices if device != "cpu"})
    mark = pytest.mark.simulated if _session.is_simulated else pytest.mark.cuda if count < 2 else pytest.mark.multi_gpu
    return pytest.param(devices, marks=mark, id=id)


def workers(count: int) -> list[str]:
    """Returns devices for a pipe that may run anywhere: workers on the CPU, in a simulated session its devices."""
    machine = _session.machine
    return ["cpu"] * count if machine is None else [f"sim:{index % machine.device_count}" for index in range(count)]


def on_cpu(tree: Any) -> Any:
    """Brings what a pipe gives to the CPU, where the plain model's is; autograd goes on through the copies."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), tree)


def last_device(pipe: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a function that brings a tensor to where the pipe's outputs are."""
    return lambda tensor: tensor.to(pipe.plan.devices[-1])


def forced_copies() -> AbstractContextManager[object]:
    """Copies values between stages of one device, too, in steps that begin in this block."""
    from fxpipe.runtime.transport import Transport

    return mock.patch.object(Transport, "copies_on_one_device", True)
