"""Tracing by `torch.fx`: symbolic tracing, a user's own `torch.fx.Tracer`, a user's function that gives a graph.

A symbolic trace needs no inputs, so that a graph can be shown without any. It goes into every module; one in which a
proxy does not do (it asks for sizes or values) stays whole, and is recorded on real values when the graph is run.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd_functions import Apply, FunctionClass, intercept_apply
from fxpipe._torch.fx_graphs import takes_input_leaves
from fxpipe._torch.module_internals import module_flags, original_module
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing.importers.graph_module import (
    attribute_getter,
    node_origin,
    raise_model_errors,
    record_imported,
    refuse_module_hooks,
    run_imported_graph,
)
from fxpipe.tracing.interpreter import NodeValues
from fxpipe.tracing.model_state import preserve_state, slots_of, without_gradients
from fxpipe.tracing.node_info import NodeInfo, set_info, update_info
from fxpipe.tracing.record.patches import PATCH_TURN
from fxpipe.tracing.record.recorder import Recorder
from fxpipe.tracing.record.unrecordable import refuse_model
from fxpipe.tracing.source_lines import line_of_error, user_line
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import InputLeaf, Traced, TracedGraph
from fxpipe.utils.python_state import PythonState
from fxpipe.utils.units import with_article


class _DeepTracer(fx.Tracer):
    """Goes into every module where proxies get through, and keeps the others whole."""

    proxy_buffer_attributes = True  # else what changes a buffer would run now, and not be in the graph

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:  # fx follows the modules of all threads
            return forward(*args, **kwargs)
        last, stack = next(iter(reversed(self.graph.nodes)), None), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.module_stack = stack
            for node in list(reversed(self.graph.nodes)):
                if node is last:
                    break
                if node.op != "get_attr":  # kept for those that read the parameter again
                    self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def trace_symbolically(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces `model` symbolically; the graph is recorded on the example inputs.

    Raises:
        TraceError: forward does what a proxy cannot do; the message names the user's line.
    """
    bound = _bind_to_forward(model, args, kwargs)
    # Else an argument that was left out would be a proxy, and `if mask is not None` true.
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    constants = {
        name: value
        for name, value in bound.arguments.items()
        if bound.signature.parameters[name].kind not in kinds and not any(True for _ in tensors_in(value))
    }
    return _record_symbolic(model, _DeepTracer(), args, kwargs, "fx", constants)


