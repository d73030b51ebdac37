"""All that one graph needs to run, and the tensors of the model it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.rewriting.program import Constant, Program, Received, Stage
from fxpipe.rewriting.splitting import split_weights
from fxpipe.rewriting.tapping import tap_weights
from fxpipe.runtime.compiled import Code, code_of
from fxpipe.runtime.wiring import Wiring
from fxpipe.thread_state import ThreadState


@dataclass(frozen=True, slots=True)
class Assembly:
    """A program on devices."""

    program: Program
    wiring: Wiring
    devices: tuple[torch.device, ...]  # by stage
    in_dims: tuple[int | None, ...]  # by input leaf: which dimension holds the batch
    out_dims: tuple[int | str | None, ...]  # by output leaf
    out_spec: Any  # tree of the output
    state: ThreadState  # of the caller
    constants: dict[str, torch.Tensor]  # tensors in lists, tuples and dicts of the model, by name
    compile: Mapping[str, Any] | None = None  # keywords of torch.compile; None: stages run as they are
    is_told: bool = False  # have out_dims been given, and not found
    _ready: dict[tuple[int, bool], tuple[Stage, Code]] = field(default_factory=dict)  # made so far

    @property
    def results(self) -> list[tuple[Received | Constant, int | str | None]]:
        """What micro-batches make, and how it goes together: outputs, then the inputs that forward writes to."""
        outputs = zip(self.program.outputs, self.out_dims, strict=True)
        return [*outputs, *((value, self.in_dims[place]) for place, value in self.program.written.items())]

    def ready(self, j: int, is_split: bool) -> tuple[Stage, Code]:
        """Stage j, and what runs of it. `is_split`: its weights get their gradients in W."""
        key = j, is_split
        if key not in self._ready:
            stage = self.program.stages[j]
            if is_split:
                stage = split_weights(stage) if self.compile is None else tap_weights(stage)
            self._ready[key] = stage, code_of(stage, self.compile)
        return self._ready[key]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The model's tensors by name, looked up anew in each step: a parameter that was replaced is followed."""

    model: nn.Module
    constants: dict[str, torch.Tensor]
    # Found so far, since a step asks for each tensor three times, and the way from the model to a module takes 0.1 ms.
    modules: dict[str, nn.Module] = field(default_factory=dict)  # by path
    places: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)  # by name: where it is, and under what

    def _module(self, path: str) -> nn.Module:
        if not path:
            return self.model
        found = self.modules.get(path)
        if found is None:
            above, _, key = path.rpartition(".")
            found = self.modules[path] = self._module(above).get_submodule(key)
        return found

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        if name in self.constants:
            return self.constants, name
        path, _, key = name.rpartition(".")
        module = self._module(path)
        for store in (module._parameters, module._buffers, module.__dict__):
            if key in store:
                return store, key
        raise AttributeError(f"{type(module).__name__} has no tensor {name!r} any more")

    def _found(self, name: str) -> tuple[dict[str, Any], str]:
        place = self.places.get(name)
        if place is None:
            place = self.places[name] = self._place(name)
        return place

    def get(self, name: str) -> torch.Tensor:
        store, key = self._found(name)
        found: torch.Tensor = store[key]
        return found

    def set(self, name: str, value: torch.Tensor) -> None:
        store, key = self._found(name)
        store[key] = value
