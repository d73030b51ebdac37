"""Finds how micro-batches give outputs without a batch dimension.

The walk goes from the output back to values that micro-batches compute, its *pieces*:

- a sum over samples (`sum`, `reduction="sum"`): micro-batches add up;
- a mean over equally many elements of each sample (`mean` over batch and length, `F.mse_loss`): a weighted mean;
- a mean over selected elements (`F.cross_entropy`, `loss[mask].mean()`): its total and its count are pieces, both sums;
- *rows*, with a dimension for the samples: they are concatenated;
- values that do not depend on samples: equal for all.

The nodes after the pieces are the *tail* (`total / count.clamp(min=1)`, the similarities of all samples). They run
once, on the pieces of the mini-batch. Rows are recognized by their shapes, then tested (`verify/sample_rows.py`): if
samples have interacted in a value, the walk continues back from there. A mean of means is combined as a mean, a sum of
sums as a sum.

If the tail is a polynomial in the pieces, its terms show whether the outputs of micro-batches combine by a mean or by
a sum.

`UnknownReductionError` names a node that cannot run once: random numbers, state, a large part of the parameters.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.guards import expect
from fxpipe.tracing.node_info import (
    TensorShape,
    constant_of,
    dependencies_of,
    info,
    named_arguments,
    number_of,
    set_info,
    state_of,
    update_info,
)
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor, runs_python
from fxpipe.utils.batch_split import rows_per_sample
from fxpipe.utils.output_combination import (
    CombinationCall,
    CombinationRef,
    OutputCombination,
    StateUpdate,
    cross_entropy_divisor,
    element_count,
    map_nested,
    sum_from_mean,
)

MAX_TAIL_SHARE = 0.1  # share of the parameters, above which the tail would be a part of the model on one device
_DIVIDED_BY_WEIGHTS = (F.mse_loss, F.l1_loss)  # their means with `weight=` are divided by the sum of weights
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
_IN_PLACE |= {"add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div"}

# Names of functions, as in `operator` and torch; r... has reversed operands.
LINEAR = frozenset(
    "neg negative pos sum mean getitem select unsqueeze squeeze reshape view view_as flatten unflatten to float double "
    "half bfloat16 type type_as contiguous clone detach expand expand_as permute transpose t unbind alias diagonal "
    "positive ravel tensor sym_float".split()
)  # linear in their first argument
JOINING = frozenset(("stack", "cat", "concat"))  # linear in all arguments
SUMS = frozenset(("add", "radd", "sub", "rsub", "subtract"))
PRODUCTS = frozenset(("mul", "rmul", "multiply"))
QUOTIENTS = frozenset(("truediv", "div", "divide", "true_divide", "rtruediv", "rdiv"))

# Terms of a polynomial in the pieces: the degree of each term in values that vary, and the power of the number of
# samples with which it grows. A mean over samples is (1, 0), a sum (1, 1), a constant count per sample (0, 1).
Terms = frozenset[tuple[int, int]]
CONSTANT_TERMS, MEAN_TERMS, SUM_TERMS, SIZE_TERMS = (frozenset({term}) for term in ((0, 0), (1, 0), (1, 1), (0, 1)))
_ROW = 1000  # the power of values with rows, until the rows are summed
ROW_TERMS: Terms = frozenset({(1, _ROW)})
_OF_EACH_ROW = PRODUCTS | QUOTIENTS | {"neg", "to", "float", "double"}


Joins = Collection[int | str]  # combinations of parts: a dimension, "sum", "mean", "same"


class UnknownReductionError(Exception):
    """A part of the graph cannot run once for the mini-batch. The message says where."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A value that a micro-batch returns."""

    node: fx.Node
    how: int | str | None  # an int: the dimension of the rows
    terms: Terms


