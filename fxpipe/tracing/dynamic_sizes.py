"""Sizes that may vary between batches: the number of samples, and dynamic dimensions of inputs.

A graph is valid for any number of samples `b` that meets its conditions. Other dimensions have the recorded size unless
they are *dynamic*: then their sizes are symbols as well, with conditions that forward and torch evaluated, for example
`length < 512`. A symbol has the user's name of the dimension (`dynamic_shapes`), or a name from the input and the
number of the dimension: `ids_dim1`.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import sympy
from torch.export import Dim

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.utils.units import with_article

if TYPE_CHECKING:
    from fxpipe.tracing.traced import InputLeaf

InputDim = tuple[int, int]  # index of an input leaf, dimension
Lengths = tuple[tuple[sympy.Symbol, int], ...]  # symbols of dynamic sizes, with their values


@dataclass(frozen=True, slots=True)
class DynamicDims:
    """Dimensions of inputs that should be dynamic."""

    dims: frozenset[InputDim] = frozenset()
    seen: tuple[Mapping[InputDim, int], ...] = ()  # sizes of inputs so far
    fixed: Mapping[InputDim, str] = field(default_factory=dict)  # dimensions that cannot be dynamic, with the reason
    asked: Mapping[InputDim, AskedDim] = field(default_factory=dict)  # dimensions in `dynamic_shapes`

    def with_asked(self, asked: Mapping[InputDim, AskedDim]) -> DynamicDims:
        """Adds the dimensions that the user requests, and removes those that the user declares static."""
        dynamic = {dim: one for dim, one in asked.items() if not one.is_static}
        static = {dim: "dynamic_shapes says that it is static" for dim in self.dims & (asked.keys() - dynamic.keys())}
        fixed = {**self.fixed, **static}
        return replace(self, dims=(self.dims | dynamic.keys()) - static.keys(), fixed=fixed, asked=dynamic)

    def names(self, leaves: Sequence[InputLeaf]) -> dict[InputDim, str]:
        """Returns the name of each size: the user's, or one from the input's name. Sizes with one name are equal."""
        asked = sorted(dim for dim, one in self.asked.items() if one.name and dim in self.dims)
        names = {dim: _size_name(self.asked[dim].name) for dim in asked}
        for dim in sorted(self.dims - names.keys()):
            name = _size_name(f"{leaves[dim[0]].path}_dim{dim[1]}".strip("_"))
            while name in names.values():
                name += "_"
            names[dim] = name
        return names


@dataclass(frozen=True, slots=True)
class AskedDim:
    """A dimension in `dynamic_shapes`: its name (or ""), its least and largest size; or it is static."""

    name: str = ""
    least: int = 0
    largest: int | None = None
    is_static: bool = False


def parse_dynamic_shapes(
    dynamic_shapes: Any, leaves: Sequence[InputLeaf], parameters: Collection[str]
) -> dict[InputDim, AskedDim]:
    """Parses `dynamic_shapes`: a dict from inputs to their dynamic dimensions, as in `torch.export`.

    A dimension is a name, a `torch.export.Dim`, or one of torch's hints (`Dim.AUTO`, `Dim.DYNAMIC`, `Dim.STATIC`); None
    and a number leave it unchanged. `parameters`: names of the parameters of forward. Raises `ArgumentError` or
    `ArgumentTypeError` if an input or a dimension does not exist, or an entry has another type.
    """
    if dynamic_shapes is None:
        return {}
    if not isinstance(dynamic_shapes, Mapping):
        raise ArgumentTypeError(
            f"dynamic_shapes is {with_article(dynamic_shapes)}; expected a dict from the names of inputs to their "
            'dimensions, as in {"ids": {1: "length"}}'
        )
    places: dict[str, list[int]] = {}
    for place, leaf in enumerate(leaves):
        for name in {leaf.path, leaf.head} if leaf.is_tensor else ():
            places.setdefault(name, []).append(place)
    asked: dict[InputDim, AskedDim] = {}
    for name, spec in dynamic_shapes.items():
        if name not in places and name in parameters:
            continue  # an optional argument
        if name not in places:
            known = ", ".join(map(repr, places))
            raise ArgumentError(
                f"dynamic_shapes names {name!r}, which is no tensor input of forward; those are {known}"
            )
        dims = {} if spec is None else dict(enumerate(spec)) if isinstance(spec, (tuple, list)) else spec
        if not isinstance(dims, Mapping):
            raise ArgumentTypeError(
                f"dynamic_shapes[{name!r}] is {with_article(spec)}; expected a dict from dimensions to names or "
                "torch.export.Dim, or a sequence with an entry for each dimension"
            )
        for place in places[name]:
            for dim, what in dims.items():
                rank = len(leaves[place].shape)
                if not isinstance(dim, int) or not -rank <= dim < rank:
                    raise ArgumentError(
                        f"dynamic_shapes gives dimension {dim!r} for {name}, which has shape {leaves[place].shape}"
                    )
                if (known_dim := _asked_dim(name, dim, what)) is not None:
                    asked[place, dim % rank] = known_dim
    _refuse_sizes(asked, leaves)
    return asked


def _refuse_sizes(asked: Mapping[InputDim, AskedDim], leaves: Sequence[InputLeaf]) -> None:
    named: dict[str, tuple[str, int]] = {}
    for (place, dim), what in asked.items():
        leaf, size = leaves[place], leaves[place].shape[dim]
        if size < what.least or (what.largest is not None and size > what.largest):
            allowed = f"at least {what.least}" if what.largest is None else f"{what.least} to {what.largest}"
            raise ArgumentError(
                f"{leaf.path} has size {size} in dimension {dim}; dynamic_shapes allows {allowed} ({what.name})"
            )
        path, other = named.setdefault(what.name, (leaf.path, size)) if what.name else (leaf.path, size)
        if size != other:
            raise ArgumentError(
                f"{leaf.path} has size {size} in dimension {dim}, and {path} has {other}; dynamic_shapes gives both "
                f"the name {what.name!r}"
            )


def _asked_dim(name: str, dim: int, what: Any) -> AskedDim | None:
    if isinstance(what, str):
        return AskedDim(what)
    if what is None or (isinstance(what, int) and not isinstance(what, bool)):
        return None
    if any(what is hint for hint in (Dim.STATIC, Dim.AUTO, Dim.DYNAMIC)):
        return AskedDim(is_static=what is Dim.STATIC)
    if isinstance(what, Dim):
        return AskedDim(what.__name__, int(what.min), what.max if isinstance(what.max, int) else None)
    raise ArgumentTypeError(
        f"dynamic_shapes[{name!r}][{dim}] is {what!r}; expected a name, a torch.export.Dim, Dim.AUTO, Dim.DYNAMIC, "
        "Dim.STATIC, or None"
    )


NO_DYNAMIC_DIMS = DynamicDims()
TOO_LONG = "torch takes too long to follow it"  # why a dimension is fixed, at any size

# Names with another meaning in figures (`plan.memory(1, b=8)`, `fxpipe.simulate(plan, chunks=4)`).
TAKEN_NAMES = frozenset(
    "b self cls stage plan samples schedule chunks checkpoint batch hardware loss_seconds overlaps sizes".split()
)


def _size_name(text: str) -> str:
    """Returns the text as a valid name of a Python argument: `batch['ids']_dim1` -> `batch_ids_dim1`."""
    name = re.sub(r"\W+", "_", text)
    name = f"_{name}" if name[:1].isdigit() else name
    return f"{name}_" if name in TAKEN_NAMES or keyword.iskeyword(name) else name


class FixedSizeError(Exception):
    """The size of a dimension that should be dynamic is a number in the graph. Never reaches the caller."""

    def __init__(self, why: str, dims: frozenset[InputDim] = frozenset(), is_of_this_size: bool = False):
        super().__init__(why)
        self.dims = dims  # dimensions that cannot be dynamic; empty: all
        self.is_of_this_size = is_of_this_size  # they may be dynamic at another size


@dataclass(frozen=True, slots=True)
class SizeCondition:
    """A condition that forward evaluated on its sizes; the graph follows the branch for which `condition` is true."""

    condition: sympy.Basic
    where: str
    is_of_torch: bool = False  # evaluated by a function of torch, which may give the same result otherwise

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def holds(self, batch: int, lengths: Lengths = ()) -> bool:
        """Returns whether the condition holds for `batch` samples. `lengths`: the dynamic sizes, if it contains any."""
        values = dict(lengths)
        try:
            return bool(self.condition.subs({s: values.get(s, batch) for s in self.condition.free_symbols}))
        except (ZeroDivisionError, AssertionError):  # from torch's `Mod`, for zero or negative operands
            return False  # no conclusion for such sizes


@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """The dynamic dimensions of a graph's inputs."""

    formulas: Mapping[InputDim, sympy.Expr]  # the size of each dimension, in the symbols
    symbols: Mapping[sympy.Symbol, InputDim]  # a dimension for each symbol
    example: Lengths  # sizes in the recording
    conditions: tuple[SizeCondition, ...]
    fixed: Mapping[InputDim, str]  # dimensions that should be dynamic and are not, with the reason
    is_observed: bool = False  # do nodes exist whose result at other sizes was only observed?
    largest: Lengths = ()  # largest sizes, if the user gives them

    def bounds(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        """Returns the least and the largest size of a symbol, from conditions on it alone; None: unbounded."""
        least, largest = 1, None
        for part in (part for one in self.conditions for part in sympy.And.make_args(one.condition)):
            if not part.is_Relational or part.lhs != symbol or not part.rhs.is_Integer:
                continue
            number = int(part.rhs)
            if isinstance(part, sympy.Ge | sympy.Gt):
                least = max(least, number + isinstance(part, sympy.Gt))
            elif isinstance(part, sympy.Le | sympy.Lt):
                most = number - isinstance(part, sympy.Lt)
                largest = most if largest is None else min(largest, most)
        return least, largest

    def with_asked(self, asked: DynamicDims) -> DynamicSizes:
        """Adds the user's conditions (bounds, and equality of sizes with one name) and largest sizes."""
        conditions, largest = list[sympy.Basic](), dict[sympy.Symbol, int]()
        first: dict[str, sympy.Expr] = {}
        for dim, one in asked.asked.items():
            if (size := self.formulas.get(dim)) is None:
                continue
            upper = sympy.true if one.largest is None else sympy.Le(size, one.largest)
            conditions.append(sympy.And(sympy.Ge(size, one.least), upper))
            if one.name:
                conditions.append(sympy.Eq(size, first.setdefault(one.name, size)))
            if isinstance(size, sympy.Symbol) and one.largest is not None:
                largest[size] = min(one.largest, largest.get(size, one.largest))
        added = [SizeCondition(condition, "dynamic_shapes") for condition in conditions if condition != sympy.true]
        return replace(self, conditions=(*self.conditions, *added), largest=tuple(largest.items()))

    @property
    def largest_lengths(self) -> Lengths:
        """The largest sizes that the user gives, or else the recorded sizes: memory is estimated for them."""
        return tuple((symbol, max(size, dict(self.largest).get(symbol, size))) for symbol, size in self.example)

    def lengths_of(self, leaves: Sequence[Any]) -> Lengths | None:
        """Returns the dynamic sizes of flattened inputs; None if some disagree (a shorter mask)."""
        lengths = tuple((symbol, leaves[place].shape[dim]) for symbol, (place, dim) in self.symbols.items())
        values = dict(lengths)
        for (place, dim), formula in self.formulas.items():
            if leaves[place].shape[dim] != (values[formula] if formula in values else formula.subs(values)):
                return None
        return lengths

    def is_far_from(self, lengths: Lengths, compared: Collection[Lengths]) -> bool:
        """Returns whether a size is more than twice, or less than half, of the sizes compared with the model.

        Forward may have an unknown threshold beyond them. If nodes run Python (`is_observed`), any size beyond counts.
        """
        known, factor = [dict(one) for one in compared or (self.example,)], 1 if self.is_observed else 2
        return any(
            size > factor * max(one[symbol] for one in known) or factor * size < min(one[symbol] for one in known)
            for symbol, size in lengths
        )


FIXED_SIZES = DynamicSizes({}, {}, (), (), {})


@dataclass(slots=True)
class SizeComparisons:
    """The sizes at which a graph was compared with its model, with the results. Later steps add to it."""

    excused: set[int] = field(default_factory=set)  # micro-batches for which conditions need not hold
    # Mini-batches with their micro-batches: whose outputs were compared and equal, and all that were tried.
    accepted_splits: set[tuple[int, frozenset[int], Lengths]] = field(default_factory=set)
    tried_splits: set[tuple[int, frozenset[int], Lengths]] = field(default_factory=set)
    lengths: set[Lengths] = field(default_factory=set)
    harmless: set[SizeCondition] = field(default_factory=set)  # conditions on dynamic sizes that need not hold
    bounds: SizeCondition | None = None  # graph and model differ beyond these sizes
