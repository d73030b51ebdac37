"""The program of one graph with all that it needs to run, and the tensors of the model that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import tensor_stores
from fxpipe._torch.thread_state import ThreadState
from fxpipe.rewriting.program import PIPE_INPUT, ConstantOutput, Program, ReceivedValue, Stage
from fxpipe.runtime.wiring import Wiring
from fxpipe.scheduling.replicas import replica_of
from fxpipe.utils.output_combination import OutputCombination


class StageReplica(NamedTuple):
    """A device that has a stage, and the stage as it runs there."""

    device: torch.device
    stage: Stage


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program on devices."""

    program: Program
    wiring: Wiring
    devices: tuple[torch.device, ...]  # by stage; of several replicas the first one's, where the parameters are
    in_dims: tuple[int | None, ...]  # by input leaf: which dimension holds the batch
    out_dims: tuple[int | str | None, ...]  # of what micro-batches hand out: output leaves, then pieces of others
    out_spec: Any  # tree of the output
    state: ThreadState  # of the caller
    constants: dict[str, torch.Tensor]  # tensors in lists, tuples and dicts of the model, by name
    left_attribute_dims: Mapping[str, int | str] = field(default_factory=dict)  # of attributes that forward leaves
    told: frozenset[int] = frozenset()  # output leaves of which the user has said how they go together
    combinations: tuple[OutputCombination, ...] = ()  # of the outputs that are made of pieces
    known_pieces: Callable[[Sequence[Any], int], Mapping[int, Any]] | None = None  # (inputs, samples) -> by place
    used_outputs: frozenset[int] = frozenset()  # those from which the model itself makes something that requires grad
    moving_buffers: tuple[str, ...] = ()  # of a graph of evaluation, which then runs in one micro-batch
    is_whole: bool = False  # is the number of samples not known, or not what micro-batches are weighted by?
    replicas: tuple[tuple[StageReplica, ...], ...] = ()  # by stage, those that take turns; none: each stage is alone

    def replicas_of(self, stage: int) -> tuple[StageReplica, ...]:
        """The replicas of a stage, in the order of their turns."""
        if self.replicas:
            return self.replicas[stage]
        return (StageReplica(self.devices[stage], self.program.stages[stage]),)

    @property
    def is_joint(self) -> bool:
        """Returns whether an output is made of all samples, so that the loss need not be a mean over samples."""
        return any(one.is_joint for one in self.combinations)

    @property
    def stage_devices(self) -> tuple[tuple[torch.device, ...], ...]:
        """By stage the devices of all of its replicas."""
        return tuple(tuple(one.device for one in self.replicas_of(j)) for j in range(len(self.devices)))

    def with_turns_from(self, micro_batch: int) -> BoundProgram:
        """The program with the replicas of each stage in the order of their turns from this micro-batch on.

        The parameters stay where they are.
        """
        if not self.replicas:
            return self
        turns = ((own, replica_of(micro_batch, len(own))) for own in self.replicas)
        return replace(self, replicas=tuple((*own[turn:], *own[:turn]) for own, turn in turns))

    @property
    def results(self) -> list[tuple[ReceivedValue | ConstantOutput, int | str | None]]:
        """The results of micro-batches, each with how its parts go together.

        Outputs and pieces, then the inputs that forward writes to, then the attributes that it leaves.
        """
        outputs = zip(self.program.outputs, self.out_dims, strict=True)
        written = ((value, self.in_dims[place]) for place, value in self.program.written_inputs.items())
        return [
            *outputs,
            *written,
            *((value, self.left_attribute_dims[name]) for name, value in self.program.left.items()),
        ]

    @property
    def returned_inputs(self) -> dict[int, int]:
        """The outputs that are inputs as they were given: place among the outputs -> place among the inputs."""
        places = {name: place for place, name in enumerate(self.program.inputs)}
        values = [o if isinstance(o, ReceivedValue) and o.source == PIPE_INPUT else None for o in self.program.outputs]
        returned = {at: places[value.name] for at, value in enumerate(values) if value is not None}
        return {at: place for at, place in returned.items() if place not in self.program.written_inputs}

    @property
    def result_names(self) -> list[str]:
        """Names each of `results`, for people."""
        leaves = self.out_spec.num_leaves
        outputs = [
            f"the output {place} ({value.name})" if isinstance(value, ReceivedValue) else f"the output {place}"
            for place, value in enumerate(self.program.outputs)
        ]
        outputs[leaves:] = [f"a part of an output ({name})" for name in outputs[leaves:]]
        written = [f"what forward writes to the input {place}" for place in self.program.written_inputs]
        return [*outputs, *written, *(f"the attribute {name!r}, which forward sets," for name in self.program.left)]

    def output(self, handed_out: Sequence[Any], combined: Mapping[int, Any] | None = None) -> Any:
        """The model's output, of what is handed out, gathered. `combined`: by place, where it is not made of that."""
        leaves = list(handed_out[: self.out_spec.num_leaves])
        for one in self.combinations:
            leaves[one.output] = one.of(handed_out) if combined is None else combined[one.output]
        return pytree.tree_unflatten(leaves, self.out_spec)


def different_programs(bounds: Sequence[BoundProgram]) -> list[BoundProgram]:
    """The programs among these, each once."""
    return list({id(bound): bound for bound in bounds}.values())


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The model's tensors by name, looked up anew in each step: a parameter that was replaced is followed."""

    model: nn.Module
    constants: dict[str, torch.Tensor]
    # Found so far, since a step asks for each tensor three times, and the way from the model to a module takes 0.1 ms.
    modules: dict[str, nn.Module] = field(default_factory=dict)  # by path
    places: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)  # by name: where it is, and under what

    def _module(self, path: str) -> nn.Module:
        if not path:
            return self.model
        module = self.modules.get(path)
        if module is None:
            above, _, key = path.rpartition(".")
            module = self.modules[path] = self._module(above).get_submodule(key)
        return module

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        if name in self.constants:
            return self.constants, name
        path, _, key = name.rpartition(".")
        module = self._module(path)
        for store in tensor_stores(module):
            if key in store:
                return store, key
        raise AttributeError(f"{type(module).__name__} has no tensor {name!r} any more")

    def _slot(self, name: str) -> tuple[dict[str, Any], str]:
        place = self.places.get(name)
        if place is None:
            place = self.places[name] = self._place(name)
        return place

    def get(self, name: str) -> torch.Tensor:
        store, key = self._slot(name)
        tensor: torch.Tensor = store[key]
        return tensor

    def set(self, name: str, value: torch.Tensor) -> None:
        try:
            store, key = self._slot(name)
        except AttributeError:  # somebody has taken away what forward sets
            path, _, key = name.rpartition(".")
            store = self._module(path).__dict__
        store[key] = value
