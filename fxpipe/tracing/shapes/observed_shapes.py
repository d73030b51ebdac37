"""Sizes that fake tensors cannot show, observed in real runs.

Fake tensors do not show the results of Python that reads values, of operators without a rule for fake tensors, or of
views of `x[mask]`. So the graph runs on real values with three numbers of samples n. Each size is fitted by a formula
slope * n + offset: two runs give both numbers, the third must agree. Which inputs hold samples is uncertain: all
candidates are varied together; if the graph fails, fewer of them are.

If a node depends on dynamic sizes, the graph also runs at other dynamic sizes. Each size of the result is fitted by a
formula in one size of the inputs, or in the product of two.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.error_messages import allocator_error
from fxpipe.errors import StateError, TraceError
from fxpipe.tracing.dynamic_sizes import InputDim
from fxpipe.tracing.interpreter import NodeValues, copy_of_input, run_node, run_nodes
from fxpipe.tracing.model_state import preserve_state
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor
from fxpipe.utils.batch_split import rows_per_sample, samples_along
from fxpipe.utils.python_objects import equal_values

MAX_CHOICES = 32  # sets of inputs to vary
_DIVISORS = (2, 3, 4, 6, 8, 16)  # tried in formulas for whole numbers
LENGTH_RUNS = 3  # at other dynamic sizes, with all of them changed

Number = int | float
SizePoint = tuple[int, Number]  # a size, the number observed there
ObservedValues = dict[fx.Node, Any]  # trees of ObservedTensor, numbers and constants


@dataclass(frozen=True, slots=True)
class FittedSize:
    """A size as a function of the number of samples (`observe_shapes`), or of a node's input sizes (`fit_lengths`)."""

    of: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class ObservedTensor:
    """An observed tensor: of one run with numbers, of all runs with formulas."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]  # empty: contiguous, or unknown
    dtype: torch.dtype
    device: torch.device

    def of(self, sizes_here: Any) -> torch.Tensor:
        shape, stride = ([size.of(sizes_here) for size in sizes] for sizes in (self.shape, self.stride))
        if len(stride) < len(shape):
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)


def fake_value(formulas: Any, sizes_here: Any) -> Any:
    """Builds a node's result under a fake mode, for a number of samples or for sizes of inputs (`fit_lengths`)."""
    return pytree.tree_map_only((ObservedTensor, FittedSize), lambda seen: seen.of(sizes_here), formulas)


@dataclass(frozen=True, slots=True)
class Observation:
    """The results of nodes in real runs, and the inputs whose samples were varied."""

    varied: tuple[int, ...]  # indices of input leaves
    fixed: frozenset[int]  # indices of inputs that may hold samples by their sizes, but cannot vary
    node_values: dict[fx.Node, Any]  # trees of ObservedTensor with formulas, formulas for numbers, and constants
    runs: Sequence[ObservedValues]
    samples: int  # the smallest number in the runs


def observe_shapes(
    traced: Traced, values: Sequence[Any], dims: Mapping[int, int], groups: Sequence[Sequence[int]], node: fx.Node
) -> Observation:
    """Runs the graph with several numbers of samples, as far as it succeeds, and fits the result of each node.

    Args:
        dims: index of an input -> the dimension that may hold the samples.
        groups: indices of inputs, grouped by number of samples.
        node: the node that is needed, or `TraceError` is raised; others are fitted if possible.
    """
    why, out_of_memory = "no input that it depends on has samples that could be varied", None
    if any(isinstance(v, torch.Tensor) and v.is_meta for v in values):
        raise TraceError("it can only be seen in a real run, and the inputs hold no values")
    if not groups:
        run = observe_graph(traced, values, node)
        return Observation((), frozenset(), _fit_all((0, 1), (run, run), node), (run,), 0)
    for varied in itertools.islice(_choices(values, dims, groups), MAX_CHOICES):
        samples = samples_along(values[varied[0]], dims[varied[0]])
        # Near numbers and the double, or multiples for models that need pairs: a number of rows selected by value may
        # fit near numbers by chance, but not the double as well.
        near = (samples, samples - 1, 2 * samples) if samples > 2 else (samples, samples + 1, samples + 2)
        for numbers in (near, (samples, 2 * samples, 3 * samples)):
            try:
                runs = [observe_graph(traced, _with_samples(values, dims, varied, n), node) for n in numbers]
            except Exception as error:
                why = f"in real runs with {_listed(numbers)} samples: {type(error).__name__}: {error}"
                out_of_memory = out_of_memory or allocator_error(error)
                if isinstance(error, StateError) and _is_of_values(traced, values, dims, varied, node):
                    raise TraceError(why) from error
                continue
            try:
                formulas = _fit_all(numbers, runs, node)
            except _NoFormula as error:
                why = f"in real runs with {_listed(numbers)} samples {error}; sizes must grow evenly with the samples"
                if _is_of_values(traced, values, dims, varied, node):
                    raise TraceError(why) from error  # with fewer varied inputs it would look fixed
                break  # multiples could fit by chance
            fixed = frozenset(p for group in groups for p in group) - {*varied}
            return Observation(varied, fixed, formulas, runs, min(numbers))
    raise TraceError(why) from out_of_memory


