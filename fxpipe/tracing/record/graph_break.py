"""Graph breaks: a forward that is recorded up to some line, after which its Python runs in every step.

    def forward(self, x):
        h = self.encoder(x)                   # recorded, like any module
        slot = int(self.pointer)              # a buffer that forward changes: a graph cannot know its value
        self.bank[slot] = h.detach().mean(0)
        return self.head(h) @ self.bank.t()

A node runs forward from its first line and replaces the recorded calls by their results:

    encoder = ...                                            # its nodes
    rest = M_rest(bank, pointer, head..., encoder, x)        # forward(x) with self.encoder(x) replaced by `encoder`

If this part holds most of the model, it is split into segments at calls of large modules, which are recorded, too:

    args = M_until_decoder(bank, pointer, encoder, x)        # forward(x), up to the line that calls self.decoder
    decoder = ...                                            # its nodes
    rest = M_rest(bank, pointer, encoder, decoder, x)

The lines of forward run once in each of these nodes; only the last node writes to buffers. So a line that writes, draws
random numbers or reads a value of the samples must not also be recorded (`calls_before_effects`). If a line draws, or
writes to an argument, there is only one segment. A run that calls other modules than the recording is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe._torch.autograd import version_of
from fxpipe._torch.checkpoint import call_checkpoints_through
from fxpipe._torch.functions import opname
from fxpipe._torch.module_internals import COMPILED_CALL
from fxpipe._torch.thread_state import ThreadState, set_thread_state
from fxpipe.errors import StateError
from fxpipe.tracing.model_state import Slot, equal_tensors, is_fixed, preserve_state, slots_of, without_gradients
from fxpipe.tracing.node_info import info, opaque_call_of, update_info
from fxpipe.tracing.record.module_hooks import forward_of
from fxpipe.tracing.record.opaque_call import OpaqueStateError, call_opaque, is_in_modules, replica_of
from fxpipe.tracing.record.recorder import Recorder, is_grad_fn_access
from fxpipe.tracing.record.unrecordable import TENSOR_HOOKS, CannotRecord
from fxpipe.tracing.source_lines import line_of_function
from fxpipe.tracing.tensors import tensors_in
from fxpipe.utils.pytree import map_tensor_leaves

MAX_OPAQUE_SHARE = 0.5  # share of the model's parameters in one node above which it is split at calls
LARGE_MODULE_SHARE = 1 / 64  # share of the module's parameters above which an inner module is a place to split

SegmentArguments = tuple[Sequence[Any], tuple[Any, ...], dict[str, Any]]  # results of calls, arguments of forward


@dataclass(frozen=True, slots=True)
class _SegmentEnd:
    name: str
    outside: ThreadState  # when the segment starts: a profiler may run it without gradients
    state: ThreadState  # at the call, perhaps inside no_grad or autocast; the recorded call uses it


class _BreakReached(BaseException):
    """Raised after the last recorded call returns. A BaseException, so that forward does not catch it."""


class _SegmentStop(BaseException):
    """Raised at the end of the segment. A BaseException, so that forward does not catch it."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.name, self.arguments, self.state = name, (args, kwargs), ThreadState.now()


