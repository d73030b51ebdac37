"""Moves the state of optimizers to the devices to which a pipe has moved parameters.

State from before the move (from steps without the pipe, `load_state_dict`, or the constructor, as of `Adagrad`) is on
the old devices. torch does not list the optimizers of a parameter, so a hook for all optimizers moves the state before
the first step after a move. The hook exists from the first move until the pipe is closed or the model is freed. The
pipe calls `follow` before overlapped updates and streams, which update stages before `step` is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerStateMover:
    """Moves the optimizer state of a model's parameters that a pipe has moved."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._devices_before: dict[str, set[torch.device]] = {}  # by name of a moved parameter
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers handled since the last move
        self._hook: Any = None

    def note_move(self, name: str, before: torch.device) -> None:
        """Records that a tensor of the model was moved from the device `before`."""
        self._devices_before.setdefault(name, set()).add(before)
        self._seen.clear()
        model = self._model()
        if self._hook is None and model is not None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            weakref.finalize(model, self._hook.remove)

    def close(self) -> None:
        """Removes the hook; if there are gradients, so that a step may follow, not before the model is freed."""
        if self._hook is not None and all(parameter.grad is None for parameter, _ in self._moved().values()):
            self._hook.remove()
            self._hook = None

    def _moved(self) -> dict[int, tuple[nn.Parameter, set[torch.device]]]:
        """Returns the moved parameters, by identity, with their earlier devices."""
        model = self._model()
        named = () if model is None else model.named_parameters(remove_duplicate=False)
        return {id(p): (p, self._devices_before[name]) for name, p in named if name in self._devices_before}

    def follow(self, optimizer: Any) -> None:
        """Moves the state of an optimizer to the current devices of its parameters, before it updates them."""
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        moved = self._moved()
        for group in optimizer.param_groups:
            is_step_on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if id(parameter) in moved and isinstance(state, dict):
                    _, before = moved[id(parameter)]
                    for key, value in state.items():
                        if key != "step" or is_step_on_device:
                            state[key] = _follow(value, before, parameter.device)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.follow(optimizer)


def _follow(value: Any, before: set[torch.device], device: torch.device) -> Any:
    """Moves the tensors of a value from the earlier devices of a parameter to its current device."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device in before else value
    if isinstance(value, Mapping):
        return {key: _follow(item, before, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_follow(item, before, device) for item in value)
    return value