def fit_lengths(
    traced: Traced,
    values: Sequence[Any],
    dims: Mapping[int, int],
    observation: Observation,
    groups: Sequence[Sequence[InputDim]],
    node: fx.Node,
) -> Any:
    """Returns formulas for the result of a node in the sizes of its inputs (`given_sizes`).

    Runs the graph at other dynamic sizes, as far as it succeeds: first all sizes change, then one of the `groups` of
    dimensions with equal sizes. Raises `TraceError` if it does not run at other sizes, or no formula fits.
    """
    inputs = _with_samples(values, dims, observation.varied, observation.samples)
    everywhere = [key for group in groups for key in group]
    runs, why = list[ObservedValues](), ""

    def run(changed: Sequence[InputDim], factor: int, more: int = 0) -> None:
        nonlocal why
        sizes = {(place, dim): factor * inputs[place].shape[dim] + more for place, dim in changed}
        try:
            runs.append(observe_graph(traced, resized(inputs, sizes), node))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"

    for factor, more in ((2, 0), (3, 0), (1, 1), (1, 2)):
        if len(runs) < LENGTH_RUNS:
            run(everywhere, factor, more)
    if len(runs) < LENGTH_RUNS - 1:
        raise TraceError(why)
    for group in groups if len(groups) > 1 else ():
        run(group, 2)
    runs = [*observation.runs, *runs]
    operands = [given_sizes(node, one) for one in runs]
    if len({*map(len, operands)}) > 1:
        raise TraceError("it returns one structure or another")
    columns: dict[tuple[int, ...], int] = {}
    for place, column in enumerate(zip(*operands, strict=True)):
        columns.setdefault(column, place)
    return _fit_value([one[node] for one in runs], functools.partial(_fit_to, columns))


def resized(values: Sequence[Any], sizes: Mapping[InputDim, int]) -> list[Any]:
    """Returns inputs with other sizes of these dimensions: cut, or repeated from their beginning."""
    result = list(values)
    for (place, dim), size in sizes.items():
        value = result[place]
        if value.shape[dim] != size:
            index = torch.arange(size, device=value.device) % value.shape[dim]
            result[place] = value.detach().index_select(dim, index).requires_grad_(value.requires_grad)
    return result


