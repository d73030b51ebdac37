"""The accelerators on which tests run that need some: those of CUDA, or in a session of its own the simulated ones."""

from __future__ import annotations

from typing import Any

import pytest

_session = {"is_simulated": False}


def simulate() -> None:
    """Makes this session one on simulated accelerators. Before tests are collected."""
    _session["is_simulated"] = True


def is_simulated() -> bool:
    return _session["is_simulated"]


def accelerator() -> str:
    """Returns the type of the devices."""
    return "sim" if is_simulated() else "cuda"


def on_accelerators(pattern: str, id: str) -> Any:
    """Makes a parameter of tests: devices as in "cpu 0", where a number is an accelerator."""
    devices = [device if device == "cpu" else f"{accelerator()}:{device}" for device in pattern.split()]
    count = len({device for device in devices if device != "cpu"})
    mark = pytest.mark.simulated if is_simulated() else pytest.mark.cuda if count < 2 else pytest.mark.multi_gpu
    return pytest.param(devices, marks=mark, id=id)
