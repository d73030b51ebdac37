"""An output without the batch as a function of pieces, and its growth with the number of samples.

    loss = total / count + 0.01 * aux       # pieces: total, count, aux; calls: truediv, mul, add

If the function is a polynomial in the pieces, its terms show whether the outputs of micro-batches combine by a mean or
by a sum (`fxpipe.tracing.shapes.batch_reductions` finds pieces and calls).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpipe.utils.output_combination import CombinationCall, CombinationRef, map_nested

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
    calls: list[tuple[CombinationCall, str]] = field(default_factory=list)  # with the names of operations
    is_opaque: bool = False  # are values changed in place, and used under another name?
    values: dict[fx.Node, int] = field(default_factory=dict)  # node -> number of a piece (from 0) or call (-1 down)

    def numbered_calls(self) -> list[CombinationCall]:
        """Returns the calls, with references numbered as pieces first and calls after them."""

        def put(value: Any) -> Any:
            if isinstance(value, CombinationRef):
                return CombinationRef(_number(value.number, len(self.pieces)))
            return value

        return [
            CombinationCall(c.function, map_nested(c.args, put), map_nested(c.kwargs, put), c.state)
            for c, _ in self.calls
        ]

    def terms(self, of_pieces: Sequence[Terms]) -> Terms | None:
        """Returns the terms of the output; None if it is not a polynomial."""
        terms: list[Terms | None] = list(of_pieces)
        for call, (_, name) in zip(self.numbered_calls(), self.calls, strict=True):
            terms.append(_terms_of(name, call, terms))
        last = None if self.is_opaque else terms[-1]
        return last if last is not None and not _has_rows(last) else None


def _has_rows(terms: Terms) -> bool:
    return any(scale > _ROW / 2 for _, scale in terms)


def _number(number: int, pieces: int) -> int:
    return number if number >= 0 else pieces - 1 - number


def _refs(value: Any) -> Iterator[CombinationRef]:
    if isinstance(value, CombinationRef):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, slice):
        yield from _refs((value.start, value.stop, value.step))
    elif isinstance(value, Mapping):
        yield from _refs(list(value.values()))


def _terms_of(name: str, call: CombinationCall, known: Sequence[Terms | None]) -> Terms | None:
    def of(value: Any) -> Terms | None:
        if isinstance(value, CombinationRef):
            return known[value.number]
        return (
            _joined([known[ref.number] for ref in _refs(value)]) if any(True for _ in _refs(value)) else CONSTANT_TERMS
        )

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
        rest = (call.args[1:], call.kwargs)
        return (
            everything if _joined([known[ref.number] for ref in _refs(rest)]) in (frozenset(), CONSTANT_TERMS) else None
        )
    is_plain = not any(True for _ in _refs(call.kwargs)) and not (name in QUOTIENTS and call.kwargs)
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
        return _product(left, frozenset((0, -scale) for _, scale in right)) if _is_one_constant(right) else None
    return CONSTANT_TERMS if everything == CONSTANT_TERMS else None


def _joined(terms: Sequence[Terms | None]) -> Terms | None:
    joined: Terms = frozenset()
    for one in terms:
        if one is None:
            return None
        joined |= one
    return joined


def _product(left: Terms, right: Terms) -> Terms | None:
    product = frozenset((d + e, s + t) for d, s in left for e, t in right)
    return product if all(degree <= 1 for degree, _ in product) else None


def _is_one_constant(terms: Terms) -> bool:
    return len(terms) == 1 and all(degree == 0 for degree, _ in terms)
