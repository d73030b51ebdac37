"""The graphs of one model with their programs, looked up by the inputs of a step.

A pipe has a graph for each kind of inputs, mode of the modules, state of the caller and answer of the guards. Lookup
compares the key first, then conditions on sizes and guards. If a dimension of an input, other than the batch, has a
second size, it becomes dynamic: the next graph is recorded for any size of it, if forward allows (`dynamic_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import ArgumentError
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.planning.passes import PreparedGraph
from fxpipe.runtime import BoundProgram
from fxpipe.tracing.cache_key import GraphKey
from fxpipe.tracing.dynamic_sizes import TOO_LONG, DynamicDims, InputDim
from fxpipe.tracing.source_lines import warn_user
from fxpipe.tracing.traced import Traced

CachedGraph = tuple[PreparedGraph, BoundProgram]
MAX_GRAPHS = 16  # of one model; the oldest is dropped
MANY_PYTHON_VALUES = 4  # values of one name that forward reads, before a warning
MANY_VALUE_GRAPHS = 8  # graphs that differ in values or sizes only, before a warning
ATTEMPTS = 2  # graphs that try to make a dimension dynamic: it may be fixed at one size only


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The flattened inputs of a mini-batch or micro-batch, and the key of their graphs."""

    call: ModelCall
    leaves: Sequence[Any]
    key: GraphKey
    seed: int
    checked: dict[int, tuple[Traced, bool]]  # by id, for all micro-batches of a step: a graph, if it is the model's now

    @property
    def elements(self) -> int:
        return sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def samples_of(self, traced: Traced) -> int:
        """Returns the number of samples.

        Raises:
            ArgumentError: there are no samples.
        """
        batch = traced.batch_of(self.leaves)
        if batch == 0:
            raise ArgumentError(
                "the inputs hold no samples (size 0 in the batch dimension); give at least one, or skip the step"
            )
        return batch

    def are_far_from(self, traced: Traced) -> bool:
        """Returns whether dynamic sizes are far from the sizes at which graph and model were compared."""
        lengths = traced.dynamic.lengths_of(self.leaves)
        return lengths is not None and traced.dynamic.is_far_from(lengths, traced.comparisons.lengths)

    def match(self, traced: Traced, sizes_of: Callable[[int], Collection[int]] | None = None) -> bool:
        """Returns whether a graph fits these inputs.

        Args:
            sizes_of: mini-batch -> sizes of its micro-batches, which the graph must fit, too.
        """
        if traced.key != self.key:
            return False
        if id(traced) not in self.checked:
            self.checked[id(traced)] = traced, traced.holds_for_model()
        return self.checked[id(traced)][1] and traced.holds_for_values(self.leaves, self.seed, sizes_of)


class GraphCache:
    """The graphs of one model, oldest first."""

    def __init__(self) -> None:
        self.entries: list[CachedGraph] = []
        self._answers: dict[str, list[dict[str, str]]] = {}  # read -> answer, by graphs that are equal otherwise
        self._warned = False

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[CachedGraph]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> CachedGraph:
        return self.entries[index]

    def clear(self) -> None:
        self.entries.clear()

    def add(self, prepared: PreparedGraph, bound: BoundProgram) -> None:
        """Adds a graph; drops the oldest if there are too many."""
        self.entries.append((prepared, bound))
        del self.entries[:-MAX_GRAPHS]

    def at_other_sizes(self, traced: Traced) -> int:
        """Counts the graphs that differ from this one in sizes only, including this one."""
        same = [other.traced for other, _ in self.entries if other.traced.key == traced.key]
        if traced.dynamic.fixed:  # sizes that cannot be dynamic distinguish them
            return sum(bool(other.dynamic.fixed) for other in same)
        has_read = traced.guards is not None and bool(traced.guards.guards)
        return 0 if has_read else len(same)  # a value that forward reads may distinguish them

    def size_conclusions(self, traced: Traced) -> list[str]:
        """Lists the lines at which forward concludes something else from the sizes of other graphs.

        Only of graphs that differ in sizes alone: each fits the sizes with the same conclusions.
        """
        lines: dict[str, None] = {}
        for other in (prepared.traced for prepared, _ in self.entries):
            if other is not traced and other.key == traced.key:
                batch, lengths = other.batch_of(other.leaves), traced.dynamic.lengths_of(other.leaves)
                failing = traced.failing_conditions(batch, lengths) if lengths is not None else ()
                lines |= dict.fromkeys(condition.where for condition in failing)
        return list(lines)

    def warn_of_many(self, traced: Traced) -> None:
        """Warns, once for a pipe, if there are so many graphs that each step may need another; `traced`: the last."""
        model = type(traced.model).__name__
        for text in (self._many_values, self._many_python_values, self._many_sizes):
            if not self._warned and (message := text(traced, model)) is not None:
                self._warned = True
                warn_user(message)

    def _many_sizes(self, traced: Traced, model: str) -> str | None:
        if (graphs := self.at_other_sizes(traced)) <= MANY_VALUE_GRAPHS:
            return None
        if traced.dynamic.fixed:
            why = "; ".join(traced.reasons_of_fixed_sizes)
            remedy = "Let forward keep the size a size (tensor functions instead of loops), or pad to few sizes"
        elif lines := self.size_conclusions(traced):
            why = f"forward concludes something else from them at {'; '.join(lines)}"
            remedy = "Pad to few sizes, or to sizes of which the same holds (multiples of a window or stride)"
        else:
            return None
        return (
            f"{graphs} graphs of {model} differ only in sizes of inputs, and each other size takes the time to record "
            f"another: {why}. {remedy}"
        )

    def _many_python_values(self, traced: Traced, model: str) -> str | None:
        states = [one.traced.python_state for one, _ in self.entries if one.traced.key == traced.key]
        for name in {name for state in states if (name := state.changed())}:
            if (count := len({state.facts_of(name) for state in states})) > MANY_PYTHON_VALUES:
                return (
                    f"forward of {model} reads {name!r}{traced.python_state.line_of(name)}, which had {count} values "
                    "so far, and each other value takes the time to record another graph: pass it to forward as a "
                    "tensor, or keep it in a buffer (register_buffer) that you fill"
                )
        return None

    def _many_values(self, traced: Traced, model: str) -> str | None:
        if not traced.guards or not traced.guards.guards:
            return None
        shapes = tuple((leaf.path, leaf.dtype, leaf.shape[1:], leaf.constant) for leaf in traced.leaves)
        seen = self._answers.setdefault(repr((traced.flags, traced.state, shapes)), [])
        seen.append({f"{guard.text} at {guard.where}": repr(guard.expected) for guard in traced.guards.guards})
        if len(seen) <= MANY_VALUE_GRAPHS:
            return None
        reads = [read for read in seen[-1] if len({answers.get(read) for answers in seen}) > 1]
        return (
            f"{len(seen)} graphs of {model} differ only in values that forward has read ({'; '.join(reads)}), and each "
            "other value takes the time to record another; keep them in tensors (torch.where, masks), take the reading "
            "outside forward, or keep the module that reads whole (leaf_modules=)"
        )

    def dynamic_dims(self, inputs: GraphInputs) -> DynamicDims:
        """Returns the dimensions that had another size before, and may be dynamic in another graph."""
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
    """Returns the sizes of the recording, except the batch dimensions."""
    return {
        (place, dim): size
        for place, leaf in enumerate(traced.leaves)
        if leaf.is_tensor
        for dim, size in enumerate(leaf.shape)
        if dim != traced.in_dims[place]
    }
