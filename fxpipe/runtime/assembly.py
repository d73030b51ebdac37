"""All that one graph needs to run, and the tensors of the model it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.rewriting.program import Program
from fxpipe.runtime.compiled import Code
from fxpipe.runtime.wiring import Wiring
from fxpipe.thread_state import ThreadState


@dataclass(frozen=True, slots=True)
class Assembly:
    """A program on devices."""

    program: Program
    codes: tuple[Code, ...]  # by stage: what runs of it
    wiring: Wiring
    devices: tuple[torch.device, ...]  # by stage
    in_dims: tuple[int | None, ...]  # by input leaf: which dimension holds the batch
    out_dims: tuple[int | str | None, ...]  # by output leaf
    out_spec: Any  # tree of the output
    state: ThreadState  # of the caller
    constants: dict[str, torch.Tensor]  # tensors in lists, tuples and dicts of the model, by name


@dataclass(frozen=True, slots=True)
class Tensors:
    """The model's tensors by name, looked up anew in each step: a parameter that was replaced is followed."""

    model: nn.Module
    constants: dict[str, torch.Tensor]
    modules: dict[str, nn.Module] = field(default_factory=dict)  # found so far, by path: the way to one takes 0.1 ms

    def _store(self, name: str) -> tuple[dict[str, Any], str]:
        if name in self.constants:
            return self.constants, name
        path, _, key = name.rpartition(".")
        module = self.modules.get(path)
        if module is None:
            module = self.modules[path] = self.model.get_submodule(path)
        for store in (module._parameters, module._buffers, module.__dict__):
            if key in store:
                return store, key
        raise AttributeError(f"{type(module).__name__} has no tensor {name!r} any more")

    def get(self, name: str) -> torch.Tensor:
        store, key = self._store(name)
        found: torch.Tensor = store[key]
        return found

    def set(self, name: str, value: torch.Tensor) -> None:
        store, key = self._store(name)
        store[key] = value