def _bind_to_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Binds arguments to the names of forward's, with the defaults of those that are left out."""
    try:
        bound = inspect.signature(original_module(model).forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward: {error}") from None
    bound.apply_defaults()
    return bound


def trace_by_tracer(
    model: nn.Module, tracer: fx.Tracer | type[fx.Tracer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced:
    """Traces `model` by a `torch.fx.Tracer` of the user's. What it keeps whole is recorded on real values."""
    instance = tracer() if isinstance(tracer, type) else tracer
    return _record_symbolic(model, instance, args, kwargs, type(instance).__name__)


def trace_by_function(
    model: nn.Module, function: Callable[[nn.Module], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced:
    """Takes the graph that `function(model)` gives, a `torch.fx.GraphModule` of the model's own parameters.

    Raises:
        ArgumentTypeError: it gives something else.
        ArgumentError: the graph has parameters that are not the model's.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    with PATCH_TURN, preserve_state(model), without_gradients(model):
        module = function(model)
    if isinstance(module, ExportedProgram):
        module = module.module()
    if not isinstance(module, fx.GraphModule):
        raise ArgumentTypeError(
            f"tracer={name} gives {with_article(module)}; expected a torch.fx.GraphModule of the model"
        )
    run = _GraphRunner(model, module.graph, attribute_getter(module), name)
    return record_imported(model, args, kwargs, run, _extra_tensors(model, module, name), name)


def symbolic_graph(model: nn.Module) -> Traced:
    """The symbolic graph of a model for which there are no inputs: to be printed, not to be run. Without shapes.

    Raises:
        TraceError: forward does what a proxy cannot do; the message names the user's line.
    """
    symbolic, _ = _symbolic_trace(model, _DeepTracer())
    graph = TracedGraph()
    copies: dict[fx.Node, fx.Node] = {}
    leaves: list[InputLeaf] = []
    paths = {path for path, _ in model.named_modules()}
    for node in symbolic.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            copy.name = f"in_{len(leaves)}"
            leaves.append(InputLeaf(True, str(node.target), str(node.target)))
        path, source = node_origin(node, paths) or ("", "")
        path = str(node.target) if node.op == "call_module" else path
        copy.meta.clear()
        set_info(copy, NodeInfo(source=source, module=path, state=ThreadState.now()))
    output = graph.output_node()
    result, out_spec = pytree.tree_flatten(output.args[0])
    output.args = ((tuple(result), {}),)
    _, in_spec = pytree.tree_flatten((tuple(leaf.head for leaf in leaves), {}))
    state = ThreadState.now()
    return Traced(
        model, graph, tuple(leaves), in_spec, out_spec, module_flags(model), state, {}, (), PythonState(), tracer="fx"
    )


def _record_symbolic(
    model: nn.Module,
    tracer: fx.Tracer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    constants: dict[str, Any] | None = None,
) -> Traced:
    refuse_model(model)
    refuse_module_hooks(model)
    try:
        graph, targets = _symbolic_trace(model, tracer, constants)
    except TraceError:
        raise_model_errors(model, args, kwargs)
        raise
    run = _GraphRunner(model, graph, targets.__getitem__, name)
    return record_imported(model, args, kwargs, run, _only_tensors(targets), name)


def _symbolic_trace(
    model: nn.Module, tracer: fx.Tracer, constants: dict[str, Any] | None = None
) -> tuple[fx.Graph, dict[str, Any]]:
    """The symbolic graph, and the tensors and modules that it speaks of: constants leave the model with the trace."""
    with PATCH_TURN, _functions_refuse_proxies(), _note_origins(tracer), preserve_state(model):
        try:
            graph = tracer.trace(model, constants) if constants else tracer.trace(model)
        except TraceError:
            raise
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise TraceError(
                f"symbolic tracing ({type(tracer).__name__}) does not take the model: {type(error).__name__}: {first} "
                f"(at {line_of_error(error)})"
            ) from error
        named = attribute_getter(model)
        targets = {str(n.target): named(str(n.target)) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    return graph, targets


@contextlib.contextmanager
def _note_origins(tracer: fx.Tracer) -> Iterator[None]:
    """A block in which every node notes where it comes from, and the state of the thread, which fx forgets."""
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        update_info(node, source=user_line(), state=ThreadState.now())
        return node

    own = vars(tracer)  # only this tracer, whatever its class
    before = own.get("create_node")
    own["create_node"] = create_node
    try:
        yield
    finally:
        del own["create_node"]
        if before is not None:
            own["create_node"] = before


def _functions_refuse_proxies() -> contextlib.AbstractContextManager[None]:
    """A block in which no `autograd.Function` is looked through: its backward would be lost."""

    def refuse(apply: Apply, function: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
            raise TraceError(f"symbolic tracing loses the backward of {function.__name__}, an autograd.Function")
        return apply(function, *args, **kwargs)

    return intercept_apply(refuse)


def _only_tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _extra_tensors(model: nn.Module, module: fx.GraphModule, name: str) -> dict[str, torch.Tensor]:
    """The tensors that a graph of the user's keeps besides the model's."""
    own = {slot.name: tensor for slot, tensor in slots_of(model).items()}
    known = {id(tensor) for tensor in own.values()}
    held = {slot.name: tensor for slot, tensor in slots_of(module).items() if id(tensor) not in known}
    for key, tensor in held.items():
        if isinstance(tensor, nn.Parameter) or key in own:
            raise ArgumentError(
                f"the graph that tracer={name} gives has a {key!r} of its own; trace the model itself, not a copy, so "
                "that the graph holds the model's parameters and buffers"
            )
    return held


class _GraphRunner:
    """A graph that runs in the model's place."""

    def __init__(self, model: nn.Module, graph: fx.Graph, named: Callable[[str], Any], tracer: str):
        self.model, self.graph, self.named, self.tracer = model, graph, named, tracer

    def __call__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        values: NodeValues = {}
        leaves = pytree.tree_leaves((args, kwargs))
        if takes_input_leaves(self.graph) and len(leaves) == len(placeholders):
            values.update(zip(placeholders, leaves, strict=True))  # a graph of export's: its inputs are leaves
            return self.graph.process_outputs(run_imported_graph(recorder, self.graph, values, self.named))
        for node, value in zip(placeholders, self._bound(placeholders, args, kwargs), strict=True):
            values[node] = value
        return run_imported_graph(recorder, self.graph, values, self.named)

    def _bound(self, placeholders: list[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        """A value for each placeholder, by the names of forward's arguments."""
        bound = _bind_to_forward(self.model, args, kwargs)
        kinds = bound.signature.parameters
        for node in placeholders:
            name = str(node.target)
            if name.startswith("*") and name.lstrip("*") in bound.arguments:
                yield bound.arguments[name.lstrip("*")]
            elif name in bound.arguments:
                yield bound.arguments[name]
            elif node.args:
                yield node.args[0]
            else:
                raise TraceError(
                    f"the graph that {self.tracer} gives has an input {name!r}; forward takes {', '.join(kinds)}"
                )
