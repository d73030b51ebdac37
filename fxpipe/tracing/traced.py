"""`Traced`: a model as a graph of functions, with everything needed to run and to cut it.

The graph contains no modules. It has, in order of execution,

- `placeholder`: one for each tensor among the flattened inputs (`in_0`, `in_1`, ...: the index among all leaves),
- `get_attr`: a parameter, a buffer or a constant of the model, by its dotted name,
- `call_function`, `call_method`: the operations,
- `output`: `(outputs, assigned, pieces)`: the leaves of the model's output, the buffers that forward re-assigns, by
  name, and the values from which outputs of the mini-batch are combined (`fxpipe.utils.output_combination`).

All other facts about a node (source line, module, thread state, shapes, ...) are in its `NodeInfo`.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import all_modules
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.dynamic_sizes import FIXED_SIZES, DynamicDims, DynamicSizes, Lengths, SizeComparisons, SizeCondition
from fxpipe.tracing.model_state import TensorGuard, is_fixed, requires_grad_flags, torch_switches
from fxpipe.tracing.node_info import info, opaque_call_of
from fxpipe.tracing.record.recorded_sizes import InputRead, LayoutRead, SizeRead
from fxpipe.tracing.tensors import slice_samples
from fxpipe.utils.batch_split import BatchDim, rows_per_sample, samples_along
from fxpipe.utils.locks import cancellation_point
from fxpipe.utils.output_combination import OutputCombination, StateUpdate
from fxpipe.utils.python_objects import equal_values
from fxpipe.utils.python_state import PythonState
from fxpipe.utils.pytree import is_plain_layout

if TYPE_CHECKING:
    from fxpipe.tracing.guards import Guards
    from fxpipe.tracing.verify.effects import Effects

CALL_OPS = ("call_function", "call_method")


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """A leaf of the inputs: a tensor, or any other value, which is a constant of the graph."""

    is_tensor: bool
    head: str  # the argument of forward that holds it
    path: str  # as the user would write it: `x`, `batch['ids']`
    constant: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    same_as: int | None = None  # index of an earlier leaf that is the same tensor
    state: PythonState | None = None  # for a function: the state that it depends on

    def is_constant(self, value: Any) -> bool:
        """Returns whether an input that is not a tensor has the value that it had during tracing."""
        if equal_values(self.constant, value):
            return self.state is None or self.state.holds()
        return self.state is not None and callable(value) and PythonState((value,)).facts == self.state.facts


def as_given(leaves: Sequence[InputLeaf], values: Iterable[Any]) -> list[Any]:
    """Returns copies of inputs in which leaves that were the same tensor are the same tensor again."""
    values = list(values)
    return [value if leaf.same_as is None else values[leaf.same_as] for leaf, value in zip(leaves, values, strict=True)]


class GraphBreak(NamedTuple):
    """A position in forward after which a module is one node: after the given number of calls of other modules."""

    calls: int
    why: str
    may_split: bool = False  # the remaining forward may become several nodes, between calls of other modules


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """Options for models that cannot be recorded as they are. Later recordings of the model reuse them."""

    whole: Mapping[str, str] = field(default_factory=dict)  # paths of modules to keep whole, with the reason
    # Paths of modules whose forward is one node after some call, with that call and the reason.
    graph_breaks: Mapping[str, GraphBreak] = field(default_factory=dict)
    in_compile_mode: bool = False  # libraries take their general code paths
    hashes_sizes: bool = False  # sizes can be keys of a dict
    records_hooks: bool = False  # hooks that are methods of modules are recorded like lines of forward
    locates_draws: bool = False  # after each module, is it asked whether Python has drawn random numbers?
    draws_for_python: bool = False  # torch draws the numbers that forward draws with Python or numpy
    may_overwrite: bool = False  # forward may overwrite attributes that it has not read
    counters: frozenset[str] = frozenset()  # numbers that forward adds to and does not use otherwise
    caches: frozenset[str] = frozenset()  # attributes and containers that forward fills in each call
    keeps_saved: bool = False  # tensors that autograd saves, since forward runs it
    reads_sequences: bool = False  # forward reads lists and tuples inside results of modules kept whole
    records_packing: bool = True  # functions on packed sequences are nodes
    reads_lengths: bool = False  # the largest length of packed sequences is a number that forward reads


PLAIN_RECORDING = RecordingOptions()


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """The arguments of `fxpipe.trace`: a model, its example inputs, and the user's options."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]  # flattened inputs
    leaf_modules: Mapping[str, str]  # paths of the modules to keep whole, with the reason
    in_dims: Any
    out_dims: Any
    chunks: int
    is_compared: bool
    seed: int  # seed of the random numbers that forward draws and reads
    dynamic: DynamicDims  # dimensions besides the batch whose size may vary
    is_whole: bool = False  # is the mini-batch the only micro-batch? Then nothing is split or combined.
    is_for_one_size: bool = False  # may the graph hold for the example's number of samples only?
    changes_once: bool = True  # may state change once for the mini-batch, instead of with each micro-batch?
    may_overwrite: bool = False  # see `RecordingOptions`
    caches: frozenset[str] = frozenset()  # see `RecordingOptions`


def inputs_key(spec: pytree.TreeSpec, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the structure of the inputs, the kind of each tensor without its sizes, and which are the same tensor."""
    kinds = tuple((x.dtype, x.dim(), x.requires_grad) if isinstance(x, torch.Tensor) else None for x in leaves)
    return spec, kinds, same_tensors(leaves)


def same_tensors(leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns for each leaf the first index of the same tensor; None if it is the first, or not a tensor."""
    first: dict[int, int] = {}
    places = (first.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i for i, leaf in enumerate(leaves))
    return tuple(None if place == i else place for i, place in enumerate(places))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The cheap properties of a step that decide which Python a model runs."""

    inputs: tuple[Any, ...]  # see `inputs_key`
    flags: tuple[Any, ...]  # flags of all modules
    state: ThreadState  # state of the caller


class TracedGraph(fx.Graph):
    """A graph that prints as a table: what each node computes, its shape, module path and source line."""

    def __str__(self) -> str:
        from fxpipe.tracing.graph_text import node_table

        return node_table(self)


@dataclass(frozen=True)
class Traced:
    """A model's graph, created by `fxpipe.trace`. `print` shows it with shapes, module paths and source lines."""

    model: nn.Module
    graph: fx.Graph
    leaves: tuple[InputLeaf, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    flags: tuple[Any, ...]  # flags of all modules (`GraphKey`)
    state: ThreadState
    constants: dict[str, torch.Tensor]
    size_reads: tuple[SizeRead, ...]
    python_state: PythonState  # values that forward reads besides tensors
    layout_reads: tuple[LayoutRead, ...] = ()
    input_reads: tuple[InputRead, ...] = ()
    attributes: tuple[TensorGuard, ...] = ()  # the model's tensors during tracing
    switches: tuple[Any, ...] = field(default_factory=torch_switches)
    requires_grad: tuple[bool, ...] | None = None  # flags of all parameters, if forward reads any flag
    in_dims: tuple[int | None, ...] = ()  # by leaf: the dimension that holds the batch
    any_sizes: frozenset[int] = frozenset()  # inputs that only modules kept whole read: their sizes do not matter
    # By output leaf: a dimension, "mean", "sum", "stack", "combined" (see below); None: not batched.
    out_dims: tuple[int | str | None, ...] = ()
    combinations: tuple[OutputCombination, ...] = ()  # one for each output that is "combined"
    piece_dims: tuple[int | str | None, ...] = ()  # for `pieces`: dimension of rows, "sum", "mean"; None: equal
    changes_once: bool = True  # may there be an `update`?
    update: StateUpdate | None = None  # state that changes once for the mini-batch
    told: frozenset[int] = frozenset()  # outputs for which the user gives the combination
    tail: frozenset[fx.Node] = frozenset()  # nodes of combinations with rows, until they are removed
    shared: frozenset[fx.Node] = frozenset()  # values of inputs that samples share, until they are the head
    head: Callable[[Sequence[Any], int], Mapping[int, Any]] | None = None  # (inputs, samples) -> inputs by place
    is_for_one_size: bool = False  # may nodes fix the number of samples?
    batch_conditions: tuple[SizeCondition, ...] = ()  # on mini-batch and micro-batches
    mini_batch_conditions: tuple[SizeCondition, ...] = ()  # on the mini-batch only
    dynamic: DynamicSizes = FIXED_SIZES  # dynamic dimensions of inputs
    first_text: tuple[str, str, int] | None = None  # place of the first formatted tensor: module, line, calls before
    not_followed: str = ""  # the line where forward reads the batch size without a condition (`for row in x`)
    comparisons: SizeComparisons = field(default_factory=SizeComparisons)
    # The batch size is a number in the graph: it holds only for accepted splits.
    compares_micro_batches: bool = False
    is_whole: bool = False  # holds only for the mini-batch as one micro-batch: its results cannot be combined
    effects: Effects | None = None  # memory that nodes share and change
    guards: Guards | None = None  # values that forward read; other values need another graph
    of_mini_batch: Traced | None = None  # the graph that this graph, of a micro-batch, replaces; its guards hold, too
    batch_bounds: tuple[int, int | None] = (0, None)  # the user's bounds for the samples of a mini-batch
    has_keys_of_sizes: bool = False  # was a value looked up in a cache by a size?
    again: Callable[..., Traced] | None = None  # records again with disguised sizes (`record.other_sizes`)
    recording_options: RecordingOptions = PLAIN_RECORDING  # that the recording needed
    device: torch.device | None = None  # to which planning moved the model for tracing; None: not moved
    signature: int = 0  # equal for recordings of the same functions on the same values; see `signature_of`
    seed: int = 0  # seed of the random numbers that forward draws and reads
    # For each random number: does a guard check it, or did a module kept whole draw it?
    draws_from_stream: tuple[bool, ...] = ()
    recorded_sizes: tuple[int, ...] = ()  # if plain numbers in the graph depend on the batch size: the only valid sizes
    recorded_samples: int | None = None  # samples in the recording, if fewer than in the example
    uneven_outputs: tuple[tuple[str, sympy.Expr], ...] = ()  # outputs whose sizes are not proportional to the batch
    marks: tuple[str, ...] = ()  # source lines of `fxpipe.cut()`, in order
    tied: frozenset[str] = frozenset()  # attributes that forward sets to tensors that require grad
    overwritten: tuple[str, ...] = ()  # attributes that forward sets before it reads them, or counts in; not kept
    left_attribute_dims: Mapping[str, int | str] = field(default_factory=dict)  # combination of each value in `left`
    print_lines: tuple[str, ...] = ()  # source lines of prints in forward, which steps do not run
    ended_modules: tuple[str, ...] = ()  # paths of modules, in the order in which they returned
    why: tuple[str, ...] = ()  # reasons why the graph is not a plain recording
    batch: sympy.Symbol = field(default_factory=lambda: sympy.Symbol("b", integer=True, positive=True))
    _modules: Sequence[nn.Module] = field(init=False)  # held: their ids in `flags` must not come again

    def __post_init__(self) -> None:
        object.__setattr__(self, "_modules", all_modules(self.model))

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations, in order."""
        return [n for n in self.graph.nodes if n.op in CALL_OPS]

    @property
    def placeholders(self) -> dict[int, fx.Node]:
        """The placeholder for each index among the input leaves."""
        return {self.place_of(n): n for n in self.graph.nodes if n.op == "placeholder"}

    @property
    def batch_placeholders(self) -> set[fx.Node]:
        """The placeholders of inputs that hold the batch; the head does not."""
        return {n for place, n in self.placeholders.items() if dict(enumerate(self.in_dims)).get(place) is not None}

    def with_head(self, leaves: Sequence[Any], samples: int) -> Sequence[Any]:
        """Returns flattened inputs, and the values that the head computes from them."""
        return leaves if self.head is None else [*leaves, *self.head(leaves, samples).values()]

    def place_of(self, placeholder: fx.Node) -> int:
        """Returns the index of the input leaf of a placeholder."""
        return int(placeholder.name.removeprefix("in_"))

    @property
    def whole(self) -> dict[str, str]:
        """Paths of the modules and methods that are one node, with the reason."""
        calls = (info(n).opaque for n in self.graph.nodes)
        return {call.path: call.why for call in calls if call is not None and call.module is not None}

    @property
    def opaque_shares(self) -> dict[str, float]:
        """The share of the model's parameters in each module that is one node, by path."""
        numbers = {name: p.numel() for name, p in self.model.named_parameters()}
        total = max(sum(numbers.values()), 1)
        shares: dict[str, float] = {}
        for node in self.graph.nodes:
            if info(node).opaque_module and (path := opaque_call_of(node).path):
                inside = sum(numbers.get(str(n.target), 0) for n in node.all_input_nodes if n.op == "get_attr")
                shares[path] = max(shares.get(path, 0.0), inside / total)
        return shares

    @property
    def cut_mark_places(self) -> tuple[int, ...]:
        """Indices among `nodes` before which the marks (`fxpipe.cut`) are; len(nodes): after all of them."""
        before = [info(n).recorded_at.cut_marks for n in self.nodes]
        return tuple(bisect_left(before, number) for number in range(1, len(self.marks) + 1))

    @property
    def ends(self) -> dict[str, int]:
        """The index among `nodes` before which each module last returned, by path. Available for recordings only."""
        before = [info(n).recorded_at.ended_modules for n in self.nodes]
        return {path: bisect_left(before, number) for number, path in enumerate(self.ended_modules, 1)}

    @property
    def outputs(self) -> list[Any]:
        """The leaves of the model's output: nodes, or constants."""
        return list(self.graph.output_node().args[0][0])  # type: ignore[index,arg-type]

    @property
    def assigned(self) -> dict[str, fx.Node]:
        """Buffers and tensor attributes that forward re-assigns, with the nodes of their new values."""
        return dict(self.graph.output_node().args[0][1])  # type: ignore[index,arg-type]

    @property
    def left(self) -> dict[str, fx.Node]:
        """The re-assigned values that forward never reads: they are combined like outputs."""
        return {name: node for name, node in self.assigned.items() if name in self.left_attribute_dims}

    @property
    def carried_state(self) -> dict[str, fx.Node]:
        """The other re-assigned values: state that each micro-batch takes over from the micro-batch before."""
        return {name: node for name, node in self.assigned.items() if name not in self.left_attribute_dims}

    @property
    def results(self) -> list[tuple[Any, int | str | None]]:
        """The results of micro-batches with their combinations: outputs, pieces, written inputs, and `left`."""
        assert self.effects is not None
        written = [(node, self.in_dims[self.place_of(node)]) for node in self.effects.written_inputs]
        outputs = zip(self.outputs, self.out_dims, strict=True)
        left = [(node, self.left_attribute_dims[name]) for name, node in self.left.items()]
        return [*outputs, *zip(self.pieces, self.piece_dims, strict=True), *written, *left]

    @property
    def pieces(self) -> list[fx.Node]:
        """The nodes from which combined outputs are computed."""
        output = self.graph.output_node().args[0]
        return list(output[2]) if len(output) > 2 else []  # type: ignore[index,arg-type]

    @property
    def handed_out(self) -> list[Any]:
        """Values that micro-batches return: leaves of the output, None for combined leaves, and pieces."""
        leaves = zip(self.outputs, self.out_dims or [None] * len(self.outputs), strict=True)
        return [*(None if how == "combined" else leaf for leaf, how in leaves), *self.pieces]

    @property
    def handed_out_dims(self) -> tuple[int | str | None, ...]:
        """The combination of each value in `handed_out`."""
        return (*(None if how == "combined" else how for how in self.out_dims), *self.piece_dims)

    def fingerprint(self) -> str:
        """Returns a hash of names, functions and arguments of all nodes, which is equal for two traces of one model.

        Each `get_attr` node counts just before its first user: its place in the graph differs between passes.
        """
        nodes: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if node.op != "get_attr":
                nodes |= dict.fromkeys(source for source in node.all_input_nodes if source.op == "get_attr")
                nodes[node] = None
        nodes |= dict.fromkeys(self.graph.nodes)  # attributes without users
        every = _with_inside(nodes)
        text = "\n".join(f"{n.op} {n.name} {_target_name(n.target)} {n.args} {n.kwargs}" for n in every)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def holds_at(self, size: int, lengths: Lengths | None = None) -> bool:
        """Returns whether the conditions hold for `size` samples or need not. `lengths`: by default those recorded."""
        is_excused = size in self.comparisons.excused or all(read.holds(size) for read in self.batch_conditions)
        return is_excused and not self.failing_conditions(size, lengths)

    def failing_conditions(self, size: int, lengths: Lengths | None = None) -> list[SizeCondition]:
        """Returns the failing conditions on dynamic sizes that may matter. `lengths`: by default those recorded."""
        lengths = self.dynamic.example if lengths is None else lengths
        bounds = self.comparisons.bounds
        conditions = self.dynamic.conditions if bounds is None else (*self.dynamic.conditions, bounds)
        return [c for c in conditions if c not in self.comparisons.harmless and not c.holds(size, lengths)]

    def holds_for(self, batch: int, sizes: Collection[int] = (), lengths: Lengths | None = None) -> bool:
        """Returns whether the graph is valid for `batch` samples in micro-batches of these sizes."""
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
        """The key of the steps for which this is the graph. Cached, because every step reads it."""
        leaves = self.leaves
        kinds = tuple((x.dtype, len(x.shape), x.requires_grad) if x.dtype is not None else None for x in leaves)
        return GraphKey((self.in_spec, kinds, tuple(leaf.same_as for leaf in leaves)), self.flags, self.state)

    def refuse_inference_mode(self) -> None:
        """Raises `TraceError` in inference mode if forward asks for it: stages never run in that mode."""
        names = ("is_inference_mode_enabled", "is_inference") if torch.is_inference_mode_enabled() else ()
        for line in filter(None, map(self.python_state.line_of, names)):
            raise TraceError(
                f"forward asks{line} whether inference mode is on, and a pipeline runs its stages without; call the "
                "pipe under torch.no_grad() instead"
            )

    def holds_for_model(self) -> bool:
        """Returns whether this is the graph of the model in its present state, whose flags equal `flags`."""
        self.refuse_inference_mode()
        tensors = {id(guard.store.get(guard.key)) for guard in self.attributes}
        return (
            self.python_state.holds()
            and self.switches == torch_switches()
            and len(tensors) == len(self.attributes)  # a new tie makes another model
            and all(guard.holds() for guard in self.attributes)
            and self.requires_grad in (None, requires_grad_flags(self.model))
        )

    def holds_for_values(
        self, leaves: Sequence[Any], seed: int = 0, sizes_of: Callable[[int], Sequence[int]] | None = None
    ) -> bool:
        """Returns whether this is the graph of these inputs, if their key equals `key` and `holds_for_model` is true.

        `seed`: of the random numbers that forward draws and reads. `sizes_of`: the sizes of the micro-batches of a
        mini-batch; the graph must be valid for them as well.
        """
        batches = set()
        for place, (leaf, dim, value) in enumerate(zip(self.leaves, self.in_dims, leaves, strict=True)):
            # The search for another graph reports another layout.
            if not (is_plain_layout(value) if leaf.is_tensor else leaf.is_constant(value)):
                return False
            if not leaf.is_tensor or place in self.any_sizes:
                continue
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
        least, largest = self.batch_bounds  # no other graph is valid either: the caller refuses it
        is_within = least <= batch and (largest is None or batch <= largest)
        if not is_within or not all(read.holds(leaves) for read in self.input_reads):
            return False
        lengths, sizes = self.dynamic.lengths_of(leaves), () if sizes_of is None else sizes_of(batch)
        return lengths is not None and self.holds_for(batch, sizes, lengths) and self.guards_hold(leaves, seed, sizes)

    def guards_hold(self, leaves: Sequence[Any], seed: int, sizes: Sequence[int] = ()) -> bool:
        """Returns whether forward reads the recorded values from these inputs, cut into micro-batches of `sizes`."""
        if self.of_mini_batch is None or not sizes:
            return self.guards is None or self.guards.hold(self, leaves, seed)
        parts = self.micro_batches(leaves, sizes)
        return self.of_mini_batch.guards_hold(leaves, seed) and all(self.guards_hold(part, seed) for part in parts)

    def micro_batches(self, leaves: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
        """Cuts flattened inputs into micro-batches with these numbers of samples."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return [slice_samples(leaves, self.in_dims, start, stop) for start, stop in bounds]

    def refuse_uneven_outputs(self, batch: int, parts: Sequence[int]) -> None:
        """Raises `ArgumentError` if the rows of such micro-batches do not add up to the rows of the mini-batch."""
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
        """The reasons why each size of a dimension that should be dynamic needs another graph."""
        return [
            f"dimension {dim} of {self.leaves[place].path} has one graph for each size: {reason}"
            for (place, dim), reason in self.dynamic.fixed.items()
        ]

    def batch_of(self, leaves: Sequence[Any]) -> int:
        """Returns the number of samples in the flattened inputs; 1 if no dimension holds samples (`is_whole`)."""
        sizes = [
            (leaf.path, samples_along(value, dim))
            for leaf, dim, value in zip(self.leaves, self.in_dims, leaves, strict=True)
            if dim is not None
        ]
        return common_batch_size(sizes) if sizes else 1

    def __str__(self) -> str:
        from fxpipe.tracing.graph_text import node_table

        head = f"{type(self.model).__name__}: {len(self.nodes)} nodes"
        guards = [f"- holds where {guard}" for guard in (self.guards.guards if self.guards else ())]
        return "\n".join([head, *(f"- {why}" for why in self.why), *guards, node_table(self.graph)])


def common_batch_size(batch_sizes: Sequence[tuple[str, int]]) -> int:
    """Returns the number of samples on which all pairs (input, number of samples) agree."""
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
    """Returns the tensor of a `get_attr` node: a parameter only if no forward writes to it."""
    name = str(node.target)
    if name in traced.constants:
        return traced.constants[name]
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(traced.model.get_submodule(path), key)
    return tensor if is_fixed(tensor) or not isinstance(tensor, nn.Parameter) else tensor.detach()


def without_attributes(traced: Traced, names: Collection[str]) -> Traced:
    """Returns a graph that does not set these attributes: a step keeps no value of them."""
    output = traced.graph.output_node()
    assigned = {name: node for name, node in traced.assigned.items() if name not in names}
    output.args = ((traced.outputs, assigned, *output.args[0][2:]),)  # type: ignore[index,misc]
    dims = {name: how for name, how in traced.left_attribute_dims.items() if name not in names}
    return replace(traced, left_attribute_dims=dims, overwritten=(*traced.overwritten, *names))


def opaque_name(node: fx.Node) -> str:
    """Returns a readable name of an opaque node: its module, or the part of the module's forward."""
    call = opaque_call_of(node)
    path, calls = call.module, call.calls_before
    if calls is None:
        return f"{'module' if call.method == 'forward' else 'method'} {call.path!r}"
    place = f" behind its call of {calls[-1]!r}" if calls else ""
    return f"forward of {f'module {path!r}' if path else 'the model'}{place}"


def runs_python(node: fx.Node) -> bool:
    """Returns whether a node runs Python, which may read values without any mode noticing."""
    return info(node).opaque is not None


def call_node(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    cancellation_point()
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def signature_of(graph: fx.Graph) -> int:
    """Hashes a graph: equal for recordings with the same functions on the same values, whatever the other arguments."""
    every = _with_inside(graph.nodes)
    return hash(tuple((n.op, n.name, _target_name(n.target), *map(str, n.all_input_nodes)) for n in every))


def _with_inside(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yields each node, then the nodes that it runs again, if it computes a gradient (`record.gradients`)."""
    for node in nodes:
        yield node
        yield from getattr(node.target, "inside", ())


def _target_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def candidate_dims(leaves: Sequence[InputLeaf], in_dims: Any) -> list[int | None]:
    """Returns for each input leaf the dimension that may hold the batch, from `in_dims` or else 0.

    In a dimension given by the user, each sample may have several rows (`BatchDim`); the smallest input has one.
    """
    heads = list(dict.fromkeys(leaf.head for leaf in leaves))
    if in_dims is None or isinstance(in_dims, int):
        by_head = {} if in_dims is None else dict.fromkeys(heads, in_dims)
    elif isinstance(in_dims, tuple) and len(in_dims) == len(heads):
        by_head = dict(zip(heads, in_dims, strict=True))
    elif isinstance(in_dims, dict) and set(in_dims) <= set(heads):
        by_head = in_dims
    else:
        raise ArgumentError(
            f"in_dims={in_dims!r} does not fit the inputs {heads}; give an int for all, a tuple with an entry (int "
            "or None) for each input, or a dict from input name to int or None"
        )
    dims: list[BatchDim | None] = []
    for leaf in leaves:
        dim = by_head.get(leaf.head, 0 if leaf.shape else None) if leaf.is_tensor else None
        if dim is not None and not -len(leaf.shape) <= dim < len(leaf.shape):
            raise ArgumentError(
                f"in_dims gives dimension {dim} for input {leaf.path}, which has shape {leaf.shape}; use None for it"
            )
        dims.append(dim if dim is None else BatchDim(dim % len(leaf.shape)))
    for leaf, dim in zip(leaves, dims, strict=True):
        if leaf.same_as is not None and dim != dims[leaf.same_as]:
            raise ArgumentError(
                f"the inputs {leaves[leaf.same_as].path} and {leaf.path} are the same tensor, and in_dims cuts them "
                "differently; give a copy of one of them (x.clone())"
            )
    sizes = {leaf.path: leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    batch = min(sizes.values(), default=0)
    if in_dims is None or batch == 0:
        return [*dims]
    smallest = next(path for path, size in sizes.items() if size == batch)
    for path, size in sizes.items():
        if size % batch:
            raise ArgumentError(
                f"in_dims says that {path} holds the batch, but its {size} rows are no whole number for each of the "
                f"{batch} samples of {smallest}; give each sample as many rows, or None in in_dims for an input "
                "without a batch"
            )
    return [
        None if dim is None else BatchDim(dim, leaf.shape[dim] // batch) for leaf, dim in zip(leaves, dims, strict=True)
    ]


def _entries_of(leaves: Sequence[InputLeaf]) -> dict[str, set[str]]:
    return {leaf.head: {x.path.split("]")[0] for x in leaves if x.head == leaf.head} for leaf in leaves}


def lists_of(leaves: Sequence[InputLeaf]) -> list[str]:
    """Returns the inputs that are containers with several entries."""
    return [head for head, paths in _entries_of(leaves).items() if len(paths) > 1]


def other_in_dims(leaves: Sequence[InputLeaf]) -> list[dict[str, int | None]]:
    """Returns `in_dims` to try if inputs of different sizes cannot all hold the batch, the most likely first.

    A list may have an entry for each sample (the boxes of each picture), which each micro-batch takes whole; the
    smallest input may hold the samples, and others several rows for each; or the inputs of the most frequent size hold
    them, and each micro-batch takes all of the others (a table).
    """
    ways: list[dict[str, int | None]] = []
    entries, lists = _entries_of(leaves), lists_of(leaves)
    if any(x.shape[:1] == (len(entries[head]),) for head in lists for x in leaves if x.head not in lists):
        ways.append({head: None if head in lists else 0 for head in entries})
    sizes = {leaf.head: [x.shape[:1] for x in leaves if x.is_tensor and x.head == leaf.head] for leaf in leaves}
    counts = Counter(size for of_head in sizes.values() for shape in of_head for size in shape if size > 1)
    if len(counts) > 1:
        batch, (most, _) = min(counts), counts.most_common(1)[0]
        multiples = {size for size in counts if size % batch == 0}
        for holding in (multiples, {most}) if len(multiples) > 1 else ({most},):
            ways.append({h: 0 if all(holding.issuperset(s) and s for s in held) else None for h, held in sizes.items()})
    return [way for place, way in enumerate(ways) if way not in ways[:place]]


def cut_elements(leaves: Sequence[InputLeaf], dims: Sequence[int | None]) -> int:
    return sum(math.prod(leaf.shape) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)


def batch_sizes(leaves: Sequence[InputLeaf], dims: Sequence[int | None]) -> set[int]:
    """Returns the numbers of samples that inputs hold in these dimensions."""
    return {leaf.shape[dim] // rows_per_sample(dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
