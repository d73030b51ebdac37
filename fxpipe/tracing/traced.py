"""`Traced`: a model as a graph of functions, with everything needed to run and to cut it.

The graph has, in order of running,

- `placeholder`: one for each tensor among the flattened inputs (`in_0`, `in_1`, ...; numbers are places among all
  leaves),
- `get_attr`: a parameter, a buffer or a constant of the model, by its dotted name,
- `call_function`, `call_method`: the work. There are no modules in the graph,
- `output`: `(outputs, assigned, pieces)`: the leaves of the model's output, the buffers that forward re-assigns, by
  name, and what such outputs are made of as only the mini-batch has (`fxpipe.utils.output_combination`).

What fxpipe knows of each node besides (source line, module, state of the thread, shapes, ...) is its `NodeInfo`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import all_modules
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.cache_key import (
    GraphKey,
    InputsKey,
    TensorGuard,
    TensorKind,
    requires_grad_flags,
    tensors_match,
    torch_switches,
)
from fxpipe.tracing.dynamic_sizes import FIXED_SIZES, DynamicSizes, Lengths, SizeComparisons, SizeCondition
from fxpipe.tracing.node_info import info, opaque_call_of
from fxpipe.tracing.record.recorded_sizes import LayoutRead, SizeRead, SourcePlace
from fxpipe.utils.batch_split import rows_per_sample, samples_along
from fxpipe.utils.equality import equal_values
from fxpipe.utils.locks import cancellation_point
from fxpipe.utils.output_combination import OutputCombination
from fxpipe.utils.python_state import PythonState
from fxpipe.utils.pytree import is_plain_layout

if TYPE_CHECKING:
    from fxpipe.tracing.guards import Guards
    from fxpipe.tracing.record.input_reads import InputRead
    from fxpipe.tracing.record.recorder import GraphBreak
    from fxpipe.tracing.verify.effects import Effects

# a condition; symbol -> place of the input of that size
SizeAssumption = tuple[sympy.Basic, Mapping[sympy.Symbol, int]]
CALL_OPS = ("call_function", "call_method")


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One leaf of the inputs: a tensor, or anything else that is a constant of the graph."""

    is_tensor: bool
    head: str  # the argument of forward that holds it
    path: str  # as the user would write it: `x`, `batch['ids']`
    constant: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    same_as: int | None = None  # the place of an earlier leaf that is the same tensor
    state: PythonState | None = None  # of a function: what it depends on

    def is_constant(self, value: Any) -> bool:
        """Returns whether an input that is not a tensor is as it was when the model was traced."""
        if equal_values(self.constant, value):
            return self.state is None or self.state.holds()
        return self.state is not None and callable(value) and PythonState((value,)).facts == self.state.facts


def as_given(leaves: Sequence[InputLeaf], values: Iterable[Any]) -> list[Any]:
    """Returns copies of inputs of which those of one tensor are one tensor again."""
    values = list(values)
    return [value if leaf.same_as is None else values[leaf.same_as] for leaf, value in zip(leaves, values, strict=True)]


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """Options for what stands in the way of a plain recording. Another recording of the model may take them too."""

    whole: Mapping[str, str] = field(default_factory=dict)  # paths of modules to keep whole, and why
    # Paths of modules whose forward is one node behind some call, behind which, and why.
    graph_breaks: Mapping[str, GraphBreak] = field(default_factory=dict)
    in_compile_mode: bool = False  # libraries take their general paths
    hashes_sizes: bool = False  # a size can be a key
    saves: bool = False  # functions of torch save what backward needs, since forward asks for it


PLAIN_RECORDING = RecordingOptions()


class TracedGraph(fx.Graph):
    """A graph that prints as a table: what each node computes, its shape, module path and source line."""

    def __str__(self) -> str:
        from fxpipe.tracing.graph_text import node_table

        return node_table(self)


@dataclass(frozen=True)
class Traced:
    """A model's graph. Made by `fxpipe.trace`; `print` shows it with shapes, module paths and source lines.

    Each pass (`tracing_passes`) takes one and returns the next, with the fields that it finds.
    """

    model: nn.Module
    graph: fx.Graph
    leaves: tuple[InputLeaf, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    flags: tuple[Any, ...]  # of all modules (`fxpipe.tracing.cache_key`): other ones are another graph
    state: ThreadState  # of the caller
    constants: dict[str, torch.Tensor]
    size_reads: tuple[SizeRead, ...]
    python_state: PythonState  # what forward has read besides tensors: other values are another graph
    layout_reads: tuple[LayoutRead, ...] = ()
    input_reads: tuple[InputRead, ...] = ()
    attributes: tuple[TensorGuard, ...] = ()  # the model's tensors as they were
    switches: tuple[Any, ...] = field(default_factory=torch_switches)  # of torch, as forward saw them
    requires_grad: tuple[bool, ...] | None = None  # of all parameters, where forward has asked a tensor for it
    tracer: str = "record"  # or the name of the function that made the graph, whatever that is
    is_recorded: bool = True  # False: something else than a recording of the model made it
    in_dims: tuple[int | None, ...] = ()  # by leaf: the dimension that holds the batch
    # By output leaf: a dimension, "mean", "sum", "stack", "combined" (see below), None: not batched.
    out_dims: tuple[int | str | None, ...] = ()
    combinations: tuple[OutputCombination, ...] = ()  # of the outputs that are "combined"
    piece_dims: tuple[int | str | None, ...] = ()  # of `pieces`: of rows the dimension, "sum", "mean", None: the same
    told: frozenset[int] = frozenset()  # outputs of which the user has said how they go together
    tail: frozenset[fx.Node] = frozenset()  # what combinations with rows run once, until it is taken out of the graph
    size_assumptions: tuple[SizeAssumption, ...] = ()  # of `torch.export`, which made the graph, on input sizes
    batch_conditions: tuple[SizeCondition, ...] = ()  # of mini-batch and micro-batches
    mini_batch_conditions: tuple[SizeCondition, ...] = ()  # what need not hold for micro-batches
    dynamic: DynamicSizes = FIXED_SIZES  # dimensions of inputs, besides the batch, that may differ from the example's
    not_followed: str = ""  # the line where forward took the batch size in a way that leaves no condition (`len(x)`)
    comparisons: SizeComparisons = field(default_factory=SizeComparisons)
    # it holds for those accepted only: the batch size is a number in what it computes
    compares_micro_batches: bool = False
    is_whole: bool = False  # holds for the mini-batch in one micro-batch only: its results were not to be put together
    effects: Effects | None = None  # what the nodes share and change
    guards: Guards | None = None  # values that forward read: other ones are another graph
    texts: tuple[SourcePlace, ...] = ()  # where forward made texts of tensors
    batch_bounds: tuple[int, int | None] = (0, None)  # samples of mini-batches, as the user has it
    has_keys_of_sizes: bool = False  # was something looked up by a size, in a cache?
    again: Callable[[Mapping[Any, int]], Traced] | None = None  # records once more, while the graph is being made
    recording_options: RecordingOptions | None = None  # None: made in another way
    device: torch.device | None = None  # to which planning had moved the model for it; None: it stayed
    signature: int = 0  # the same for recordings of the same functions of the same values; see `signature_of`
    seed: int = 0  # of the numbers that forward drew and read
    # Of each number drawn: does a guard answer for it, or did a module kept whole draw it?
    draws_from_stream: tuple[bool, ...] = ()
    recorded_sizes: tuple[int, ...] = ()  # where plain numbers in it depend on the batch size: it holds for these only
    recorded_samples: int | None = None  # samples, where these were not all of the example's
    uneven_outputs: tuple[tuple[str, sympy.Expr], ...] = ()  # outputs whose sizes do not simply grow with the batch
    marks: tuple[str, ...] = ()  # source lines of `fxpipe.cut()`, in order
    tied: frozenset[str] = frozenset()  # attributes that forward sets to tensors that require grad
    left_attribute_dims: Mapping[str, int | str] = field(default_factory=dict)  # of `left`: how it goes together
    print_lines: tuple[str, ...] = ()  # source lines of what forward prints, and no step
    ended_modules: tuple[str, ...] = ()  # paths of modules, in the order in which they ended
    why: tuple[str, ...] = ()  # how the graph came to be as it is, where that is not plain recording
    batch: sympy.Symbol = field(default_factory=lambda: sympy.Symbol("b", integer=True, positive=True))
    _modules: Sequence[nn.Module] = field(init=False)  # held: their ids in `flags` must not come again

    def __post_init__(self) -> None:
        object.__setattr__(self, "_modules", all_modules(self.model))

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that work, in order."""
        return [n for n in self.graph.nodes if n.op in CALL_OPS]

    @property
    def placeholders(self) -> dict[int, fx.Node]:
        """Place among the input leaves -> node."""
        return {self.place_of(n): n for n in self.graph.nodes if n.op == "placeholder"}

    def place_of(self, placeholder: fx.Node) -> int:
        """Returns the place of the input leaf that a placeholder stands for."""
        return int(placeholder.name.removeprefix("in_"))

    @property
    def whole(self) -> dict[str, str]:
        """Paths of the modules that are one node, and why."""
        calls = (info(n).opaque for n in self.graph.nodes)
        return {call.module: call.why for call in calls if call is not None and call.module is not None}

    @property
    def opaque_names(self) -> dict[str, str]:
        """The same for people: of a module that is continued as Python, behind which of its calls."""
        first = {info(n).opaque_module: n for n in reversed(self.graph.nodes) if info(n).opaque_module is not None}
        return {opaque_name(n): opaque_call_of(n).why for n in reversed(first.values())}

    @property
    def largest_opaque_share(self) -> float:
        """Share of the model's parameters that is in the largest of these."""
        return max(self.opaque_shares.values(), default=0.0)

    @property
    def opaque_shares(self) -> dict[str, float]:
        """The share of the model's parameters, by path of a module that is one node."""
        numbers = {name: p.numel() for name, p in self.model.named_parameters()}
        total = max(sum(numbers.values()), 1)
        shares: dict[str, float] = {}
        for node in self.graph.nodes:
            if path := info(node).opaque_module:
                inside = sum(numbers.get(str(n.target), 0) for n in node.all_input_nodes if n.op == "get_attr")
                shares[path] = max(shares.get(path, 0.0), inside / total)
        return shares

    @property
    def cut_mark_places(self) -> tuple[int, ...]:
        """Places among `nodes` before which a mark (`fxpipe.cut`) stands; len(nodes): behind all of them."""
        before = [info(n).recorded_at.cut_marks for n in self.nodes]
        return tuple(bisect_left(before, number) for number in range(1, len(self.marks) + 1))

    @property
    def ends(self) -> dict[str, int]:
        """The place among `nodes` before which a module that ran last ended, by its path. Known where recorded."""
        before = [info(n).recorded_at.ended_modules for n in self.nodes]
        return {path: bisect_left(before, number) for number, path in enumerate(self.ended_modules, 1)}

    @property
    def outputs(self) -> list[Any]:
        """The leaves of the model's output: nodes, or constants."""
        return list(self.graph.output_node().args[0][0])  # type: ignore[index,arg-type]

    @property
    def assigned(self) -> dict[str, fx.Node]:
        """Buffers and tensor attributes that forward re-assigns, and the nodes of their new values."""
        return dict(self.graph.output_node().args[0][1])  # type: ignore[index,arg-type]

    @property
    def left(self) -> dict[str, fx.Node]:
        """Of these, what forward only leaves there, for each sample: it is put together as outputs are."""
        return {name: node for name, node in self.assigned.items() if name in self.left_attribute_dims}

    @property
    def carried_state(self) -> dict[str, fx.Node]:
        """The others: state, that each micro-batch takes over from the one before."""
        return {name: node for name, node in self.assigned.items() if name not in self.left_attribute_dims}

    @property
    def results(self) -> list[tuple[Any, int | str | None]]:
        """The results of micro-batches, each with how it goes together.

        Outputs, pieces, then the inputs that forward writes to, then the attributes that it leaves.
        """
        assert self.effects is not None
        written = [(node, self.in_dims[self.place_of(node)]) for node in self.effects.written_inputs]
        outputs = zip(self.outputs, self.out_dims, strict=True)
        left = [(node, self.left_attribute_dims[name]) for name, node in self.left.items()]
        return [*outputs, *zip(self.pieces, self.piece_dims, strict=True), *written, *left]

    @property
    def pieces(self) -> list[fx.Node]:
        """The nodes that combinations of outputs are made of."""
        output = self.graph.output_node().args[0]
        return list(output[2]) if len(output) > 2 else []  # type: ignore[index,arg-type]

    @property
    def handed_out(self) -> list[Any]:
        """Values that micro-batches hand out: leaves of the output, None for those that are combined, and pieces."""
        leaves = zip(self.outputs, self.out_dims or [None] * len(self.outputs), strict=True)
        return [*(None if how == "combined" else leaf for leaf, how in leaves), *self.pieces]

    @property
    def handed_out_dims(self) -> tuple[int | str | None, ...]:
        """The way in which each value of `handed_out` goes together."""
        return (*(None if how == "combined" else how for how in self.out_dims), *self.piece_dims)

    def fingerprint(self) -> str:
        """The same for two traces of one model: names, functions and arguments of all nodes."""
        text = "\n".join(f"{n.op} {n.name} {_target_name(n.target)} {n.args} {n.kwargs}" for n in self.graph.nodes)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def holds_at(self, size: int, lengths: Lengths | None = None) -> bool:
        """Returns whether what forward concluded from sizes holds for so many samples, or does no harm.

        `lengths`: the dynamic sizes; by default those of the recording.
        """
        is_excused = size in self.comparisons.excused or all(read.holds(size) for read in self.batch_conditions)
        return is_excused and not self.failing_conditions(size, lengths)

    def failing_conditions(self, size: int, lengths: Lengths | None = None) -> list[SizeCondition]:
        """Returns what forward concluded from dynamic sizes and does not hold for these, where that may do harm.

        `lengths`: the dynamic sizes; by default those of the recording.
        """
        lengths = self.dynamic.example if lengths is None else lengths
        bounds = self.comparisons.bounds
        conditions = self.dynamic.conditions if bounds is None else (*self.dynamic.conditions, bounds)
        return [c for c in conditions if c not in self.comparisons.harmless and not c.holds(size, lengths)]

    def holds_for(self, batch: int, sizes: Collection[int] = (), lengths: Lengths | None = None) -> bool:
        """Returns whether it is the graph of so many samples, in micro-batches of these sizes."""
        lengths = self.dynamic.example if lengths is None else lengths
        if (batch, frozenset(sizes), lengths) in self.comparisons.accepted_splits:
            return True
        if (self.compares_micro_batches or self.is_whole) and any(size != batch for size in sizes):
            return False
        reads = (*self.batch_conditions, *self.mini_batch_conditions)
        if not all(read.holds(batch) for read in reads) or self.failing_conditions(batch, lengths):
            return False
        return all(self.holds_at(size, lengths) for size in {*sizes})

    @cached_property
    def key(self) -> GraphKey:
        """The key of the steps that it is the graph of. Every step asks for it."""
        kinds = (
            TensorKind(leaf.dtype, len(leaf.shape), leaf.requires_grad) if leaf.dtype is not None else None
            for leaf in self.leaves
        )
        same_as = tuple(leaf.same_as for leaf in self.leaves)
        return GraphKey(InputsKey(self.in_spec, tuple(kinds), same_as), self.flags, self.state)

    def matches(self, leaves: Sequence[Any], in_spec: pytree.TreeSpec, flags: tuple[Any, ...], seed: int = 0) -> bool:
        """Returns whether this is the graph of these inputs. Sizes may differ: of the batch, and dynamic ones."""
        key = GraphKey(InputsKey.of(in_spec, leaves), flags, ThreadState.now())
        return key == self.key and self.holds_for_inputs(leaves, seed)

    def holds_for_inputs(
        self, leaves: Sequence[Any], seed: int = 0, sizes_of: Callable[[int], Collection[int]] | None = None
    ) -> bool:
        """Returns whether this is the graph of these inputs, whose key is its own.

        Args:
            seed: that of the numbers that forward draws and reads.
            sizes_of: mini-batch -> its micro-batches, for which it must be the graph as well.
        """
        return self.holds_for_model() and self.holds_for_values(leaves, seed, sizes_of)

    def is_within_bounds(self, batch: int) -> bool:
        """Returns whether the user allows mini-batches of so many samples."""
        least, largest = self.batch_bounds
        return least <= batch and (largest is None or batch <= largest)

    def refuse_inference_mode(self) -> None:
        """Raises `TraceError` in inference mode, in which stages do not run, if forward asks for it."""
        names = ("is_inference_mode_enabled", "is_inference") if torch.is_inference_mode_enabled() else ()
        for line in filter(None, map(self.python_state.line_of, names)):
            raise TraceError(
                f"forward asks{line} whether inference mode is on, and a pipeline runs its stages without; call the "
                "pipe under torch.no_grad() instead"
            )

    def holds_for_model(self) -> bool:
        """Returns whether this is the graph of the model as it is now, whose flags are its own."""
        self.refuse_inference_mode()
        return (
            self.python_state.holds()
            and self.switches == torch_switches()
            and tensors_match(self.attributes)
            and self.requires_grad in (None, requires_grad_flags(self.model))
        )

    def holds_for_values(
        self, leaves: Sequence[Any], seed: int = 0, sizes_of: Callable[[int], Collection[int]] | None = None
    ) -> bool:
        """The same for these inputs, where it is the graph of the model as it is now."""
        batches = set()
        for place, (leaf, dim, value) in enumerate(zip(self.leaves, self.in_dims, leaves, strict=True)):
            if not leaf.is_tensor:
                if not leaf.is_constant(value):
                    return False
                continue
            if not is_plain_layout(value):  # the search for another graph will say so
                return False
            differing = (d for d, (s, t) in enumerate(zip(leaf.shape, value.shape, strict=True)) if s != t)
            if any(d != dim and (place, d) not in self.dynamic.formulas for d in differing):
                return False
            if dim is not None:
                if value.shape[dim] % rows_per_sample(dim):
                    return False
                batches.add(samples_along(value, dim))
        if len(batches) > 1:
            return False
        batch = next(iter(batches), 1)
        if not self.is_within_bounds(batch):  # nor is any other graph: what is asked for is refused
            return False
        if not all(read.holds(leaves) for read in self.input_reads):
            return False
        lengths = self.dynamic.lengths_of(leaves)
        if lengths is None or not self.holds_for(batch, () if sizes_of is None else sizes_of(batch), lengths):
            return False
        return self.guards is None or self.guards.hold(self, leaves, seed)

    def refuse_uneven_outputs(self, batch: int, parts: Sequence[int]) -> None:
        """Raises `ArgumentError` if micro-batches of these sizes do not make as many rows as the mini-batch."""
        for name, rows in self.uneven_outputs:
            whole, part_rows = rows.subs(self.batch, batch), [rows.subs(self.batch, part) for part in parts]
            if sum(part_rows) != whole:
                raise ArgumentError(
                    f"the output {name} has {whole} rows for {batch} samples ({rows}), but micro-batches of "
                    f"{', '.join(map(str, parts))} samples make {', '.join(map(str, part_rows))}; choose the batch "
                    "size and chunks so that they add up, or say with out_dims how the outputs go together"
                )

    @property
    def reasons_of_fixed_sizes(self) -> list[str]:
        """The reasons why each size of a dimension that was to be dynamic is another graph."""
        return [
            f"dimension {dim} of {self.leaves[place].path} has one graph for each size: {reason}"
            for (place, dim), reason in self.dynamic.fixed.items()
        ]

    def batch_of(self, leaves: Sequence[Any]) -> int:
        """Number of samples in the flattened inputs: 1 where no dimension holds them (`is_whole`).

        Raises:
            ArgumentError: inputs disagree.
        """
        sizes = [
            (leaf.path, samples_along(value, dim))
            for leaf, dim, value in zip(self.leaves, self.in_dims, leaves, strict=True)
            if dim is not None
        ]
        return common_batch_size(sizes) if sizes else 1

    def __str__(self) -> str:
        from fxpipe.tracing.graph_text import graph_table

        return graph_table(self)


def common_batch_size(batch_sizes: Sequence[tuple[str, int]]) -> int:
    """The number of samples that all of (input, number of samples) agree on."""
    if not batch_sizes:
        raise ArgumentError(
            "no input has a batch dimension, so there is nothing to cut into micro-batches; "
            "pass a tensor whose dimension 0 holds the samples, or name the dimension with in_dims"
        )
    if len({size for _, size in batch_sizes}) > 1:
        sizes = ", ".join(f"{path}: {size}" for path, size in batch_sizes)
        raise ArgumentError(
            f"inputs disagree on the batch size ({sizes}); give all of them the same number of samples, "
            "mark an input without a batch with None in in_dims, or say with in_dims (in_dims=0) that one with several "
            "rows for each sample holds the batch, too"
        )
    return batch_sizes[0][1]


def attribute_tensor(traced: Traced, node: fx.Node) -> torch.Tensor:
    """The tensor of a `get_attr` node."""
    name = str(node.target)
    if name in traced.constants:
        return traced.constants[name]
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(traced.model.get_submodule(path), key)
    return tensor


def opaque_name(node: fx.Node) -> str:
    """Names a module that is one node, or the part of it that is, for people."""
    call = opaque_call_of(node)
    path, calls = call.module, call.calls_before
    if calls is None:
        return f"module {path!r}"
    place = f" behind its call of {calls[-1]!r}" if calls else ""
    return f"forward of {f'module {path!r}' if path else 'the model'}{place}"


def runs_python(node: fx.Node) -> bool:
    """Returns whether a node runs Python as it is, which may look at values in ways that no mode sees."""
    return info(node).opaque is not None


def call_node(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Runs a working node."""
    cancellation_point()
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def signature_of(graph: fx.Graph) -> int:
    """The same for two recordings in which the same functions take the same values, with whatever other arguments."""
    return hash(tuple((n.op, n.name, _target_name(n.target), *map(str, n.all_input_nodes)) for n in graph.nodes))


def _target_name(target: Any) -> str:
    return (
        target
        if isinstance(target, str)
        else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
    )