def _choices(
    values: Sequence[Any], dims: Mapping[int, int], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Yields the inputs to vary: all groups, then fewer; only inputs with equal numbers of samples together."""
    for count in range(len(groups), 0, -1):
        for chosen in itertools.combinations(groups, count):
            places = tuple(place for group in chosen for place in group)
            if len({samples_along(values[place], dims[place]) for place in places}) == 1:
                yield places


def _with_samples(values: Sequence[Any], dims: Mapping[int, int], varied: Sequence[int], number: int) -> list[Any]:
    return resized(values, {(place, dims[place]): number * rows_per_sample(dims[place]) for place in varied})


# No model of the zoo: Python whose sizes depend on values of samples needs it (behaviour/test_continuation.py).
def _is_of_values(
    traced: Traced, values: Sequence[Any], dims: Mapping[int, int], varied: Sequence[int], node: fx.Node
) -> bool:
    """Returns whether values of samples affect the sizes of `node`, or its path. Tries each sample for all of them."""
    observed: list[list[Any]] = []
    for k in (None, *range(samples_along(values[varied[0]], dims[varied[0]]))):
        samples = list(values)
        for place in varied if k is not None else ():
            value, rows = values[place], rows_per_sample(dims[place])
            index = k * rows + torch.arange(value.shape[dims[place]], device=value.device) % rows
            samples[place] = value.detach().index_select(dims[place], index).requires_grad_(value.requires_grad)
        try:
            leaves = pytree.tree_leaves(observe_graph(traced, samples, node)[node])
        except StateError:  # an opaque node takes another path
            return True
        except Exception:  # the model rejects such samples
            continue
        observed.append([leaf.shape if isinstance(leaf, ObservedTensor) else leaf for leaf in leaves])
        if observed[-1] != observed[0]:
            return True
    return False


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def observe_graph(traced: Traced, sample: Sequence[Any], wanted: fx.Node) -> ObservedValues:
    """Runs the graph and observes each node, until an error. Raises the error if `wanted` was not reached."""
    seen: ObservedValues = {}
    values: NodeValues = {}

    def placeholder(node: fx.Node) -> Any:
        return copy_of_input(sample[traced.place_of(node)])

    def observed(tensor: torch.Tensor) -> ObservedTensor:
        stride = tensor.stride() if tensor.layout == torch.strided else ()
        return ObservedTensor(tuple(tensor.shape), stride, tensor.dtype, tensor.device)

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = attribute_tensor(traced, node)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return tensor.detach().requires_grad_(tensor.requires_grad) if is_parameter else copy_of_input(tensor)

    with preserve_state(traced.model):
        try:
            for node in run_nodes(traced.graph.nodes, values, placeholder, attribute, run_node, keep=()):
                seen[node] = pytree.tree_map_only(torch.Tensor, observed, values[node])
        except Exception:
            if wanted not in seen:
                raise
    return seen


def observed_tensors(value: Any) -> list[ObservedTensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, ObservedTensor)]


class SizeFormula(NamedTuple):
    """`(slope * size + start) // divisor`; with true division if the numbers are floats."""

    slope: int
    start: int
    divisor: int = 1
    is_float: bool = False

    def at(self, size: Any) -> Any:
        """Evaluates the formula at a size, which may be symbolic."""
        number = size * self.slope + self.start if self.slope else self.start
        if self.is_float:
            return number / self.divisor
        return number if self.divisor == 1 else number // self.divisor

    def fits(self, points: Sequence[SizePoint]) -> bool:
        return all(type(value := self.at(size)) is type(number) and value == number for size, number in points)


def simplest_formula(points: Sequence[SizePoint]) -> SizeFormula | None:
    """Returns a line, or a line of whole numbers with floor division, that fits all points; None if none does."""
    if len(points) < 2 or not all(math.isfinite(number) for _, number in points):
        return None
    (x, v), (y, w) = ((size, Fraction(number)) for size, number in points[:2])
    slope = (w - v) / (y - x)
    start = v - slope * x
    divisor = math.lcm(slope.denominator, start.denominator)
    is_float = type(points[0][1]) is float
    line = SizeFormula(int(slope * divisor), int(start * divisor), divisor, is_float)
    parts = [SizeFormula(1, over + of * (int(v) - (x + over) // of), of) for of in _DIVISORS for over in range(of)]
    formulas = [line] if is_float else [line, *parts] if divisor == 1 else [*parts, line]
    return next((formula for formula in formulas if formula.fits(points)), None)


class _NoFormula(TraceError):
    """No formula fits the observed sizes."""


def _fit_all(numbers: Sequence[int], runs: Sequence[Mapping[fx.Node, Any]], wanted: fx.Node) -> dict[fx.Node, Any]:
    """Fits the results of nodes for any number of samples, if possible; `wanted` must succeed."""

    def fit(sizes: Sequence[int]) -> FittedSize:
        formula = simplest_formula([*zip(numbers, sizes, strict=True)])
        if formula is None or formula.divisor != 1:
            raise _NoFormula(f"it makes {' and '.join(f'[{size}]' for size in sizes)}")
        return FittedSize(formula.at)

    formulas = {wanted: _fit_value([run[wanted] for run in runs], fit)}
    for node in (node for node in runs[0] if node.op in CALL_OPS):
        with contextlib.suppress(_NoFormula, KeyError):
            formulas[node] = _fit_value([run[node] for run in runs], fit)
    return formulas


def given_sizes(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[Any]:
    """Returns the sizes of the tensors, observed or fake, and the numbers that a node takes."""
    sizes: list[Any] = []
    for leaf in pytree.tree_leaves([values[n] for n in node.all_input_nodes if not info(n).is_guarded_read]):
        if isinstance(leaf, (ObservedTensor, torch.Tensor)):
            sizes += leaf.shape
        elif isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool):
            sizes.append(leaf)
    return sizes


_Fit = Callable[[Sequence[int]], FittedSize]  # the size in each run -> its formula


def _fit_value(observed: Sequence[Any], fit: _Fit) -> Any:
    flat, specs = zip(*(pytree.tree_flatten(value) for value in observed), strict=True)
    if any(spec != specs[0] for spec in specs[1:]):
        raise _NoFormula("it returns one structure or another")
    return pytree.tree_unflatten([_fit_leaf(leaves, fit) for leaves in zip(*flat, strict=True)], specs[0])


def _fit_leaf(leaves: Sequence[Any], fit: _Fit) -> Any:
    first = leaves[0]
    if all(isinstance(leaf, ObservedTensor) for leaf in leaves):
        if len({(leaf.dtype, leaf.device, len(leaf.shape), len(leaf.stride)) for leaf in leaves}) > 1:
            raise _NoFormula("it makes tensors of one kind or another")
        try:
            shape = tuple(map(fit, zip(*(leaf.shape for leaf in leaves), strict=True)))
        except _NoFormula:
            raise _NoFormula(f"it makes {' and '.join(str(list(leaf.shape)) for leaf in leaves)}") from None
        stride: tuple[Any, ...] = ()
        if any(leaf.stride != torch.empty(leaf.shape, device="meta").stride() for leaf in leaves):
            with contextlib.suppress(_NoFormula):
                stride = tuple(map(fit, zip(*(leaf.stride for leaf in leaves), strict=True)))
        return ObservedTensor(shape, stride, first.dtype, first.device)
    if all(type(leaf) is int for leaf in leaves):
        return fit(leaves)
    if all(equal_values(leaf, first) for leaf in leaves):
        return first
    raise _NoFormula(f"it returns {' and '.join(map(repr, leaves))}")


def _fit_to(columns: Mapping[tuple[int, ...], int], sizes: Sequence[int]) -> FittedSize:
    """Returns the simplest formula for a size with the values `sizes`, by run, in `columns` of input sizes."""
    if len({*sizes}) == 1:
        return FittedSize(lambda _: sizes[0])
    products: dict[tuple[int, ...], tuple[int, ...]] = {}
    products |= {(place,): column for column, place in columns.items() if len({*column}) > 1}
    products |= {
        (one, other): tuple(map(operator.mul, left, right))
        for (left, one), (right, other) in itertools.combinations_with_replacement(columns.items(), 2)
    }
    for places, column in products.items():
        if column == tuple(sizes):
            return FittedSize(functools.partial(_value_of_product, places, SizeFormula(1, 0)))
    for places, column in products.items():
        points = dict(zip(column, sizes, strict=True))
        is_function = all(points[x] == size for x, size in zip(column, sizes, strict=True))
        formula = simplest_formula([*points.items()]) if is_function and len(points) > 2 else None
        if formula is not None:
            return FittedSize(functools.partial(_value_of_product, places, formula))
    raise _NoFormula(f"it makes sizes of {_listed(list(sizes))}")


def _value_of_product(places: tuple[int, ...], formula: SizeFormula, sizes: Sequence[Any]) -> Any:
    """Returns the formula of the product of some sizes of a node's inputs; `places`: their indices."""
    return formula.at(functools.reduce(operator.mul, (sizes[place] for place in places)))