@dataclass(slots=True)
class ReducedOutput:
    """An output as a function of pieces."""

    pieces: list[OutputPiece] = field(default_factory=list)
    calls: list[CombinationCall] = field(default_factory=list)
    is_opaque: bool = False  # are values changed in place, and used under another name?
    values: dict[fx.Node, int] = field(default_factory=dict)  # node -> number of its `CombinationRef`

    def terms(self, of_pieces: Iterable[Terms]) -> Terms | None:
        """Returns the terms of the output; None if it is not a polynomial."""
        known: dict[int, Terms | None] = dict(enumerate(of_pieces))
        for number, call in enumerate(self.calls, 1):
            known[-number] = _terms_of(call, known)
        last = None if self.is_opaque else known[-len(self.calls)]
        return last if last is not None and not _has_rows(last) else None


class ReductionWalk:
    """The walk from outputs back to pieces.

    Args:
        dependent: the nodes that depend on batched inputs.
        joins: the observed joins of each node; None: a value with one dimension of samples is taken as rows.
        updated: names of state that changes once for the mini-batch: micro-batches only read its old value.
    """

    def __init__(
        self,
        traced: Traced,
        dependent: set[fx.Node],
        joins: Mapping[fx.Node, Joins] | None = None,
        updated: Collection[str] = (),
    ):
        self.traced, self.batch_dependent, self.joins, self.updated = traced, dependent, joins, updated
        self.order = {node: place for place, node in enumerate(traced.graph.nodes)}
        self.changed = frozenset[int]().union(*(info(node).written_storages for node in traced.graph.nodes))
        held = [n for n in self.order if n.op in ("get_attr", "placeholder")]
        self.state = frozenset[int]().union(*(info(n).storages for n in held))  # memory of the model and of inputs
        self.of_samples = set[fx.Node]()  # nodes that depend on more than the number of samples
        written = set[int]()  # storages
        for node in traced.graph.nodes:
            sources = [n for n in node.all_input_nodes if info(n).number is None]
            is_of = any(n in self.of_samples or not written.isdisjoint(info(n).storages) for n in sources)
            if node in dependent and (node.op not in CALL_OPS or is_of):
                self.of_samples.add(node)
                written |= info(node).written_storages
        self.updated_memory = frozenset[int]().union(*(info(n).storages for n in held if n.target in updated))
        self.after_update = self._nodes_after_update()
        self._counted: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # mean -> its total and count
        self._copies: dict[fx.Node, fx.Node] = {}
        self._size: fx.Node | None = None  # the number of samples, read from an input
        self.added: list[fx.Node] = []
        self.reduced = ReducedOutput()  # the present output
        self.handed_out: dict[fx.Node, int | str | None] = {}  # the pieces of all combinations, with their joins
        self.tail = set[fx.Node]()  # tails of all combinations that have rows

    def combination(self, output: fx.Node, place: int) -> OutputCombination | int | str | None:
        """Combines an output: as one piece, or as a function of pieces. Raises `UnknownReductionError`."""
        reduced = self._reduced(output)
        pieces = reduced.pieces
        if len(pieces) == 1 and not reduced.calls:
            return pieces[0].how
        is_after = output in self.after_update
        terms = reduced.terms(piece.terms for piece in pieces) if not is_after else None
        if terms is not None and terms <= CONSTANT_TERMS | MEAN_TERMS:
            return "mean"
        if terms == SUM_TERMS:
            return "sum"
        where = f"output {place} ({output.name}, made at {info(output).source or 'the input'})"
        return self._combination(place, where, is_after)

    def update(self) -> StateUpdate:
        """Computes the updated state from pieces. Raises `UnknownReductionError`."""
        assigned = {name: node for name, node in self.traced.assigned.items() if name in self.updated}
        writers = [n for n in self.order if not self.updated_memory.isdisjoint(info(n).written_storages)]
        held = {str(n.target): n for n in self.order if n.op == "get_attr" and n.target in self.updated}
        self._reduce([*held.values(), *assigned.values(), *writers], len(self.order), is_update=True)
        refs = tuple(CombinationRef(self.reduced.values[assigned.get(name, held[name])]) for name in self.updated)
        self.reduced.calls.append(CombinationCall(tuple, (refs,), {}, self.traced.state))
        if unused := [n for n in self.after_update - self.tail if runs_python(n)]:
            raise _unknown_reduction(unused[0], "which is Python that may read changed state")
        self.tail |= self.after_update
        combination = self._combination(-1, f"what forward leaves in {' and '.join(self.updated)}", is_after=True)
        return StateUpdate(tuple(self.updated), frozenset(assigned), combination)

    def _nodes_after_update(self) -> set[fx.Node]:
        """Returns the nodes that compute updated state from its old value and samples, and all that depend on them."""
        new = set[fx.Node]()
        for held in (n for n in self.order if n.op == "get_attr" and n.target in self.updated):
            ends = {n for n in self.order if not info(held).storages.isdisjoint(info(n).written_storages)}
            ends |= {n for name, n in self.traced.assigned.items() if name == held.target}
            for node in set[fx.Node]().union(*map(dependencies_of, ends)) & self.of_samples:
                has_batch = any(size.free_symbols for shape in info(node).shapes for size in shape.shape)
                if not has_batch and held in dependencies_of(node):
                    new.add(node)  # the new value, before it is detached or written
            new |= ends
        after, written = set[fx.Node](), set[int]()
        for node in self.traced.nodes if new else ():
            sources = [n for n in node.all_input_nodes if info(n).number is None or info(n).is_data_dependent]
            if node in new or any(n in after or not written.isdisjoint(info(n).storages) for n in sources):
                after.add(node)
                written |= info(node).written_storages
        return after

    def _combination(self, place: int, where: str, is_after: bool) -> OutputCombination:
        reduced, pieces = self.reduced, self.reduced.pieces
        # A piece that depends on inputs only is known for the mini-batch before a step.
        known = [p.how is not None and all(map(self.is_of_inputs, dependencies_of(p.node))) for p in pieces]
        varying = [CONSTANT_TERMS if is_known else p.terms for p, is_known in zip(pieces, known, strict=True)]
        nodes = []
        for piece in pieces:
            node = piece.node
            is_changed = not (self.changed - self.updated_memory).isdisjoint(info(node).storages)
            if is_changed and info(node).number is None:
                if node not in self._copies:  # a later node changes the value
                    self._copies[node] = self._add_after(node, torch.clone, (node,), info(node).shapes[0].dtype)
                node = self._copies[node]
            nodes.append(node)
            self.handed_out.setdefault(node, piece.how)
        order, first = [*self.handed_out], len(self.traced.outputs)
        return OutputCombination(
            place,
            tuple(first + order.index(node) for node in nodes),
            tuple(piece.how for piece in pieces),
            tuple(reduced.calls),
            tuple(known),
            not is_after and reduced.terms(varying) is not None and not any(isinstance(p.how, int) for p in pieces),
            where,
        )

    def finish(self) -> tuple[int | str | None, ...]:
        """Makes the pieces outputs of the graph, erases unused added nodes, and returns the join of each piece."""
        output = self.traced.graph.output_node()
        pieces = (tuple(self.handed_out),) if self.handed_out else ()
        output.args = ((*output.args[0][:2], *pieces),)  # type: ignore[index, misc]
        self.erase_unused()
        return tuple(self.handed_out.values())

    def erase_unused(self) -> None:
        """Erases added nodes that nothing uses."""
        for node in reversed(self.added):
            if not node.users:
                self.traced.graph.erase_node(node)

    def _reduced(self, output: fx.Node) -> ReducedOutput:
        """Walks back from an output to its pieces; the nodes after the pieces are the tail."""
        later = [*self.order][self.order[output] + 1 :]
        if any(not info(output).storages.isdisjoint(info(n).written_storages) for n in later):
            raise _unknown_reduction(output, "which is changed in place before it is returned")
        self._reduce([output], self.order[output])
        return self.reduced

    def _reduce(self, todo: list[fx.Node], end: int, is_update: bool = False) -> None:
        """Walks back from nodes, and from all that changes their values before the place `end`."""
        self.reduced, tail = ReducedOutput(), set[fx.Node]()
        while todo:
            node = todo.pop()
            if node not in tail and node not in self.reduced.values and not self._is_piece(node):
                todo += self._sources_in_tail(node, tail)
            for writer in self._writers([*tail, *self.reduced.values], end, tail) if not todo else ():
                if writer in self.reduced.values:
                    raise _unknown_reduction(writer, "which is changed in place, and used as another view")
                todo += self._sources_in_tail(writer, tail)
            for check in self._checks(tail) if not todo else ():
                todo += self._sources_in_tail(check, tail)
        same = [piece.node for piece in self.reduced.pieces if piece.how is None]  # unless it is drawn
        used = tail.union(*map(dependencies_of, same)) if is_update else set[fx.Node]()
        if random := [node for node in used if info(node).is_random]:
            raise _unknown_reduction(random[0], "which draws random numbers")  # the loss may use them, too
        self._refuse_tail(tail)
        self._add_calls(tail)

    def _is_piece(self, node: fx.Node) -> bool:
        """Adds the pieces of a value that micro-batches compute; returns False if the tail computes it."""
        number = info(node).number
        is_view = node.op in CALL_OPS and not self.updated_memory.isdisjoint(info(node).storages)
        if node in self.after_update or is_view:
            return False
        if node not in self.batch_dependent:
            self._piece(node, None, CONSTANT_TERMS)
        elif number is not None:
            per_sample, known = sympy.cancel(number / self.traced.batch), info(node)
            if known.is_float_number or known.is_data_dependent or per_sample.free_symbols:
                return False
            self._size_piece(node, per_sample)
        elif not self._reduction(node):
            if (dim := self._rows(node)) is None:
                return False
            self._piece(node, dim, ROW_TERMS)
        return True

    def _sources_in_tail(self, node: fx.Node, tail: set[fx.Node]) -> list[fx.Node]:
        """Adds a node to the tail and returns its sources. Raises if the node cannot run once, on the caller's side."""
        if node.op not in CALL_OPS:
            raise _unknown_reduction(node, "whose samples are not in one dimension")
        if info(node).is_random and (info(node).is_scalar_draw or runs_python(node)):
            raise _unknown_reduction(node, "which draws random numbers")
        if info(node).is_hook:
            raise _unknown_reduction(node, "which is a forward hook")
        if self.updated and (call := info(node).opaque) is not None and call.calls_before is not None:
            raise _unknown_reduction(node, "which is a part of forward as Python")  # parts share local variables
        if self._writes_to_state(node):
            raise _unknown_reduction(node, "which changes the model's state or an input")
        tail.add(node)
        return [n for n in node.all_input_nodes if not self._is_constant(n)]

    def _refuse_tail(self, tail: set[fx.Node]) -> None:
        """Raises if a tail reads state that forward changes, is read by forward, or is a large part of the model."""
        is_joint = any(isinstance(piece.how, int) for piece in self.reduced.pieces)
        is_after = not tail.isdisjoint(self.after_update)
        frozen = dict(self.traced.model.named_parameters())  # a teacher, which each micro-batch changes alike
        held = [n for n in self.order if n.op == "get_attr" and n.target not in {*self.updated, *frozen}]
        changed = {n for n in held if not self.changed.isdisjoint(info(n).storages) or n.target in self.traced.assigned}
        taken = 0.0
        for piece in self.reduced.pieces if tail else ():
            for node in dependencies_of(piece.node) if is_joint else ():
                is_reader = node.op in CALL_OPS and "_norm" not in base_opname(node)
                if piece.node in changed or (is_reader and not changed.isdisjoint(node.all_input_nodes)):
                    raise _unknown_reduction(node, "which reads state that forward changes")
                # Micro-batches draw other numbers, so samples of different micro-batches would not fit each other.
                sizes = [size for shape in info(node).shapes for size in shape.shape]
                if info(node).is_random and (runs_python(node) or not any(size.free_symbols for size in sizes)):
                    raise _unknown_reduction(
                        node, "which draws random numbers for all samples, again in each micro-batch"
                    )
            attributes = [n for n in dependencies_of(piece.node) if n.op == "get_attr"] if piece.how is None else []
            if any(isinstance(attribute_tensor(self.traced, n), torch.nn.Parameter) for n in attributes):
                elements = [sympy.Mul(*shape.shape) for shape in info(piece.node).shapes]
                taken += sum(float(number) for number in elements if number.is_number)
        share = taken / max(1, sum(p.numel() for p in self.traced.model.parameters()))
        first = min(tail, key=self.order.__getitem__, default=None)
        if first is not None and share >= MAX_TAIL_SHARE:
            raise _unknown_reduction(first, f"after which {share:.0%} of the parameters are used")
        if is_joint or is_after:
            kept = {node for name, node in self.traced.assigned.items() if name not in self.updated}
            kept |= {n for n in self.order if info(n).read or self._writes_to_state(n)}
            for node in kept - {n for n in kept if (read := info(n).read) is not None and read.is_check}:
                if not (tail | self.after_update).isdisjoint(dependencies_of(node)):
                    raise _unknown_reduction(node, "which forward reads or keeps")
            self.tail |= tail

    def _writes_to_state(self, node: fx.Node) -> bool:
        return not (self.state - self.updated_memory).isdisjoint(info(node).written_storages)

    def _add_calls(self, tail: set[fx.Node]) -> None:
        """Adds the tail as calls, in the order of the graph. The calls write to copies of pieces."""
        written = frozenset[int]().union(*(info(node).written_storages for node in tail))
        for node in [n for n in self.reduced.values if n not in tail and not written.isdisjoint(info(n).storages)]:
            if any(n is not node and not info(n).storages.isdisjoint(info(node).storages) for n in self.reduced.values):
                raise _unknown_reduction(node, "which is changed in place, and used as another view")
            self._call(node, torch.clone, (CombinationRef(self.reduced.values[node]),), {})

        def put(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if not self._is_constant(value):
                return CombinationRef(self.reduced.values[value])
            if info(value).dynamic_number is not None:
                raise FixedSizeError(f"an output is put together with a size as a number, at {info(value).source}")
            return constant_of(value, number_of(value))

        for node in sorted(tail, key=self.order.__getitem__):
            changed = node.args[0] if node.args else None
            if info(node).written_storages and isinstance(changed, fx.Node):
                is_last = all(self.order.get(user, -1) <= self.order[node] for user in changed.users)
                self.reduced.is_opaque |= base_opname(node) not in _IN_PLACE or not is_last
            function = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            args, kwargs = map_nested((tuple(node.args), dict(node.kwargs)), put)
            self._call(node, function, args, kwargs, is_shared=not written)

    def _writers(self, held: list[fx.Node], end: int, tail: set[fx.Node]) -> list[fx.Node]:
        """Returns the nodes that change memory of the tail or of pieces after these were computed."""
        memory = frozenset[int]().union(*(info(n).storages for n in held))
        return [
            node
            for node, place in self.order.items()
            if place < end and node not in tail and not memory.isdisjoint(info(node).written_storages)
            if any(self.order.get(n, place) < place for n in held if info(n).storages & info(node).written_storages)
        ]

    def _checks(self, tail: set[fx.Node]) -> list[fx.Node]:
        """Returns the nodes that compare what forward has checked of values that a tail of all samples computes."""
        if not any(isinstance(piece.how, int) for piece in self.reduced.pieces):
            return []  # micro-batches may check their own values
        checks = [n for n in self.order if n.target is expect and n not in tail]
        return [n for n in checks if not tail.isdisjoint(dependencies_of(n))]

    def _piece(self, node: fx.Node, how: int | str | None, terms: Terms) -> None:
        self.reduced.values[node] = len(self.reduced.pieces)
        self.reduced.pieces.append(OutputPiece(node, how, terms))

    def _size_piece(self, node: fx.Node, of_sample: sympy.Expr) -> None:
        """Adds a multiple of the number of samples, read from an input: the value itself may need the tail."""
        place = next(place for place, dim in enumerate(self.traced.in_dims) if dim is not None)
        dim, source = self.traced.in_dims[place], self.traced.placeholders[place]
        factor = of_sample / rows_per_sample(dim)
        if not factor.is_Integer:
            return self._piece(node, "sum", SIZE_TERMS)
        if self._size is None:
            self._size = self._add_after(source, torch.Tensor.size, (source, int(dim or 0)), torch.int64)
            number = self.traced.batch * rows_per_sample(dim)
            update_info(self._size, known_shapes=(), number=number)
        self.tail.add(node)
        if self._size not in self.reduced.values:
            self._piece(self._size, "sum", SIZE_TERMS)
        self._call(node, operator.mul, (CombinationRef(self.reduced.values[self._size]), int(factor)), {})

    def _counted_piece(self, node: fx.Node, count: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        """Adds a mean over selected elements: its total and its count are pieces."""
        if node not in self._counted:
            weight = args[1] if count is cross_entropy_divisor else None
            dtype = info(weight).shapes[0].dtype if isinstance(weight, fx.Node) else torch.int64
            number = self._add_after(node, count, args, dtype)
            wide = torch.promote_types(info(node).shapes[0].dtype, torch.float32)
            if dtype.is_floating_point:
                wide = torch.promote_types(wide, dtype)
            self._counted[node] = self._add_after(number, sum_from_mean, (node, number), wide), number
        total, number = self._counted[node]
        self._piece(total, "sum", SUM_TERMS)
        self._piece(number, "sum", SUM_TERMS)
        operands = (CombinationRef(self.reduced.values[total]), CombinationRef(self.reduced.values[number]))
        # Divide first, then convert to the dtype of the mean.
        self._call(node, operator.truediv, operands, {})
        if info(total).shapes[0].dtype != info(node).shapes[0].dtype:
            mean = CombinationRef(self.reduced.values[node])
            self._call(node, torch.Tensor.to, (mean, info(node).shapes[0].dtype), {})

    def _call(self, node: fx.Node, function: Any, args: Any, kwargs: Any, is_shared: bool = False) -> None:
        state = state_of(node) if info(node).state is not None else self.traced.state
        self.reduced.calls.append(CombinationCall(function, args, kwargs, state, node.name if is_shared else ""))
        self.reduced.values[node] = -len(self.reduced.calls)

    def _is_constant(self, node: fx.Node) -> bool:
        number = info(node).number
        return number is not None and not (number.free_symbols or info(node).is_data_dependent)

    def _rows(self, node: fx.Node) -> int | None:
        """Returns the dimension of the samples, if each row of the tensor belongs to one sample, in order."""
        shapes = info(node).shapes
        if len(shapes) != 1 or node not in self.of_samples:
            return None
        dims = [d for d, size in enumerate(shapes[0].shape) if size.free_symbols]
        is_seen = self.joins is None or dims == [d for d in self.joins.get(node, ()) if isinstance(d, int)]
        return dims[0] if len(dims) == 1 and is_seen else None

    def _reduction(self, node: fx.Node) -> bool:
        """Adds the pieces of a node that reduces rows over samples; returns False for any other node."""
        if not node.all_input_nodes or node.op not in CALL_OPS or len(info(node).shapes) != 1:
            return False
        if any(size.free_symbols for size in info(node).shapes[0].shape):
            return False
        source = node.args[0] if node.args else next(iter(node.kwargs.values()))
        batched = [n for n in node.all_input_nodes if n in self.batch_dependent and info(n).number is None]
        if not isinstance(source, fx.Node) or any(self._rows(n) is None for n in (source, *batched)):
            return False
        name, size = base_opname(node), self._batch_dim(source)[1]
        even = not sympy.cancel(size / self.traced.batch).free_symbols  # have all samples equally many elements?
        if not even and self.traced.batch in size.free_symbols:
            return False
        if name in ("sum", "nansum", "count_nonzero"):
            return self._simple_piece(node, "sum")
        if name == "mean":
            if even:
                return self._simple_piece(node, "mean")
            return not info(node).shapes[0].shape and self._elements_piece(node, source)
        is_of_torch = node.op == "call_function" and getattr(F, name, None) is node.target
        arguments = dict[str, Any]()
        if is_of_torch and isinstance(node.target, FunctionType):
            arguments = {key: value.default for key, value in inspect.signature(node.target).parameters.items()}
            arguments |= named_arguments(node)
        if any(arguments.get(old) is not None for old in ("size_average", "reduce")) or "reduction" not in arguments:
            return False
        # A loss of arguments that hold the samples in different dimensions may compare all pairs.
        differ = node.target is not F.ctc_loss and len({self._batch_dim(n) for n in batched}) > 1
        return not differ and self._loss(node, source, arguments, even)

    def _simple_piece(self, node: fx.Node, how: str) -> bool:
        """Adds a sum or a mean, unless observation contradicts it."""
        if self.joins is not None and how not in self.joins.get(node, ()):
            return False
        self._piece(node, how, SUM_TERMS if how == "sum" else MEAN_TERMS)
        return True

    # No model of the zoo: a mean over `x[mask]` needs it (behaviour/test_own_losses.py).
    def _elements_piece(self, node: fx.Node, source: fx.Node) -> bool:
        """Adds a mean over a number of elements that depends on values; a mask that selects them gives the number."""
        mask = source.args[1] if base_opname(source) in ("getitem", "masked_select") and len(source.args) == 2 else None
        shapes = info(mask).shapes if isinstance(mask, fx.Node) else ()
        if shapes == (TensorShape(info(source.all_input_nodes[0]).shapes[0].shape, torch.bool),):
            self._counted_piece(node, torch.count_nonzero, (mask,))
        else:
            self._counted_piece(node, element_count, (source,))
        return True

    def _loss(self, node: fx.Node, source: fx.Node, arguments: dict[str, Any], even: bool) -> bool:
        target, weight, reduction = arguments.get("target"), arguments.get("weight"), arguments["reduction"]
        shape, is_counted = info(source).shapes[0].shape, "ignore_index" in arguments
        others = info(target).shapes[0] if isinstance(target, fx.Node) and info(target).shapes else None
        if is_counted and (others is None or len(shape) < 2 or shape[1].free_symbols):
            return False
        if others is not None and "input" in arguments and others.dtype.is_floating_point and others.shape != shape:
            return False  # broadcast: it may compare each sample with each
        if reduction == "sum":
            return self._simple_piece(node, "sum")
        if reduction == "batchmean":
            is_mean = bool(shape[0].free_symbols)
            return not (is_mean and not even) and self._simple_piece(node, "mean" if is_mean else "sum")
        if reduction != "mean":
            return False
        if is_counted and others is not None and not others.dtype.is_floating_point:
            if isinstance(weight, fx.Node) and weight in self.batch_dependent:
                return False
            self._counted_piece(node, cross_entropy_divisor, (target, weight, arguments["ignore_index"]))
        elif weight is not None and node.target in _DIVIDED_BY_WEIGHTS:
            self._counted_piece(node, torch.sum, (weight,))
        elif even:
            return self._simple_piece(node, "mean")
        else:
            return self._elements_piece(node, source)
        return True

    def _batch_dim(self, node: fx.Node) -> tuple[int, Any]:
        shape = info(node).shapes[0].shape
        return next((d, size) for d, size in enumerate(shape) if size.free_symbols)

    def _add_after(self, node: fx.Node, function: Any, args: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        graph = self.traced.graph
        like = node if node.op in CALL_OPS else next(n for n in graph.nodes if n.op in CALL_OPS)
        with graph.inserting_after(node) if like is node else graph.inserting_before(like):
            new = graph.call_function(function, args)
        shape = info(node).shapes[0].shape if function is torch.clone else ()
        set_info(new, info(like).beside(known_shapes=(TensorShape(shape, dtype),)))
        self.added.append(new)
        if any(source in self.batch_dependent for source in new.all_input_nodes):
            self.batch_dependent.add(new)
        return new

    def is_of_inputs(self, node: fx.Node) -> bool:
        """Returns whether a node computes something before a step that it computes in one, from known arguments."""
        if info(node).number is not None:
            return True
        if not self.changed.isdisjoint(info(node).storages):
            return False  # it may be read before or after the change
        if node.op == "get_attr":
            return not isinstance(attribute_tensor(self.traced, node), torch.nn.Parameter)
        is_work = node.op in CALL_OPS and not (runs_python(node) or info(node).is_random or info(node).is_guarded_read)
        return is_work or node.op == "placeholder"


def base_opname(node: fx.Node) -> str:
    """Returns the name of an operation: `add` for `operator.add`, `torch.add`, `Tensor.__add__`, `aten.add.Tensor`."""
    return _base_name(node.target)


def _base_name(function: Any) -> str:
    name = opname(function)
    return name.strip("_") if name.startswith("__") else name


def _unknown_reduction(node: fx.Node, why: str) -> UnknownReductionError:
    return UnknownReductionError(f"{node.name}, made at {info(node).source or 'the input'}, {why}")


def _has_rows(terms: Terms) -> bool:
    return any(scale > _ROW / 2 for _, scale in terms)


def _refs(value: Any) -> list[CombinationRef]:
    leaves: list[Any] = []
    map_nested(value, leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, CombinationRef)]


def _terms_of(call: CombinationCall, known: Mapping[int, Terms | None]) -> Terms | None:
    name = _base_name(call.function)
    name = _IN_PLACE.get(name, name)

    def of(value: Any) -> Terms | None:
        return _joined([known[ref.number] for ref in refs]) if (refs := _refs(value)) else CONSTANT_TERMS

    everything = _joined([known[ref.number] for ref in _refs((call.args, call.kwargs))])
    if everything is None:
        return None
    if _has_rows(everything) and name not in _OF_EACH_ROW:
        is_sum = name == "sum" and len(call.args) == 1 and not call.kwargs
        is_rows = all(scale > _ROW / 2 for _, scale in everything)
        return frozenset((d, scale - _ROW + 1) for d, scale in everything) if is_sum and is_rows else None
    if name in JOINING:
        return everything
    if name == "full":  # `torch.tensor(len(x))` is recorded as this
        return of(call.args[1])
    if name in LINEAR:
        return everything if of((call.args[1:], call.kwargs)) == CONSTANT_TERMS else None
    is_plain = not _refs(call.kwargs) and not (name in QUOTIENTS and call.kwargs)
    if name in (SUMS | PRODUCTS | QUOTIENTS) and len(call.args) == 2 and is_plain:
        left, right = map(of, call.args)
        if left is None or right is None:
            return None
        if name in SUMS:
            return left | right
        if name in PRODUCTS:
            return _product(left, right)
        if name in ("rtruediv", "rdiv"):
            left, right = right, left
        is_constant = len(right) == 1 and all(degree == 0 for degree, _ in right)
        return _product(left, frozenset((0, -scale) for _, scale in right)) if is_constant else None
    return CONSTANT_TERMS if everything == CONSTANT_TERMS else None


def _joined(terms: Sequence[Terms | None]) -> Terms | None:
    return None if None in terms else frozenset[tuple[int, int]]().union(*terms)  # type: ignore[arg-type]


def _product(left: Terms, right: Terms) -> Terms | None:
    product = frozenset((d + e, s + t) for d, s in left for e, t in right)
    return product if all(degree <= 1 for degree, _ in product) else None
