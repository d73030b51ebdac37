"""Runs graphs from other tracers under the recorder.

`torch.export` and symbolic tracing create different kinds of graphs: with modules, with `aten` operators, with sizes as
symbols. Instead of translating each, fxpipe runs the graph once on the example inputs and records it: functions only,
the model's tensors by identity, sizes followed, random nodes detected. The nodes keep source lines and module paths.

A graph does not show what it has lost. So hooks on modules are refused, the model is observed while it runs
(`verify.imported_graph_check`), and gradients are compared: export and symbolic tracing ignore the backward of an
`autograd.Function`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpipe._torch.functions import opname
from fxpipe._torch.functorch import PREDISPATCH_MODULE
from fxpipe._torch.module_internals import GUARDS_MODULE
from fxpipe._torch.operators import HigherOrderOperator
from fxpipe.errors import TraceError
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.interpreter import NodeValues
from fxpipe.tracing.model_state import container_tensors, equal_tensors, slots_of
from fxpipe.tracing.record.module_hooks import user_hooks_of
from fxpipe.tracing.record.record_model import input_leaves, record
from fxpipe.tracing.record.recorder import Recorder
from fxpipe.tracing.source_lines import UNKNOWN_LINE, line_in_stack
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.imported_graph_check import check_imported_graph, observe_model

# Pure checks: the pipeline has its own checks of sizes.
_ASSERTIONS = frozenset(
    "_assert _assert_is_none _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async "
    "sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range "
    "_functional_sym_constrain_range_for_size".split()
)
# Computations of plain numbers, skipped if only checks use them, since comparing a size counts as reading it.
_SCALAR_FUNCTIONS = frozenset(
    "sym_size sym_stride sym_numel sym_storage_offset sym_max sym_min sym_not sym_float sym_int sym_ite eq ne lt le gt "
    "ge and_ or_ add sub mul floordiv mod truediv neg pow".split()
)


def record_imported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[..., Any],
    held: Mapping[str, torch.Tensor],
    tracer: str,
) -> Traced:
    """Records `run` (recorder, *args, **kwargs) instead of the model.

    Args:
        held: tensors that `run` uses and the model does not have.
        tracer: the name of the tracer, for messages.

    Raises:
        TraceError: the graph has lost something that the model does, or a graph cannot represent it.
    """
    refuse_module_hooks(model)
    held = _tensors_not_of_model(model, held)
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    try:
        traced = record(model, args, kwargs, run=run, held=held)
        for name, tensor in held.items():
            if not equal_tensors(tensor, before[name]):
                raise TraceError(
                    f"the graph that {tracer!r} made changes the tensor {name!r}, which is no buffer of the model; "
                    "register it (register_buffer)"
                )
    except TraceError:
        raise
    except Exception as error:
        observe_model(model, *input_leaves(model, args, kwargs))  # raises the model's own error
        raise TraceError(
            f"the graph that {tracer!r} made raises, and the model does not: {type(error).__name__}: {error}; forward "
            "may decide by what was another thing while it was traced; leave it to recording (tracer='record')"
        ) from error
    finally:
        for name, tensor in held.items():
            if not equal_tensors(tensor, before[name]):
                with torch.no_grad():
                    tensor.copy_(before[name])
    if is_faked():
        raise TraceError(
            f"the graph that {tracer!r} made cannot be compared with the model: it or its inputs have no values (meta "
            "or fake); leave it to recording (tracer='record'), or trace it with values"
        )
    traced = replace(traced, tracer=tracer, is_recorded=False, recording_options=None)
    return check_imported_graph(traced, input_leaves(model, args, kwargs)[2])


def refuse_module_hooks(model: nn.Module) -> None:
    """Raises `TraceError` if a module has hooks, which would run only once, while the graph is created."""
    for path, module in model.named_modules():
        hooks = user_hooks_of(module) if path else []  # hooks of the model itself run in the pipe
        if hooks:
            raise TraceError(
                f"module {path!r} ({type(module).__name__}) has the hook {hooks[0]!r}, which would not run in the "
                "pipeline; remove it before fxpipe.pipeline (hook.remove()), or move what it does into forward"
            )


def _tensors_not_of_model(model: nn.Module, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of `held` that are not the model's, under new names if the model uses the name."""
    known = [*slots_of(model).values(), *container_tensors(model).values()]
    names = {slot.name for slot in slots_of(model)} | set(container_tensors(model))
    others: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        if not any(tensor is other for other in (*known, *others.values())):
            free = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
            others[next(n for n in free if n not in names and n not in others)] = tensor
    return others


