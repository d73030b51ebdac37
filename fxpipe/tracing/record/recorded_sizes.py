"""Sizes of recorded tensors: integers that remember the graph node that computes them.

A model asks a tensor for its shape and computes with the answer. While it is recorded, the answer is a `RecordedSize`:
an `int` of the right value (torch's C++ functions take nothing else) whose arithmetic adds nodes. What leaves the world
of integers, a comparison, `float(size)` or `size / 2`, gives a plain value and leaves a `SizeRead`: what the model saw.
Whether that holds for other batch sizes is asked later, when the symbolic value of the node is known.

What cannot be seen is what becomes of `range(size)`, `len(x)` and `size.bit_length()`: for these every graph is also
compared with the model at other batch sizes, and what was computed is found by recording at these (`batch_numbers`).
Where forward took such a number, the graph holds for the sizes compared and no others: a slice clips its bounds, and
many a number is the same for several sizes (`h[: len(x) // 2 * 2]`, `h / len(x).bit_length()`). A size that depends on
the values of tensors is a value itself, and what was read of it is a read like any other (`guards`).
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe.tracing.node_info import info

if TYPE_CHECKING:
    from fxpipe.tracing.record.recorder import Recorder


@dataclass(frozen=True, slots=True)
class SizeRead:
    """The model computed `function(*operands)` of sizes, or `length` of a tensor, and went on with the result."""

    function: Callable[..., Any]
    operands: tuple[fx.Node | int, ...]
    result: Any
    where: str  # the user's source line
    module: str = ""  # the path of the one that did so
    calls: int = 0  # of other modules that it had made


@dataclass(frozen=True, slots=True)
class LayoutRead:
    """The model asked how a tensor lies in memory, which its sizes tell, and went on with the answer."""

    tensor: fx.Node
    question: Callable[[torch.Tensor], Any]
    answer: Any  # a truth value, or numbers
    where: str  # the user's source line


class SourcePlace(NamedTuple):
    """A place in forward at which it did something."""

    module: str  # its path
    source: str  # the user's line
    calls: int  # of other modules that it had made by then

    @classmethod
    def of(cls, node: fx.Node) -> SourcePlace:
        return cls(info(node).module, info(node).source, info(node).recorded_at.calls)


def length(tensor: torch.Tensor, dim: int) -> int:
    """Returns the size that `len` and iteration take: a number that goes on in Python, where nothing can follow it."""
    return tensor.size(dim)


# No model of the zoo: `x.shape[0].bit_length()` needs it (behaviour/test_batch_sizes_in_python.py).
def plain_number(size: int) -> int:
    """Returns the number that goes on where nothing follows it: the bits of a size, its text, what a closure takes."""
    return size


def split_pieces(tensor: torch.Tensor, dim: int, size: int) -> int:
    """Returns how many pieces of this size `split` makes: how long a list forward gets."""
    return int(_pieces_of_size(tensor.size(dim), size))


def chunk_pieces(tensor: torch.Tensor, dim: int, chunks: int) -> int:
    """Returns how many pieces `chunk` makes, which may be fewer than are asked for."""
    return int(_pieces_of_number(tensor.size(dim), chunks))


def _pieces_of_size(whole: Any, size: Any) -> Any:
    return -(-whole // size)


def _pieces_of_number(whole: Any, chunks: Any) -> Any:
    return _pieces_of_size(whole, _pieces_of_size(whole, chunks))


# The same as formulas in sizes.
PIECES: dict[Callable[..., Any], Callable[[Any, Any], Any]] = {
    split_pieces: _pieces_of_size,
    chunk_pieces: _pieces_of_number,
}
NOT_FOLLOWED = (length, plain_number, *PIECES)


class RecordedSize(int):
    """`shown` is what code that asks no method sees, `value` what the size is: they differ in `untracked_values`
    only."""

    node: fx.Node
    recorder: Recorder
    value: int

    def __new__(cls, value: int, node: fx.Node, recorder: Recorder, shown: int | None = None) -> RecordedSize:
        size = super().__new__(cls, value if shown is None else shown)
        size.value, size.node, size.recorder = value, node, recorder
        return size

    @property
    def shown(self) -> int:
        return int.__int__(self)

    def __hash__(self) -> int:
        # As for torch.SymInt: a cache keyed by sizes goes by their values, and many libraries then do without. What a
        # cache hands out wrongly where one cannot, the check finds.
        if self.recorder.recording and not self.recorder.hashable:
            self.recorder.was_hashed = True
            raise TypeError("unhashable type: a recorded size")
        if self.recorder.recording:  # what is not found under a key is never compared with it
            self.recorder.read_size(operator.eq, (self, plain_size(self)), True)
        return int.__hash__(self)

    def __neg__(self) -> int:
        return self * -1

    def __divmod__(self, other: Any) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[int, int]:
        return other // self, other % self

    def __invert__(self) -> int:
        return self * -1 - 1

    def __pos__(self) -> int:
        return self

    def __round__(self, digits: Any = None) -> int:
        return self

    __trunc__ = __ceil__ = __floor__ = conjugate = __pos__
    real = numerator = property(__pos__)

    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return self.shown

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.shown,)


def plain_size(value: Any) -> Any:
    return value.value if isinstance(value, RecordedSize) else value


def _shown_value(value: Any) -> Any:
    return value.shown if isinstance(value, RecordedSize) else value


def unwrap_sizes(value: Any) -> Any:
    """The arguments of a call with what sizes are in their place."""
    if isinstance(value, RecordedSize):
        return value.value
    if isinstance(value, RecordedShape):
        return torch.Size(map(unwrap_sizes, value))
    if type(value) in (tuple, list):
        return type(value)(map(unwrap_sizes, value))
    if type(value) is dict:
        return {key: unwrap_sizes(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(unwrap_sizes, (value.start, value.stop, value.step)))
    return value


def _arithmetic_method(function: Callable[[Any, Any], Any], swap: bool) -> Callable[[RecordedSize, Any], Any]:
    def method(self: RecordedSize, other: Any) -> Any:
        if not isinstance(other, (int, torch.SymInt)):  # which only a nested tensor has: that is refused
            return NotImplemented
        left, right = (other, self) if swap else (self, other)
        value = function(plain_size(left), plain_size(right))
        if not self.recorder.recording or isinstance(other, torch.SymInt):
            return value
        if self.recorder.runs_opaque:
            self.recorder.read_size(plain_number, (self,), self.value)
            return value
        shown = function(_shown_value(left), _shown_value(right)) if self.recorder.disguised else value
        return RecordedSize(value, self.recorder.add_size(function, left, right), self.recorder, shown)

    return method


def _reading_method(function: Callable[..., Any], swap: bool = False) -> Callable[..., Any]:
    def method(self: RecordedSize, *others: Any) -> Any:
        if not all(isinstance(other, (int, torch.SymInt)) for other in others):
            return NotImplemented
        operands = (*others, self) if swap else (self, *others)
        value = function(*map(plain_size, operands))
        if self.recorder.recording and not isinstance(value, torch.SymInt):
            self.recorder.read_size(function, operands, value)
        return value

    return method


def _mixed_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of sizes: where the other operand is no integer, the size is a plain number that was read."""
    plain = getattr(int, name)

    def both(self: RecordedSize, *others: Any) -> Any:
        result = method(self, *others)
        if result is not NotImplemented:
            return result
        if isinstance(others[0], float) and self.recorder.recording:
            self.recorder.read_size(int, (self,), plain_size(self))
        return plain(plain_size(self), *map(plain_size, others))

    return both


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(RecordedSize, f"__{_name}__", _mixed_method(f"__{_name}__", _arithmetic_method(_function, False)))
    setattr(RecordedSize, f"__r{_name}__", _mixed_method(f"__r{_name}__", _arithmetic_method(_function, True)))
