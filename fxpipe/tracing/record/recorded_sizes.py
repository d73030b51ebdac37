"""Sizes of recorded tensors: integers with the graph node that computes them.

During a recording, the shape of a tensor consists of `RecordedSize`: an `int` with the actual value (torch's C++
functions require it) whose arithmetic adds nodes. `size / 2` is a `RecordedFloat`, and `math.floor(size / 2)` is a size
again. Other operations (a comparison, `int(size)`, `size & 1`) return a plain value and leave a `SizeRead`, which is
checked for other batch sizes when the symbolic value of the node is known.

A recording cannot follow `range(size)` and `int(size)`: such numbers are found by recording at other sizes
(`batch_numbers`), and the graph holds only for the compared sizes, since a number can be equal for several sizes
(`h[: int(size) // 2 * 2]`). A size that depends on tensor values is guarded like any other read (`guards`).
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe.utils.python_objects import captured_values

if TYPE_CHECKING:
    from fxpipe.tracing.record.size_recorder import SizeRecorder


@dataclass(frozen=True, slots=True)
class SizeRead:
    """A function of sizes, or `length` of a tensor, whose result the model used."""

    function: Callable[..., Any]
    operands: tuple[fx.Node | int | float, ...]
    result: Any
    where: str  # the user's source line
    module: str = ""
    calls: int = 0  # number of other modules that it had called


@dataclass(frozen=True, slots=True)
class LayoutRead:
    """A question about a tensor's memory layout, which follows from its sizes, and the answer that the model used."""

    tensor: fx.Node
    question: Callable[[torch.Tensor], Any]
    answer: Any  # a truth value, or numbers
    where: str  # the user's source line


def length(tensor: torch.Tensor, dim: int) -> int:
    """Returns the size that `len` and iteration use: a number that Python uses untracked."""
    return tensor.size(dim)


# No model of the zoo: `x.shape[0].bit_length()` needs it (behaviour/test_micro_batch_sizes.py).
def plain_number(size: int) -> int:
    """Returns a number that is used untracked: the bits of a size, its text, a value in a closure."""
    return size


def split_pieces(tensor: torch.Tensor, dim: int, size: int) -> int:
    return int(_pieces_of_size(tensor.size(dim), size))


def chunk_pieces(tensor: torch.Tensor, dim: int, chunks: int) -> int:
    """Returns the number of pieces that `chunk` makes, which can be fewer than requested."""
    return int(_pieces_of_number(tensor.size(dim), chunks))


