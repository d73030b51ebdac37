"""Sums and means over samples in an output without the batch, found from the graph.

Walks back from the output to the first values that hold the batch. What has reduced those are its *pieces*:

- a sum over samples (`sum`, `reduction="sum"`): those of micro-batches add up;
- a mean over as many elements of each sample (`mean` over batch and length, `F.mse_loss`): a mean weighted by size;
- a mean over elements that count (`F.cross_entropy`, of which padding is ignored; `loss[mask].mean()`): its total and
  its count are pieces, both sums;
- what does not depend on samples: the same for all.

In between stand functions of pieces (`total / count.clamp(min=1)`, `ce + 0.01 * aux`), whatever they are: the output
of the mini-batch is the same function of the pieces of the mini-batch. Where the function is plain, a mean of
means or a sum of sums, the outputs go together as such. What the walk does not know is `UnknownReductionError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.tracing.dynamic_sizes import FixedSizeError
from fxpipe.tracing.node_arguments import named_arguments_and_defaults
from fxpipe.tracing.node_info import constant_of, info, number_of, set_info, state_of
from fxpipe.tracing.shapes.reduced_output import (
    CONSTANT_TERMS,
    JOINING,
    LINEAR,
    MEAN_TERMS,
    PRODUCTS,
    QUOTIENTS,
    SIZE_TERMS,
    SUM_TERMS,
    SUMS,
    OutputPiece,
    ReducedOutput,
    Terms,
    map_nested,
)
from fxpipe.tracing.shapes.tensor_shape import TensorShape
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor, runs_python
from fxpipe.utils.output_combination import (
    CombinationCall,
    CombinationRef,
    OutputCombination,
    cross_entropy_divisor,
    element_count,
    sum_from_mean,
)

MAX_PIECE_ELEMENTS = 1 << 14  # of a piece, or of what is made of pieces: it is made in the caller's thread

_ELEMENTWISE_LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.hinge_embedding_loss,
    F.multilabel_soft_margin_loss,
    F.multilabel_margin_loss,
)
_COUNTED_LOSSES = (F.cross_entropy, F.nll_loss)
_SAMPLE_LOSSES = (
    F.gaussian_nll_loss,
    F.multi_margin_loss,
    F.margin_ranking_loss,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.ctc_loss,
)  # means over samples of what each gives
_DIVIDED_BY_WEIGHTS = (F.mse_loss, F.l1_loss)  # whose means with `weight=` are over the sum of these
_OTHER = frozenset(
    "pow square exp exp2 expm1 log log1p log2 log10 sqrt rsqrt abs clamp clamp_min clamp_max maximum minimum max min "
    "amax amin where sigmoid tanh relu softplus softmax log_softmax logsumexp reciprocal eq ne gt lt ge le isnan isinf "
    "isfinite nan_to_num prod norm std var dot matmul floor_divide floordiv remainder round floor ceil sign "
    "logical_and logical_or logical_not and or invert not zeros_like ones_like full_like masked_fill argmax argmin any "
    "all int long bool cumsum sort topk median".split()
)
_FUNCTIONS = LINEAR | JOINING | _OTHER | {"full"} | SUMS | PRODUCTS | QUOTIENTS
_IN_PLACE = {"iadd": operator.add, "isub": operator.sub, "imul": operator.mul, "itruediv": operator.truediv}
_IN_PLACE |= {"add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div}


class UnknownReductionError(Exception):
    """The graph does not tell. The text says where."""


class ReductionWalk:
    """A walk back from outputs without the batch. `dependent`: the nodes that depend on batched inputs."""

    def __init__(self, traced: Traced, dependent: set[fx.Node]):
        self.traced, self.batch_dependent = traced, dependent
        self.order = {node: place for place, node in enumerate(traced.graph.nodes)}
        self.changed = frozenset[int]().union(*(info(node).written_storages for node in traced.graph.nodes))
        self._counted: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # mean -> its total and count
        self._copies: dict[fx.Node, fx.Node] = {}
        self.added: list[fx.Node] = []
        self.handed_out: dict[fx.Node, str | None] = {}  # the pieces of all combinations, and how they go together

    def reduced(self, output: fx.Node) -> ReducedOutput:
        """Walks back from an output to its pieces; raises UnknownReductionError where the graph does not tell them."""
        reduced = ReducedOutput()
        if self._is_changed_between(output, self.traced.graph.output_node()):
            raise _unknown_reduction(output, "which is changed in place before it is returned")
        self._visit(output, reduced)
        return reduced

    def combination(self, output: fx.Node, place: int) -> OutputCombination | str:
        """Finds how the output goes together: "mean", "sum", or a function of pieces, which are then in the graph.

        Raises:
            UnknownReductionError: the graph does not tell.
        """
        reduced = self.reduced(output)
        terms = reduced.terms([piece.terms for piece in reduced.pieces])
        if terms is not None and terms <= CONSTANT_TERMS | MEAN_TERMS:
            return "mean"
        if terms is not None and terms == SUM_TERMS:
            return "sum"
        return self._combination(reduced, output, place)

    def finish(self) -> tuple[str | None, ...]:
        """Makes the pieces outputs of the graph, and takes out again what was added and nobody needs.

        Returns how each piece goes together.
        """
        output = self.traced.graph.output_node()
        if self.handed_out:
            output.args = ((*output.args[0][:2], tuple(self.handed_out)),)  # type: ignore[index, misc]
        for node in reversed(self.added):
            if not node.users:
                self.traced.graph.erase_node(node)
        return tuple(self.handed_out.values())

    def _combination(self, reduced: ReducedOutput, output: fx.Node, place: int) -> OutputCombination:
        known = [self._is_known(piece) for piece in reduced.pieces]
        varying = [
            CONSTANT_TERMS if is_known else piece.terms for piece, is_known in zip(reduced.pieces, known, strict=True)
        ]
        nodes = [self._handed_out(piece.node) for piece in reduced.pieces]
        for piece, node in zip(reduced.pieces, nodes, strict=True):
            self.handed_out.setdefault(node, piece.how)
        order, first = [*self.handed_out], len(self.traced.outputs)
        return OutputCombination(
            place,
            tuple(first + order.index(node) for node in nodes),
            tuple(piece.how for piece in reduced.pieces),
            tuple(reduced.numbered_calls()),
            tuple(known),
            reduced.terms(varying) is not None,
            f"output {place} ({output.name}, made at {info(output).source or 'the input'})",
        )

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node, reduced: ReducedOutput) -> None:
        if node in reduced.values:
            return
        number = info(node).number
        if node not in self.batch_dependent:
            self._piece(node, None, CONSTANT_TERMS, reduced)
        elif number is not None and not info(node).is_float_number:
            if sympy.cancel(number / self.traced.batch).free_symbols:
                raise _unknown_reduction(node, "which is a number that does not simply grow with the batch")
            self._piece(node, "sum", SIZE_TERMS, reduced)
        elif self._reduction(node, reduced):
            return
        else:
            self._function(node, reduced)

    def _piece(self, node: fx.Node, how: str | None, terms: Terms, reduced: ReducedOutput) -> None:
        if _elements(node) > MAX_PIECE_ELEMENTS:
            raise _unknown_reduction(node, "which is large")
        reduced.values[node] = len(reduced.pieces)
        reduced.pieces.append(OutputPiece(node, how, terms))

    def _counted_piece(
        self, node: fx.Node, count: Callable[..., torch.Tensor], args: tuple[Any, ...], reduced: ReducedOutput
    ) -> None:
        """A mean over what counts: its total and its count are pieces."""
        total, number = self._total_and_count(node, count, args)
        self._piece(total, "sum", SUM_TERMS, reduced)
        self._piece(number, "sum", SUM_TERMS, reduced)
        operands = (CombinationRef(reduced.values[total]), CombinationRef(reduced.values[number]))
        # Divided, then given the digits of the mean.
        self._call("truediv", operator.truediv, operands, {}, node, reduced)
        if info(total).shapes[0].dtype != info(node).shapes[0].dtype:
            self._call(
                "to",
                torch.Tensor.to,
                (CombinationRef(reduced.values[node]), info(node).shapes[0].dtype),
                {},
                node,
                reduced,
            )

    def _call(
        self,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node: fx.Node,
        reduced: ReducedOutput,
    ) -> None:
        reduced.calls.append((CombinationCall(function, args, kwargs, state_of(node)), name))
        reduced.values[node] = -len(reduced.calls)

    # No model of the zoo: a mean over `x[mask]` needs it (behaviour/test_own_losses.py).
    def _elements_piece(self, node: fx.Node, source: fx.Node, reduced: ReducedOutput) -> None:
        """A mean over elements of which values tell the number: a mask does, where they are chosen by one."""
        mask = source.args[1] if base_opname(source) in ("getitem", "masked_select") and len(source.args) == 2 else None
        if isinstance(mask, fx.Node) and [s.dtype for s in info(mask).shapes] == [torch.bool]:
            chosen = info(source.all_input_nodes[0]).shapes[0].shape
            if info(mask).shapes[0].shape == chosen:
                return self._counted_piece(node, torch.count_nonzero, (mask,), reduced)
        return self._counted_piece(node, element_count, (source,), reduced)

    def _function(self, node: fx.Node, reduced: ReducedOutput) -> None:
        """A function of values that are known as functions of pieces."""
        name = base_opname(node)
        in_place = _IN_PLACE.get(name)
        if node.op not in CALL_OPS or runs_python(node) or info(node).is_random or self._holds_batch(node):
            raise _unknown_reduction(node, "which is no known function of sums and means over samples")
        if in_place is not None:
            if not self._is_last_of(node, node.args[0]):
                raise _unknown_reduction(node, "which changes a value that is used again")
            name = name.removeprefix("i") if name.startswith("i") else name.removesuffix("_")
        elif info(node).written_storages or name not in _FUNCTIONS:
            raise _unknown_reduction(node, "which is no known function of sums and means over samples")
        if _elements(node) > MAX_PIECE_ELEMENTS:
            raise _unknown_reduction(node, "which is large")
        for source in node.all_input_nodes:
            if not self._is_constant(source):
                if self._is_changed_between(source, node):
                    raise _unknown_reduction(source, "which is changed in place before it is used")
                self._visit(source, reduced)

        def put(value: Any) -> Any:
            if isinstance(value, slice):
                if any(isinstance(part, fx.Node) for part in (value.start, value.stop, value.step)):
                    raise _unknown_reduction(node, "which takes a part whose bounds are computed")
                return value
            if not isinstance(value, fx.Node):
                return value
            if not self._is_constant(value):
                return CombinationRef(reduced.values[value])
            if info(value).dynamic_number is not None:
                raise FixedSizeError(f"an output is put together with a size as a number, at {info(node).source}")
            return constant_of(value, number_of(value))

        args = map_nested(tuple(node.args), put)
        kwargs = {key: map_nested(value, put) for key, value in node.kwargs.items()}
        function = in_place or (getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target)
        self._call(name, function, args, kwargs, node, reduced)

    def _is_constant(self, node: fx.Node) -> bool:
        number = info(node).number
        return number is not None and not number.free_symbols

    def _is_changed_between(self, source: fx.Node, user: fx.Node) -> bool:
        storages = info(source).storages
        if self.changed.isdisjoint(storages):
            return False
        first, last = self.order.get(source, -1), self.order.get(user, len(self.order))
        return any(
            first < place < last and not storages.isdisjoint(info(node).written_storages)
            for node, place in self.order.items()
        )

    def _is_last_of(self, node: fx.Node, changed: Any) -> bool:
        """Returns whether nobody uses a value after this node has changed it."""
        later = self.order.get(node, 0)
        return (
            isinstance(changed, fx.Node)
            and all(user is node or self.order.get(user, -1) < later for user in changed.users if user.op in CALL_OPS)
            and changed not in self.traced.outputs
        )

    def _holds_batch(self, node: fx.Node) -> bool:
        return any(size.free_symbols for shape in info(node).shapes for size in shape.shape)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def _reduction(self, node: fx.Node, reduced: ReducedOutput) -> bool:
        """Adds the pieces of a node that reduces over samples; False where it is none."""
        if not node.all_input_nodes or node.op not in CALL_OPS or self._holds_batch(node):
            return False
        source = node.args[0] if node.args else next(iter(node.kwargs.values()))
        if not isinstance(source, fx.Node) or not self._holds_batch(source) or len(info(node).shapes) != 1:
            return False
        name = base_opname(node)
        if name in ("sum", "mean") and (parts := self._samples_and_factor(source)) is not None:
            self._reduction_of_product(node, source, *parts, reduced)
            return True
        if name in ("sum", "nansum", "mean", "count_nonzero"):
            even = self._is_reduced_over_samples(source)
            if even is None:
                return False
            if name != "mean":
                self._piece(node, "sum", SUM_TERMS, reduced)
            elif even:
                self._piece(node, "mean", MEAN_TERMS, reduced)
            else:
                if info(node).shapes[0].shape:
                    return False
                self._elements_piece(node, source, reduced)
            return True
        arguments = _loss_arguments(node)
        if arguments is None or arguments.get("size_average") is not None or arguments.get("reduce") is not None:
            return False
        even = self._is_even(source)
        if even is None or arguments["reduction"] not in ("mean", "sum", "batchmean"):
            return False
        if node.target in _SAMPLE_LOSSES:
            return self._loss_of_samples(node, source, arguments["reduction"], even, reduced)
        return self._loss(node, source, arguments, even, reduced)

    def _samples_and_factor(self, source: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The operands of a product or a quotient by one number that all samples share."""
        name = base_opname(source)
        if name not in PRODUCTS | {"truediv", "div", "divide", "true_divide"} or len(source.args) != 2 or source.kwargs:
            return None
        samples, factor = source.args
        if name in PRODUCTS and not (isinstance(samples, fx.Node) and self._holds_batch(samples)):
            samples, factor = factor, samples
        if not isinstance(samples, fx.Node) or not isinstance(factor, fx.Node) or factor not in self.batch_dependent:
            return None
        is_one = not self._holds_batch(factor) and _elements(factor) <= 1
        has_same_shape = [s.shape for s in info(samples).shapes] == [info(source).shapes[0].shape]
        return (samples, factor) if is_one and has_same_shape else None

    # No model of the zoo: a loss weighed by what samples share needs it (behaviour/test_own_losses.py).
    def _reduction_of_product(
        self, node: fx.Node, source: fx.Node, samples: fx.Node, factor: fx.Node, reduced: ReducedOutput
    ) -> None:
        """`(loss * mask / mask.sum()).sum()` is `(loss * mask).sum() / mask.sum()`: a factor comes last."""
        if node not in self._counted:
            with self.traced.graph.inserting_after(node):
                new = self.traced.graph.create_node(node.op, node.target, (samples, *node.args[1:]), node.kwargs)
            set_info(new, replace(info(node), storages=frozenset()))
            self.added.append(new)
            self.batch_dependent.add(new)
            self._counted[node] = new, new
        new = self._counted[node][0]
        self._visit(new, reduced)
        self._visit(factor, reduced)
        refs = (CombinationRef(reduced.values[new]), CombinationRef(reduced.values[factor]))
        is_product = base_opname(source) in PRODUCTS
        self._call(
            "mul" if is_product else "truediv",
            operator.mul if is_product else operator.truediv,
            refs,
            {},
            node,
            reduced,
        )

    def _loss(
        self, node: fx.Node, source: fx.Node, arguments: dict[str, Any], even: bool, reduced: ReducedOutput
    ) -> bool:
        target, reduction = arguments.get("target"), arguments["reduction"]
        shape = info(source).shapes[0].shape
        if not isinstance(target, fx.Node) or not info(target).shapes:
            return False
        is_counted = node.target in _COUNTED_LOSSES
        others = info(target).shapes[0]
        if is_counted and (len(shape) < 2 or shape[1].free_symbols):
            return False
        if not is_counted and others.shape != shape and node.target is not F.multilabel_margin_loss:
            return False  # broadcast: each sample against each, it may be
        if reduction == "sum":
            self._piece(node, "sum", SUM_TERMS, reduced)
        elif reduction == "batchmean":
            is_mean = bool(shape[0].free_symbols)
            if is_mean and not even:
                return False
            self._piece(node, "mean" if is_mean else "sum", MEAN_TERMS if is_mean else SUM_TERMS, reduced)
        elif is_counted and not others.dtype.is_floating_point:
            weight = arguments.get("weight")
            if isinstance(weight, fx.Node) and weight in self.batch_dependent:
                return False
            self._counted_piece(node, cross_entropy_divisor, (target, weight, arguments["ignore_index"]), reduced)
        elif arguments.get("weight") is not None and node.target in _DIVIDED_BY_WEIGHTS:
            self._counted_piece(node, torch.sum, (arguments["weight"],), reduced)
        elif even:
            self._piece(node, "mean", MEAN_TERMS, reduced)
        else:
            self._elements_piece(node, source, reduced)
        return True

    # No model of the zoo: a mean of `triplet_margin_loss` needs it (behaviour/test_own_losses.py).
    def _loss_of_samples(
        self, node: fx.Node, source: fx.Node, reduction: str, even: bool, reduced: ReducedOutput
    ) -> bool:
        first = self._batch_dim(source)
        others = [other for other in node.all_input_nodes if info(other).shapes and self._holds_batch(other)]
        if node.target is not F.ctc_loss and any(self._batch_dim(other) != first for other in others):
            return False  # broadcast: each sample against each
        if reduction == "sum":
            self._piece(node, "sum", SUM_TERMS, reduced)
        elif even:
            self._piece(node, "mean", MEAN_TERMS, reduced)
        else:
            return False
        return True

    def _batch_dim(self, node: fx.Node) -> tuple[int, Any]:
        """Returns the dimension that holds the batch, and its size."""
        shape = info(node).shapes[0].shape
        return next((d, size) for d, size in enumerate(shape) if size.free_symbols)

    def _is_even(self, node: fx.Node) -> bool | None:
        """Returns whether it has as many elements for each sample; None where several dimensions hold samples, say."""
        shape = info(node).shapes[0].shape
        sizes = [size for size in shape if size.free_symbols]
        if len(sizes) != 1:
            return None
        if not sympy.cancel(sizes[0] / self.traced.batch).free_symbols:
            return True
        return None if self.traced.batch in sizes[0].free_symbols else False

    def _is_reduced_over_samples(self, source: fx.Node) -> bool | None:
        """Returns `_is_even` of what is reduced."""
        if len(info(source).shapes) != 1:
            return None
        return self._is_even(source)  # the result holds no batch, so that its dimension is among those that are gone

    # -- nodes for the pieces ------------------------------------------------------------------------------------------

    def _total_and_count(
        self, mean: fx.Node, count: Callable[..., torch.Tensor], args: tuple[Any, ...]
    ) -> tuple[fx.Node, fx.Node]:
        if mean not in self._counted:
            weight = args[1] if count is cross_entropy_divisor else None
            dtype = info(weight).shapes[0].dtype if isinstance(weight, fx.Node) else torch.int64
            number = self._add_after(mean, count, args, dtype)
            wide = torch.promote_types(info(mean).shapes[0].dtype, torch.float32)
            if dtype.is_floating_point:
                wide = torch.promote_types(wide, dtype)
            total = self._add_after(number, sum_from_mean, (mean, number), wide)
            self._counted[mean] = total, number
        return self._counted[mean]

    def _handed_out(self, node: fx.Node) -> fx.Node:
        """The node whose value is handed out: a copy, where something changes the value later."""
        if self.changed.isdisjoint(info(node).storages) or info(node).number is not None:
            return node
        if node not in self._copies:
            self._copies[node] = self._add_after(node, torch.clone, (node,), info(node).shapes[0].dtype)
        return self._copies[node]

    def _add_after(self, node: fx.Node, function: Any, args: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        graph = self.traced.graph
        if node.op in CALL_OPS:
            with graph.inserting_after(node):
                new = graph.call_function(function, args)
            like = node
        else:
            like = next(n for n in graph.nodes if n.op in CALL_OPS)
            with graph.inserting_before(like):
                new = graph.call_function(function, args)
        shape = info(node).shapes[0].shape if function is torch.clone else ()
        set_info(new, info(like).beside(known_shapes=(TensorShape(shape, dtype),)))
        self.added.append(new)
        if any(source in self.batch_dependent for source in new.all_input_nodes):
            self.batch_dependent.add(new)
        return new

    def _is_known(self, piece: OutputPiece) -> bool:
        """Returns whether it comes from inputs alone, so that the mini-batch's is known before a step."""
        return piece.how is not None and all(map(self._is_of_inputs, dependencies_of(piece.node)))

    def _is_of_inputs(self, node: fx.Node) -> bool:
        if info(node).number is not None:
            return True
        if not self.changed.isdisjoint(info(node).storages):
            return False  # it may be read before it is changed, or after
        if node.op == "get_attr":
            return not isinstance(attribute_tensor(self.traced, node), torch.nn.Parameter)
        is_work = node.op in CALL_OPS and not (runs_python(node) or info(node).is_random or info(node).is_guarded_read)
        return is_work or node.op == "placeholder"


def dependencies_of(node: fx.Node) -> dict[fx.Node, None]:
    """Collects the nodes that a node is computed from, itself included; sizes that are numbers need nothing more."""
    dependencies: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        node = todo.pop()
        if node not in dependencies:
            dependencies[node] = None
            if info(node).number is None:
                todo.extend(node.all_input_nodes)
    return dependencies


def base_opname(node: fx.Node) -> str:
    """`add` of `operator.add`, `torch.add`, `Tensor.__add__` and `aten.add.Tensor`."""
    name = opname(node.target)
    return name.strip("_") if name.startswith("__") else name


def _loss_arguments(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a loss function of torch by name."""
    if node.target not in (*_ELEMENTWISE_LOSSES, *_COUNTED_LOSSES, *_SAMPLE_LOSSES):
        return None
    return named_arguments_and_defaults(node)


def _elements(node: fx.Node) -> float:
    sizes = [sympy.Mul(*shape.shape) for shape in info(node).shapes]
    return sum(float(size) if size.is_number else 0.0 for size in sizes)


def _unknown_reduction(node: fx.Node, why: str) -> UnknownReductionError:
    return UnknownReductionError(f"{node.name}, made at {info(node).source or 'the input'}, {why}")