for _name in ("truediv", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _function, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(RecordedSize, f"__{_name}__", _mixed_method(f"__{_name}__", _reading_method(_function)))
    setattr(RecordedSize, f"__r{_name}__", _mixed_method(f"__r{_name}__", _reading_method(_function, True)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(RecordedSize, f"__{_name}__", _mixed_method(f"__{_name}__", _reading_method(getattr(operator, _name))))
for _function in (float, int, bool, abs):
    setattr(RecordedSize, f"__{_function.__name__}__", _reading_method(_function))


def _not_followed(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: RecordedSize, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.recording:
            self.recorder.read_size(plain_number, (self,), self.value)
        return plain(self.shown, *args, **kwargs)

    return method


for _name in ("bit_length", "bit_count", "to_bytes", "as_integer_ratio", "__str__", "__repr__", "__format__"):
    setattr(RecordedSize, _name, _not_followed(_name))


def captured_sizes(function: Any) -> Iterator[RecordedSize]:
    """Yields the sizes that a function has in its closure, and that it keeps for later calls."""
    todo, known = [function], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, RecordedSize):
            yield value
        elif isinstance(value, (tuple, list)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, functools.partial):
            todo += (value.func, value.args, value.keywords)
        elif isinstance(value, types.FunctionType):
            todo += (_content(cell) for cell in value.__closure__ or ())
        elif isinstance(value, types.MethodType):
            todo.append(value.__func__)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


class RecordedShape(tuple[int, ...]):
    """The shape of a recorded tensor; `torch.Size` cannot hold `RecordedSize` objects, and cannot be subclassed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(repr, self))}])"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for models that ask `isinstance(shape, torch.Size)`
        return torch.Size

    def numel(self) -> int:
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        item = tuple.__getitem__(self, index)
        return RecordedShape(item) if isinstance(index, slice) else item


pytree.register_pytree_node(
    RecordedShape, lambda shape: (list(shape), None), lambda sizes, _: torch.Size(sizes)
)  # as an output
