"""The inputs of a step by micro-batch: parts of one mini-batch, or micro-batches of the caller.

Micro-batches of the caller are independent: each is a mini-batch to the model, may have its own sizes, and runs the
program of its own graph, usually the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import StateError
from fxpipe.rewriting.program import clone
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors, different_programs
from fxpipe.runtime.microbatches import scatter
from fxpipe.utils.output_combination import needing_all


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """A mini-batch to be split into micro-batches, or micro-batches of the caller."""

    bounds: tuple[BoundProgram, ...]  # by micro-batch
    leaves: Sequence[Any]  # flattened inputs of the mini-batch; or by micro-batch
    samples: tuple[int, ...]  # by micro-batch
    targets: tuple[Any, ...] = ()  # () or (target,) of the mini-batch; or by micro-batch
    is_handed_over: bool = False

    @classmethod
    def of_mini_batch(
        cls, bound: BoundProgram, leaves: Sequence[Any], samples: Sequence[int], target: tuple[Any, ...] = ()
    ) -> GivenInputs:
        return cls((bound,) * len(samples), leaves, tuple(samples), target)

    @property
    def bound(self) -> BoundProgram:
        """The program of the mini-batch, or of the first micro-batch."""
        return self.bounds[0]

    def takes_all(self, reduction: str) -> bool:
        """Returns whether the backward of a step needs the outputs of all micro-batches."""
        is_split = len(self.samples) > 1 and not self.is_handed_over
        return is_split and (reduction == "batch" or needing_all(self.bound.combinations) is not None)

    @property
    def batch(self) -> int:
        return sum(self.samples)

    @property
    def shares(self) -> list[float]:
        return [size / self.batch for size in self.samples]


@dataclass(frozen=True, slots=True)
class TrainedInput:
    """An input that requires grad, of the mini-batch or of one micro-batch of the caller."""

    tensor: torch.Tensor
    place: int  # index in the flattened inputs
    micro_batches: range  # users
    dim: int | None  # along which it is split; None: each micro-batch has all of it


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The micro-batches of a step."""

    bounds: tuple[BoundProgram, ...]  # by micro-batch
    parts: tuple[Sequence[Any], ...]  # by micro-batch: flattened inputs
    weights: tuple[float, ...]  # by micro-batch: share of all samples
    values: tuple[Any, ...]  # all values of the caller, flattened
    trained: tuple[TrainedInput, ...]

    @classmethod
    def of(cls, given_inputs: GivenInputs) -> StepInputs:
        if given_inputs.is_handed_over:
            parts = [*map(_with_head, given_inputs.bounds, given_inputs.leaves, given_inputs.samples)]
            return cls.of_micro_batches(given_inputs.bounds, parts, given_inputs.shares)
        leaves = _with_head(given_inputs.bound, given_inputs.leaves, given_inputs.batch)
        return cls.of_mini_batch(given_inputs.bound, leaves, given_inputs.shares)

    @classmethod
    def of_mini_batch(cls, bound: BoundProgram, leaves: Sequence[Any], weights: Sequence[float]) -> StepInputs:
        """Splits a mini-batch with flattened inputs into micro-batches of these weights."""
        m = len(weights)
        dims = (*bound.in_dims, *[None] * (len(leaves) - len(bound.in_dims)))
        trained = tuple(
            TrainedInput(leaf, place, range(m), dim)
            for place, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
            if tensor_requires_grad(leaf)
        )
        with torch.no_grad():  # parts begin separate graphs
            parts = scatter(_own_inputs(bound, leaves), dims, m)
        return cls((bound,) * m, tuple(parts), tuple(weights), tuple(leaves), trained)

    @classmethod
    def of_micro_batches(
        cls, bounds: Sequence[BoundProgram], leaves: Sequence[Sequence[Any]], weights: Sequence[float]
    ) -> StepInputs:
        """Returns the inputs of the caller's micro-batches."""
        trained = tuple(
            TrainedInput(leaf, place, range(i, i + 1), None)
            for i, of_one in enumerate(leaves)
            for place, leaf in enumerate(of_one)
            if tensor_requires_grad(leaf)
        )
        with torch.no_grad():
            parts = tuple(map(_own_inputs, bounds, leaves))
        values = tuple(leaf for of_one in leaves for leaf in of_one)
        return cls(tuple(bounds), parts, tuple(weights), values, trained)

    @property
    def programs(self) -> list[BoundProgram]:
        return different_programs(self.bounds)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the stages, the same in all programs."""
        return self.bounds[0].devices

    @property
    def stage_devices(self) -> tuple[tuple[torch.device, ...], ...]:
        """By stage, the devices of all replicas."""
        return self.bounds[0].stage_devices


def _with_head(bound: BoundProgram, leaves: Sequence[Any], samples: int) -> Sequence[Any]:
    """Returns the inputs of the program: the model's inputs, and the values that `bound.head` computes from them."""
    return leaves if bound.head is None else [*leaves, *bound.head(leaves, samples).values()]


def _own_inputs(bound: BoundProgram, leaves: Sequence[Any]) -> list[Any]:
    """Copies inputs that are written to after forward, since R reads their old values."""
    return [clone(leaf) if place in bound.program.written_inputs else leaf for place, leaf in enumerate(leaves)]


def tensor_requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def check_programs_fit(bounds: Sequence[BoundProgram], tensors: Sequence[ModelTensors]) -> None:
    """Checks that micro-batches of different programs can follow each other in one step.

    If a program changes a tensor of the model, the next micro-batch must use it in the same stage and by the same name.

    Raises:
        StateError: they cannot.
    """
    changed = {name for bound in bounds for name in bound.program.changes}
    places: dict[str, set[int]] = {}
    objects: dict[str, set[int]] = {}
    for bound, own in zip(bounds, tensors, strict=True):
        for j, stage in enumerate(bound.program.stages):
            for name in {*stage.attributes, *stage.assigns}:
                places.setdefault(name, set()).add(j)
                if name in stage.attributes and (name in changed or own.get(name).requires_grad):
                    objects.setdefault(name, set()).add(id(own.get(name)))
    for name in sorted(changed):
        if len(places[name]) > 1:
            numbers = " and ".join(map(str, sorted(places[name])))
            raise StateError(
                f"these micro-batches take {len(bounds)} graphs, as forward concludes different things from them, and "
                f"{name!r}, which forward changes, is in stages {numbers} of these: the next micro-batch would not "
                "find what one has left; give those for which forward does the same in a step of their own"
            )
    for name, different in objects.items():
        if len(different) > 1:
            raise StateError(
                f"these micro-batches take {len(bounds)} graphs, in which {name!r} is not the same tensor; keep it as "
                "a parameter or buffer of a module (register_parameter, register_buffer)"
            )
