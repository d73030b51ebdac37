"""`NodeInfo`: what fxpipe stores about a node of a graph, in `node.meta["fxpipe"]`.

It is frozen, so that torch.fx may copy it with the node; a pass replaces it:

    info(node).module                       # the path of the module that ran
    update_info(node, rng=RandomDraws())    # the node draws random numbers
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.functions import opname
from fxpipe.errors import InternalError
from fxpipe.utils.accelerator import accelerator_type

if TYPE_CHECKING:
    from fxpipe._torch.thread_state import ThreadState
    from fxpipe.tracing.dynamic_sizes import Lengths

T = TypeVar("T")

KEY = "fxpipe"  # in `node.meta`
_RUNNING = ("input", "weight", "bias", "running_mean", "running_var")
_MADE_IN_C: dict[Any, tuple[str, ...]] = {  # without a signature
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    torch.batch_norm: (*_RUNNING, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: (*_RUNNING, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}
# Functions that create a tensor, on the default device if no device is given.
_FACTORIES = frozenset(
    "arange as_tensor asarray bartlett_window blackman_window empty empty_strided eye fft_fftfreq fft_rfftfreq full "
    "hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor "
    "tensor tril_indices triu_indices zeros".split()
)


@dataclass(frozen=True, slots=True)
class RecordingPlace:
    """The position of forward at which a node was recorded."""

    calls: int = 0  # calls of other modules by the node's module, so far
    cut_marks: int = 0  # cut marks (`fxpipe.cut()`) so far
    ended_modules: int = 0  # modules that have returned


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """The random numbers that a node draws."""

    is_scalar: bool = False  # one number that forward may read, from the stream of the step (`forward_rng`)
    from_python: bool = False  # also from Python's or numpy's generators


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A read of a tensor's value, or of a size that depends on values; the node repeats it."""

    value: Any  # the value in the recording
    text: str  # the function that read it, as in messages: `item`, `bool`
    is_size: bool = False
    is_check: bool = False  # another value raises, and has no other effect
    is_compared_in_stage: bool = False  # no guard can read it: the node stays in the graph, followed by a comparison


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """Python that a node runs unchanged: a module or a method kept whole, a forward after some call, a hook, a leaf."""

    constants: Mapping[int, Any]  # arguments that are not values of the graph, by index among the leaves
    arguments: pytree.TreeSpec  # the structure of (args, kwargs)
    module: str | None = None  # the path of the module; None: a function
    method: str = "forward"  # the method of the module that is kept whole
    why: str = ""  # the reason why the module is kept whole
    calls_before: tuple[str, ...] | None = None  # calls before a graph break; None: all of forward runs here
    recorded_calls: int = 0  # the number of these calls before any opaque part of this forward
    is_hook: bool = False  # a hook of a module
    seeds_generator: bool = False  # draws random numbers, but restores torch's generator (`fork_rng`)

    @property
    def path(self) -> str:
        """The path of the module or method that is kept whole; "" for a function."""
        path = self.module or ""
        return path if self.method == "forward" else f"{path}.{self.method}".removeprefix(".")


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a node, with sizes in the batch size `b`."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> sympy.Expr:
        return sympy.Mul(*self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The facts about a node."""

    source: str = ""  # the user's line: `/home/me/unet.py:31`
    module: str = ""  # the path of the module that ran; "": the model itself
    state: ThreadState | None = None  # the thread state in which the node runs; None: the node is not an operation
    recorded_at: RecordingPlace = RecordingPlace()
    storages: frozenset[int] = frozenset()  # memory of the tensors in the value, during recording
    written_storages: frozenset[int] = frozenset()  # memory that the call wrote to
    rng: RandomDraws | None = None  # None: draws no random numbers
    read: ValueRead | None = None  # None: forward has not read the value
    opaque: OpaqueCall | None = None  # None: a function of torch
    recorded_rank: int | None = None  # rank of an input of the model
    recorded_size: int | None = None  # recorded value of a size or stride
    known_shapes: tuple[TensorShape, ...] | None = None  # shapes of the tensors in the value; None: not yet known
    number: sympy.Expr | None = None  # the value as a formula in the batch size; None: not computed from sizes
    # With dynamic sizes as symbols, which are numbers in `known_shapes` and `number`; None: there are none.
    dynamic_shapes: tuple[TensorShape, ...] | None = None
    dynamic_number: sympy.Expr | None = None
    is_float_number: bool = False
    is_data_dependent: bool = False  # do its number or sizes depend on values of tensors?
    attribute: str = ""  # for an input of a stage: its parameter or buffer

    @property
    def shapes(self) -> tuple[TensorShape, ...]:
        """The shapes of the tensors in the value, as far as they are known."""
        return self.known_shapes or ()

    @property
    def full_shapes(self) -> tuple[TensorShape, ...]:
        """The shapes with dynamic sizes as symbols; `shapes` contains the recorded sizes."""
        return self.dynamic_shapes or self.shapes

    @property
    def opaque_module(self) -> str | None:
        """The path of the module that is kept whole, or continues as Python, in this node; None: neither."""
        return None if self.opaque is None else self.opaque.module

    @property
    def is_graph_break(self) -> bool:
        """Returns whether the forward of a module continues here as Python, after recorded calls."""
        return self.opaque is not None and self.opaque.calls_before is not None

    def beside(self, **changes: Any) -> NodeInfo:
        """Returns the info of a node that a pass adds next to this node: the same origin, state and position."""
        added = NodeInfo(source=self.source, module=self.module, state=self.state, recorded_at=self.recorded_at)
        return replace(added, **changes)

    @property
    def is_random(self) -> bool:
        return self.rng is not None

    @property
    def is_scalar_draw(self) -> bool:
        return self.rng is not None and self.rng.is_scalar

    @property
    def is_hook(self) -> bool:
        return self.opaque is not None and self.opaque.is_hook

    @property
    def is_guarded_read(self) -> bool:
        """Returns whether forward reads the value, and a guard checks it."""
        return self.read is not None and not self.read.is_compared_in_stage

    @property
    def is_compared_read(self) -> bool:
        """Returns whether forward reads the value, and its stage compares it."""
        return self.read is not None and self.read.is_compared_in_stage


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    known: NodeInfo = node.meta.get(KEY, _NOTHING)
    return known


def set_info(node: fx.Node, known: NodeInfo) -> None:
    node.meta[KEY] = known


# `dataclasses.replace` takes twice as long, and the recorder replaces fields of every node.
_SETTERS = {field.name: getattr(NodeInfo, field.name).__set__ for field in fields(NodeInfo)}


def update_info(node: fx.Node, **changes: Any) -> None:
    known, changed = info(node), object.__new__(NodeInfo)
    for name, set_field in _SETTERS.items():
        set_field(changed, changes.pop(name) if name in changes else getattr(known, name))
    if changes:
        raise TypeError(f"NodeInfo has no field {next(iter(changes))!r}")
    node.meta[KEY] = changed


# Required facts: an error if a node has none.


def state_of(node: fx.Node) -> ThreadState:
    return _required(node, info(node).state, "state of the thread")


def number_of(node: fx.Node) -> sympy.Expr:
    return _required(node, info(node).number, "number")


def constant_of(node: fx.Node, number: sympy.Expr) -> int | float:
    return float(number) if info(node).is_float_number else int(number)


def value_read_of(node: fx.Node) -> ValueRead:
    return _required(node, info(node).read, "value that forward has read")


def opaque_call_of(node: fx.Node) -> OpaqueCall:
    return _required(node, info(node).opaque, "opaque call")


def _required(node: fx.Node, value: T | None, what: str) -> T:
    if value is None:
        raise InternalError(f"the node {node.name} has no {what}")
    return value


def named_arguments(node: fx.Node) -> dict[str, Any]:
    return dict(zip(parameter_names(node.target), node.args, strict=False)) | dict(node.kwargs)


@functools.lru_cache(maxsize=256)
def parameter_names(function: Any) -> tuple[str, ...]:
    return _MADE_IN_C.get(function) or tuple(inspect.signature(function).parameters)


def container_of(node: fx.Node) -> fx.Node | None:
    """Returns the node from whose value this node takes an item (`values[1]`); None for other nodes."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else None


def dependencies_of(node: fx.Node) -> dict[fx.Node, None]:
    """Collects the nodes from which a node is computed, itself included. Numbers of sizes of inputs have no sources."""
    dependencies: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        node = todo.pop()
        if node not in dependencies:
            dependencies[node] = None
            if info(node).number is None or info(node).is_float_number or info(node).is_data_dependent:
                todo.extend(node.all_input_nodes)
    return dependencies


def set_node_device(node: fx.Node, device: torch.device) -> None:
    node.target, node.args, node.kwargs = call_on_device(node, device)


def call_on_device(node: fx.Node, device: torch.device) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns target and arguments of a node with each device replaced; a factory without one gets it."""

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(replaced, value))
        return value

    target, args = node.target, tuple(map(replaced, node.args))
    kwargs = {key: replaced(value) for key, value in node.kwargs.items()}
    if kwargs.get("device") is not None:  # a name ("cuda:0") or the number of a GPU
        kwargs["device"] = device
    if node.op == "call_method":
        if target in ("cpu", accelerator_type()):
            return "to", (args[0], device), {}
        if target == "to" and len(args) > 1 and isinstance(args[1], (str, int)):
            args = (args[0], device, *args[2:])
    elif kwargs.get("device") is None and device.type != "cpu":
        is_of_torch = str(getattr(target, "__module__", None) or "torch").startswith("torch")
        if is_of_torch and opname(target) in _FACTORIES:
            kwargs["device"] = device
    return target, args, kwargs


@functools.lru_cache(maxsize=4096)
def bytes_formula(shapes: tuple[TensorShape, ...]) -> sympy.Expr:
    return sympy.Add(*(shape.bytes for shape in shapes))


@functools.lru_cache(maxsize=4096)
def bytes_at(formula: sympy.Expr, batch: sympy.Symbol, samples: int, lengths: Lengths = ()) -> int:
    """Computes the bytes for these sizes, at least 0. Data-dependent sizes count as 0."""
    number = formula.xreplace({batch: sympy.Integer(samples), **{s: sympy.Integer(size) for s, size in lengths}})
    return max(0, int(number.subs(dict.fromkeys(number.free_symbols, 0))))
