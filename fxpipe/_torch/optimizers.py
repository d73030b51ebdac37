"""Optimizers of torch, of which a part of the parameters is stepped by itself.

Hooks of an optimizer are required, and kept under the same names from torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from fxpipe._torch.versions import missing_name

_PRE_HOOKS, _POST_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def part_of_optimizer(
    optimizer: torch.optim.Optimizer, optimizer_class: type[torch.optim.Optimizer], groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Makes an optimizer of these groups alone, which shares all else with `optimizer`, its state too.

    It has no hooks: those of `optimizer` see all of its parameters.
    """
    part = object.__new__(optimizer_class)
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.update({_PRE_HOOKS: OrderedDict(), _POST_HOOKS: OrderedDict(), "param_groups": list(groups)})
    return part


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Runs the step of an optimizer's class, without the hooks and the profiler's range that torch puts around it."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):  # by the first instance of the class
        function = function.__wrapped__
    function(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer, when: str) -> bool:
    """Returns whether this optimizer has hooks of its own before ("pre") or after ("post") its step.

    Raises:
        TorchVersionError: this version of torch does not show its hooks.
    """
    name = {"pre": _PRE_HOOKS, "post": _POST_HOOKS}[when]
    if not hasattr(optimizer, name):
        raise missing_name(f"Optimizer has no attribute {name!r}")
    return bool(getattr(optimizer, name))
