"""Packed sequences in forward: packing, recurrent modules on packed data, and padding.

    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, h = self.lstm(packed)                             # a node: lstm(x, ..., lengths=lengths)
    out, _ = pad_packed_sequence(out, batch_first=True)    # a node: pad(lstm, lengths, ...)

The number of rows of packed data depends on the lengths, and the rows are not in the order of the samples. So values of
the graph are padded: each node packs its arguments, and pads its results. Packing itself is a node only if forward uses
the packed data, as in `PackedSequence(dropout(packed.data), *packed[1:])`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.operators import RNN_FUNCTIONS
from fxpipe.tracing.record.recorded_sizes import plain_size
from fxpipe.tracing.record.recorder import Recorder


def _copy_of(f: Any) -> Callable[..., Any]:
    return FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__)


_PACK, _PAD = _copy_of(pack_padded_sequence), _copy_of(pad_packed_sequence)  # recording replaces their code


def pack(x: torch.Tensor, lengths: torch.Tensor, enforce_sorted: bool) -> torch.Tensor:
    if isinstance(x, FakeTensor):
        return x[torch.arange(x.shape[1], device=lengths.device) < lengths[:, None]]
    data: torch.Tensor = _PACK(x, lengths.cpu(), True, enforce_sorted).data
    return data


def pad(
    x: torch.Tensor, lengths: torch.Tensor, enforce_sorted: bool, value: float, length: Any, data: Any = None
) -> torch.Tensor:
    """Pads the packed `x`, or other data in its order. `length`: a tensor if it is the largest of all `lengths`."""
    if isinstance(x, FakeTensor):
        if isinstance(length, torch.Tensor):
            length = (torch.arange(x.shape[1], device=length.device) < length).nonzero().shape[0]
        like, rest = (x, x.shape[2:]) if data is None else (data, data.shape[1:])
        return like.new_empty(x.shape[0], length, *rest)
    packed = _PACK(x, lengths.cpu(), True, enforce_sorted)
    packed = packed if data is None else PackedSequence(data, *packed[1:])
    padded: torch.Tensor = _PAD(packed, True, value, int(plain_size(length)))[0]
    return padded


def _packed_function(function: Any) -> Callable[..., Any]:
    """Makes a function of padded tensors that runs the function of a recurrent module on packed data."""

    def run(
        x: torch.Tensor, hx: Any, params: Any, *options: Any, lengths: torch.Tensor, enforce_sorted: bool
    ) -> tuple[torch.Tensor, ...]:
        *settings, batch_first = options
        if isinstance(x, FakeTensor):  # one step of the sequences has all other sizes
            out, *states = function(x.narrow(int(batch_first), 0, 1), hx, params, *options)
            return out.new_empty(*x.shape[:2], *out.shape[2:]), *states

        def in_order(states: Any, order: torch.Tensor | None) -> Any:
            return states if order is None else pytree.tree_map(lambda state: state.index_select(1, order), states)

        packed = _PACK(x, lengths.cpu(), batch_first, enforce_sorted)
        hx = in_order(hx, packed.sorted_indices)
        data, *states = function(packed.data, packed.batch_sizes, hx, params, *settings)
        out, _ = _PAD(PackedSequence(data, *packed[1:]), batch_first, 0.0, x.shape[int(batch_first)])
        return out, *in_order(states, packed.unsorted_indices)

    run.__name__ = run.__qualname__ = function.__name__
    return run


PACKED_FUNCTIONS = {function: _packed_function(function) for function in RNN_FUNCTIONS}
PACKING_NODES = frozenset({pack, pad, *PACKED_FUNCTIONS.values()})


class PackingRecorder:
    """Records what one forward does with packed sequences."""

    def __init__(self, recorder: Recorder, is_elsewhere: Callable[[], bool]):
        self._recorder, self._is_elsewhere = recorder, is_elsewhere
        self._packed: list[tuple[PackedSequence, torch.Tensor, Any]] = []  # with what is packed: the samples first

    @contextlib.contextmanager
    def replace_functions(self) -> Iterator[None]:
        with _replaced_code(pack_padded_sequence, self._pack), _replaced_code(pad_packed_sequence, self._pad):
            yield

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._recorder.__torch_function__(function, (), args, kwargs)

    def _pack(self, input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
        is_recorded = isinstance(lengths, torch.Tensor) and self._recorder.options.records_packing
        if self._is_elsewhere() or not is_recorded:
            return _PACK(input, lengths, batch_first, enforce_sorted)
        x, lengths = input if batch_first else input.transpose(0, 1), lengths.to(torch.int64, copy=True)
        with self._recorder.pause():
            packed = _PACK(x, lengths, True, enforce_sorted)
        return self._keep(x, packed, {"lengths": lengths, "enforce_sorted": enforce_sorted})

    def _keep(self, x: torch.Tensor, packed: PackedSequence, options: Any) -> PackedSequence:
        data = self._call(pack, x, **options)
        self._recorder.repeated[self._recorder.node_of(data)] = None
        with self._recorder.pause():
            packed = PackedSequence(data, *packed[1:])
        self._packed.append((packed, x, options))
        self._recorder.lengths[id(packed.batch_sizes)] = packed.batch_sizes, options["lengths"]
        return packed

    def _source(self, sequence: Any) -> tuple[torch.Tensor, Any] | None:
        """Returns the padded tensor and the options that a packed sequence comes from; None if unknown."""
        if self._is_elsewhere() or not isinstance(sequence, PackedSequence):
            return None
        known = [one for one in self._packed if one[0].batch_sizes is sequence.batch_sizes]
        if not known:
            return None
        first, x, options = known[0]
        if not all(map(operator.is_, first[2:], sequence[2:])):
            what = "makes a packed sequence without the indices of the one it comes from"
            error = self._recorder.refuse(what, "keep them (PackedSequence(data, *packed[1:]))")
            error.is_final = True  # the samples would be in another order, which differs between micro-batches
            raise error
        own = [padded for packed, padded, _ in known if packed.data is sequence.data]
        if not own:  # forward has computed the data
            own = [self._call(pad, x, **options, value=0.0, length=x.shape[1], data=sequence.data)]
        return own[0], options

    def _pad(
        self, sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None
    ) -> Any:
        source = self._source(sequence)
        if source is None:
            return _PAD(sequence, batch_first, padding_value, total_length)
        x, options = source
        length = options["lengths"].max() if total_length is None else total_length
        length = int(length) if self._recorder.options.reads_lengths else length
        out = self._call(pad, x, **options, value=padding_value, length=length)
        return out if batch_first else out.transpose(0, 1).contiguous(), options["lengths"].clone()

    def forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward of a recurrent module, which may be called with a packed sequence."""

        def forward(module: Any, input: Any, hx: Any = None) -> Any:
            source = self._source(input)
            if source is None:
                return plain(module, input, hx)
            x, options = source
            before, call = self._recorder.replacements, partial(self._call, **options)
            self._recorder.replacements = before | {f: partial(call, run) for f, run in PACKED_FUNCTIONS.items()}
            try:
                out, states = plain(module, x if module.batch_first else x.transpose(0, 1), hx)
            finally:
                self._recorder.replacements = before
            return self._keep(out if module.batch_first else out.transpose(0, 1), input, options), states

        return forward


@contextlib.contextmanager
def _replaced_code(function: Any, replacement: Callable[..., Any]) -> Iterator[None]:
    """A block in which `function` calls another function, in all threads and wherever it was imported."""
    before = function.__code__, function.__kwdefaults__
    function.__kwdefaults__ = {"replacement": replacement}
    function.__code__ = _call_replacement.__code__
    try:
        yield
    finally:
        function.__code__, function.__kwdefaults__ = before


def _call_replacement(*args: Any, replacement: Callable[..., Any], **kwargs: Any) -> Any:
    return replacement(*args, **kwargs)
