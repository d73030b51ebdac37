"""Sizes of recorded tensors: integers with the graph node that computes them.

During a recording, the shape of a tensor consists of `RecordedSize`: an `int` with the actual value (torch's C++
functions require it) whose arithmetic adds nodes. `size / 2` is a `RecordedFloat`, and `math.floor(size / 2)` is a size
again. Other operations (a comparison, `int(size)`, `size & 1`) return a plain value and leave a `SizeRead`, which is
checked for other batch sizes when the symbolic value of the node is known. `range(size)` and `int(size)` cannot be
followed: such numbers are found by recording at other sizes (`other_sizes`).
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.functions import TEXT_METHODS
from fxpipe.errors import ArgumentError
from fxpipe.tracing.node_info import update_info
from fxpipe.tracing.tensors import storage_of
from fxpipe.utils.python_objects import captured_values

if TYPE_CHECKING:
    from fxpipe.tracing.record.recorder import Recorder


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


@dataclass(frozen=True, slots=True)
class InputRead:
    """A question about the flattened inputs besides sizes and values; the graph holds for inputs with this answer."""

    question: Callable[[Sequence[Any]], Any]
    answer: Any  # for the copies on which forward is recorded
    text: str
    where: str  # the user's source line

    def holds(self, leaves: Sequence[Any]) -> bool:
        return bool(self.question(leaves) == self.answer)


def refuse_other_answers(reads: Sequence[InputRead], leaves: Sequence[Any]) -> None:
    """Raises `ArgumentError` if the inputs answer differently from the copies on which forward was recorded."""
    for read in reads:
        if not read.holds(leaves):
            raise ArgumentError(
                f"forward asks for {read.text} at {read.where}, and for the tensors given the answer is another one "
                "than for the copies on which it was traced; give copies (x.clone(), x.contiguous()), or ask outside "
                "forward"
            )


def _layouts_of(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the strides of each tensor; () for a contiguous one."""
    return [() if leaf.is_contiguous() else leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _memory_of(leaves: Sequence[Any]) -> list[tuple[int, bool]]:
    """Returns for each tensor the index of the first tensor in its storage, and whether it fills the storage."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    first = [storage_of(tensor) for tensor in tensors]
    return [(first.index(storage_of(tensor)), tensor.untyped_storage().nbytes() == tensor.nbytes) for tensor in tensors]


LAYOUT = _layouts_of, "the memory layout of its inputs"
MEMORY = _memory_of, "the memory of its inputs"


def length(tensor: torch.Tensor, dim: int) -> int:
    """Returns the size that `len` and iteration use: a number that Python uses untracked."""
    return tensor.size(dim)


# No model of the zoo: `x.shape[0].bit_length()` needs it (behaviour/test_micro_batch_sizes.py).
def plain_number(size: int) -> int:
    """Returns a number that is used untracked: the bits of a size, a value in a closure."""
    return size


def split_pieces(tensor: torch.Tensor, dim: int, size: int) -> int:
    return int(PIECES[split_pieces](tensor.size(dim), size))


def chunk_pieces(tensor: torch.Tensor, dim: int, chunks: int) -> int:
    """Returns the number of pieces that `chunk` makes, which can be fewer than requested."""
    return int(PIECES[chunk_pieces](tensor.size(dim), chunks))


# Formulas in sizes for the same functions.
PIECES: dict[Callable[..., Any], Callable[[Any, Any], Any]] = {
    split_pieces: lambda whole, size: -(-whole // size),
    chunk_pieces: lambda whole, chunks: -(-whole // -(-whole // chunks)),
}
NOT_FOLLOWED = (length, plain_number, str, *PIECES)


class _RecordedNumber:
    """A number computed from sizes. Code that calls no method sees `shown`: `value`, if it is not disguised."""

    node: fx.Node
    recorder: SizeRecorder
    value: Any
    plain: type  # int or float

    @property
    def shown(self) -> Any:
        return self.plain.__pos__(self)  # type: ignore[operator]

    def __pos__(self) -> Any:
        return self

    conjugate = __pos__
    real = property(__pos__)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self  # type: ignore[operator]

    def __reduce__(self) -> tuple[type, tuple[Any]]:  # a copy is a plain number
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


# Forms of formulas. Sympy flattens a sum of sums, or a product of products, and then rounds differently than Python.
_ATOM, _PRODUCT, _SUM = range(3)


class RecordedFloat(_RecordedNumber, float):
    """A float computed from sizes. Its arithmetic adds nodes if sympy evaluates it like Python, or leaves a read."""

    plain = float
    value: float
    form: int

    def __new__(
        cls, value: float, node: fx.Node, recorder: SizeRecorder, form: int, shown: float | None = None
    ) -> RecordedFloat:
        number = super().__new__(cls, value if shown is None else shown)
        number.value, number.node, number.recorder, number.form = value, node, recorder, form
        return number

    def __hash__(self) -> int:
        self.recorder.read(operator.eq, (self, self.value), True)
        return hash(self.shown)

    def __neg__(self) -> Any:
        return self._derived(operator.neg, functools.partial(RecordedFloat, form=self.form))

    def __round__(self, digits: Any = None) -> Any:
        if digits is None:
            return self._derived(round, RecordedSize)
        self.recorder.read(round, (self, digits), round(self.value, digits))
        return round(self.shown, digits)

    def is_integer(self) -> bool:
        return bool(self == math.floor(self))

    def _derived(self, function: Callable[[Any], Any], make: Callable[..., Any]) -> Any:
        if not self.recorder.follows(self):
            return function(self.value)
        node = self.recorder.add(function, self)
        return make(function(self.value), node, self.recorder, shown=function(self.shown))

    __trunc__ = functools.partialmethod(_derived, math.trunc, RecordedSize)
    __floor__ = functools.partialmethod(_derived, math.floor, RecordedSize)
    __ceil__ = functools.partialmethod(_derived, math.ceil, RecordedSize)


RECORDED = (RecordedSize, RecordedFloat)


def plain_size(value: Any) -> Any:
    return value.value if isinstance(value, RECORDED) else value


def unwrap_sizes(value: Any) -> Any:
    """Replaces recorded sizes in the arguments of a call by their values."""

    def unwrap(part: Any) -> Any:
        return slice(*map(plain_size, (part.start, part.stop, part.step))) if isinstance(part, slice) else part.value

    return pytree.tree_map_only((*RECORDED, slice), unwrap, value)


_NUMBERS = (int, float, torch.SymInt)  # only nested tensors have a SymInt, and they are refused
_WHOLE = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)

_ROUNDING: tuple[Callable[..., Any], ...] = (math.trunc, math.floor, math.ceil, round)
SIZE_FUNCTIONS = (*_WHOLE, operator.truediv, operator.pow, operator.neg, *_ROUNDING)


def _result(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Callable[..., Any] | None:
    """Returns the constructor of the recorded result; None if sympy would evaluate the formula differently."""
    is_whole = isinstance(left, int) and isinstance(right, int)
    is_power = function is operator.pow and not isinstance(right, RECORDED)
    if is_whole and (function in _WHOLE or (is_power and right >= 0)):
        return RecordedSize
    forms = [getattr(one, "form", _ATOM) for one in (left, right) if isinstance(one, RECORDED)]
    form = None
    if function is operator.truediv or (is_power and not is_whole):
        form = _ATOM
    elif function is operator.mul and max(forms) == _ATOM:
        form = _PRODUCT
    elif function in (operator.add, operator.sub) and (max(forms) == _ATOM or forms == [_PRODUCT]):
        form = _SUM
    return None if form is None else functools.partial(RecordedFloat, form=form)


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
        shown = value
        if self.recorder.disguised:
            shown = function(*(one.shown if isinstance(one, RECORDED) else one for one in (left, right)))
        return make(value, self.recorder.add(function, left, right), self.recorder, shown=shown)

    return method


def _reading_method(function: Callable[..., Any], swap: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, _NUMBERS) for other in others):
            return NotImplemented
        operands = (*others, self) if swap else (self, *others)
        value = function(*map(plain_size, operands))
        if not isinstance(value, torch.SymInt):
            self.recorder.read(function, operands, value)
        return value

    return method


for _kind in RECORDED:
    for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
        for _prefix in ("", "r"):
            _method = _arithmetic_method(getattr(operator, f"__{_name}__"), swap=bool(_prefix))
            setattr(_kind, f"__{_prefix}{_name}__", _method)
    for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_kind, f"__{_name}__", _reading_method(getattr(operator, _name)))
    for _function in (float, int, bool):
        setattr(_kind, f"__{_function.__name__}__", _reading_method(_function))
for _name in ("lshift", "rshift", "and", "or", "xor"):
    for _prefix in ("", "r"):
        _method = _reading_method(getattr(operator, f"__{_name}__"), swap=bool(_prefix))
        setattr(RecordedSize, f"__{_prefix}{_name}__", _method)


def _not_followed(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.read(str if name in TEXT_METHODS else plain_number, (self,), self.value)
        return plain(self.shown, *args, **kwargs)

    return method


for _name in ("bit_length", "bit_count", "to_bytes", "as_integer_ratio", "__str__", "__repr__", "__format__"):
    setattr(RecordedSize, _name, _not_followed(int, _name))
for _name in ("hex", "as_integer_ratio", "__str__", "__repr__", "__format__", "__divmod__", "__rdivmod__"):
    setattr(RecordedFloat, _name, _not_followed(float, _name))


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


Disguise = Mapping[tuple[str, int], int]  # name of a node and dimension -> how much larger Python sees the size
TEXTS = ("texts of tensors", 0)  # a key of a disguise: the guise in which Python sees texts
GUISES = range(11)


def disguised_text(text: str, guise: int) -> str:
    """Returns a text with other values: guise 0 inverts signs and truth values, the others change each digit."""
    if guise == 0:
        opposite = {"True": "False", "False": "True", "-": ""}
        return re.sub(r"True|False|-(?=\d)|(?<![\d.e-])(?=\d)", lambda match: opposite.get(match[0], "-"), text)
    digits = "0123456789"
    return text.translate(str.maketrans(digits, digits[guise:] + digits[:guise] if guise < 10 else "9" * 10))


class SizeRecorder:
    """The sizes of one recording. Every recorded number refers to it."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.disguised: Disguise = {}  # sizes that code outside the recording sees increased
        self.reads: list[SizeRead] = []
        self.layout_reads: dict[tuple[fx.Node, str], LayoutRead] = {}
        self.input_leaves: Sequence[Any] = ()  # copies of the inputs
        self.input_paths: Sequence[str] = ()
        self.input_reads: dict[str, InputRead] = {}
        self.names = set[str | None]()  # tensors of the model whose sizes forward has read
        self.are_keys = False  # True if a size was used as a key
        self.was_refused_as_key = False  # True if a size was used as a key, which options do not allow
        self._nodes: dict[tuple[fx.Node, str, int], fx.Node] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # by id: storages that forward holds

    def ask(self, question: Callable[[Sequence[Any]], Any], text: str) -> None:
        if text not in self.input_reads:
            with self.recorder.pause():
                answer = question(self.input_leaves)
            self.input_reads[text] = InputRead(question, answer, text, self.recorder.source)

    def ask_about(self, tensor: Any, question: Callable[[Any], Any], name: str) -> None:
        """Records a question about a tensor if it is an input: its number or bool, or whether it is not None."""
        places = [place for place, leaf in enumerate(self.input_leaves) if leaf is tensor]

        def answer(leaves: Sequence[Any]) -> Any:
            value = question(leaves[places[0]])
            return value if isinstance(value, (bool, int)) else value is not None

        if places:
            self.ask(answer, f"{name} of the input {self.input_paths[places[0]]}")

    def of(self, tensor: torch.Tensor, method: str) -> tuple[int, ...]:
        numbers = tensor.shape if method == "size" else tensor.stride()
        if not self.recorder.knows(tensor):
            self._ask_unknown(tensor)
            return numbers
        if method == "stride":
            self.ask(*LAYOUT)
        node, sizes = self.recorder.node_of(tensor), []
        for dim, number in enumerate(numbers):
            key = (node, method, dim)
            if key not in self._nodes:
                self._nodes[key] = self.recorder.add("call_method", method, (node, dim))
                update_info(self._nodes[key], recorded_size=number)
            shown = number + self.disguised.get((node.name, dim), 0)
            sizes.append(RecordedSize(number, self._nodes[key], self, shown))
        return RecordedShape(sizes)

    def _ask_unknown(self, tensor: torch.Tensor) -> None:
        """Notes a tensor of the model, or reads the longest of packed sequences: other sizes need another graph."""
        self.names.add(self.recorder.names.own(tensor))
        _, lengths = self.recorder.lengths.get(id(tensor), (tensor, None))
        if lengths is not None:
            self.recorder.call(torch.Tensor.__int__, self.recorder.call(torch.Tensor.max, lengths))

    def read_length(self, tensor: torch.Tensor, dim: int) -> None:
        if not self.recorder.knows(tensor):
            self._ask_unknown(tensor)
        elif -tensor.dim() <= dim < tensor.dim():
            self.read(length, (tensor, dim % tensor.dim()), tensor.shape[dim])

    def read_pieces(self, name: str, args: tuple[Any, ...], dim: int) -> None:
        """Records the length of the list that `split` or `chunk` returns."""
        tensor, size = args[0], (*args, None)[1]
        function = {"split": split_pieces, "chunk": chunk_pieces}.get(name.removeprefix("unsafe_"))
        is_known = self.recorder.knows(tensor) and -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] > 0
        if function is None or not is_known or not isinstance(size, int) or size < 1:
            self.read_length(tensor, dim)
            return
        where = dim % tensor.dim()
        self.read(function, (tensor, where, size), function(tensor, where, plain_size(size)))

    def read_layout(self, tensor: torch.Tensor, question: Callable[[torch.Tensor], Any], name: str) -> Any:
        self.ask(*LAYOUT)
        with self.recorder.pause():
            answer = question(tensor)
        if self.recorder.knows(tensor):
            node = self.recorder.node_of(tensor)
            self.layout_reads[node, name] = LayoutRead(node, question, answer, self.recorder.source)
        else:
            self.names.add(self.recorder.names.own(tensor))
        return answer

    def add(self, function: Callable[..., Any], *operands: Any) -> fx.Node:
        return self.recorder.add("call_function", function, tuple(map(self.recorder.node_argument, operands)))

    def read(self, function: Callable[..., Any], operands: tuple[Any, ...], result: Any) -> None:
        recorder = self.recorder
        if recorder.recording:
            nodes = tuple(map(recorder.node_argument, operands))
            calls = recorder.calls[recorder.module]
            self.reads.append(SizeRead(function, nodes, result, recorder.source, recorder.module, calls))

    def read_plain(self, number: RecordedSize | RecordedFloat) -> None:
        """Records that a size continues as a plain number."""
        self.read(plain_number, (number,), number.value)

    def follows(self, number: RecordedSize | RecordedFloat) -> bool:
        """Returns whether arithmetic on a size adds nodes. In opaque calls a size is read as a plain number."""
        if self.recorder.runs_opaque:
            self.read_plain(number)
        return self.recorder.recording and not self.recorder.runs_opaque

    def read_captured(self, *functions: Any) -> None:
        """Records sizes in closures of functions that run opaquely in every step: they are plain numbers there."""
        for value in captured_values(functions):
            if isinstance(value, RECORDED) and value.recorder is self:
                self.read_plain(value)

    def read_key(self, size: RecordedSize) -> None:
        """Records that a size is a key: first an error, as for torch.SymInt, since many libraries then skip a cache."""
        if self.recorder.recording and not self.recorder.options.hashes_sizes:
            self.was_refused_as_key = True
            raise TypeError("unhashable type: a recorded size")
        self.are_keys = True  # a missing key is never compared with the size
        self.read(operator.eq, (size, size.value), True)