def run_imported_graph(recorder: Recorder, graph: fx.Graph, values: NodeValues, named: Callable[[str], Any]) -> Any:
    """Runs `graph` node by node under `recorder`; `named` returns the targets of `get_attr` and `call_module`."""
    paths = {path for path, _ in recorder.model.named_modules()}
    for node in graph.nodes:
        if getattr(node.target, "__module__", None) == PREDISPATCH_MODULE:
            line = (node_origin(node, paths) or ("", UNKNOWN_LINE))[1]
            raise TraceError(f"forward uses a transform of torch.func (vmap, grad) at {line}; write the function out")
    needed = _needed_nodes(graph)
    before = recorder.origin
    try:
        for node in graph.nodes:
            if node.op == "output":
                return _with_values(node.args[0], values)
            if node.op == "placeholder" or node not in needed:
                continue
            # A called module of the user records its own origin.
            recorder.origin = None if node.op == "call_module" else node_origin(node, paths) or before
            values[node] = _run_node(recorder, node, values, named)
    finally:
        recorder.origin = before
    raise TraceError("the graph has no output")


def attribute_getter(module: nn.Module) -> Callable[[str], Any]:
    return lambda name: operator.attrgetter(name)(module)


def _run_node(recorder: Recorder, node: fx.Node, values: NodeValues, named: Callable[[str], Any]) -> Any:
    if node.op == "get_attr":
        return named(str(node.target))
    args, kwargs = _with_values(node.args, values), _with_values(node.kwargs, values)
    if node.op == "call_module":
        return named(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if isinstance(node.target, HigherOrderOperator):
        return _run_block(recorder, node.target, args, kwargs)
    function: Any = _PUBLIC.get(node.target, node.target)
    return function(*args, **kwargs)


def _run_block(recorder: Recorder, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a part of the graph in another thread state."""
    block: contextlib.AbstractContextManager[object]
    if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        block, inner, operands = torch.set_grad_enabled(args[0]), args[1], args[2:]
    elif target is torch.ops.higher_order.wrap_with_autocast:
        device, dtype, enabled, cache = args[:4]
        block, inner, operands = torch.autocast(device, dtype, enabled, cache), args[4], args[5:]
    else:
        raise TraceError(
            f"the graph has a block of the kind {target.__name__!r} (at {(recorder.origin or ('', 'unknown'))[1]}), "
            "which cannot be cut; keep decisions in tensors (torch.where, masks), and loops in Python"
        )
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    with block:
        return run_imported_graph(
            recorder, inner.graph, dict(zip(placeholders, operands, strict=True)), attribute_getter(inner)
        )


def _with_values(value: Any, values: NodeValues) -> Any:
    """Replaces nodes in arguments; fx's immutable containers become plain ones."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, tuple):
        items = [_with_values(item, values) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_with_values(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _with_values(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_with_values(item, values) for item in (value.start, value.stop, value.step)))
    return value


def _needed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes, except checks and numbers that only checks use."""
    needed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        name = opname(node.target)
        is_check = name in _ASSERTIONS or (node.op == "call_module" and str(node.target).endswith(GUARDS_MODULE))
        is_number = (
            name in _SCALAR_FUNCTIONS
            and node.op == "call_function"
            and not isinstance(node.meta.get("val"), torch.Tensor)
        )
        if not is_check and not (is_number and node.users and not needed.intersection(node.users)):
            needed.add(node)
    return needed


def node_origin(node: fx.Node, paths: set[str]) -> tuple[str, str] | None:
    """Returns the module path and source line stored in a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = next((entry[0] for entry in reversed(stack) if entry[0] in paths), "")
    line = line_in_stack(node.meta.get("stack_trace") or "")
    return (path, line or UNKNOWN_LINE) if stack or line else None


# -- functions that later passes recognize ---------------------------------------------------------------------------


_aten = torch.ops.aten
_PUBLIC: dict[Any, Callable[..., Any]] = {
    _aten.sym_size.int: torch.Tensor.size,
    _aten.sym_stride.int: torch.Tensor.stride,
    _aten.sym_numel.default: torch.numel,
    # The last argument switches cuDNN on.
    _aten.batch_norm.default: lambda x, weight, bias, mean, var, *rest: F.batch_norm(
        x, mean, var, weight, bias, *rest[:-1]
    ),
    _aten.instance_norm.default: lambda x, weight, bias, mean, var, *rest: F.instance_norm(
        x, mean, var, weight, bias, *rest[:-1]
    ),
    _aten.dropout.default: F.dropout,
    _aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
}
