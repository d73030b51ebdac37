"""Graphs that a function of the user creates from the model: by symbolic tracing, `torch.export`, ...

Instead of translating each kind of graph, fxpipe runs the graph once on the example inputs and records it: functions
only, the model's tensors by identity, sizes followed, random nodes detected. The nodes keep source lines and paths.

A graph does not show what it has lost: hooks, the `backward` of the model, Python's random numbers, tensors outside the
model that require grad. So hooks on modules are refused, the model is observed while it runs, and gradients and state
are compared (`verify.equivalence`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd_functions import PREDISPATCH_MODULE
from fxpipe._torch.functions import opname, takes_input_leaves
from fxpipe._torch.module_internals import GUARDS_MODULE, original_module
from fxpipe._torch.operators import HigherOrderOperator
from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing import model_state
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.forward_rng import OwnGenerators, generator_states, same_generator_states
from fxpipe.tracing.interpreter import copy_as_leaf, writable_copy
from fxpipe.tracing.record.module_hooks import run_model, user_hooks_of
from fxpipe.tracing.record.patches import PATCH_TURN
from fxpipe.tracing.record.record_model import changed_container_error, changed_input_item, input_leaves, record
from fxpipe.tracing.record.recorder import NODE_PROBLEM, NODE_REMEDY, Recorder, is_grad_fn_access
from fxpipe.tracing.record.unrecordable import OPAQUE_REMEDY, CannotRecord, lost_by_import, python_rng_error
from fxpipe.tracing.source_lines import UNKNOWN_LINE, line_in_stack, user_line
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import InputLeaf, Traced
from fxpipe.tracing.verify.effects import observe_run
from fxpipe.utils.accelerator import comparison_seed
from fxpipe.utils.pytree import flatten_output, preserve_objects
from fxpipe.utils.units import with_article

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


def trace_by_function(
    model: nn.Module, function: Callable[[nn.Module], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced:
    """Imports the graph that `function(model)` returns, a `torch.fx.GraphModule` with the model's own parameters.

    Raises `ArgumentTypeError` if it returns something else, `ArgumentError` if the graph has parameters or buffers that
    are not the model's, `TraceError` if it has lost something that the model does, or no graph can represent it.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    with PATCH_TURN, model_state.preserve_state(model), model_state.without_gradients(model):
        module = function(model)
    if isinstance(module, ExportedProgram):
        module = module.module()
    if not isinstance(module, fx.GraphModule):
        raise ArgumentTypeError(
            f"tracer={name} gives {with_article(module)}; expected a torch.fx.GraphModule of the model"
        )
    held = _extra_tensors(model, module, name)
    for path, part in model.named_modules():
        hooks = user_hooks_of(part) if path else []  # hooks of the model itself run in the pipe
        if hooks:
            raise TraceError(
                f"module {path!r} ({type(part).__name__}) has the hook {hooks[0]!r}, which would not run in the "
                "pipeline; remove it before fxpipe.pipeline (hook.remove()), or move what it does into forward"
            )
    before = {key: tensor.detach().clone() for key, tensor in held.items()}
    try:
        traced = record(model, args, kwargs, run=functools.partial(_run_graph, model, module, name), held=held)
    except TraceError:
        raise
    except Exception as error:
        _observe_model(model, *input_leaves(model, args, kwargs))  # raises the model's own error
        raise TraceError(
            f"the graph that {name!r} made raises, and the model does not: {type(error).__name__}: {error}; forward "
            "may decide by what was another thing while it was traced; leave it to recording (tracer='record')"
        ) from error
    finally:
        changed = [key for key, tensor in held.items() if not model_state.equal_tensors(tensor, before[key])]
        with torch.no_grad():
            for key in changed:
                held[key].copy_(before[key])
    if changed:
        raise TraceError(
            f"the graph that {name!r} made changes the tensor {changed[0]!r}, which is no buffer of the model; "
            "register it (register_buffer)"
        )
    if is_faked():
        raise TraceError(
            f"the graph that {name!r} made cannot be compared with the model: it or its inputs have no values (meta "
            "or fake); leave it to recording (tracer='record'), or trace it with values"
        )
    # Export may have decided by the batch size, which its graph does not show.
    is_for_one = takes_input_leaves(module.graph)
    traced = replace(traced, tracer=name, is_recorded=False, recording_options=None, is_for_one_size=is_for_one)
    return _check_imported(traced, input_leaves(model, args, kwargs)[2])


