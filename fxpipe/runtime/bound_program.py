"""The program of one graph on devices, and the tensors of the model that it uses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
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
from fxpipe.utils.output_combination import OutputCombination, StateUpdate
from fxpipe.utils.python_objects import NotKept


class StageReplica(NamedTuple):
    """A device of a stage, and the stage's code for this device."""

    device: torch.device
    stage: Stage


@dataclass(frozen=True, slots=True)
class BoundProgram:
    program: Program
    wiring: Wiring
    devices: tuple[torch.device, ...]  # by stage; for replicas the first device, which has the parameters
    in_dims: tuple[int | None, ...]  # by input leaf: the batch dimension
    out_dims: tuple[int | str | None, ...]  # by result of micro-batches: output leaves, then pieces of other outputs
    out_spec: Any  # tree of the output
    state: ThreadState  # the caller's
    constants: dict[str, torch.Tensor]  # tensors in lists, tuples and dicts of the model, by name
    left_attribute_dims: Mapping[str, int | str] = field(default_factory=dict)  # for attributes that forward sets
    overwritten: tuple[str, ...] = ()  # attributes that forward sets before it reads them, or counts in; not kept
    told: frozenset[int] = frozenset()  # output leaves that the user has said how to combine
    combinations: tuple[OutputCombination, ...] = ()  # for outputs combined from pieces
    update: StateUpdate | None = None  # state that changes once for the mini-batch
    known_pieces: Callable[[Sequence[Any], int], Mapping[int, Any]] | None = None  # (inputs, samples) -> by place
    head: Callable[[Sequence[Any], int], Mapping[int, Any]] | None = None  # (inputs, samples) -> further inputs
    used_outputs: frozenset[int] = frozenset()  # outputs that the model itself uses in a value that requires grad
    moving_buffers: tuple[str, ...] = ()  # in an evaluation graph, which then runs in one micro-batch
    is_whole: bool = False  # the number of samples is unknown, or not the weight of micro-batches
    replicas: tuple[tuple[StageReplica, ...], ...] = ()  # by stage, in order of turns; or empty

    def replicas_of(self, stage: int) -> tuple[StageReplica, ...]:
        """Returns the replicas of a stage, in the order of their turns."""
        if self.replicas:
            return self.replicas[stage]
        return (StageReplica(self.devices[stage], self.program.stages[stage]),)

    @property
    def is_joint(self) -> bool:
        """True if an output with a gradient combines all samples, so that the loss need not be a mean over samples."""
        return any(one.is_joint and one.requires_grad for one in self.combinations)

    @property
    def stage_devices(self) -> tuple[tuple[torch.device, ...], ...]:
        """By stage, the devices of all replicas."""
        return tuple(tuple(one.device for one in self.replicas_of(j)) for j in range(len(self.devices)))

    def with_turns_from(self, micro_batch: int) -> BoundProgram:
        """Returns the program with the replicas of each stage in the order of their turns from this micro-batch on."""
        if not self.replicas:
            return self
        turns = ((own, replica_of(micro_batch, len(own))) for own in self.replicas)
        return replace(self, replicas=tuple((*own[turn:], *own[:turn]) for own, turn in turns))

    @property
    def results(self) -> list[tuple[ReceivedValue | ConstantOutput, int | str | None, str]]:
        """Outputs and pieces, inputs that forward writes to, attributes that it sets; how parts are combined; names."""
        results: list[tuple[ReceivedValue | ConstantOutput, int | str | None, str]] = []
        for place, (value, how) in enumerate(zip(self.program.outputs, self.out_dims, strict=True)):
            what = f"the output {place} ({value.name})" if isinstance(value, ReceivedValue) else f"the output {place}"
            is_piece = place >= self.out_spec.num_leaves
            results.append((value, how, f"a part of an output ({what})" if is_piece else what))
        for place, value in self.program.written_inputs.items():
            results.append((value, self.in_dims[place], f"what forward writes to the input {place}"))
        for name, value in self.program.left.items():
            results.append((value, self.left_attribute_dims[name], f"the attribute {name!r}, which forward sets,"))
        return results

    @property
    def other_results(self) -> list[tuple[Any, int | str | None, str]]:
        """The `results` that are no outputs, then pieces of updated state."""
        results = self.results
        pieces = () if self.update is None else self.update.combination.pieces
        return [*results[len(self.program.outputs) :], *(results[place] for place in pieces)]

    @property
    def returned_inputs(self) -> dict[int, int]:
        """The outputs that are unchanged inputs: index of the output -> index of the input."""
        written, own = self.program.written_inputs, self.program.inputs[: len(self.in_dims)]  # not the head
        places = {(PIPE_INPUT, name): place for place, name in enumerate(own) if place not in written}
        values = [(o.source, o.name) if isinstance(o, ReceivedValue) else None for o in self.program.outputs]
        return {at: places[value] for at, value in enumerate(values) if value in places}

    @property
    def is_weighed(self) -> bool:
        """True if an output of a micro-batch differs from its share in the mini-batch's."""
        return bool(self.combinations) or "sum" in self.out_dims

    def handed_out(self, values: Sequence[Any]) -> list[Any]:
        """Returns outputs and pieces, from the values that the loss receives."""
        return [place.value if isinstance(place, ConstantOutput) else values[place] for place in self.wiring.outputs]

    def output_of(self, values: Sequence[Any]) -> Any:
        """Returns the output of the mini-batch, or of a micro-batch, from the values that the loss receives."""
        is_simple = self.wiring.outputs == (0,) and self.out_spec.is_leaf()
        return values[0] if is_simple else self.output(self.handed_out(values))

    def output(self, handed_out: Sequence[Any], combined: Mapping[int, Any] | None = None) -> Any:
        """Returns the model's output from gathered values. `combined`: by place, outputs that are not among these."""
        leaves, computed = list(handed_out[: self.out_spec.num_leaves]), dict[str, Any]()
        for one in self.combinations:
            leaves[one.output] = one.of(handed_out, computed) if combined is None else combined[one.output]
        return pytree.tree_unflatten(leaves, self.out_spec)


def different_programs(bounds: Sequence[BoundProgram]) -> list[BoundProgram]:
    return list({id(bound): bound for bound in bounds}.values())


_hiding = threading.RLock()


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The model's tensors by name, looked up again in each step, since parameters may be replaced."""

    model: nn.Module
    constants: dict[str, torch.Tensor]
    # Caches, since a step looks up each tensor three times, and finding a module takes 0.1 ms.
    modules: dict[str, nn.Module] = field(default_factory=dict)
    places: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)  # by name: dict and key
    versions: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by identity, in place of parameters

    def _module(self, path: str) -> nn.Module:
        if not path:
            return self.model
        module = self.modules.get(path)
        if module is None:
            above, _, key = path.rpartition(".")
            module = self.modules[path] = self._module(above).get_submodule(key)
        return module

    def _slot(self, name: str) -> tuple[dict[str, Any], str]:
        """Returns the dict that has a tensor, and its key there."""
        if name not in self.places:
            path, _, key = name.rpartition(".")
            if name in self.constants:
                self.places[name] = self.constants, name
            elif store := next((store for store in tensor_stores(self._module(path)) if key in store), None):
                self.places[name] = store, key
            else:
                raise AttributeError(f"{type(self._module(path)).__name__} has no tensor {name!r} any more")
        return self.places[name]

    def has(self, name: str) -> bool:
        with contextlib.suppress(AttributeError):
            self._slot(name)
            return True
        return False

    def get(self, name: str) -> torch.Tensor:
        store, key = self._slot(name)
        tensor: Any = store[key]
        tensor = tensor.__wrapped__ if tensor.__class__ is NotKept else tensor
        return self.versions.get(id(tensor), tensor)

    def set(self, name: str, value: torch.Tensor | NotKept) -> None:
        try:
            store, key = self._slot(name)
        except AttributeError:  # other code has deleted the attribute
            path, _, key = name.rpartition(".")
            store = self._module(path).__dict__
        with _hiding:
            store[key] = value

    def hiding(self, names: Collection[str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function during which any use of these tensors of the model, other than `get`, is an error."""
        # One call at a time: replicas of the last stage, and steps of a stream, call it in threads of their own.

        def call(*args: Any) -> Any:
            with _hiding:
                places = [(*self._slot(name), name) for name in names]
                before = [store[key] for store, key, _ in places]
                try:
                    for store, key, name in places:
                        store[key] = NotKept(name, "loss_fn would read its value of before the step", store[key])
                    return function(*args)
                finally:
                    for (store, key, _), value in zip(places, before, strict=True):
                        store[key] = value

        return call
