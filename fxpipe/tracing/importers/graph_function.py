"""Imports graphs that a function of the user creates from the model: symbolic tracing, `torch.export`, ..."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.fx_graphs import takes_input_leaves
from fxpipe._torch.module_internals import original_module
from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing.importers.graph_module import attribute_getter, record_imported, run_imported_graph
from fxpipe.tracing.interpreter import NodeValues
from fxpipe.tracing.model_state import preserve_state, slots_of, without_gradients
from fxpipe.tracing.record.patches import PATCH_TURN
from fxpipe.tracing.record.recorder import Recorder
from fxpipe.tracing.shapes.input_dims import candidate_dims
from fxpipe.tracing.traced import SizeAssumption, Traced
from fxpipe.utils.units import with_article


def trace_by_function(
    model: nn.Module,
    function: Callable[[nn.Module], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_dims: Any = None,
) -> Traced:
    """Imports the graph that `function(model)` returns, a `torch.fx.GraphModule` with the model's own parameters.

    Raises:
        ArgumentTypeError: the function returns something else.
        ArgumentError: the graph has parameters or buffers that are not the model's.
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
    run = _GraphRunner(model, module, name)
    traced = record_imported(model, args, kwargs, run, _extra_tensors(model, module, name), name)
    return replace(traced, size_assumptions=_size_assumptions(module.graph, candidate_dims(traced.leaves, in_dims)))


def _size_assumptions(graph: fx.Graph, dims: Sequence[int | None]) -> tuple[SizeAssumption, ...]:
    """Returns the conditions on sizes that export relied on; `dims`: the batch dimension of each leaf, or None."""
    placeholders = graph.find_nodes(op="placeholder")
    if not takes_input_leaves(graph) or len(placeholders) != len(dims):
        return ()
    conditions: list[Any] = []
    place_of: dict[Any, int] = {}
    for place, (node, dim) in enumerate(zip(placeholders, dims, strict=True)):
        example = node.meta.get("val")  # set by export
        size = example.shape[dim] if dim is not None and isinstance(example, torch.Tensor) else None
        if isinstance(size, torch.SymInt):
            place_of |= {symbol: place for symbol in size.node.expr.free_symbols if symbol not in place_of}
            conditions += [guard.expr for guard in size.node.shape_env.guards]
        elif size is not None:
            fixed = sympy.Symbol(f"size_of_{place}", integer=True, positive=True)
            place_of[fixed] = place
            conditions.append(sympy.Eq(fixed, size))
    known = [condition for condition in dict.fromkeys(conditions) if condition.free_symbols <= place_of.keys()]
    return tuple((condition, {symbol: place_of[symbol] for symbol in condition.free_symbols}) for condition in known)


def _extra_tensors(model: nn.Module, module: fx.GraphModule, name: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of the user's graph that are not the model's."""
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
    """A graph that runs instead of the model."""

    def __init__(self, model: nn.Module, module: fx.GraphModule, tracer: str):
        self.model, self.graph, self.named, self.tracer = model, module.graph, attribute_getter(module), tracer

    def __call__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        values: NodeValues = {}
        leaves = pytree.tree_leaves((args, kwargs))
        if takes_input_leaves(self.graph) and len(leaves) == len(placeholders):
            values.update(zip(placeholders, leaves, strict=True))  # a graph of export, whose inputs are leaves
            return self.graph.process_outputs(run_imported_graph(recorder, self.graph, values, self.named))
        for node, value in zip(placeholders, self._bound(placeholders, args, kwargs), strict=True):
            values[node] = value
        return run_imported_graph(recorder, self.graph, values, self.named)

    def _bound(self, placeholders: list[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        """Yields a value for each placeholder, by the names of forward's arguments."""
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


def _bind_to_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    try:
        bound = inspect.signature(original_module(model).forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward: {error}") from None
    bound.apply_defaults()
    return bound
