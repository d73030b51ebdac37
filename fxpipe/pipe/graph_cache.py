"""The graphs of one model, each with the program made of it, looked up by the inputs of a step.

A pipe has one for each kind of inputs, mode of the modules, state of the caller and answer of the guards. What can be
told at a glance is the key; then the conditions on sizes and the guards are asked.

A dimension of an input, besides the batch, that comes with a second size becomes dynamic: the next graph is recorded
for any size of it, as far as forward lets it be (`tracing.dynamic_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe._torch import torch_pytree as pytree
from fxpipe.planning.passes import PreparedGraph
from fxpipe.runtime import BoundProgram
from fxpipe.tracing.cache_key import GraphKey
from fxpipe.tracing.dynamic_sizes import TOO_LONG, DynamicDims, InputDim
from fxpipe.tracing.traced import Traced

CachedGraph = tuple[PreparedGraph, BoundProgram]
MAX_GRAPHS = 16  # of one model, by inputs, mode and state of the caller; the oldest goes
ATTEMPTS = 2  # graphs that try to have a dimension dynamic: at one size it may be fixed by what is so only there


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The flattened inputs of a step, and what is told of them at a glance."""

    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    key: GraphKey
    seed: int  # of the numbers that forward draws and reads


class StepGraphs:
    """The graphs of the micro-batches of one step, which ask a graph once whether it is that of the model now."""

    def __init__(self) -> None:
        self._are_of_model: dict[int, tuple[Traced, bool]] = {}  # by id

    def hold(self, graph: CachedGraph, inputs: GraphInputs) -> bool:
        """Returns whether a graph is that of a micro-batch by itself."""
        traced = graph[0].traced
        if traced.key != inputs.key:
            return False
        if id(traced) not in self._are_of_model:
            self._are_of_model[id(traced)] = traced, traced.holds_for_model()
        return self._are_of_model[id(traced)][1] and traced.holds_for_values(inputs.leaves, inputs.seed)


class GraphCache:
    """The graphs of one model, oldest first."""

    def __init__(self) -> None:
        self.entries: list[CachedGraph] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[CachedGraph]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> CachedGraph:
        return self.entries[index]

    def clear(self) -> None:
        self.entries.clear()

    def add(self, prepared: PreparedGraph, bound: BoundProgram) -> None:
        """Adds a graph; where there are too many, the oldest goes."""
        self.entries.append((prepared, bound))
        del self.entries[:-MAX_GRAPHS]

    def candidates(
        self, inputs: GraphInputs, sizes_of: Callable[[int], Collection[int]] | None = None
    ) -> Iterator[CachedGraph]:
        """Yields the graphs that hold for these inputs.

        Args:
            sizes_of: mini-batch -> its micro-batches, for which it must be the graph as well.
        """
        for entry in list(self.entries):
            traced = entry[0].traced
            if traced.key == inputs.key and traced.holds_for_inputs(inputs.leaves, inputs.seed, sizes_of):
                yield entry

    def at_other_sizes(self, traced: Traced) -> int:
        """Counts the graphs that differ from this one in sizes alone, and this one."""
        same = [other.traced for other, _ in self.entries if other.traced.key == traced.key]
        if traced.dynamic.fixed:  # a size that cannot be dynamic tells them apart
            return sum(bool(other.dynamic.fixed) for other in same)
        has_read = traced.guards is not None and bool(traced.guards.guards)
        return 0 if has_read else len(same)  # what forward has read may tell them apart

    def size_conclusions(self, traced: Traced) -> list[str]:
        """Lists the lines at which forward concludes something else from the sizes of other graphs.

        Of graphs that differ in sizes alone: each is for the sizes for which the same holds.
        """
        lines: dict[str, None] = {}
        for other in (prepared.traced for prepared, _ in self.entries):
            if other is not traced and other.key == traced.key:
                batch, lengths = other.batch_of(other.leaves), traced.dynamic.lengths_of(other.leaves)
                failing = traced.failing_conditions(batch, lengths) if lengths is not None else ()
                lines |= dict.fromkeys(condition.where for condition in failing)
        return list(lines)

    def dynamic_dims(self, inputs: GraphInputs) -> DynamicDims:
        """Returns the dimensions that came with another size before, and may be dynamic in another graph."""
        known = [prepared.traced for prepared, _ in self.entries if prepared.traced.key.inputs == inputs.key.inputs]
        tried = [traced.dynamic.fixed for traced in known if traced.key == inputs.key]
        fixed = {
            dim: why
            for dims in tried
            for dim, why in dims.items()
            if why.startswith(TOO_LONG) or sum(dim in d for d in tried) >= ATTEMPTS
        }
        seen = tuple(map(_sizes, known))
        varying = {
            (place, dim)
            for sizes in seen
            for (place, dim), size in sizes.items()
            if inputs.leaves[place].shape[dim] != size
        }
        dynamic = {dim for traced in known for dim in traced.dynamic.formulas}
        return DynamicDims(frozenset((varying | dynamic) - fixed.keys()), seen, fixed)


def _sizes(traced: Traced) -> dict[InputDim, int]:
    """The sizes of the recording, but for those of the batch."""
    return {
        (place, dim): size
        for place, leaf in enumerate(traced.leaves)
        if leaf.is_tensor
        for dim, size in enumerate(leaf.shape)
        if dim != traced.in_dims[place]
    }