def call_with_graph_break(recorder: Recorder, module: nn.Module, path: str, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a module's forward: recorded up to a call, then nodes that run its Python. Raises `CannotRecord`."""
    continued = recorder.graph_breaks[path]
    names: list[str] = []  # of the recorded calls
    results: list[Any] = []

    def add(name: str, result: Any) -> None:
        names.append(name.removeprefix(f"{path}.") if path else name)
        results.append(result)
        if len(results) == continued.calls:
            raise _BreakReached

    if continued.calls:
        recorder.listeners[path] = add
        try:
            with contextlib.suppress(_BreakReached):
                forward_of(module)(*args, **kwargs)
        finally:
            del recorder.listeners[path]
    rest = {id(t): t.numel() for slot, t in slots_of(module).items() if not is_in_modules(slot, names)}
    most = MAX_OPAQUE_SHARE * sum(p.numel() for p in recorder.model.parameters())
    is_split = continued.may_split and sum(rest.values()) > most
    stops = _large_modules(module) if is_split else frozenset[str]()
    if not names and not stops:
        raise CannotRecord("there is nothing that could be recorded before it, or after it")
    shared, before = frozenset[Slot](), recorder.refusal
    while True:
        segment = _Segment(module, tuple(names), continued.calls, stops, shared)
        try:
            result = segment.record(recorder, path, continued.why, (tuple(results), args, kwargs))
        except Exception as error:
            recorder.refusal = before
            raise CannotRecord(
                f"the rest of forward of {path or 'the model'!r} cannot be run as Python: {error}",
                frozenset({path} - {""}),
            ) from error
        if segment.end is None:
            return result
        with set_thread_state(segment.end.state):
            results.append(module.get_submodule(segment.end.name)(*result[0], **result[1]))
        names.append(segment.end.name)
        shared = segment.shared


def _large_modules(module: nn.Module) -> frozenset[str]:
    least = LARGE_MODULE_SHARE * sum(p.numel() for p in module.parameters())
    inner = module.named_modules()
    return frozenset(path for path, m in inner if path and sum(p.numel() for p in m.parameters()) > least)


@contextlib.contextmanager
def _unwritten(buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A block that must not write to these buffers. If it does, or fails, their values are restored."""
    before = {name: (version_of(buffer), buffer.clone()) for name, buffer in buffers.items()}

    def written() -> list[str]:
        pairs = [(name, version, old, buffers[name]) for name, (version, old) in before.items()]
        return [name for name, v, old, now in pairs if version_of(now) != v or not equal_tensors(now, old)]  # `.data`

    try:
        yield
        if names := written():
            raise OpaqueStateError(f"writes to {names[0]!r}, which it reads before it calls other modules")
    except BaseException:
        with torch.no_grad():
            for name in written():
                buffers[name].copy_(before[name][1])
        raise


class _HookRefusal(TorchFunctionMode):
    """A block of lines that several nodes run, so that a hook on a tensor would see a part of the gradient in each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if opname(func) in TENSOR_HOOKS or (is_grad_fn_access(func, opname(func)) and func(*args) is not None):
            what = "puts a hook on a tensor, or looks at its grad_fn: the hook would see a part of the gradient"
            raise OpaqueStateError(what, "do so outside forward, or in a module inside, which is kept whole")
        return func(*args, **(kwargs or {}))


class _Segment:
    """Forward from its first line up to a call of one of `stops`, with the calls of `names` replaced by results."""

    def __init__(
        self, module: nn.Module, names: tuple[str, ...], first: int, stops: frozenset[str], shared: frozenset[Slot]
    ):
        self.module, self.names, self.stops = module, names, stops
        self.shared = shared  # buffers that earlier segments read, perhaps in another stage: not to be written
        self.first = first  # number of names that are called before any other module
        self._left_out = {*stops} | _large_modules(module).intersection(names)  # unless the first run calls it
        self.end: _SegmentEnd | None = None
        self._has_run = False

    def record(self, recorder: Recorder, path: str, why: str, arguments: SegmentArguments) -> Any:
        with recorder.pause():
            slots = self._slots_used(recorder, arguments)
            run = replica_of(recorder.model, self.module, slots, self._run, tuple(self._left_out))
        tensors = [slot.store(self.module)[slot.key] for slot in slots]
        if self.end is not None:
            self.shared |= {slot for slot, tensor in zip(slots, tensors, strict=True) if not is_fixed(tensor)}
        read_only = [(place, slot.name) for place, slot in enumerate(slots) if slot in self.shared]

        def run_apart(tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = list(tensors)
            for place, _ in read_only if self.end is not None else ():
                own[place] = own[place].clone()
            unwritten = {name: own[place] for place, name in read_only if self.end is None}
            # Without gradients no hook runs, and under a mode torch does not use its fast kernels of attention.
            with _unwritten(unwritten), _HookRefusal() if torch.is_grad_enabled() else contextlib.nullcontext():
                return run(own, args, kwargs)

        name = f"{type(self.module).__name__}_" + (f"until_{self.end.name}" if self.end else "rest").replace(".", "_")
        before, recorder.origin = recorder.origin, (path, line_of_function(forward_of(self.module)))
        try:
            result, node = call_opaque(recorder, run_apart, name, tensors, arguments, {}, final=False)
        finally:
            recorder.origin = before
        if self.end is not None and info(node).is_random:
            raise CannotRecord("it draws random numbers")
        if {recorder.registry.storages.name(tensors[place]) for place, _ in read_only} & info(node).written_storages:
            raise CannotRecord("it changes a buffer that it reads before it calls other modules")
        call = replace(opaque_call_of(node), module=path, why=why, calls_before=self.names, recorded_calls=self.first)
        update_info(node, opaque=call)
        return result

    def _slots_used(self, recorder: Recorder, arguments: SegmentArguments) -> tuple[Slot, ...]:
        """Returns the tensors to pass: tensors outside the modules that do not run, and tensors used in a first run."""
        slots = slots_of(self.module)
        outside = [slot for slot in slots if not is_in_modules(slot, self._left_out)]
        run = replica_of(recorder.model, self.module, (), self._run)
        copied = map_tensor_leaves(torch.clone, arguments)
        with (
            without_gradients(recorder.model),
            preserve_state(recorder.model),
            recorder.random.ignore_draws(),
            recorder.observe_opaque() as opaque,
        ):
            run((), copied, {})
        used = set(map(id, opaque.known_tensors))
        if self.end is not None:  # later writes to other buffers must not reach an earlier stage
            outside = [slot for slot in outside if is_fixed(slots[slot])]
        return tuple(slot for slot, tensor in slots.items() if slot in outside or id(tensor) in used)

    def _run(self, replica: nn.Module, arguments: tuple[Any, ...], _: dict[str, Any]) -> Any:
        results, args, kwargs = arguments
        versions = [(tensor, version_of(tensor)) for tensor in tensors_in(arguments)]
        answers = list(zip(self.names, results, strict=True))
        result, end, outside = None, None, ThreadState.now()
        try:
            # The recompute of a checkpoint would have neither the results of calls nor the end of the segment.
            with self._answered(replica, answers), call_checkpoints_through():
                result = forward_of(replica)(*args, **kwargs)
        except _SegmentStop as stop:
            result, end = stop.arguments, _SegmentEnd(stop.name, outside, stop.state)
        is_other = (end and end.name) != (self.end and self.end.name)
        if end is not None and self.end is not None and end.outside == self.end.outside:
            is_other |= end.state != self.end.state  # inside other blocks
        if answers or (self._has_run and is_other):
            raise StateError(self._other_calls(end.name if end else None))
        if end is not None and any(version_of(tensor) != version for tensor, version in versions):
            raise OpaqueStateError("writes to a value that it was given", "write to a copy (clone)")
        if not self._has_run:
            self.end, self._has_run = end, True
        return result

    @contextlib.contextmanager
    def _answered(self, replica: nn.Module, answers: list[tuple[str, Any]]) -> Iterator[None]:
        """A block in which calls of modules return these results, and the next call of a stop raises."""

        def call_of(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if answers and answers[0][0] == name:
                    return answers.pop(0)[1]
                if name in self.stops and not answers:
                    raise _SegmentStop(name, args, kwargs)
                is_first = len(answers) > len(self.names) - self.first
                if is_first or name in self.stops or (name in self._left_out and self._has_run):
                    raise StateError(self._other_calls(name))
                self._left_out.discard(name)
                own = modules[name].__dict__
                own.pop(COMPILED_CALL)
                try:
                    return modules[name](*args, **kwargs)
                finally:
                    own[COMPILED_CALL] = call

            return call

        # torch looks here for a module's compiled call, before its hooks and its forward.
        modules = {name: replica.get_submodule(name) for name in (*self.names, *self.stops)}
        try:
            for name, module in modules.items():
                module.__dict__[COMPILED_CALL] = call_of(name)
            yield
        finally:
            for module in modules.values():
                module.__dict__.pop(COMPILED_CALL, None)

    def _other_calls(self, name: str | None) -> str:
        expected = f"calls {self.end.name!r}" if self.end else "returns"
        does = f"calls {name!r}" if name else "returns"
        return (
            f"forward {does} after {', '.join(map(repr, self.names)) or 'no other module'}, where it {expected} when "
            "it was traced: which modules it calls depends on values that only a stage knows; put these lines into a "
            "module inside, which is kept whole"
        )