def _pieces_of_size(whole: Any, size: Any) -> Any:
    return -(-whole // size)


def _pieces_of_number(whole: Any, chunks: Any) -> Any:
    return _pieces_of_size(whole, _pieces_of_size(whole, chunks))


# Formulas in sizes for the same functions.
PIECES: dict[Callable[..., Any], Callable[[Any, Any], Any]] = {
    split_pieces: _pieces_of_size,
    chunk_pieces: _pieces_of_number,
}
NOT_FOLLOWED = (length, plain_number, *PIECES)


class _RecordedNumber:
    """A number computed from sizes. Code that calls no method sees `shown`, which differs from `value` only in
    `untracked_sizes`."""

    node: fx.Node
    recorder: SizeRecorder
    value: Any
    plain: type  # int or float

    @property
    def shown(self) -> Any:
        return self.plain.__pos__(self)  # type: ignore[operator]

    @property
    def is_recording(self) -> bool:
        return self.recorder.recorder.recording

    def __pos__(self) -> Any:
        return self

    conjugate = __pos__
    real = property(__pos__)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self  # type: ignore[operator]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.shown

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return self.plain, (self.shown,)


class RecordedSize(_RecordedNumber, int):
    """A size of a recorded tensor. Its arithmetic adds nodes."""

    plain = int
    value: int

    def __new__(cls, value: int, node: fx.Node, recorder: SizeRecorder, shown: int | None = None) -> RecordedSize:
        size = super().__new__(cls, value if shown is None else shown)
        size.value, size.node, size.recorder = value, node, recorder
        return size

    def __hash__(self) -> int:
        if self.is_recording:
            self.recorder.read_key(self)
        return int.__hash__(self)

    def __neg__(self) -> int:
        return self * -1

    def __divmod__(self, other: Any) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[int, int]:
        return other // self, other % self

    def __invert__(self) -> int:
        return self * -1 - 1

    def __round__(self, digits: Any = None) -> int:
        return self

    __trunc__ = __ceil__ = __floor__ = _RecordedNumber.__pos__
    numerator = property(_RecordedNumber.__pos__)


class FloatForm(enum.Enum):
    """The form of a formula. Sympy flattens a sum of sums, or a product of products, and then rounds differently than
    Python."""

    ATOM = "atom"
    PRODUCT = "product"
    SUM = "sum"


class RecordedFloat(_RecordedNumber, float):
    """A float computed from sizes.

    Its arithmetic adds nodes if sympy evaluates the formula like Python; else it returns a number and leaves a read.
    """

    plain = float
    value: float
    form: FloatForm

    def __new__(
        cls, value: float, node: fx.Node, recorder: SizeRecorder, form: FloatForm, shown: float | None = None
    ) -> RecordedFloat:
        number = super().__new__(cls, value if shown is None else shown)
        number.value, number.node, number.recorder, number.form = value, node, recorder, form
        return number

    def __hash__(self) -> int:
        if self.is_recording:
            self.recorder.read(operator.eq, (self, self.value), True)
        return hash(self.shown)

    def __neg__(self) -> Any:
        return self._derived(operator.neg, functools.partial(RecordedFloat, form=self.form))

    def __trunc__(self) -> Any:
        return self._derived(math.trunc, RecordedSize)

    def __floor__(self) -> Any:
        return self._derived(math.floor, RecordedSize)

    def __ceil__(self) -> Any:
        return self._derived(math.ceil, RecordedSize)

    def __round__(self, digits: Any = None) -> Any:
        if digits is None:
            return self._derived(round, RecordedSize)
        if self.is_recording:
            self.recorder.read(round, (self, digits), round(self.value, digits))
        return round(self.shown, digits)

    def is_integer(self) -> bool:
        whole: float = self.__floor__()
        return self == whole

    def _derived(self, function: Callable[[Any], Any], make: Callable[..., Any]) -> Any:
        if not self.recorder.follows(self):
            return function(self.value)
        node = self.recorder.add(function, self)
        return make(function(self.value), node, self.recorder, shown=function(self.shown))


RECORDED = (RecordedSize, RecordedFloat)


def plain_size(value: Any) -> Any:
    return value.value if isinstance(value, RECORDED) else value


def _shown_value(value: Any) -> Any:
    return value.shown if isinstance(value, RECORDED) else value


def unwrap_sizes(value: Any) -> Any:
    """Replaces recorded sizes in the arguments of a call by their values."""

    def unwrap(part: Any) -> Any:
        return slice(*map(plain_size, (part.start, part.stop, part.step))) if isinstance(part, slice) else part.value

    return pytree.tree_map_only((*RECORDED, slice), unwrap, value)


# -- arithmetic ------------------------------------------------------------------------------------------------------

_NUMBERS = (int, float, torch.SymInt)  # only nested tensors have a SymInt, and they are refused
_WHOLE = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)

SIZE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *_WHOLE,
    operator.truediv,
    operator.pow,
    operator.neg,
    math.trunc,
    math.floor,
    math.ceil,
    round,
)


