"""Steps of a part of an optimizer's parameters.

The hooks of an optimizer are required, and unchanged from torch 2.11 to 2.14.
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
    """Creates an optimizer of these groups that shares the state and all else with `optimizer`, except the hooks."""
    part = object.__new__(optimizer_class)
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.update({_PRE_HOOKS: OrderedDict(), _POST_HOOKS: OrderedDict(), "param_groups": list(groups)})
    return part


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Runs the step of an optimizer's class without torch's hooks and profiler range."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):  # since the class's first instance
        function = function.__wrapped__
    function(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer, when: str) -> bool:
    """Returns True if this optimizer has hooks before ("pre") or after ("post") its step, other than global hooks."""
    name = {"pre": _PRE_HOOKS, "post": _POST_HOOKS}[when]
    if not hasattr(optimizer, name):
        raise missing_name(f"Optimizer has no attribute {name!r}")
    return bool(getattr(optimizer, name))
