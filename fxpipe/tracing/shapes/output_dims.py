"""Determines how to combine the outputs of micro-batches: along a dimension of samples, by a sum, by a mean.

Some values of the mini-batch depend on inputs only, and are computed before a step and without gradients: pieces of
outputs (counts of labels, masks), and the *head*: values that samples share and forward uses (a scale of all series).
Micro-batches receive the head as further inputs, whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.errors import ArgumentError
from fxpipe.tracing.fake_tensors import fake_if_active
from fxpipe.tracing.guards import input_program
from fxpipe.tracing.interpreter import NodeValues, run_node_without_grad, run_nodes
from fxpipe.tracing.model_state import STATISTICS
from fxpipe.tracing.node_info import NodeInfo, dependencies_of, info, set_info, value_read_of
from fxpipe.tracing.shapes.batch_reductions import Joins, ReductionWalk, UnknownReductionError
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor, batch_sizes, runs_python
from fxpipe.utils.output_combination import OutputCombination
from fxpipe.utils.pytree import UNNAMED, StructureError, broadcast_prefix

OUT_DIM_REDUCTIONS = ("mean", "sum", "stack")


def batch_dependent_nodes(traced: Traced) -> set[fx.Node]:
    """Returns the nodes that depend on batched inputs by more than fixed sizes, including through writes to memory."""
    dependent = traced.batch_placeholders
    written = set[Any]()  # storages
    for node in traced.graph.nodes:
        if node.op not in CALL_OPS or node in traced.shared:
            continue
        sources = node.all_input_nodes
        if any(n in dependent or not written.isdisjoint(info(n).storages) for n in sources):
            number = info(node).number
            if number is None or number.free_symbols or info(node).is_data_dependent:
                dependent.add(node)
                written |= info(node).written_storages
    return dependent


def with_out_dims(traced: Traced, out_dims: Any, joins: Mapping[fx.Node, Joins] | None = None) -> Traced:
    """Determines how to combine outputs. `joins`: the observed joins of each node; None: use the shapes only."""
    if traced.is_whole:
        return replace(traced, out_dims=(None,) * len(traced.outputs))
    asked: Any = None
    is_for_rest = isinstance(out_dims, str) and out_dims in ("mean", "sum")  # not for outputs that hold samples
    if out_dims is not None:
        try:
            asked = broadcast_prefix(out_dims, traced.out_spec)
        except StructureError as error:
            raise ArgumentError(
                f"out_dims={out_dims!r} does not fit the output, which has {len(traced.outputs)} leaves: {error}"
            ) from error
    is_needed, updated = updated_state(traced) if out_dims is None and traced.changes_once else (False, ())
    failure: Exception | None = None
    for names in dict.fromkeys((updated, ()) if is_needed else ((), updated)):
        walk = ReductionWalk(traced, batch_dependent_nodes(traced), joins, names)
        try:
            return _combined(traced, walk, asked, is_for_rest)
        except (ArgumentError, UnknownReductionError) as error:
            walk.erase_unused()
            failure = failure if names else error
    assert failure is not None
    raise failure


def _combined(traced: Traced, walk: ReductionWalk, asked: Any, is_for_rest: bool) -> Traced:
    dependent = walk.batch_dependent
    hows: list[int | str | None] = []
    combinations: list[OutputCombination] = []
    for place, output in enumerate(traced.outputs):
        if not isinstance(output, fx.Node):
            hows.append(None)
            continue
        is_given = asked is not None and asked[place] is not UNNAMED
        if is_given and not (is_for_rest and (output not in dependent or _batch_dim(traced, output) is not None)):
            dim, shape = asked[place], info(output).shapes[0].shape if info(output).shapes else ()
            is_dim = type(dim) is int and -len(shape) <= dim < len(shape)
            if not (dim is None or dim in OUT_DIM_REDUCTIONS or is_dim):
                raise ArgumentError(
                    f"out_dims gives {dim!r} for the output {output.name} of shape {list(shape)}; accepted are a "
                    f"dimension, None, {', '.join(map(repr, OUT_DIM_REDUCTIONS))}"
                )
            hows.append(dim % len(shape) if is_dim else dim)
        elif output not in dependent | walk.after_update and walk.updated_memory.isdisjoint(info(output).storages):
            hows.append(None)
        else:
            how = _out_dim(traced, output, place, walk)
            if isinstance(how, OutputCombination):
                combinations.append(how)
                how = "combined"
            hows.append(how)
    update = walk.update() if walk.updated else None
    return replace(
        traced,
        out_dims=tuple(hows),
        combinations=tuple(combinations),
        piece_dims=walk.finish(),
        update=update,
        told=frozenset(place for place, dim in enumerate(asked or ()) if dim is not UNNAMED),
        tail=frozenset(walk.tail),
    )


def updated_state(traced: Traced) -> tuple[bool, tuple[str, ...]]:
    """Returns the state that forward changes by samples, with what it is connected to: a bank and the place in it.

    The bool says whether outputs depend on it.
    """
    dependent, parameters = batch_dependent_nodes(traced), dict(traced.model.named_parameters())
    held = {str(n.target): n for n in traced.graph.nodes if n.op == "get_attr"}
    sources, updated = dict[str, set[fx.Node]](), set[str]()
    for name, node in held.items():
        own = [n for n in traced.graph.nodes if not info(n).written_storages.isdisjoint(info(node).storages)]
        own += [traced.assigned[name]] if name in traced.assigned else []
        is_other = name in parameters or name in traced.tied or name.rpartition(".")[2] in STATISTICS
        if own and not (is_other or any(n.op == "get_attr" for n in own)):
            sources[name] = set[fx.Node]().union(*map(dependencies_of, own))
            updated |= set() if dependent.isdisjoint(own) else {name}
    while True:
        read = set[fx.Node]().union(*(sources[name] for name in updated))
        nodes = {held[name] for name in updated}
        more = {name for name in sources if held[name] in read or not nodes.isdisjoint(sources[name])} - updated
        if not more:
            break
        updated |= more
    used = set[fx.Node]().union(*(dependencies_of(n) for n in traced.outputs if isinstance(n, fx.Node)))
    return not used.isdisjoint(nodes), tuple(name for name in sources if name in updated)


def read_by_python_only(traced: Traced) -> frozenset[int]:
    """Returns the inputs of a recording that only modules kept whole read: forward itself uses no size of them."""
    asked = {o for read in traced.size_reads for o in read.operands} | {read.tensor for read in traced.layout_reads}
    return frozenset(
        place
        for place, node in traced.placeholders.items()
        if node not in asked and node.users and all(map(runs_python, node.users))
    )


def of_any_sizes(traced: Traced, places: Collection[int]) -> frozenset[int]:
    """Returns those of these inputs that only the tail reads, where no value that is used further has a size."""

    def has_no_sizes(node: fx.Node) -> bool:
        users = [user for user in node.users if user.op != "output"]
        parts = [user for user in users if runs_python(user) and user.all_input_nodes == [node]]
        is_scalar = [shape.shape for shape in info(node).shapes] == [()]
        return (is_scalar or len(parts) == len(users)) and all(map(has_no_sizes, parts))

    readers = {p: [n for n in traced.placeholders[p].users if n.op != "output"] for p in places}
    return frozenset(p for p, users in readers.items() if all(n in traced.tail and has_no_sizes(n) for n in users))


def left_dims(traced: Traced) -> dict[str, int | str]:
    """Returns how to combine attributes that forward sets and never reads: dimensions of samples, or "mean"."""
    read = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    dependent = batch_dependent_nodes(traced)
    dims: dict[str, int | str] = {}
    for name, node in traced.assigned.items():
        if name in read or not isinstance(node, fx.Node) or node.op == "get_attr":
            continue
        dim = _batch_dim(traced, node) if node in dependent else None
        if dim is not None:
            dims[name] = dim
        elif name in traced.tied:
            dims[name] = "mean"  # if samples show that; else a step does not keep it
    return dims


def _sizes_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    shapes = info(node).shapes
    return shapes[0].shape if len(shapes) == 1 else ()


def _batch_dim(traced: Traced, node: fx.Node) -> int | None:
    """Returns the dimension whose size depends on the batch, or else on values (`x[mask]`), if there is only one."""
    symbols = [size.free_symbols for size in _sizes_of(node)]
    holding = [d for d, of in enumerate(symbols) if traced.batch in of] or [d for d, of in enumerate(symbols) if of]
    return holding[0] if len(holding) == 1 else None


def uneven_outputs(traced: Traced) -> tuple[tuple[str, sympy.Expr], ...]:
    """Returns the outputs whose number of rows is not proportional to the number of samples."""
    uneven = []
    for place, (output, dim) in enumerate(zip(traced.outputs, traced.out_dims, strict=True)):
        if isinstance(output, fx.Node) and isinstance(dim, int) and place not in traced.told:
            rows = info(output).shapes[0].shape[dim]
            if rows.free_symbols == {traced.batch} and sympy.cancel(rows / traced.batch).free_symbols:
                uneven.append((output.name, rows))
    return tuple(uneven)


def _out_dim(traced: Traced, output: fx.Node, place: int, walk: ReductionWalk) -> int | str | OutputCombination | None:
    dim = _batch_dim(traced, output) if output not in walk.after_update else None
    if dim is not None and (walk.joins is None or dim in walk.joins.get(output, ())):
        return dim
    shapes = info(output).shapes
    number = info(output).number
    if number is not None and not sympy.cancel(number / traced.batch).free_symbols:
        return "sum"  # proportional to the samples: each micro-batch has its share
    what = str(shapes[0]) if shapes else "a number"
    try:
        return walk.combination(output, place)
    except UnknownReductionError as unknown:
        if walk.joins is not None:
            raise
        cause = unknown
    if any(size.free_symbols for size in _sizes_of(output)):
        why = "holds the batch in several dimensions"
    else:
        why = "depends on the batch but has no dimension for it"
        example, rows = batch_sizes(traced.leaves, traced.in_dims), _sizes_of(output)[:1]
        if traced.is_for_one_size and len(example) == 1 and any(size % max(example) == 0 for size in rows):
            return 0  # comparisons of micro-batches decide whether the rows are of samples
        if example & {int(s) for shape in shapes for s in shape.shape if s != 1}:
            why += " (forward may have taken its size in plain Python: range(len(x)), int(x.shape[0]))"
        lists = [n for n in traced.graph.nodes if info(n).is_guarded_read and isinstance(value_read_of(n).value, list)]
        if lists:  # `x.split(counts.tolist())`
            why += f" (forward reads the values of all samples at {info(lists[0]).source}, which may have set its size)"
    why += f", and it cannot be made of all samples once, since it is made of {cause}"
    raise ArgumentError(
        f"output {place} ({output.name}, {what}, made at {info(output).source or 'the input'}) {why}, so the "
        "outputs of micro-batches cannot be put together; say how with out_dims: a dimension, None (the same for "
        "all), 'mean', 'sum' or 'stack'; or, if samples act on each other, let the model return the values of single "
        "samples and compute the rest of them outside, or keep the mini-batch whole (chunks=1)"
    )


@dataclass(frozen=True, slots=True, eq=False)
class InputValues:
    """The program that computes values from inputs."""

    traced: Traced
    device: torch.device
    program: tuple[fx.Node, ...]
    results: Mapping[int, fx.Node]  # by place: of a piece, among the results of micro-batches; of a further input

    @classmethod
    def of(cls, traced: Traced, results: Mapping[int, fx.Node], device: torch.device) -> InputValues:
        used = {node for result in results.values() for node in dependencies_of(result)}
        program, copies = input_program(traced.graph.nodes, used, _is_size, device)
        return cls(traced, device, program, {place: copies[node] for place, node in results.items()})

    @classmethod
    def of_pieces(cls, traced: Traced, device: torch.device) -> InputValues:
        ways = [
            (place, known) for one in traced.combinations for place, known in zip(one.pieces, one.is_known, strict=True)
        ]
        return cls.of(traced, {place: traced.handed_out[place] for place, is_known in ways if is_known}, device)

    def on(self, device: torch.device) -> InputValues:
        program, copies = input_program(self.program, self.program, _is_size, device)
        return replace(self, device=device, program=program, results={p: copies[n] for p, n in self.results.items()})

    def __call__(self, leaves: Sequence[Any], batch: int) -> dict[int, Any]:
        sizes = {**dict(self.traced.dynamic.lengths_of(leaves) or ()), self.traced.batch: batch}
        leaves = self.traced.with_head(leaves, batch)

        def placeholder(node: fx.Node) -> Any:
            number = info(node).number
            if number is not None:
                return int(number.subs(sizes))
            return leaves[self.traced.place_of(node)].detach().to(self.device)

        def attribute(node: fx.Node) -> torch.Tensor:
            return fake_if_active(attribute_tensor(self.traced, node)).detach().to(self.device)

        values: NodeValues = {}
        for _ in run_nodes(self.program, values, placeholder, attribute, run_node_without_grad):
            pass
        return {place: values[node] for place, node in self.results.items()}


def _is_size(node: fx.Node) -> bool:
    return info(node).number is not None and not (info(node).is_float_number or info(node).is_data_dependent)


def shared_values(traced: Traced) -> frozenset[fx.Node]:
    """Returns the nodes whose values depend on inputs only, and on no single sample: candidates for the head."""
    dependent = batch_dependent_nodes(traced)
    walk, known = ReductionWalk(traced, dependent), set[fx.Node]()
    for node in traced.graph.nodes:
        is_trained = node.op == "placeholder" and traced.leaves[traced.place_of(node)].requires_grad
        is_size = info(node).number is not None
        if not is_trained and walk.is_of_inputs(node) and (is_size or known.issuperset(node.all_input_nodes)):
            known.add(node)
    kept = set[fx.Node]().union(*map(dependencies_of, traced.assigned.values()))
    sizes = {n: [size for shape in info(n).shapes for size in shape.shape] for n in (known & dependent) - kept}
    return frozenset(
        n
        for n, of in sizes.items()
        if n.op in CALL_OPS and info(n).number is None and len(info(n).shapes) == 1
        if not any(size.free_symbols for size in of)
    )


def graph_of_stages(traced: Traced) -> Traced:
    """Returns the graph without nodes that run once for the mini-batch; values that samples share become inputs."""
    joint = {one.output for one in traced.combinations if traced.outputs[one.output] in traced.tail}
    output, updated = traced.graph.output_node(), () if traced.update is None else traced.update.names
    outputs = tuple(None if place in joint else leaf for place, leaf in enumerate(traced.outputs))
    assigned = {name: node for name, node in traced.assigned.items() if name not in updated}
    kept = [n for n in traced.graph.nodes if n not in traced.tail]
    memory = frozenset[int]().union(*(info(n).storages for n in kept))
    memory -= frozenset[int]().union(*(info(n).storages for n in kept if n.op == "get_attr" and n.target in updated))
    requires_grad = {} if traced.effects is None else traced.effects.requires_grad
    combinations = tuple(
        replace(one, requires_grad=requires_grad.get(traced.outputs[one.output], True)) for one in traced.combinations
    )
    output.args = ((outputs, assigned, *output.args[0][2:]),)  # type: ignore[index,misc]
    for node in reversed(traced.nodes):
        if node in traced.tail and not node.users and memory.isdisjoint(info(node).written_storages):
            traced.graph.erase_node(node)
    head = [n for n in traced.graph.nodes if n in traced.shared and not traced.shared.issuperset(n.users)]
    places = dict(enumerate(head, len(traced.leaves)))
    values = InputValues.of(traced, places, torch.device("cpu")) if head else None
    for place, node in places.items():
        first = next(n for n in traced.graph.nodes if n.op != "placeholder")
        with traced.graph.inserting_before(first):
            new = traced.graph.placeholder(f"in_{place}")
        set_info(new, NodeInfo(known_shapes=info(node).known_shapes, dynamic_shapes=info(node).dynamic_shapes))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in traced.shared)
    for node in reversed(traced.nodes):
        if node in traced.shared and not node.users:
            traced.graph.erase_node(node)
    return replace(traced, combinations=combinations, tail=frozenset(), head=values, shared=frozenset())