def _result(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Callable[..., Any] | None:
    """Returns the constructor of the recorded result, (value, node, recorder, shown=); None if it is not followed."""
    is_whole = isinstance(left, int) and isinstance(right, int)
    exponent = right if function is operator.pow and not isinstance(right, RECORDED) else None
    if is_whole and (function in _WHOLE or (exponent is not None and exponent >= 0)):
        return RecordedSize
    form = _float_form(function, left, right)
    return None if form is None else functools.partial(RecordedFloat, form=form)


def _float_form(function: Callable[[Any, Any], Any], left: Any, right: Any) -> FloatForm | None:
    """Returns the form of a formula that sympy evaluates like Python; None if it would differ."""
    if function is operator.pow:
        is_plain = not is_recorded(right) and isinstance(left, float) | isinstance(right, float)
        return FloatForm.ATOM if is_plain else None
    forms = {
        one.form if isinstance(one, RecordedFloat) else FloatForm.ATOM for one in (left, right) if is_recorded(one)
    }
    if function is operator.truediv:
        return FloatForm.ATOM
    if function is operator.mul:
        return FloatForm.PRODUCT if forms == {FloatForm.ATOM} else None
    if function not in (operator.add, operator.sub) or FloatForm.SUM in forms:
        return None
    is_of_two = is_recorded(left) and is_recorded(right)
    return None if FloatForm.PRODUCT in forms and is_of_two else FloatForm.SUM


def is_recorded(value: Any) -> bool:
    return isinstance(value, RECORDED)


def _arithmetic_method(function: Callable[[Any, Any], Any], swap: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:
            self.recorder.read_plain(self)
            return pow(plain_size(self), plain_size(other), *map(plain_size, modulus))
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        left, right = (other, self) if swap else (self, other)
        value = function(plain_size(left), plain_size(right))
        if isinstance(other, torch.SymInt) or not self.recorder.follows(self):
            return value
        make = _result(function, left, right)
        if make is None or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.recorder.read(function, (left, right), value)
            return value
        shown = function(_shown_value(left), _shown_value(right)) if self.recorder.disguised else value
        return make(value, self.recorder.add(function, left, right), self.recorder, shown=shown)

    return method


def _reading_method(function: Callable[..., Any], swap: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, _NUMBERS) for other in others):
            return NotImplemented
        operands = (*others, self) if swap else (self, *others)
        value = function(*map(plain_size, operands))
        if self.is_recording and not isinstance(value, torch.SymInt):
            self.recorder.read(function, operands, value)
        return value

    return method


def _mixed_method(kind: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of sizes: for operands of other types, the size is a plain number."""
    plain = getattr(kind, name)

    def both(self: Any, *others: Any) -> Any:
        result = method(self, *others)
        return result if result is not NotImplemented else plain(plain_size(self), *map(plain_size, others))

    return both


def _add_methods(kind: type, name: str, method_of: Callable[..., Callable[..., Any]], swaps: bool = True) -> None:
    function, name = getattr(operator, name), name.rstrip("_")
    plain = kind.plain  # type: ignore[attr-defined]
    setattr(kind, f"__{name}__", _mixed_method(plain, f"__{name}__", method_of(function, False)))
    if swaps:
        setattr(kind, f"__r{name}__", _mixed_method(plain, f"__r{name}__", method_of(function, True)))


for _kind in RECORDED:
    for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
        _add_methods(_kind, _name, _arithmetic_method)
    for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
        _add_methods(_kind, _name, _reading_method, swaps=False)
    for _function in (float, int, bool):
        setattr(_kind, f"__{_function.__name__}__", _reading_method(_function))
for _name in ("lshift", "rshift", "and_", "or_", "xor"):
    _add_methods(RecordedSize, _name, _reading_method)


def _not_followed(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.read_plain(self)
        return plain(self.shown, *args, **kwargs)

    return method


for _name in ("bit_length", "bit_count", "to_bytes", "as_integer_ratio", "__str__", "__repr__", "__format__"):
    setattr(RecordedSize, _name, _not_followed(int, _name))
for _name in ("hex", "as_integer_ratio", "__str__", "__repr__", "__format__", "__divmod__", "__rdivmod__"):
    setattr(RecordedFloat, _name, _not_followed(float, _name))


def captured_sizes(function: Any) -> Iterator[RecordedSize | RecordedFloat]:
    """Yields the sizes in the closure of a function, which it keeps for later calls."""
    return (value for value in captured_values(function) if isinstance(value, RECORDED))


class RecordedShape(tuple[int, ...]):
    """The shape of a recorded tensor; `torch.Size` can neither hold `RecordedSize` nor be subclassed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(repr, self))}])"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for models that check `isinstance(shape, torch.Size)`
        return torch.Size

    def numel(self) -> int:
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        item = tuple.__getitem__(self, index)
        return RecordedShape(item) if isinstance(index, slice) else item


pytree.register_pytree_node(
    RecordedShape, lambda shape: (list(shape), None), lambda sizes, _: torch.Size(sizes)
)  # as an output
