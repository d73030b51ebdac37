"""Guards: values of tensors that forward has read. The graph is valid while these values are the same.

A read that depends only on inputs, buffers or parameters is repeated in every step, on the whole mini-batch, like in
the plain model; another value needs another graph. Guards never run per micro-batch: micro-batches may give different
values although one graph is right for all. A read is unknown before the step if it depends on both inputs and
parameters, or on a buffer that forward changes. `extract_guards` moves the reads to a separate program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpipe.errors import DecisionError
from fxpipe.tracing.forward_rng import DrawStream
from fxpipe.tracing.interpreter import NodeValues, run_node_without_grad, run_nodes
from fxpipe.tracing.node_info import (
    info,
    number_of,
    opaque_call_of,
    set_info,
    set_node_device,
    update_info,
    value_read_of,
)
from fxpipe.tracing.record.unrecordable import CHANGED_STATE, CannotRecord, calls_before_effects
from fxpipe.tracing.tensors import slice_samples
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor
from fxpipe.tracing.verify.effects import NORM_FUNCTIONS, running_statistics
from fxpipe.utils.python_objects import equal_values

_RANDOM_NUMBERS = "random numbers"

# -- values that forward checks and only the stages know --------------------------------------------------------------
#
# No guard can read them before a step. So the graph reads them again, in their stage, for each micro-batch. If the
# check fails for a micro-batch, the step raises, as the model does.


def expect(value: Any, expected: Any, what: str) -> None:
    """Compares a value that forward has checked; a node of the graph. Raises `DecisionError` if it differs."""
    if not equal_values(value, expected):
        raise DecisionError(
            f"forward checks {what}, which is {value!r} for these samples; it was {expected!r} when the model was "
            "traced. Look at the samples; or switch the check off (validate_args=False), or make a module of the code "
            "around it, which will be kept whole"
        )


def add_expectations(reads: Sequence[fx.Node]) -> None:
    """Turns each read into a node that stays in the graph, followed by a comparison."""
    for read in reads:
        known, asked = info(read), value_read_of(read)
        # Reads that are found after the shape pass have no `known_shapes` yet.
        known = replace(known, read=replace(asked, is_compared_in_stage=True), known_shapes=known.shapes)
        set_info(read, known)
        what = f"{describe_read(read)} ({asked.text} of {read.args[0]}) at {known.source}"
        arguments = read, asked.value, what
        with read.graph.inserting_after(read):
            node = read.graph.create_node("call_function", expect, arguments, name=f"expect_{read.name}")
        set_info(node, known.beside(known_shapes=known.known_shapes))


def describe_read(read: fx.Node) -> str:
    return "a size" if value_read_of(read).is_size else "the value of a tensor"


def expectations_of(traced: Traced) -> tuple[str, ...]:
    return tuple(f"{n.args[2]} is {n.args[1]!r}" for n in traced.graph.nodes if n.target is expect)


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that forward has read, and the line that read it."""

    node: fx.Node  # a node of the program
    expected: Any
    where: str  # the user's source line

    def __str__(self) -> str:
        value = repr(self.expected)
        short = value if len(value) < 40 else f"{value[:36]} ..."
        return f"{self.text} was {short} at {os.path.basename(self.where)}"

    @property
    def text(self) -> str:
        return f"{value_read_of(self.node).text} of {self.node.args[0]}"


@dataclass(frozen=True, slots=True, eq=False)
class Guards:
    """All guards of a graph, and the program that computes them from inputs (by index) and attributes (by name)."""

    program: tuple[fx.Node, ...] = ()
    guards: tuple[Guard, ...] = ()

    def hold(self, traced: Traced, leaves: Sequence[Any], seed: int) -> bool:
        """Returns whether the reads on these inputs give the recorded values. `seed`: of the draws."""
        asked = {guard.node: guard for guard in self.guards}
        values: NodeValues = {}
        draws = DrawStream(seed)
        writes = any(_written_storages(node) for node in self.program)

        def placeholder(node: fx.Node) -> Any:
            if (number := info(node).number) is not None:
                lengths = dict(traced.dynamic.lengths_of(leaves) or ())
                return int(number.subs({traced.batch: traced.batch_of(leaves), **lengths}))
            return leaves[traced.place_of(node)].detach().to("cpu", copy=writes)

        def attribute(node: fx.Node) -> torch.Tensor:
            return attribute_tensor(traced, node).detach().to("cpu", copy=writes)

        def work(node: fx.Node, values: NodeValues) -> Any:
            if info(node).is_scalar_draw:
                return draws.take(lambda: run_node_without_grad(node, values))
            return run_node_without_grad(node, values)

        try:
            for node in run_nodes(self.program, values, placeholder, attribute, work):
                if node in asked and not equal_values(values[node], asked[node].expected):
                    return False
        except Exception:  # not for these inputs; should they be wrong ones, the model will say so itself
            return False
        return True


