"""`NodeInfo`: what fxpipe knows of a node of a graph besides what torch.fx says, kept in `node.meta["fxpipe"]`.

It is frozen, so that torch.fx may copy it with the node; a pass that learns more replaces it:

    info(node).module                       # the path of the module that ran
    update_info(node, rng=RandomDraws())    # the node draws random numbers

The recorder writes where a node comes from and what it touches, the symbolic run its shapes, later passes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import sympy
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe.errors import InternalError

if TYPE_CHECKING:
    from fxpipe._torch.thread_state import ThreadState
    from fxpipe.tracing.shapes.tensor_shape import TensorShape

T = TypeVar("T")

KEY = "fxpipe"  # in `node.meta`


@dataclass(frozen=True, slots=True)
class RecordingPlace:
    """The point that forward had come to when a node was recorded."""

    calls: int = 0  # calls of other modules that the node's module had made
    cut_marks: int = 0  # cut marks (`fxpipe.cut()`) that forward had passed
    ended_modules: int = 0  # modules that had returned


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """A node draws random numbers."""

    is_scalar: bool = False  # one number that forward may read: taken from the stream of the step (`forward_rng`)
    from_python: bool = False  # also Python's or numpy's numbers
    ordinal: int | None = None  # the number of the node among random ones, where these were put into another order


@dataclass(frozen=True, slots=True)
class ValueRead:
    """Forward has read the value of a tensor, or a size that depends on such; the node reads it again."""

    value: Any  # what it read
    text: str  # the function that read it, as messages call it: `item`, `bool`
    is_size: bool = False
    is_validation: bool = False  # of arguments: another value raises, and nothing else is made of it
    is_compared_in_stage: bool = False  # no guard can ask: the node stays in the graph, followed by a comparison


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """A node runs Python as it is: a module kept whole, a forward from some call on, a hook, a leaf function."""

    constants: Mapping[int, Any]  # by place among the leaves of its arguments: those that are no matter of a graph
    arguments: pytree.TreeSpec  # the structure of (args, kwargs)
    module: str | None = None  # the path of the module that is kept whole; None: a function
    why: str = ""  # the module is kept whole
    calls_before: tuple[str, ...] | None = None  # after which forward goes on here; None: all of forward is here
    recorded_calls: int = 0  # of these calls: those that are made before any opaque part of this forward
    is_hook: bool = False  # of a module
    host_places: frozenset[int] = frozenset()  # of those leaves: tensors that stay on the CPU
    seeds_generator: bool = False  # it draws random numbers and leaves torch's generator as it was (`fork_rng`)

    @property
    def path(self) -> str:
        """The path of the module that is kept whole; of a function: of the model itself."""
        return self.module or ""


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """The places in the graph of the model at which a value of a stage is computed, and its memory last changes."""

    place: int  # -1: an input, a parameter, a buffer
    last_write: int  # the last node that writes to memory of the value; -1: none


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The facts that fxpipe knows of a node."""

    source: str = ""  # the user's line: `/home/me/unet.py:31`
    module: str = ""  # the path of the module that ran; "": the model itself
    state: ThreadState | None = None  # of the thread, in which the node runs; None: the node does no work
    recorded_at: RecordingPlace = RecordingPlace()
    storages: frozenset[int] = frozenset()  # memory that the tensors in the value lay in when it was recorded
    written_storages: frozenset[int] = frozenset()  # memory that the call was seen to write to
    rng: RandomDraws | None = None  # None: it draws no random numbers
    read: ValueRead | None = None  # None: forward has not read the value
    opaque: OpaqueCall | None = None  # None: a function of torch
    recorded_rank: int | None = None  # of an input of the model
    recorded_size: int | None = None  # of a size or stride of a tensor: what it was
    known_shapes: tuple[TensorShape, ...] | None = None  # of the tensors in the value; None: not found yet
    number: sympy.Expr | None = None  # the value as a formula in the batch size; None: it is not computed of sizes
    # The same in the dynamic sizes as well, which shapes and number have as in the recording; None: there are none.
    dynamic_shapes: tuple[TensorShape, ...] | None = None
    dynamic_number: sympy.Expr | None = None
    is_float_number: bool = False  # is the number a float?
    is_data_dependent: bool = False  # do its number or sizes depend on values of tensors?
    attribute: str = ""  # of an input of a stage: the parameter or buffer that it is
    writes: WriteOrder | None = None  # of a node of a stage

    @property
    def shapes(self) -> tuple[TensorShape, ...]:
        """The shapes of the tensors in the value, as far as they are known."""
        return self.known_shapes or ()

    @property
    def full_shapes(self) -> tuple[TensorShape, ...]:
        """The shapes with dynamic sizes as symbols, which are those of the recording in `shapes`."""
        return self.dynamic_shapes or self.shapes

    @property
    def opaque_module(self) -> str | None:
        """The path of the module that is kept whole here, or goes on as Python; None: neither."""
        return None if self.opaque is None else self.opaque.module

    @property
    def is_graph_break(self) -> bool:
        """Returns whether a forward goes on here as Python, behind calls that are recorded."""
        return self.opaque is not None and self.opaque.calls_before is not None

    def beside(self, **changes: Any) -> NodeInfo:
        """Of a node that a pass adds beside this one: its line, module, state and place, and nothing else of it."""
        added = NodeInfo(source=self.source, module=self.module, state=self.state, recorded_at=self.recorded_at)
        return replace(added, **changes)

    @property
    def is_random(self) -> bool:
        """Returns whether it draws random numbers."""
        return self.rng is not None

    @property
    def is_scalar_draw(self) -> bool:
        return self.rng is not None and self.rng.is_scalar

    @property
    def is_hook(self) -> bool:
        return self.opaque is not None and self.opaque.is_hook

    @property
    def is_guarded_read(self) -> bool:
        """Returns whether forward has read the value, and a guard answers for it."""
        return self.read is not None and not self.read.is_compared_in_stage

    @property
    def is_compared_read(self) -> bool:
        """Returns whether forward has read the value, and the stage compares it."""
        return self.read is not None and self.read.is_compared_in_stage


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    """Returns what fxpipe knows of a node."""
    known: NodeInfo = node.meta.get(KEY, _NOTHING)
    return known


