"""All that one graph needs to run, and the tensors of the model it runs on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.compiler import compile_backward_at_once
from fxpipe._torch.module_internals import tensor_stores
from fxpipe._torch.thread_state import ThreadState
from fxpipe.rewriting.program import ConstantOutput, Program, ReceivedValue, Stage
from fxpipe.rewriting.split_backward import split_stage_backward
from fxpipe.rewriting.split_backward_compiled import TappedStage, split_compiled_stage_backward
from fxpipe.runtime.wiring import Wiring
from fxpipe.utils.locks import DISPATCH_MODE_LOCK
from fxpipe.utils.output_combination import OutputCombination, UndeterminedOutput

# -- The code of stages as it runs: as it is, or compiled by `torch.compile` -----------------------------------------
#
# A stage compiles at its first F, in its worker, since the compiler bakes in how many threads an operation may take;
# one stage at a time, while others may run. Uneven micro-batches have two sizes, so a stage compiles twice for a graph:
# torch makes the second one for any size. Stages that take inputs may do so a third time, as torch tells apart whether
# a tensor starts where its storage does, as the first micro-batch's part of an input.
#
# Where backward is split, B cannot ask for gradients inside of a compiled graph: such stages have taps
# (`split_backward_compiled`).

StageFunction = Callable[..., tuple[Any, ...]]


def stage_function_of(stage: Stage, options: Mapping[str, Any] | None) -> StageFunction:
    """What to call. `options`: keywords of `torch.compile`; None: do not compile."""
    run: Any = stage.run
    if options is None:
        # Not `run` itself: fx's own call gives up the traceback of a failing builtin, and with it the node.
        return run.forward  # type: ignore[no-any-return]
    from fxpipe.rewriting.rng_compiled import with_compilable_rng

    compiled: StageFunction = torch.compile(with_compilable_rng(run).forward, **options)
    in_turn = SerializedCompilation(compiled, len(stage.attributes))
    return in_turn if stage.taps is None else TappedStage(stage, stage.taps, in_turn)


class SerializedCompilation:
    """Compiled code that compiles while no other does."""

    def __init__(self, code: StageFunction, attributes: int):
        self._code, self._attributes = code, attributes
        self._seen: set[Hashable] = set()

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        # Attributes stay as they are, or the graph is another; `requires_grad` alone may change.
        kind = (
            torch.is_grad_enabled(),
            *(a.requires_grad for a in args[: self._attributes] if isinstance(a, torch.Tensor)),
            *map(_compile_key, args[self._attributes :]),
        )
        if kind in self._seen:
            return self._code(*args)
        # Backward, too: else it would be compiled when it first runs.
        with DISPATCH_MODE_LOCK, compile_backward_at_once():
            made = self._code(*args)
        self._seen.add(kind)
        return made


def _compile_key(value: Any) -> Any:
    """What the compiler tells apart."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    strides = value.stride() if value.layout == torch.strided else None
    return value.dtype, value.shape, strides, value.requires_grad, strides is None or value.storage_offset() == 0


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program on devices."""

    program: Program
    wiring: Wiring
    devices: tuple[torch.device, ...]  # by stage
    in_dims: tuple[int | None, ...]  # by input leaf: which dimension holds the batch
    out_dims: tuple[int | str | None, ...]  # of what micro-batches hand out: output leaves, then pieces of others
    out_spec: Any  # tree of the output
    state: ThreadState  # of the caller
    constants: dict[str, torch.Tensor]  # tensors in lists, tuples and dicts of the model, by name
    compile: Mapping[str, Any] | None = None  # keywords of torch.compile; None: stages run as they are
    left_attribute_dims: Mapping[str, int | str] = field(default_factory=dict)  # of attributes that forward leaves
    told: frozenset[int] = frozenset()  # output leaves of which the user has said how they go together
    combinations: tuple[OutputCombination, ...] = ()  # of the outputs that are made of pieces
    known_pieces: Callable[[Sequence[Any], int], Mapping[int, Any]] | None = None  # (inputs, samples) -> by place
    untold: tuple[
        UndeterminedOutput, ...
    ] = ()  # why outputs are taken for means over samples, though nobody has said so
    _ready: dict[tuple[int, bool], tuple[Stage, StageFunction]] = field(default_factory=dict)  # made so far

    @property
    def results(self) -> list[tuple[ReceivedValue | ConstantOutput, int | str | None]]:
        """What micro-batches make, and how it goes together.

        Outputs and pieces, then the inputs that forward writes to, then the attributes that it leaves.
        """
        outputs = zip(self.program.outputs, self.out_dims, strict=True)
        written = ((value, self.in_dims[place]) for place, value in self.program.written_inputs.items())
        return [
            *outputs,
            *written,
            *((value, self.left_attribute_dims[name]) for name, value in self.program.left.items()),
        ]

    def output(self, handed_out: Sequence[Any], combined: Mapping[int, Any] | None = None) -> Any:
        """The model's output, of what is handed out, gathered. `combined`: by place, where it is not made of that."""
        leaves = list(handed_out[: self.out_spec.num_leaves])
        for one in self.combinations:
            leaves[one.output] = one.of(handed_out) if combined is None else combined[one.output]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def ready(self, j: int, is_split: bool) -> tuple[Stage, StageFunction]:
        """Stage j, and what runs of it. `is_split`: its weights get their gradients in W."""
        key = j, is_split
        if key not in self._ready:
            stage = self.program.stages[j]
            if is_split:
                stage = split_stage_backward(stage) if self.compile is None else split_compiled_stage_backward(stage)
            self._ready[key] = stage, stage_function_of(stage, self.compile)
        return self._ready[key]


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
        for store in tensor_stores(module):
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
        try:
            store, key = self._found(name)
        except AttributeError:  # somebody has taken away what forward sets
            path, _, key = name.rpartition(".")
            store = self._module(path).__dict__
        store[key] = value
