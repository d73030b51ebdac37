"""The recorder: a function mode under which a model runs once; every torch function it calls becomes a graph node.

Recording uses real tensors, so any Python of the model simply runs. The graph contains only functions, and tensors of
the model are `get_attr` nodes, identified by object identity. The recorder also records the state of the thread, random
nodes (torch's generators advanced, or might: `might_draw`), sizes (`RecordedSize`) and conclusions from them, and reads
of values, which `guards` check. A tensor of unknown origin is a constant if a second recording finds the same object;
otherwise the mode missed the function that created it, and recording is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from fxpipe._torch import functions
from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import forward_class_of, version_of
from fxpipe._torch.autograd_functions import is_in_functorch_transform
from fxpipe._torch.fake_tensor_mode import NEEDS_VALUES_ERRORS
from fxpipe._torch.modes import without_torch_function
from fxpipe._torch.saved_tensor_hooks import NoSavedTensors, saving_block_for
from fxpipe._torch.tensor_data import StorageNumbers, storage_address
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import FxpipeError
from fxpipe.tracing import forward_rng, model_state
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.node_info import NodeInfo, RandomDraws, RecordingPlace, ValueRead, info, set_info, update_info
from fxpipe.tracing.record.python_reads import PythonReads
from fxpipe.tracing.record.recorded_sizes import MEMORY, RECORDED, TEXTS, SizeRecorder, disguised_text, unwrap_sizes
from fxpipe.tracing.record.unrecordable import (
    OPAQUE_REMEDY,
    TENSOR_HOOKS,
    CannotRecord,
    calls_before_effects,
    is_of_inputs_alone,
    refusal_of_call,
    written_arguments,
)
from fxpipe.tracing.source_lines import is_check, user_line
from fxpipe.tracing.tensors import storage_of, tensors_in
from fxpipe.tracing.traced import PLAIN_RECORDING, RecordingOptions, TracedGraph
from fxpipe.utils.accelerator import comparison_seed
from fxpipe.utils.progress import ProgressStep, ignore_progress

NODE_PROBLEM, NODE_REMEDY = "looks at a node of autograd (grad_fn)", "do so outside forward"
_MEMORY_QUESTIONS = frozenset("data_ptr is_set_to storage_offset".split())
# Methods and attributes that describe one tensor.
_INPUT_METHODS = frozenset("is_conj is_neg is_pinned is_shared _is_view".split())
_INPUT_ATTRIBUTES = frozenset("_base _version is_leaf grad grad_fn retains_grad".split())


@dataclass(frozen=True, slots=True)
class RunningModule:
    path: str
    module: nn.Module
    in_transform: bool = field(default_factory=is_in_functorch_transform)  # True inside a torch.func transform


@dataclass(slots=True)
class PausedRun:
    """The effects of Python that runs as one node, while recording is paused, and the effects that it may have."""

    unhookable: Sequence[torch.Tensor] = ()  # arguments that must not get a hook
    known_tensors: list[torch.Tensor] = field(default_factory=list)  # used tensors of forward and of the model
    written: set[int] = field(default_factory=set)  # storages that functions write to, also through `.data`
    has_drawn: bool = False  # random numbers
    has_applied: bool = False  # an `autograd.Function`


class TensorRegistry:
    """The tensors that forward holds, by identity and without references, with the nodes that created them.

    A custom node of autograd (of an `autograd.Function` in Python or C++) is in the graph only if a recorded function
    created it. One that appears on a tensor later is of an unrecorded function, whose inside was recorded instead. A
    stage has other nodes of autograd, where a hook would not run: so only a module kept whole may look at `grad_fn`.
    """

    def __init__(self) -> None:
        self.storages = StorageNumbers()
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[torch.Tensor]]] = {}
        self._own_nodes: dict[int, str | None] = {}  # by id of the tensor: the custom backward of its recorded call

    def add(self, tensor: torch.Tensor, node: fx.Node) -> None:
        nodes, key = self._nodes, id(tensor)
        nodes[key] = node, weakref.ref(tensor, lambda _: nodes.pop(key, None))  # the id may be reused
        self.expect_backward(tensor)
        update_info(node, storages=info(node).storages | {self.storages.name(tensor)})

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        return self._nodes[id(tensor)][0] if id(tensor) in self._nodes else None

    def expect_backward(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """Records that recorded calls created a tensor's current grad_fn, or that the function `name` will."""
        with contextlib.suppress(RuntimeError):  # a view whose node is no longer valid
            self._own_nodes[id(tensor)] = name or custom_backward_name(tensor)

    def unexpected_backward(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a custom backward that a tensor got from an unrecorded call; None if it has none."""
        if not torch.is_grad_enabled():
            return None
        name = custom_backward_name(tensor)
        return name if name != self._own_nodes.get(id(tensor)) else None


class TensorNames:
    """The names under which a graph reads tensors that it did not create: of the model, and constants, kept alive."""

    def __init__(self, model: nn.Module):
        slots = model_state.slots_of(model)
        self._own: dict[int, str] = {}
        # A shared tensor gets the name of the parameter, which optimizers and `state_dict` use.
        for slot, tensor in sorted(slots.items(), key=lambda item: item[0].kind != "parameter"):
            self._own.setdefault(id(tensor), slot.name)
        self._others: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in model_state.container_tensors(model).items():
            self._others.setdefault(id(tensor), (name, tensor))
        taken = {slot.name for slot in slots}.union(name for name, _ in self._others.values())
        self._free = (name for n in itertools.count() if (name := f"constant_{n}") not in taken)

    def own(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a tensor that a module holds directly: a parameter, a buffer, an attribute."""
        return self._own.get(id(tensor))

    def other(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a tensor in a container of a module, or of a constant."""
        name, _ = self._others.get(id(tensor), (None, tensor))
        return name

    def add(self, tensor: torch.Tensor) -> str:
        name = next(self._free)
        self._others[id(tensor)] = (name, tensor)
        return name


def is_grad_fn_access(func: Any, name: str) -> bool:
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn"


def custom_backward_name(tensor: torch.Tensor) -> str | None:
    """Returns the name of a tensor's node if it has a custom backward."""
    with without_torch_function():
        node: Any = tensor.grad_fn if tensor.requires_grad else None
    if isinstance(node, BackwardCFunction):
        return str(forward_class_of(node).__name__)
    if type(node).__name__ == "CppFunction":  # Python's type for custom C++ nodes
        return str(node.name())
    return None


class RandomRecorder:
    """The random numbers of one recording. `seed`: of the numbers that forward draws and reads."""

    def __init__(self, recorder: Recorder, seed: int):
        self.recorder = recorder
        self.seed, self.stream = seed, forward_rng.DrawStream(seed)
        self.draws_from_stream: list[bool] = []  # for each draw, whether it came from the stream
        self.python_modules: set[str] = set()  # paths of modules that draw Python's random numbers
        self._python_state = model_state.python_rng_state()
        self.seed_of_generator = comparison_seed()  # seeds torch's generator in forward, to detect seeding there
        self._draw_starts = set[tuple[bytes, str]]()  # generator states in which a draw has begun

    def note_python(self, in_node: bool = False) -> bool:
        """Returns whether Python drew random numbers; records the module, unless a node repeats them (`in_node`)."""
        before, self._python_state = self._python_state, model_state.python_rng_state()
        has_drawn = not model_state.same_python_rng_state(before, self._python_state)
        if has_drawn and not in_node:
            self.python_modules.add(self.recorder.module)
        return has_drawn

    @contextlib.contextmanager
    def ignore_draws(self) -> Iterator[None]:
        """A block that runs Python of forward once more."""
        drawn = len(self.draws_from_stream)
        yield
        del self.draws_from_stream[drawn:]

    def refuse_seeding(self, seed: int, states: list[Any]) -> None:
        """Raises `CannotRecord` if a draw, or the end of forward, has another seed, or the state of an earlier draw."""
        start = None if is_faked() else (bytes(states[0].tolist()), repr(states[1:]))  # fake draws do not advance it
        if seed != self.seed_of_generator or start in self._draw_starts:
            raise self.recorder.refuse(
                "seeds torch's random generator, or resets it (manual_seed, fork_rng, set_rng_state),",
                "draw these numbers in __init__ and keep them (register_buffer), or in a module of their own that is "
                "kept whole (leaf_modules=)",
                whole=False,
            )
        if start is not None:
            self._draw_starts.add(start)


class Recorder(TorchFunctionMode):
    """Records the functions called while it is active. Use it through `fxpipe.tracing.record.record_model`."""

    def __init__(
        self,
        model: nn.Module,
        options: RecordingOptions = PLAIN_RECORDING,
        seed: int = 0,  # seeds the random numbers that forward draws and reads
        step: ProgressStep = ignore_progress,  # called for each node
    ):
        super().__init__()
        self.model = model
        self.graph = TracedGraph()
        self.recording, self._step = True, step
        self.options, self.whole, self.graph_breaks = options, options.whole, options.graph_breaks
        self.sizes, self.random = SizeRecorder(self), RandomRecorder(self, seed)
        self.lengths: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # by id: `batch_sizes` of packed sequences, lengths
        self.replacements: dict[Any, Callable[..., Any]] = {}  # functions that record a call in another way
        self.differentiates = False  # True if forward runs autograd, for which only another recording keeps tensors
        self.repeated = dict[fx.Node, None]()  # nodes that a gradient runs again: not needed if nothing else uses them
        self.listeners: dict[str, Callable[[str, Any], None]] = {}  # by path of a module: gets the calls that it makes
        self.calls = Counter[str]()  # calls of other modules, by path of the calling module
        self.python_reads = PythonReads(model)
        # The place of the first tensor that forward formats: module, line, number of its calls before.
        self.first_text: tuple[str, str, int] | None = None
        # True if forward has read which tensors require grad, or may write to those that do not.
        self.asks_for_gradients = not all(map(model_state.is_fixed, model.parameters()))
        self.has_hooks = self.uses_unknown = False  # True if a hook ran as a node; if forward used an unknown tensor
        self.hides_sequences = False  # True if lists or tuples of modules kept whole are hidden from forward
        self.writes_frozen = False  # True if forward writes to a frozen parameter, which only another recording can do
        self.constants: dict[str, torch.Tensor] = {}  # by name: tensors that are not attributes of a module
        self.unknown_tensors: list[tuple[torch.Tensor, CannotRecord]] = []  # with errors to raise if not constants
        self.refusal: CannotRecord | None = None
        self.module_of_error: str | None = None
        self.error_of_recording: CannotRecord | None = None  # to raise if only the recording fails there
        self.origin: tuple[str, str] | None = None  # module path and source line, if the running code is not the user's
        self._changed: frozenset[int] = frozenset()
        self.stack: list[RunningModule] = []
        self.paths = {id(m): path for path, m in reversed(list(model.named_modules()))}
        self.paused = 0
        self.runs_opaque = False  # True inside an opaque call, whose closures keep the sizes of this recording
        self.opaque: PausedRun | None = None  # Python that runs as one node, or its trial
        self.marks: list[str] = []
        self.ended_modules: list[str] = []
        self.registry = TensorRegistry()
        self._forgetting = NoSavedTensors()
        self.names = TensorNames(model)
        self.attribute_nodes: dict[str, fx.Node] = {}  # by name of the tensor
        fixed = [
            (p, name) for name, p in model.named_parameters() if p.layout == torch.strided and model_state.is_fixed(p)
        ]
        self._parameters = {storage_address(p): name for p, name in fixed}
        self._default_dtype = torch.get_default_dtype()

    def end(self) -> None:
        """Drops all values, since caches of libraries keep sizes alive."""
        self.recording = False
        self.registry = TensorRegistry()
        self.sizes.storages.clear()

    @property
    def module(self) -> str:
        """The path of the innermost running module."""
        return self.origin[0] if self.origin else self.stack[-1].path if self.stack else ""

    @property
    def source(self) -> str:
        return self.origin[1] if self.origin else user_line()

    # -- values to nodes ---------------------------------------------------------------------------------------------

    def knows(self, tensor: torch.Tensor) -> bool:
        return self.registry.node(tensor) is not None

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        maker = self.registry.node(tensor)
        if maker is not None:
            if function := self.registry.unexpected_backward(tensor):
                path = info(maker).module
                self.refusal = self.refusal or CannotRecord(
                    f"the model{f' in module {path!r}' if path else ''} applies {function} at {info(maker).source}, a "
                    "function with a backward of its own, in a way that recording does not see: its inside would be "
                    f"recorded instead; call {function}.apply, or a custom operator (torch.library)",
                    frozenset({path}) if path else frozenset(),
                )
                raise self.refusal
            return maker
        name = self.names.own(tensor)
        if name is None:
            name = self.names.other(tensor) or self._constant_name(tensor)
            if tensor.requires_grad:
                raise self.refuse(
                    f"uses {name!r}, a tensor that requires grad in a plain container",
                    "register it (nn.Parameter, nn.ParameterList, register_buffer)",
                    whole=False,
                )
            self.constants[name] = tensor
        if name not in self.attribute_nodes:
            node = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
            update_info(node, storages=frozenset({self.registry.storages.name(tensor)}))
            self.attribute_nodes[name] = node
        return self.attribute_nodes[name]

    def _constant_name(self, tensor: torch.Tensor) -> str:
        """Returns a name for a tensor that neither the graph nor the model created."""
        self.uses_unknown = True
        if isinstance(tensor, nn.Parameter):
            remedy = "make it in __init__, or call the model once before, if only the first call makes it"
            raise self.refuse("makes a parameter or a module in forward", remedy, whole=False)
        what = f"({tuple(tensor.shape)}, {tensor.dtype})"
        if tensor.requires_grad and tensor.is_leaf:
            raise self.refuse(
                f"uses a tensor that requires grad and is not the model's {what}",
                "make it a parameter of the module (nn.Parameter), or give it as an input",
                whole=False,
            )
        error = self._error(
            f"uses a tensor of unknown origin {what}",
            "make it with a torch function in forward (torch.tensor; not torch.FloatTensor, nor a compiled "
            "or scripted function), or keep it in the module (register_buffer)",
        )
        if tensor.requires_grad:
            self.refusal = self.refusal or error
            raise error
        self.unknown_tensors.append((tensor, error))
        return self.names.add(tensor)

    def node_argument(self, value: Any) -> Any:
        """Returns an argument of a node: nodes replace tensors and sizes, also in containers and slices."""
        return map_aggregate(value, self._part_of_argument)

    def _part_of_argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, RECORDED):
            return value.node if value.recorder is self.sizes else value.value
        if isinstance(value, functions.CONSTANT_TYPES):
            return value
        if isinstance(value, type) and value in functions.DTYPES_OF_PYTHON:
            return functions.DTYPES_OF_PYTHON[value]
        for kind in functions.PLAIN_TYPES:  # converts subclasses: numpy.float64, enumerations
            if isinstance(value, kind):
                return value if type(value) is kind else kind.__call__(value)
        if type(value).__module__ == "numpy" and not getattr(value, "shape", ()) and hasattr(value, "item"):
            return self._part_of_argument(value.item())
        raise self.refuse(
            f"passes a {type(value).__module__}.{type(value).__qualname__} to a torch function",
            "convert it to a tensor or a plain number first",
        )

    def add(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> fx.Node:
        path = self.module
        module = self.stack[-1].module if self.stack else None
        label = functions.label_of(path, module, functions.opname(target), args)
        node = self.graph.create_node(op, target, args, kwargs or {}, name=label)
        place = RecordingPlace(self.calls[path], len(self.marks), len(self.ended_modules))
        state, written, self._changed = ThreadState.now(), self._changed, frozenset()
        set_info(node, NodeInfo(self.source, path, state, place, written_storages=written))
        self._step()
        return node

    def keep(self, value: Any, node: fx.Node) -> None:
        """Registers `node` as the creator of the tensors in `value`."""
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise self.refuse(
                    "makes a nested tensor, whose sizes are those of its samples",
                    "use padded tensors and a mask, or make it in a module inside the model, which is kept whole",
                )
            self.registry.add(value, node)
        elif isinstance(value, (Mapping, tuple, list)):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                if any(True for _ in tensors_in(item)):
                    name = f"{node.name}_{key}"
                    part = self.graph.create_node("call_function", operator.getitem, (node, key), name=name)
                    set_info(part, replace(info(node), rng=None, written_storages=frozenset()))
                    self.keep(item, part)

    # -- torch functions ---------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.python_reads.watch(False)  # this is not the model's Python
        try:
            return self._record(func, args, kwargs or {})
        finally:
            self.python_reads.watch(True)

    def call(self, func: Any, *args: Any) -> Any:
        return self._record(func, args, {})

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds nodes for a call of a function, and returns what it returns."""
        name = functions.opname(func)
        if self.paused:
            return self._unrecorded(func, args, kwargs)
        if name in _MEMORY_QUESTIONS:
            self.sizes.ask(*MEMORY)
        if name in _INPUT_METHODS:
            self.sizes.ask_about(args[0], lambda x: func(x, *args[1:], **kwargs), name)
            return self._plainly(func, args, kwargs)
        if name in functions.STORAGE_METHODS and args[0].layout == torch.strided:
            with self.pause():
                storage = args[0].untyped_storage()
            self.sizes.storages[id(storage)] = storage, args[0]
            return self._plainly(func, args, kwargs)
        if name in functions.LAYOUT_QUESTIONS and args[0].layout == torch.strided:
            question = f"{name}{args[1:]}{kwargs}"
            return self.sizes.read_layout(args[0], lambda x: func(x, *args[1:], **kwargs), question)
        if name == "is_same_size" and len(args) == 2:
            return self.sizes.of(args[0], "size") == self.sizes.of(args[1], "size")
        if name in functions.TEXT_METHODS:
            text = self._plainly(func, args, kwargs)
            self.first_text = self.first_text or (self.module, self.source, self.calls[self.module])
            guise = self.sizes.disguised.get(TEXTS)  # to detect whether forward depends on it
            return text if guise is None else disguised_text(text, guise)
        if name in functions.NODELESS or (name.startswith("is_") and name != "is_nonzero"):
            return self._plainly(func, args, kwargs)
        if name in ("__get__", "__set__"):
            return self._attribute(func, name, args)
        if name in ("size", "stride"):
            sizes = self.sizes.of(args[0], name)
            dim = (*args[1:], *kwargs.values())
            return sizes if not dim or dim[0] is None else sizes[dim[0]]
        if name in ("numel", "nelement"):
            return math.prod(self.sizes.of(args[0], "size"))
        if name == "__len__":
            self.sizes.read_length(args[0], 0)
            return self._plainly(func, args, kwargs)
        if (name == "__ior__" and self._adds_nothing(args[1])) or (name == "__setitem__" and self._is_own_item(*args)):
            return args[0]
        self._refuse_unrecordable(func, name, args, kwargs)
        if func in self.replacements:
            return self.replacements[func](*args, **kwargs)
        if functions.SPLIT_FUNCTIONS.get(name) == 2 and isinstance((*args, 1)[1], torch.Tensor):
            self._record(torch.Tensor.__index__, args[1:2], {})
        if name in functions.SPLIT_FUNCTIONS and args and not isinstance((*args, 1)[1], (list, tuple)):
            self.sizes.read_pieces(name, args, kwargs.get("dim", (*args, 0, 0)[functions.SPLIT_FUNCTIONS[name]]))
        if name == "__iter__":
            parts, _ = self.run(torch.Tensor.unbind, (args[0], 0), {})
            self.keep(parts, self.add("call_method", "unbind", (self.node_of(args[0]), 0)))
            return iter(parts)
        if functions.takes_only_arrays(args, kwargs):
            result, _ = self.run(func, args, kwargs)
            for tensor in tensors_in(result):
                self.names.add(tensor)  # created by NumPy from values that were read, or from none
            return result
        node_args, node_kwargs = self.node_argument(args), self.node_argument(kwargs)
        result, random = self.run(func, args, kwargs)
        if name in ("tensor", "as_tensor") and len(args) == 1 and isinstance(args[0], RECORDED):
            func, name, node_args = torch.full, "full", ((), *node_args)  # `tensor` takes no symbolic number
        has_tensors = any(True for _ in tensors_in(result))
        leaves = [] if has_tensors or result is None else pytree.tree_leaves(result)
        if any(isinstance(x, (int, float, complex)) for x in leaves) or (
            name in functions.VALUE_READS and not has_tensors
        ):
            self._read(func, name, node_args, node_kwargs, result)
            return result
        if result is not None and not has_tensors:
            return result
        is_draw = False
        if name == "__setitem__":
            node = self.add("call_function", operator.setitem, node_args, node_kwargs)
        else:
            node = self._call(func, name, node_args, node_kwargs)
            if random and forward_rng.is_draw_of_numbers(args, kwargs, result):
                is_draw = result.numel() == 1
                self.random.draws_from_stream.append(is_draw)
            if is_draw:
                result = self.random.stream.take(lambda: func(*args, **kwargs))
            self.keep(result, node)
        if random or forward_rng.might_draw(func, args, kwargs, result):
            update_info(node, rng=RandomDraws(is_scalar=is_draw))
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Returns the result of a function, and whether it drew random numbers. Recording is paused meanwhile."""
        with self.pause():  # a custom op applies autograd.Functions
            seed, before = torch.default_generator.initial_seed(), forward_rng.generator_states()
            versions = [(t, version_of(t)) for t in tensors_in((args, kwargs)) if not t.is_inference()]
            with contextlib.nullcontext() if self.options.keeps_saved else saving_block_for(func, self._forgetting):
                result = self._plainly(func, args, kwargs)
            changed = [t for t, version in versions if version_of(t) != version]
            for tensor in filter(self.knows, changed):
                self.registry.expect_backward(tensor)
            self._changed = frozenset(map(self.registry.storages.name, changed))
            random = not forward_rng.same_generator_states(before, forward_rng.generator_states())
            if random:
                self.random.refuse_seeding(seed, before)
            return result, random

    def run_opaque(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unhookable: Sequence[torch.Tensor] = ()
    ) -> tuple[Any, bool, PausedRun]:
        """Runs a function that is one node as Python; see `run` and `PausedRun`."""
        outer, self.runs_opaque = self.runs_opaque, True
        try:
            with self.observe_opaque(unhookable) as opaque:
                return *self.run(func, args, kwargs), opaque
        finally:
            self.runs_opaque = outer

    @contextlib.contextmanager
    def observe_opaque(self, unhookable: Sequence[torch.Tensor] = ()) -> Iterator[PausedRun]:
        outer, self.opaque = self.opaque, PausedRun(unhookable)
        try:
            yield self.opaque
        finally:
            self.opaque = outer

    def _unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function inside an opaque call; records draws, and known tensors that are not arguments."""
        if self.runs_opaque:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, RECORDED) and leaf.recorder is self.sizes:
                    self.sizes.read_plain(leaf)
            name = functions.opname(func)
            if self.opaque is not None and any(arg is one for arg in args[:1] for one in self.opaque.unhookable):
                if name in TENSOR_HOOKS:
                    raise self._refuse_hook(
                        "puts a hook on a tensor that is given to what is kept whole and used before: the hook would "
                        "see a part of the gradient",
                        "put it on a tensor of its own (x = x.view_as(x); x.register_hook(...)), or do so in the "
                        "module that makes x",
                    )
                if is_grad_fn_access(func, name) and func(*args) is not None:
                    raise self._refuse_hook(NODE_PROBLEM, NODE_REMEDY)
        tensors = list(tensors_in((args, kwargs)))
        if self.opaque is not None:
            self.opaque.known_tensors += [t for t in tensors if self.knows(t) or self.names.own(t)]
            if not is_in_functorch_transform():  # whose tensors have no storage
                written = tensors_in(tuple(written_arguments(func, args, kwargs)))
                self.opaque.written.update(map(storage_of, written))
        if tensors and not self.runs_opaque:
            return self._plainly(func, args, kwargs)
        before = forward_rng.generator_states()
        result = self._plainly(func, args, kwargs)
        if not forward_rng.same_generator_states(before, forward_rng.generator_states()):
            if self.opaque is not None:
                self.opaque.has_drawn = True
            if forward_rng.is_draw_of_numbers(args, kwargs, result):
                self.random.draws_from_stream.append(False)
        return result

    def _plainly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function; refuses it if it needs values that fake tensors do not have."""
        name = functions.opname(func)
        try:
            if self.sizes.disguised:
                return func(*unwrap_sizes(args), **unwrap_sizes(kwargs))
            return func(*args, **kwargs)
        except Exception as error:
            if is_faked() and name == "__format__":
                return repr(args[0])  # a format like `.3f` needs a value, and the text is for display
            if not (isinstance(error, NEEDS_VALUES_ERRORS) or (is_faked() and name in functions.VALUE_READS)):
                raise
            reason = self._error(
                f"needs the values of tensors ({name.strip('_')}), and it or its inputs have none (meta or fake)",
                "trace it with values, or take the decision outside forward",
            )
            self.refusal = self.refusal or CannotRecord(str(reason))  # an opaque module would not have them either
            raise self.refusal from error

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if functions.is_tensor_method(func, name):
            return self.add("call_method", name, args, kwargs)
        return self.add("call_function", func, args, kwargs)

    def _read(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Adds a node that reads `value`; the graph is valid if the read returns the same again."""
        if type(value).__module__ == "numpy":  # the model gets the array, the guard compares a list
            node = self.add("call_method", "tolist", args[:1])
            value = value.tolist()
        else:
            node = self._call(func, name, args, kwargs)
        update_info(node, read=ValueRead(value, name.strip("_"), is_check=isinstance(value, bool) and is_check()))

    def _adds_nothing(self, flag: Any) -> bool:
        """Returns whether `mask |= flag` changes nothing: it then reads that a flag of inputs alone is false."""
        is_flag = isinstance(flag, torch.Tensor) and flag.dtype == torch.bool and flag.numel() == 1
        is_known = is_flag and not is_faked() and self.knows(flag) and is_of_inputs_alone(self.node_of(flag))
        if not is_known or self.run(bool, (flag,), {})[0]:
            return False
        self.__torch_function__(torch.Tensor.__bool__, (), (flag,))
        return True

    def _is_own_item(self, target: torch.Tensor, index: Any, value: Any) -> bool:
        """Returns whether a value is the item that it is written to: the second half of `mask[0] |= flag`."""
        node = self.registry.node(value) if isinstance(value, torch.Tensor) and type(index) is int else None
        return node is not None and node.target == "__getitem__" and node.args == self.node_argument((target, index))

    def _attribute(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        attribute = func.__self__.__name__
        if name == "__set__" and attribute == "requires_grad" and args[1] and self.knows(args[0]):
            self._record(torch.Tensor.requires_grad_, args[:1], {})
            return None
        if name == "__set__" and attribute == "_backward_hooks" and args[1] is None:
            return func(*args)  # called by C++ for tensors that an autograd.Function has written to
        if name == "__set__" and attribute == "data" and args[1] is args[0]:
            return None  # `module.to(x.dtype)` that changes nothing
        if name == "__set__" and attribute == "data" and _is_frozen(args[0]) and args[0].shape == args[1].shape:
            with torch.no_grad():
                value = self._record(torch.Tensor.detach, args[1:], {})
                return self._record(torch.Tensor.copy_, (args[0], value), {})
        if name == "__set__":
            remedy = "use a function that gives a new tensor"
            raise self.refuse(f"sets the attribute `.{attribute}` of a tensor", remedy, whole=self.knows(args[0]))
        if attribute == "shape":
            return self.sizes.of(args[0], "size")
        if attribute == "nbytes" and args[0].layout == torch.strided:
            return math.prod(self.sizes.of(args[0], "size")) * args[0].element_size()
        value = func(*args)
        if attribute in _INPUT_ATTRIBUTES:
            self.sizes.ask_about(args[0], func, attribute)
        self.asks_for_gradients |= attribute in functions.GRADIENT_ATTRIBUTES
        if attribute == "grad" and value is not None:
            raise self.refuse("reads a gradient", "read gradients outside forward", whole=False)
        if attribute == "grad_fn" and value is not None:
            raise self._refuse_hook(NODE_PROBLEM, NODE_REMEDY)
        if attribute in functions.TENSOR_ATTRIBUTES and value is not None:
            self.keep(value, self.add("call_function", getattr, (self.node_of(args[0]), attribute)))
        return value

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _error(self, what: str, remedy: str, whole: bool = True) -> CannotRecord:
        where = f" in module {self.module!r}" if self.module else ""
        path = next((r.path for r in reversed(self.stack) if not r.in_transform), "")
        modules = frozenset({path}) if whole and path else frozenset[str]()
        calls = {self.module: calls_before_effects(self.graph, self.module, self.calls[self.module])}
        return CannotRecord(f"the model{where} {what} at {self.source}; {remedy}", modules, not whole, calls=calls)

    def refuse(self, what: str, remedy: str, whole: bool = True) -> CannotRecord:
        """Returns the error to raise and keeps it, in case forward catches it. `whole`: an opaque module would help."""
        error = self._error(what, remedy, whole)
        self.refusal = self.refusal or error
        return error

    def note_error(self, path: str, error: BaseException) -> None:
        """Records the innermost module that raised."""
        if self.module_of_error is None:
            self.module_of_error = path
        if self.error_of_recording is None and not isinstance(error, FxpipeError):
            self.error_of_recording = self._error(
                f"raises {type(error).__name__} ({error}) when it is recorded, though not when it runs,",
                "make tensors with functions of torch (torch.zeros; not torch.FloatTensor(x.size()))",
            )

    def refuse_use(self, message: str) -> CannotRecord:
        """Returns the error to raise for a use of a counter, and keeps it, in case forward catches it."""
        self.refusal = self.refusal or CannotRecord(message)
        return self.refusal

    def refusal_of_write(self, parameter: torch.Tensor, name: str | None) -> tuple[str, str, bool]:
        """Returns the refusal of a write to a parameter. If it is frozen, another recording takes it as a buffer."""
        if _is_frozen(parameter):
            model_state.allow_writes(self.model)
            self.writes_frozen = True
        return (
            f"writes to the parameter {name!r}",
            "keep what forward changes in a buffer (register_buffer), or in a parameter without a gradient "
            "(requires_grad_(False)), or change the parameter outside forward (by calling the model once in this "
            "mode, where only the first call does)",
            False,
        )

    def _refuse_hook(self, what: str, remedy: str) -> CannotRecord:
        error = self.refuse(what, remedy)
        error.calls.clear()  # do not continue forward: its lines would run in several nodes, with parts of the gradient
        error.is_final = error.modules <= self.whole.keys()
        return error

    def _refuse_unrecordable(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asks = name == "requires_grad_" and (*args[1:], *kwargs.values(), True)[0] and not args[0].requires_grad
        in_transform = is_in_functorch_transform()  # it calls requires_grad_ internally
        is_models = asks and not self.knows(args[0]) and (self.names.own(args[0]) or self.names.other(args[0]))
        if is_models and not in_transform:
            raise self.refuse("starts to ask for gradients in forward", "do so before the model is called", False)
        if torch.get_default_dtype() != self._default_dtype:
            remedy = "do so outside forward, or pass dtype= to the functions"
            raise self.refuse("changes the default dtype", remedy, whole=False)
        refusal = refusal_of_call(func, name, args, kwargs)
        written = [t for t in tensors_in(tuple(written_arguments(func, args, kwargs))) if t.layout == torch.strided]
        for address in map(storage_address, written):
            if refusal is None and (parameter := self._parameters.get(address)):
                refusal = self.refusal_of_write(self.model.get_parameter(parameter), parameter)
        if refusal is not None:
            if name in TENSOR_HOOKS:
                raise self._refuse_hook(refusal[0], refusal[1] + OPAQUE_REMEDY)
            raise self.refuse(*refusal)


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad
