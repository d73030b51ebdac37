"""Runs the graph once on fake tensors whose batch dimensions and dynamic dimensions are symbols.

Each such dimension starts with a separate symbol (`duck_shape=False`). Operations unify symbols that meet; meeting a
fixed size turns a symbol into a number. Without the Python dispatcher `F.pad` and `F.interpolate` would turn the batch
size into a constant.

Shapes that fake tensors cannot show are observed in real runs (`observed_shapes`). Equal calls run once (`NodeCache`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.error_messages import allocator_error
from fxpipe._torch.fake_tensor_mode import FakeTensor, FakeTensorMode, first_expression
from fxpipe._torch.shape_env import LocalSource, QuietShapeEnv, enable_python_dispatcher
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.errors import TraceError
from fxpipe.tracing.dynamic_sizes import TOO_LONG, FixedSizeError, InputDim, SizeCondition
from fxpipe.tracing.interpreter import run_node_without_grad
from fxpipe.tracing.model_state import preserve_rng
from fxpipe.tracing.node_info import info, named_arguments, opaque_call_of, state_of, value_read_of
from fxpipe.tracing.record.recorded_sizes import LayoutRead
from fxpipe.tracing.record.unrecordable import CannotRecord, calls_before_effects
from fxpipe.tracing.shapes.observed_shapes import Observation, fake_value, fit_lengths, given_sizes, observe_shapes
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor
from fxpipe.utils.batch_split import rows_per_sample, samples_along
from fxpipe.utils.progress import progress

PATIENCE = 20.0  # seconds of CPU time for formulas of dynamic sizes
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def run_on_symbols(
    traced: Traced,
    values: Sequence[Any],
    asked: Sequence[int | None],
    sure: bool,
    single: bool,
    dynamic: Collection[InputDim],
) -> SymbolicRun:
    """Runs `traced`, recorded on `values`. Raises `FixedSizeError` or `TraceError` if shapes cannot be determined.

    Args:
        asked: for each input leaf the dimension that may hold the batch.
        sure: the user gave the dimensions, and all are candidates. Otherwise only dimensions of size 1 are (if
            `single`), or only dimensions of other sizes.
        dynamic: dimensions besides the batch whose sizes are symbols, too.
    """
    dims = {
        place: dim
        for place, dim in enumerate(asked)
        if dim is not None and (sure or single == (samples_along(values[place], dim) == 1))
    }
    is_shared, known = True, _Knowledge(traced)
    while True:
        try:
            run = SymbolicRun(traced, values, dims, dynamic, known, NodeCache() if is_shared else None)
            run.run()
            return run
        except ChangedInPlaceError:
            is_shared = False
        except _RetryError as retry:
            retry.observe()


@dataclass
class _Knowledge:
    """Facts that an attempt passes to later attempts."""

    traced: Traced
    unknown_nodes: dict[fx.Node, Exception] = field(default_factory=dict)  # to fake tensors, with the error
    # They read a number from a value, so that sizes of their results may depend on values (`t[:n]`).
    value_dependent_nodes: set[fx.Node] = field(default_factory=set)
    baked: set[fx.Node] = field(default_factory=set)  # functions that fix the batch size
    fixing: dict[fx.Node, None] = field(default_factory=dict)  # nodes that hold for the example's batch size only
    observed: list[Observation] = field(default_factory=list)
    lengths: dict[fx.Node, Any] = field(default_factory=dict)  # formulas for the results of nodes in dynamic sizes

    def __post_init__(self) -> None:
        self.inputs = {n: frozenset([place]) for place, n in self.traced.placeholders.items()}  # indices of leaves
        for n in self.traced.graph.nodes:
            self.inputs.setdefault(n, frozenset().union(*(self.inputs[a] for a in n.all_input_nodes)))

    def distrust(self, node: fx.Node, why: Exception) -> None:
        """Marks a node, and all calls of the same user function, as unknown to fake tensors."""
        same = function_key(node.target)
        for other in self.traced.graph.nodes if _is_user_function(node) else ():
            if other.op == node.op and function_key(other.target) == same:
                self.unknown_nodes.setdefault(other, why)
        self.unknown_nodes[node] = why


class _RetryError(Exception):
    """Attempt again: a failed call left guards, or after `observe`, which runs nodes unknown to fake tensors."""

    def __init__(self, observe: Callable[[], None] = lambda: None):
        super().__init__()
        self.observe = observe


class _BakesSizeError(Exception):
    """A function took a size as a number, as `max_pool1d`, a GRU or a user's Python do. A real run may show more."""


@dataclass
class SymbolicRun:
    """A run of the graph on symbols, and its results."""

    traced: Traced
    values: Sequence[Any]
    dims: dict[int, int]
    asked_dynamic: Collection[InputDim]
    known: _Knowledge
    cache: NodeCache | None
    node_values: dict[fx.Node, Any] = field(default_factory=dict)  # equal values are one object
    inputs: dict[int, Any] = field(default_factory=dict)  # index of an input leaf -> the size of its batch dimension
    symbols: dict[int, sympy.Symbol] = field(default_factory=dict)  # index -> the symbol of its batch dimension
    dynamic: dict[InputDim, sympy.Symbol] = field(default_factory=dict)
    fixed_by: dict[sympy.Symbol, fx.Node] = field(default_factory=dict)  # the node that gave a symbol a fixed size
    guards: list[SizeCondition] = field(default_factory=list)  # in torch's symbols
    layouts: list[tuple[LayoutRead, Any]] = field(default_factory=list)  # with the answers of fake tensors
    observed_dims: set[InputDim] = field(default_factory=set)  # affect nodes whose shapes were only observed
    start: float = field(default_factory=time.thread_time)

    def __post_init__(self) -> None:
        self.env = QuietShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # torch never removes symbols from it, and `cache` does the same
        is_stride_read = any(node.target == "stride" for node in self.traced.graph.nodes)
        self.is_layout_asked = bool(self.traced.layout_reads) or is_stride_read

    @property
    def batch_symbols(self) -> set[sympy.Symbol]:
        """The symbols of batch sizes that no node has fixed."""
        return {s for symbol in self.symbols.values() for s in self.env.replace(symbol).free_symbols}

    def run(self) -> None:
        self._make_inputs()
        nodes = self.traced.graph.nodes
        with (
            progress("shapes", len(nodes)) as step,
            preserve_rng(),
            torch.no_grad(),
            self.mode,
            enable_python_dispatcher(),
        ):
            for node in nodes:
                if self.dynamic and time.thread_time() - self.start > PATIENCE:  # windows of patches of patches
                    where = info(node).source or "an input"
                    raise FixedSizeError(f"{TOO_LONG} ({PATIENCE:.0f} s up to {where})", frozenset(self.dynamic))
                if node.op == "get_attr":
                    self.node_values[node] = self._attribute(attribute_tensor(self.traced, node))
                elif info(node).is_compared_read:
                    self.node_values[node] = value_read_of(node).value
                elif node.op in CALL_OPS and not info(node).is_guarded_read:
                    self.node_values[node] = self._call(node)
                step()
            self.layouts += [(read, self._layout_answer(read)) for read in self.traced.layout_reads]

    def _make_inputs(self) -> None:
        for place, node in self.traced.placeholders.items():
            value, dim = self.values[place].detach(), self.dims.get(place)
            rows = rows_per_sample(dim)
            if dim is not None and rows > 1:
                value = value.narrow(dim, 0, samples_along(value, dim)).contiguous()
            if dim is not None and value.shape[dim] == 1:  # torch specializes sizes 0 and 1: use three samples instead
                value = torch.cat([value] * 3, dim)
            wanted = [d for d in range(value.dim()) if (place, d) in self.asked_dynamic and d != dim]
            free = {d for d in wanted if value.shape[d] > 1}  # torch specializes 0 and 1
            is_symbol = [d == dim or d in free for d in range(value.dim())]
            dynamic = [DimDynamic.DYNAMIC if is_one else DimDynamic.STATIC for is_one in is_symbol]
            context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
            fake: Any = self.mode.from_tensor(value, source=LocalSource(node.name), symbolic_context=context)
            self.node_values[node] = fake
            self.dynamic |= {(place, d): fake.shape[d].node.expr for d in sorted(free)}
            if dim is not None:
                self.inputs[place], self.symbols[place] = fake.shape[dim], fake.shape[dim].node.expr
            if rows > 1:
                sizes = [size * rows if d == dim else size for d, size in enumerate(fake.shape)]
                self.node_values[node] = fake.new_empty(sizes)

    def _attribute(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            tensor = tensor.as_subclass(torch.Tensor)  # fake tensors of subclasses are not supported
        known: dict[Hashable, Any] = {} if self.cache is None else self.cache.values
        key: Hashable = object()  # equal to no other: a tensor of a special kind
        if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            sizes = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            key = tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), sizes
        if key not in known:
            known[key] = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        return known[key]

    def _call(self, node: fx.Node) -> Any:
        if info(node).opaque is not None and not node.users:
            return None  # it may refuse other sizes: `assert K % len(keys) == 0`
        if node in self.known.unknown_nodes or info(node).opaque is not None:
            return self._seen(node)
        if node.target in ("view", "reshape", torch.reshape):
            self._set_inferred_size(node)
        if self.cache is None:
            return self._fake(node)
        key = self.cache.key(node, self.node_values)
        value = self.cache.values.get(key)
        if value is None:
            value = self._fake(node)
            self.cache.keep(node, key, value, self.node_values)
        return value

    def _fake(self, node: fx.Node) -> Any:
        before = len(self.env.replacements), len(self.env.guards)
        try:
            value = self._run(node)
        except Exception as error:
            self.known.distrust(node, error)
            if isinstance(error, GuardOnDataDependentSymNode):
                self.known.value_dependent_nodes.add(node)
            if before != (len(self.env.replacements), len(self.env.guards)):
                raise _RetryError from error
            return self._seen(node)
        self._keep_guards(before[1], info(node).source, is_of_torch=True)
        fixed = self._note_fixed(node) if len(self.env.replacements) != before[0] else []
        # A function of one tensor meets no size of another: torch may compute with numbers (`fill_diagonal_`).
        may_bake = _is_user_function(node) or len(node.all_input_nodes) == 1
        may_bake |= not {*self.dynamic.values()}.isdisjoint(fixed)
        if fixed and may_bake and node not in self.known.baked:
            self.known.distrust(node, _BakesSizeError())
            raise _RetryError
        if not {*self.symbols.values()}.isdisjoint(fixed) and self._may_fix(node):
            self.known.fixing[node] = None
            self.known.unknown_nodes[node] = _BakesSizeError()
            raise _RetryError
        return value

    def _may_fix(self, node: fx.Node) -> bool:
        return self.traced.is_for_one_size and node not in self.known.fixing

    def _run(self, node: fx.Node) -> Any:
        is_asked = self.is_layout_asked and node.target is not F.linear  # attention is stored as its kernel stores it
        is_cast = any(autocast.enabled for autocast in state_of(node).autocast)
        if node.target in _PRODUCTS and not (is_asked or is_cast):
            sizes = product_sizes(node.target, *fx.map_arg((node.args, node.kwargs), self.node_values.__getitem__))
            if sizes is not None:
                source: Any = self.node_values[node.all_input_nodes[0]]
                return source.new_empty(sizes)
        if node.target is not F.interpolate:
            return run_node_without_grad(node, self.node_values)
        arguments = {**fx.map_arg(named_arguments(node), self.node_values.__getitem__)}
        if any(isinstance(scale, torch.SymFloat) for scale in pytree.tree_leaves(arguments.get("scale_factor"))):
            arguments["recompute_scale_factor"] = True  # same sizes, in Python: C++ does not accept symbolic scales
        with set_thread_state(state_of(node)), torch.no_grad():
            return F.interpolate(**arguments)

    def _set_inferred_size(self, node: fx.Node) -> None:
        """Replaces -1 in a view of selected rows: torch infers no size if there are no rows (`x[mask].view(n, -1)`)."""
        value, *sizes = pytree.tree_map_only(fx.Node, self.node_values.get, [*pytree.tree_leaves(node.args)])
        plain = [size for size in sizes if type(size) is int]
        if -1 in plain and isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
            inferred = value.numel() // -math.prod(sizes)
            size = self._formula(inferred) if isinstance(inferred, torch.SymInt) else sympy.Integer(inferred)
            if size.is_number:
                node.args = pytree.tree_map(lambda one: int(size) if one == -1 else one, node.args)

    def _keep_guards(self, start: int, where: str, is_of_torch: bool) -> None:
        self.guards += [SizeCondition(guard.expr, where, is_of_torch) for guard in self.env.guards[start:]]

    def _layout_answer(self, read: LayoutRead) -> Any:
        """Evaluates the question on the fake tensor, if any. Earlier conclusions of torch may enter the answer."""
        fake = self.node_values.get(read.tensor)
        if not isinstance(fake, torch.Tensor):
            return None
        start, answer = len(self.env.guards), read.question(fake)
        self._keep_guards(start, read.where, is_of_torch=False)
        sizes = (*fake.shape, *fake.stride())
        symbols = {s for size in sizes if isinstance(size, torch.SymInt) for s in self._formula(size).free_symbols}
        self.guards = [
            replace(guard, is_of_torch=guard.is_of_torch and symbols.isdisjoint(guard.condition.free_symbols))
            for guard in self.guards
        ]
        return answer

    def _note_fixed(self, node: fx.Node) -> list[sympy.Symbol]:
        fixed = [s for s, v in self.env.replacements.items() if v.is_number and s not in self.fixed_by]
        self.fixed_by.update(dict.fromkeys(fixed, node))
        return fixed

    def _seen(self, node: fx.Node) -> Any:
        """Returns the result of a node as observed in real runs. Raises `FixedSizeError` if it depends on values."""
        groups = [] if self.known.fixing else self._groups(node)
        candidates = {place for group in groups for place in group}
        # Each of the candidates was varied, or found to be fixed.
        known = (o for o in self.known.observed if node in o.node_values and candidates <= {*o.varied, *o.fixed})
        if (observation := next(known, None)) is None:
            is_asked = isinstance(self.known.unknown_nodes.get(node), GuardOnDataDependentSymNode)  # `t[:n]`
            is_of_values = is_asked or self._is_of_values(node)  # does a size depend on the values of tensors?
            raise _RetryError(functools.partial(self._observe, node, groups, is_of_values))
        for place in observation.fixed & candidates:
            int(self.inputs[place])  # fixes the symbol
        self._note_fixed(node)
        dims = self._dynamic_dims_given(node)
        if not dims:
            varied = [place for place in observation.varied if self.known.fixing or place in candidates]
            return fake_value(observation.node_values[node], self.inputs[varied[0]] if varied else 0)
        if node in self.known.value_dependent_nodes or self._is_of_values(node):
            raise FixedSizeError(f"the sizes of {node.name} ({info(node).source}) depend on values", dims)
        if node not in self.known.lengths:
            by_size: dict[sympy.Expr, list[InputDim]] = {}
            for key, symbol in self.dynamic.items():
                if (size := self.env.replace(symbol)).free_symbols:
                    by_size.setdefault(size, []).append(key)
            observe = functools.partial(self._observe_lengths, node, observation, [*by_size.values()])
            raise _RetryError(observe)
        self.observed_dims |= dims
        return fake_value(self.known.lengths[node], given_sizes(node, self.node_values))

    def _observe(self, node: fx.Node, groups: list[list[int]], is_of_values: bool) -> None:
        """Observes a node with other numbers of samples. `groups`: inputs whose samples may vary, by symbol."""
        try:
            self.known.observed.append(observe_shapes(self.traced, self.values, self.dims, groups, node))
        except TraceError as error:
            if self._may_fix(node):
                self.known.fixing[node] = None
                return
            why = self.known.unknown_nodes.pop(node, None)
            if isinstance(why, _BakesSizeError):
                self.known.baked.add(node)
                return
            # The first line of torch's message: the advice after it is for users of `torch.compile`.
            first = f"{type(why).__name__}: {next(iter(str(why).splitlines()), '')}".strip(": ")
            told = f"with fake tensors: {first}; " if why else ""
            text = (
                f"the shape of {node.name} ({info(node).module or 'the model'}, made at {info(node).source}) cannot be "
                f"told for other batch sizes: {told}{error}. Let it take sizes from its inputs (x.shape[0]) and make "
                "the same for each sample, or take it out of forward"
            )
            cause = allocator_error(error) or why  # with more memory it may succeed
            if info(node).is_graph_break:  # it may succeed in one piece
                raise CannotRecord(text, frozenset({opaque_call_of(node).path} - {""})) from cause
            if not is_of_values:
                raise TraceError(text) from cause
            path = info(node).module
            calls = {path: calls_before_effects(self.traced.graph, path, info(node).recorded_at.calls)}
            raise CannotRecord(text, frozenset({path} - {""}), calls=calls) from cause

    def _observe_lengths(self, node: fx.Node, observation: Observation, groups: list[list[InputDim]]) -> None:
        """Observes a node at other dynamic sizes. `groups`: dynamic dimensions, by size. Raises `FixedSizeError`."""
        try:
            formulas = fit_lengths(self.traced, self.values, self.dims, observation, groups, node)
            self.known.lengths[node] = formulas
        except TraceError as error:
            if isinstance(self.known.unknown_nodes.get(node), _BakesSizeError) and not _is_user_function(node):
                del self.known.unknown_nodes[node]
                self.known.baked.add(node)
                return
            raise FixedSizeError(
                f"torch cannot tell what {node.name} ({info(node).source}) makes of other sizes, where nothing but a "
                f"run shows it; {error}",
                frozenset(key for group in groups for key in group),
            ) from error

    def _dynamic_dims_given(self, node: fx.Node) -> frozenset[InputDim]:
        """Returns the dynamic dimensions whose sizes the inputs of a node depend on."""
        symbols = {s: key for key, symbol in self.dynamic.items() for s in self.env.replace(symbol).free_symbols}
        numbers = [self.node_values.get(source) for source in node.all_input_nodes]
        symbolic = [number for number in numbers if isinstance(number, (torch.SymInt, torch.SymFloat))]
        sizes = [*self._sizes_given(node), *map(self._formula, symbolic)]
        return frozenset(symbols[s] for size in sizes for s in size.free_symbols & symbols.keys())

    def _sizes_given(self, node: fx.Node) -> list[sympy.Expr]:
        tensors = tensors_in([self.node_values.get(source) for source in node.all_input_nodes])
        shape: list[Any] = [size for tensor in tensors for size in tensor.shape]
        return [self._formula(size) for size in shape if isinstance(size, torch.SymInt)]

    def _formula(self, size: torch.SymInt | torch.SymFloat) -> sympy.Expr:
        return self.env.replace(size.node.expr)

    def _is_of_values(self, node: fx.Node) -> bool:
        symbols = (*self.symbols.values(), *self.dynamic.values())
        of_inputs = {s for symbol in symbols for s in self.env.replace(symbol).free_symbols}
        return any(size.free_symbols - of_inputs for size in self._sizes_given(node))

    def _groups(self, node: fx.Node) -> list[list[int]]:
        """Returns the inputs whose samples may vary for a node, grouped by symbol, and others of these symbols."""
        sizes = {place: self.env.replace(symbol) for place, symbol in self.symbols.items()}
        of_node = {sizes[place] for place in self.known.inputs[node] if place in sizes}
        groups: dict[Any, list[int]] = {}
        for place, size in sorted(sizes.items()):
            if size in of_node and size.free_symbols:
                groups.setdefault(size, []).append(place)
        return [*groups.values()]


def _is_user_function(node: fx.Node) -> bool:
    home = str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    return node.op == "call_function" and home not in ("torch", "_operator", "operator", "math", "builtins")


class ChangedInPlaceError(Exception):
    """A function has changed the sizes or strides of its argument, which may represent several values."""


class _Number(NamedTuple):
    of_value: int


_PRODUCTS = (F.linear, F.scaled_dot_product_attention)


def product_sizes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the sizes of `F.linear` and of attention, which take torch up to 40 ms to derive from symbols.

    None if torch has to check them: sizes that are not obviously equal, or are broadcast.
    """
    tensors, settings = [x for x in args if isinstance(x, torch.Tensor)], kwargs.keys()
    if len(tensors) < min(len(args), 3 if function is not F.linear else 2) or len({t.dtype for t in tensors}) > 1:
        return None
    of = [tuple(map(_value_key, t.shape)) for t in tensors]
    first = tensors[0]
    if function is F.linear:
        is_plain = len(of[0]) > 1 and len(of[1]) == 2 and type(first.shape[-1]) is int and not settings
        is_plain = is_plain and of[0][-1] == of[1][1] and all(bias == of[1][:1] for bias in of[2:])
        return (*first.shape[:-1], tensors[1].shape[0]) if is_plain else None
    mask = kwargs.get("attn_mask")
    if len(args) != 3 or kwargs.get("enable_gqa") or not (mask is None or isinstance(mask, torch.Tensor)):
        return None
    query, key, value = of
    wanted = (*query[:-1], key[-2])
    masked = wanted if mask is None else tuple(map(_value_key, mask.shape))
    pairs = zip(masked, wanted[-len(masked) :], strict=True) if len(masked) <= len(wanted) else ((0, 1),)
    is_plain = (
        len(query) >= 3 and query[:-2] == key[:-2] == value[:-2] and key[-2] == value[-2] and query[-1] == key[-1]
    )
    fits = all(one == other or one == _value_key(1) for one, other in pairs)
    return (*first.shape[:-1], tensors[2].shape[-1]) if is_plain and fits else None


class NodeCache:
    """A cache of calls with equal results: a call takes milliseconds, and models have many equal blocks.

    Each value gets a *number*, equal for values with equal metadata, and a known call returns the same object again.
    The graph runs without the cache if a function changes its argument (`unsqueeze_`, `resize_`). The cache refers to
    values by id, so all of them must outlive it.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self._numbers: dict[Hashable, int] = {}
        self._number_of: dict[int, int] = {}  # id of a value -> its number

    def number(self, value: Any) -> int:
        if id(value) not in self._number_of:
            self._number_of[id(value)] = self._numbers.setdefault(_value_key(value), len(self._numbers))
        return self._number_of[id(value)]

    def key(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Hashable:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Number(self.number(values[n])))
        return node.op, function_key(node.target), _value_key(arguments), state_of(node)

    def keep(self, node: fx.Node, key: Hashable, value: Any, values: Mapping[fx.Node, Any]) -> None:
        """Stores the result of a call. Raises `ChangedInPlaceError` if the call has changed its arguments as well."""
        arguments = [values[n] for n in node.all_input_nodes]
        if any(self._numbers.get(_value_key(a)) != self.number(a) for a in arguments):
            raise ChangedInPlaceError
        # A size that depends on values differs in each call.
        if not (unbacked_sizes(value) - unbacked_sizes(arguments)):
            self.values[key] = value


def function_key(target: Any) -> Hashable:
    """Returns a key of a function. Calls of one `autograd.Function` are closures with equal code and equal cells."""
    if isinstance(target, FunctionType) and target.__closure__:
        return target.__code__, tuple(id(cell.cell_contents) for cell in target.__closure__)
    return target  # type: ignore[no-any-return]


def _value_key(value: Any) -> Hashable:
    """Returns the metadata of a fake value, or a constant with its type (1, 1.0 and True are equal), or else the id."""
    if type(value) is FakeTensor and value.layout == torch.strided and value.constant is None:
        sizes = tuple(map(_value_key, (value.storage_offset(), *value.shape, *value.stride())))
        return FakeTensor, value.dtype, value.device, value.is_conj(), value.is_neg(), sizes
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return type(value), first_expression(value)  # stays the same when symbols are unified
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, dict):
        return dict, tuple((key, _value_key(item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, tuple(map(_value_key, (value.start, value.stop, value.step)))
    if type(value) in _PLAIN:
        return type(value), value
    return id(value)


def unbacked_sizes(value: Any) -> set[Any]:
    try:
        return set(free_unbacked_symbols(value))
    except AssertionError:  # a container of another kind
        return {id(value)}