def refuse_unguardable(traced: Traced) -> None:
    """Raises `CannotRecord`, with the modules to keep whole, if a value that was read is unknown before a step."""
    for node in traced.graph.nodes:  # a forward with a graph break may read values of the samples in both parts
        if info(node).is_graph_break:
            call = opaque_call_of(node)
            number = calls_before_effects(traced.graph, call.path, call.recorded_calls)
            if number < call.recorded_calls:
                raise CannotRecord(call.why, frozenset({call.path} - {""}), calls={call.path: number})
    reads = [n for n in traced.graph.nodes if info(n).is_guarded_read]
    known = set[fx.Node]().union(*map(_dependencies_of_read, reads))
    sources = {read: source for read in reads if (source := _unknown_source(traced, read, known)) is not None}
    # A value that is only checked may be compared in its stage, since no other node uses it.
    stopping = [read for read in sources if not value_read_of(read).is_check]
    if not stopping:
        add_expectations(list(sources))
        return
    modules = frozenset(info(read).module for read in stopping) - {""}
    earliest: dict[str, int] = {}  # by path of a module, the calls that it makes before the first of these reads
    for known_read in map(info, stopping):
        number = known_read.recorded_at.calls
        earliest[known_read.module] = min(earliest.get(known_read.module, number), number)
    calls = {path: calls_before_effects(traced.graph, path, number) for path, number in earliest.items()}
    read, path = stopping[0], info(stopping[0]).module
    remedy = "keep the decision in tensors (torch.where, masks), or take it outside forward"
    remedy += "" if path else ", or into a module inside the model, which recording keeps whole"
    if "nested_tensor" in str(read.target):
        remedy = "build it with TransformerEncoder(..., enable_nested_tensor=False)"
    raise CannotRecord(
        f"the model{f' in module {path!r}' if path else ''} reads {describe_read(read)} ({value_read_of(read).text}) "
        f"that depends on {sources[read]} at {info(read).source}; {remedy}",
        modules,
        calls=calls,
        source=info(read).source,
        reads_size=value_read_of(read).is_size,
    )


def reads_are_of_all_samples(traced: Traced, leaves: Sequence[Any]) -> bool:
    """Returns whether what forward reads of all samples, and of one more, is what it has read of a part of them."""
    reads, samples = _reads(traced), (leaves, slice_samples(leaves, traced.in_dims, 0, traced.batch_of(leaves) + 1))
    return not reads or all(_guards_of(traced, reads).hold(traced, part, traced.seed) for part in samples)


def extract_guards(traced: Traced) -> Guards:
    """Moves the reads out of a graph whose fixed sizes are constants."""
    needs = _reads(traced)
    guards = _guards_of(traced, {r: n for r, n in needs.items() if {*_source_names(traced, n), *filter(_is_size, n)}})
    dead = set[fx.Node]().union(*needs.values())
    for node in reversed(list(traced.graph.nodes)):
        is_dead = node in dead and not node.users and node.op in CALL_OPS
        if is_dead and (info(node).is_guarded_read or not (info(node).is_random or _written_storages(node))):
            traced.graph.erase_node(node)
    return guards


def _reads(traced: Traced) -> dict[fx.Node, set[fx.Node]]:
    """Returns the reads, with what they depend on."""
    return {n: _dependencies_of_read(n) for n in traced.graph.nodes if info(n).is_guarded_read}


def _guards_of(traced: Traced, reads: Mapping[fx.Node, Collection[fx.Node]]) -> Guards:
    wanted = set[fx.Node]().union(*reads.values())
    for draw in filter(lambda n: info(n).is_scalar_draw, traced.graph.nodes):  # they advance the stream, read or not
        wanted |= _dependencies_of_read(draw) if wanted else wanted
    program, copies = input_program(traced.graph.nodes, wanted, _is_size, torch.device("cpu"))
    return Guards(program, tuple(Guard(copies[n], value_read_of(n).value, info(n).source) for n in reads))


