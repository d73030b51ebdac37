"""Records sizes: the numbers that forward gets for the shapes of recorded tensors, and its conclusions from them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpipe.tracing.node_info import update_info
from fxpipe.tracing.record.input_reads import InputReads
from fxpipe.tracing.record.recorded_sizes import (
    LayoutRead,
    RecordedFloat,
    RecordedShape,
    RecordedSize,
    SizeRead,
    captured_sizes,
    chunk_pieces,
    length,
    plain_number,
    plain_size,
    split_pieces,
)

if TYPE_CHECKING:
    from fxpipe.tracing.record.recorder import Recorder


Disguise = Mapping[tuple[str, int], int]  # name of a node and dimension -> how much larger Python sees the size
TEXTS = ("texts of tensors", 0)  # a key of a disguise: the guise in which Python sees texts
GUISES = range(11)


def disguised_text(text: str, guise: int) -> str:
    """Returns a text with other values: guise 0 inverts signs and truth values, the others change each digit.

    The guises of a one-digit number include all other digits, and the guises of any number larger and smaller ones.
    """
    if guise == 0:
        opposite = {"True": "False", "False": "True", "-": ""}
        return re.sub(r"True|False|-(?=\d)|(?<![\d.e-])(?=\d)", lambda match: opposite.get(match[0], "-"), text)
    digits = "0123456789"
    return text.translate(str.maketrans(digits, digits[guise:] + digits[:guise] if guise < 10 else "9" * 10))


class SizeRecorder:
    """The sizes of one recording. Every recorded number refers to it.

    disguised: sizes, by name of node and dimension, that code outside the recording sees increased by this value
        (`untracked_sizes`).
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.disguised: Disguise = {}
        self.reads: list[SizeRead] = []
        self.layout_reads: dict[tuple[fx.Node, str], LayoutRead] = {}
        self.input_reads = InputReads()
        self.names = set[str]()  # tensors of the model whose sizes forward has read
        self.are_keys = False  # True if a size was used as a key
        self.was_refused_as_key = False  # True if a size was used as a key, which options do not allow
        self._nodes: dict[tuple[fx.Node, str, int], fx.Node] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # by id: storages that forward holds

    def end(self) -> None:
        self._storages.clear()

    # -- shapes and layouts of tensors -------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor, method: str) -> tuple[int, ...]:
        """Returns the sizes or strides of a tensor."""
        numbers = tensor.shape if method == "size" else tensor.stride()
        if not self.recorder.knows(tensor):
            self._note_model_tensor(tensor)
            return numbers  # a tensor of the model: other sizes need another graph
        if method == "stride":
            self.input_reads.ask_layouts(self.recorder.source)
        node = self.recorder.node_of(tensor)
        return RecordedShape(
            RecordedSize(n, self._node(node, method, i, n), self, n + self.disguised.get((node.name, i), 0))
            for i, n in enumerate(numbers)
        )

    def _node(self, node: fx.Node, method: str, dim: int, number: int) -> fx.Node:
        key = (node, method, dim)
        if key not in self._nodes:
            self._nodes[key] = self.recorder.add("call_method", method, (node, dim))
            update_info(self._nodes[key], recorded_size=number)
        return self._nodes[key]

    def _note_model_tensor(self, tensor: torch.Tensor) -> None:
        """Records that forward depends on the sizes of a tensor of the model."""
        name = self.recorder.name_of(tensor)
        if name is not None:
            self.names.add(name)

    def read_length(self, tensor: torch.Tensor, dim: int) -> None:
        if not self.recorder.knows(tensor):
            self._note_model_tensor(tensor)
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
        with self.recorder.pause():
            self.input_reads.ask_layouts(self.recorder.source)
            answer = question(tensor)
        if self.recorder.knows(tensor):
            node = self.recorder.node_of(tensor)
            self.layout_reads[node, name] = LayoutRead(node, question, answer, self.recorder.source)
        else:
            self._note_model_tensor(tensor)
        return answer

    def note_storage(self, tensor: torch.Tensor) -> None:
        with self.recorder.pause():
            storage = tensor.untyped_storage()
        self._storages[id(storage)] = storage, tensor

    def read_storage_bytes(self, storage: torch.UntypedStorage) -> None:
        """Records that forward has read the bytes of a storage that it took from a tensor."""
        if id(storage) in self._storages:
            with self.recorder.pause():
                self.input_reads.ask_memory(self.recorder.source)
            self.read_layout(self._storages[id(storage)][1], lambda t: t.untyped_storage().nbytes(), "storage")

    # -- what Python does with numbers -------------------------------------------------------------------------------

    def add(self, function: Callable[..., Any], *operands: Any) -> fx.Node:
        return self.recorder.add("call_function", function, tuple(map(self.recorder.node_argument, operands)))

    def read(self, function: Callable[..., Any], operands: tuple[Any, ...], result: Any) -> None:
        recorder = self.recorder
        nodes = tuple(map(recorder.node_argument, operands))
        calls = recorder.calls[recorder.module]
        self.reads.append(SizeRead(function, nodes, result, recorder.source, recorder.module, calls))

    def read_plain(self, number: RecordedSize | RecordedFloat) -> None:
        """Records that a size continues as a plain number."""
        if self.recorder.recording:
            self.read(plain_number, (number,), number.value)

    def follows(self, number: RecordedSize | RecordedFloat) -> bool:
        """Returns whether arithmetic on a size adds nodes. In opaque calls a size is read as a plain number."""
        if self.recorder.runs_opaque:
            self.read_plain(number)
        return self.recorder.recording and not self.recorder.runs_opaque

    def read_captured(self, *functions: Any) -> None:
        """Records sizes in closures of functions that run opaquely in every step: they are plain numbers there."""
        for size in captured_sizes(functions):
            if size.recorder is self:
                self.read_plain(size)

    def read_key(self, size: RecordedSize) -> None:
        """Records that a size is used as a key.

        As for torch.SymInt: a cache keyed by sizes would depend on their values, and many libraries then skip the
        cache. The comparison with the model detects wrong cache entries.
        """
        if not self.recorder.options.hashes_sizes:
            self.was_refused_as_key = True
            raise TypeError("unhashable type: a recorded size")
        self.are_keys = True  # a missing key is never compared with the size
        self.read(operator.eq, (size, size.value), True)