def set_info(node: fx.Node, known: NodeInfo) -> None:
    node.meta[KEY] = known


def update_info(node: fx.Node, **changes: Any) -> None:
    """Replaces these fields."""
    node.meta[KEY] = _replace(info(node), changes)


# `dataclasses.replace` takes four times as long, and the recorder replaces a field or two of each node.
_SETTERS = {field.name: getattr(NodeInfo, field.name).__set__ for field in fields(NodeInfo)}


def _replace(known: NodeInfo, changes: dict[str, Any]) -> NodeInfo:
    changed = object.__new__(NodeInfo)
    for name, set_field in _SETTERS.items():
        set_field(changed, changes.pop(name) if name in changes else getattr(known, name))
    if changes:
        raise TypeError(f"NodeInfo has no field {next(iter(changes))!r}")
    return changed


# What a pass knows a node to have, where others have none.


def state_of(node: fx.Node) -> ThreadState:
    """The state of the thread in which a working node runs."""
    return _required(node, info(node).state, "state of the thread")


def number_of(node: fx.Node) -> sympy.Expr:
    """The formula of a size."""
    return _required(node, info(node).number, "number")


def size_formula(node: fx.Node) -> sympy.Expr:
    """The formula of a size, in the batch size and the dynamic sizes."""
    known = info(node)
    return number_of(node) if known.dynamic_number is None else known.dynamic_number


def constant_of(node: fx.Node, number: sympy.Expr) -> int | float:
    """The value of a size whose formula, or what has become of it for some sizes, is this number."""
    return float(number) if info(node).is_float_number else int(number)


def value_read_of(node: fx.Node) -> ValueRead:
    """The value that forward has read, of a node that reads it again."""
    return _required(node, info(node).read, "value that forward has read")


def opaque_call_of(node: fx.Node) -> OpaqueCall:
    """The call of a node that runs Python as it is."""
    return _required(node, info(node).opaque, "opaque call")


def random_draws_of(node: fx.Node) -> RandomDraws:
    """The draws of a random node."""
    return _required(node, info(node).rng, "draws of random numbers")


def _required(node: fx.Node, value: T | None, what: str) -> T:
    if value is None:
        raise InternalError(f"the node {node.name} has no {what}")
    return value