def input_program(
    nodes: Iterable[fx.Node], wanted: Collection[fx.Node], is_size: Callable[[fx.Node], bool], device: torch.device
) -> tuple[tuple[fx.Node, ...], dict[fx.Node, fx.Node]]:
    """Returns the program that computes `wanted` from the inputs, before a step, and its node for each of these nodes.

    Sizes are placeholders of it, with their formulas (`NodeInfo.number`).
    """
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in wanted and is_size(node):
            copies[node], formula = program.placeholder(node.name), info(node).dynamic_number
            update_info(copies[node], number=number_of(node) if formula is None else formula)
        elif node in wanted:
            copies[node] = program.node_copy(node, copies.__getitem__)
            set_node_device(copies[node], device)
    return tuple(program.nodes), copies


def _written_storages(node: fx.Node) -> frozenset[int]:
    """Returns the memory that a node writes to. Batch norm does not raise the versions of its statistics."""
    storages = info(node).written_storages
    if node.target in NORM_FUNCTIONS:
        storages = storages.union(*(info(n).storages for n in running_statistics(node)))
    return storages


def _dependencies_of_read(read: fx.Node) -> set[fx.Node]:
    """Returns the nodes that a read depends on, including earlier nodes that write to memory of a dependency."""
    needed, storages, node = {read}, set[int](), read
    while node.op != "root":
        if node in needed or not storages.isdisjoint(_written_storages(node)):
            needed.add(node)
            if not _is_size(node):  # sizes are known without the value
                needed.update(node.all_input_nodes)
                storages.update(*(info(n).storages for n in node.all_input_nodes))
        node = node.prev
    return needed


def _source_names(traced: Traced, needed: set[fx.Node]) -> Iterator[str]:
    for node in needed:
        if node.op == "placeholder":
            yield "the inputs"
        elif node.op == "get_attr" and node.target not in traced.constants:
            yield str(node.target)
        elif info(node).is_random:
            yield _RANDOM_NUMBERS


def _is_size(node: fx.Node) -> bool:
    """Returns whether a node is a size that is known without the values of tensors."""
    return node.target in ("size", "stride") and not info(node).is_data_dependent


def _unknown_source(traced: Traced, read: fx.Node, known: Collection[fx.Node]) -> str | None:
    """Returns the source that makes a read unknown before a step, or None. `known`: dependencies of all reads."""
    needed = _dependencies_of_read(read)
    sources = set(_source_names(traced, needed))
    attributes = {str(n.target): n for n in traced.graph.nodes if n.op == "get_attr"}
    own = sorted(s for s in sources if s in attributes)
    parameters = [s for s in own if isinstance(attribute_tensor(traced, attributes[s]), torch.nn.Parameter)]
    written = frozenset[int]().union(*map(_written_storages, traced.graph.nodes))
    changing = [s for s in own if s in traced.assigned or not written.isdisjoint(info(attributes[s]).storages)]
    path, asked = info(read).module, value_read_of(read)
    if _RANDOM_NUMBERS in sources and not _only_decide(needed, known):
        return _RANDOM_NUMBERS
    if "the inputs" in sources and parameters:
        return f"the inputs and {parameters[0]!r}"
    if changing:
        return f"{changing[0]!r}, {CHANGED_STATE}"
    if asked.is_size and "the inputs" in sources and (path or not isinstance(asked.value, bool)):
        return "the inputs"  # it differs for each micro-batch
    is_of_samples = any(n.op == "placeholder" and traced.leaves[traced.place_of(n)].shape for n in needed)
    if is_of_samples or not path or not isinstance(asked.value, (float, complex)):
        return None  # what depends on samples belongs to the mini-batch: a module cannot compute it from a micro-batch
    # A number that changes in each step, and with it the graph, but not between micro-batches.
    read_tensors = [n for n in needed if n.op == "get_attr" and attribute_tensor(traced, n).requires_grad]
    trained = sorted(repr(n.target) for n in read_tensors)
    return next(iter([*trained, *(s for s in (_RANDOM_NUMBERS, "the inputs") if s in sources)]), None)


def _only_decide(needed: Collection[fx.Node], known: Collection[fx.Node]) -> bool:
    """Returns whether all random numbers among these nodes are only drawn to be read: each stage draws others."""
    numbers = {n for n in needed if info(n).is_random}
    if not all(info(n).is_scalar_draw for n in numbers):
        return False
    for node in next(iter(needed)).graph.nodes:  # in order, so that one pass finds all dependent nodes
        if node in needed and not numbers.isdisjoint(node.all_input_nodes):
            numbers.add(node)
    return all(user in known for node in numbers for user in node.users)