def _extra_tensors(model: nn.Module, module: fx.GraphModule, tracer: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of the user's graph that are not the model's, each once, under names that the model lacks."""
    names, own = model_state.tensors_of(model), {slot.name for slot in model_state.slots_of(model)}
    known, held = set(map(id, names.values())), dict[str, torch.Tensor]()
    for slot, tensor in model_state.slots_of(module).items():
        if id(tensor) in known:
            continue
        if isinstance(tensor, nn.Parameter) or slot.name in own:
            raise ArgumentError(
                f"the graph that tracer={tracer} gives has a {slot.name!r} of its own; trace the model itself, not a "
                "copy, so that the graph holds the model's parameters and buffers"
            )
        known.add(id(tensor))
        free = itertools.chain([slot.name], (f"{slot.name}_{number}" for number in itertools.count(1)))
        held[next(name for name in free if name not in names and name not in held)] = tensor
    return held


class _GraphRun(fx.Interpreter):
    """Runs a graph of the user's under the recorder, node by node, except checks."""

    def __init__(self, recorder: Recorder, module: nn.Module):
        super().__init__(module)
        self.extra_traceback = False
        self.recorder, self.outer_origin = recorder, recorder.origin
        self.paths = {path for path, _ in recorder.model.named_modules()}
        self.needed = _needed_nodes(self.graph)
        for node in self.graph.nodes:
            if getattr(node.target, "__module__", None) == PREDISPATCH_MODULE:
                _, line = _node_origin(node, self.paths) or ("", UNKNOWN_LINE)
                what = "forward uses a transform of torch.func (vmap, grad)"
                raise TraceError(f"{what} at {line}; write the function out")

    def run_on(self, values: Sequence[Any]) -> Any:
        env = dict(zip(self.graph.find_nodes(op="placeholder"), values, strict=True))
        try:
            return self.run(initial_env=env, enable_io_processing=False)
        finally:
            self.recorder.origin = self.outer_origin

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "output" and n not in self.needed:
            return None
        # A called module of the user records its own origin.
        self.recorder.origin = None if n.op == "call_module" else _node_origin(n, self.paths) or self.outer_origin
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(_PUBLIC.get(target, target), args, kwargs)
        # A part of the graph in another thread state.
        block: contextlib.AbstractContextManager[object]
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            block, inner, operands = torch.set_grad_enabled(args[0]), args[1], args[2:]
        elif target is torch.ops.higher_order.wrap_with_autocast:
            device, dtype, enabled, cache = args[:4]
            block, inner, operands = torch.autocast(device, dtype, enabled, cache), args[4], args[5:]
        else:
            _, line = self.recorder.origin or ("", UNKNOWN_LINE)
            raise TraceError(
                f"the graph has a block of the kind {target.__name__!r} (at {line}), which cannot be cut; keep "
                "decisions in tensors (torch.where, masks), and loops in Python"
            )
        with block:
            return _GraphRun(self.recorder, inner).run_on(operands)


def _run_graph(
    model: nn.Module, module: fx.GraphModule, tracer: str, recorder: Recorder, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs a graph instead of the model. Its placeholders are all leaves of the inputs, or arguments of forward."""
    placeholders, leaves = module.graph.find_nodes(op="placeholder"), pytree.tree_leaves((args, kwargs))
    if takes_input_leaves(module.graph) and len(leaves) == len(placeholders):
        return module.graph.process_outputs(_GraphRun(recorder, module).run_on(leaves))
    try:
        bound = inspect.signature(original_module(model).forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward: {error}") from None
    bound.apply_defaults()
    values = []
    for node in placeholders:
        name = str(node.target).lstrip("*")
        if name not in bound.arguments and not node.args:
            names = ", ".join(bound.signature.parameters)
            raise TraceError(f"the graph that {tracer} gives has an input {node.target!r}; forward takes {names}")
        values.append(bound.arguments[name] if name in bound.arguments else node.args[0])
    return _GraphRun(recorder, module).run_on(values)


def _needed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes, except checks and numbers that only checks use."""
    needed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        name, is_tensor = opname(node.target), isinstance(node.meta.get("val"), torch.Tensor)
        is_check = name in _ASSERTIONS or (node.op == "call_module" and str(node.target).endswith(GUARDS_MODULE))
        is_number = name in _SCALAR_FUNCTIONS and node.op == "call_function" and not is_tensor
        if not is_check and not (is_number and node.users and not needed.intersection(node.users)):
            needed.add(node)
    return needed


def _node_origin(node: fx.Node, paths: set[str]) -> tuple[str, str] | None:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = next((entry[0] for entry in reversed(stack) if entry[0] in paths), "")
    line = line_in_stack(node.meta.get("stack_trace") or "")
    return (path, line or UNKNOWN_LINE) if stack or line else None


_aten = torch.ops.aten
_PUBLIC: dict[Any, Callable[..., Any]] = {
    _aten.sym_size.int: torch.Tensor.size,
    _aten.sym_stride.int: torch.Tensor.stride,
    _aten.sym_numel.default: torch.numel,
    # The last argument switches cuDNN on.
    _aten.batch_norm.default: lambda x, w, b, mean, var, *rest: F.batch_norm(x, mean, var, w, b, *rest[:-1]),
    _aten.instance_norm.default: lambda x, w, b, mean, var, *rest: F.instance_norm(x, mean, var, w, b, *rest[:-1]),
    _aten.dropout.default: F.dropout,
    _aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
}


class _LossDetector(TorchFunctionMode):
    """Records the first call of a function that imported graphs lose. `known`: tensors of the model and its inputs."""

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.error: CannotRecord | None = None
        self._known = {id(tensor): tensor for tensor in known}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        loss = lost_by_import(func, opname(func), args, keywords)
        if any(t.requires_grad and t.is_leaf and id(t) not in self._known for t in tensors_in((args, keywords))):
            other = "uses a tensor that requires grad and is not the model's", "make it an nn.Parameter of the model"
            loss = loss or other
        if loss is not None:
            self.note(f"the model {loss[0]} at {user_line()}; {loss[1]}")
        result = func(*args, **keywords)
        if result is not None and is_grad_fn_access(func, opname(func)):
            self.note(f"the model {NODE_PROBLEM} at {user_line()}; {NODE_REMEDY}{OPAQUE_REMEDY}")
        return result

    def note(self, text: str) -> None:
        self.error = self.error or CannotRecord(text, is_final=True)


def _observe_model(
    model: nn.Module,
    leaves: Sequence[InputLeaf],
    spec: pytree.TreeSpec,
    values: Sequence[Any],
    read: Collection[str] = (),
    seed: int = 0,
) -> tuple[Any, list[Any]]:
    """Runs the model on flattened inputs; returns its output, and the states of torch's random generators after it.

    Raises `CannotRecord` if only a recording, or no graph, is the model. `read`: names of tensors that the graph reads.
    """
    inputs = list(map(copy_as_leaf, values))  # their `grad` shows whether backward reached them
    copies = list(map(writable_copy, inputs))
    args, kwargs = pytree.tree_unflatten(copies, spec)
    with model_state.preserve_state(model) as snapshot, preserve_objects(spec):
        torch.manual_seed(seed)
        before, own_generators = model_state.python_rng_state(), OwnGenerators(model)
        witness = _LossDetector([*model_state.tensors_of(model).values(), *inputs])
        with model_state.without_gradients(model):
            with witness:
                result = run_model(model, args, kwargs)
            tensors = [*model.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
            if any(tensor.grad is not None for tensor in tensors):
                witness.note(
                    "forward runs backward, which puts gradients into the model's parameters or inputs; do so outside "
                    "forward"
                )
        if witness.error is not None:
            raise witness.error
        if not model_state.same_python_rng_state(before, model_state.python_rng_state()):
            raise python_rng_error()
        own_generators.refuse_drawn()
        if changed := changed_input_item(model, (args, kwargs), leaves, copies, spec):
            raise changed_container_error(changed)
        generators = generator_states()
        snapshot.assigned(read)
    snapshot.refuse_changes()
    return result, generators


def _check_imported(traced: Traced, values: Sequence[Any]) -> Traced:
    """Returns the graph with the structure of the model's output. Raises `TraceError` if the graph is not the model."""
    seed, read = comparison_seed(), {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    result, generators = _observe_model(traced.model, traced.leaves, traced.in_spec, values, read, seed)
    spec = pytree.tree_structure(result)
    if spec != traced.out_spec:
        spec = flatten_output(result, lambda value: isinstance(value, torch.Tensor))[1]
    if spec.num_leaves != traced.out_spec.num_leaves:
        raise TraceError(
            f"the graph that {traced.tracer!r} made returns {traced.out_spec.num_leaves} values and the model "
            f"{spec.num_leaves}; leave it to recording (tracer='record')"
        )
    with model_state.preserve_rng():
        torch.manual_seed(seed)
        observe_run(traced, values)
        of_graph = generator_states()
    if not same_generator_states(generators, of_graph):
        raise TraceError(
            f"forward draws random numbers that the graph which {traced.tracer!r} made does not draw: what was made of "
            "them, or decided by them, would be the same in every step; leave it to recording (tracer='record')"
        )
    return replace(traced, out_spec=spec)  # fx returns plain dicts for all kinds of dicts
