"""Autograd graphs: gradients, leaves, entry nodes, and attributes of nodes.

Versions and views of tensors, hooks on leaves and input metadata of nodes are required, and unchanged from torch 2.11
to 2.14. Optional are direct calls of the engine (`torch.autograd.grad` is slower), the C++ classes of nodes (public
functions are slower), hooks of saved tensors, and the id of the backward run that calls a hook.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe._torch.modes import without_torch_function
from fxpipe._torch.versions import missing_name, optional_name, require_attributes, required_names
from fxpipe.errors import InternalError, StateError

require_attributes(torch.Tensor, "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")
with required_names():
    _get_tracing_state: Any = torch._C._get_tracing_state
require_attributes(forward_ad, "_current_level")

_engine: Any = optional_name("torch.autograd.variable", "Variable._execution_engine")
_AccumulateGrad: Any = optional_name("torch", "_C._functions.AccumulateGrad")
_PythonNode: Any = optional_name("torch", "_C._FunctionBase")
_current_graph_task_id: Any = optional_name("torch", "_C._current_graph_task_id")
_DelayedError: Any = optional_name("torch", "_C._functions.DelayedError")
# Functions that torch generates show all of their state as attributes, except strides of the input.
_SHOWN_CLASS = re.compile(r"(?!AsStrided)\w+Backward\d+")


def gradients_of(
    inputs: Sequence[Any], roots: Sequence[Any], gradients: Sequence[torch.Tensor], keep_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Computes gradients as `torch.autograd.grad`, for tensors and gradient edges; None for unused inputs.

    Calls the engine directly: torch's Python code around it takes longer than the backward of several small nodes
    (overrides, shape checks that the engine repeats, preparations for threads of the engine). Callers must have set
    `torch.autograd.set_multithreading_enabled(False)`.

    Not `.backward()`: AccumulateGrad would give each gradient the strides of its leaf, which changes the bits of the
    next kernel's result.
    """
    ends, starts = tuple(roots), tuple(inputs)
    if _engine is None:
        return torch.autograd.grad(ends, starts, tuple(gradients), retain_graph=keep_graph, allow_unused=True)
    results: tuple[torch.Tensor | None, ...] = _engine.run_backward(
        ends, tuple(gradients), keep_graph, False, starts, True, accumulate_grad=False
    )
    return results


def gradient_edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Returns `get_gradient_edge`, but faster. Raises `InternalError` if the gradient of a leaf would be lost."""
    node = tensor.grad_fn
    # A leaf; or a Python node, which does not own its graph; or Python nodes cannot be recognized.
    if node is None or _PythonNode is None or isinstance(node, _PythonNode):
        with without_torch_function():  # torch takes a view, for which the tensor's class would add a node
            edge = get_gradient_edge(tensor)
        if node is None and getattr(edge.node, "variable", None) is not tensor:
            raise InternalError(f"a {type(tensor).__name__} whose gradient would be lost: its edge is {edge.node}")
        return edge
    return GradientEdge(node, tensor.output_nr)


def takes_gradient(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor takes a gradient, unlike a view made under `no_grad` with its base's `requires_grad`."""
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    return not (tensor._base is not None and tensor._base.requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Returns the number of writes to a tensor and its views. Inference tensors have no version and raise."""
    return tensor._version


def has_gradient_hooks(leaf: Any) -> bool:
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def leaves_below(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the leaves that a tensor depends on. For a loss: the outputs, and parameters of the loss function."""
    leaves: list[torch.Tensor] = []
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") if _AccumulateGrad is None else type(node) is _AccumulateGrad:
            leaves.append(node.variable)
        else:
            todo += [below for below, _ in node.next_functions]
    return leaves


@contextmanager
def suspend_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which hooks on these tensors do not run: `autograd.grad` would run hooks that belong to the step."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves]
    try:
        for leaf, _ in hooks:
            leaf._backward_hooks = None
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own


KEPT_TENSOR = (
    "backward through a tensor that a forward hook, or a module kept whole, has kept. In a pipe it is of one "
    "micro-batch, or of planning, and its graph is the pipe's own, which goes back through it once. Let forward return "
    "the tensor, and take the loss of what the pipe returns; or keep it without its graph (tensor.detach())"
)
_ENTRY_MESSAGE = f"fxpipe: {KEPT_TENSOR}".encode()


class _GraphEntry(torch.autograd.Function):
    """A node whose outputs are its inputs, and whose backward raises; in Python."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StateError(KEPT_TENSOR)


def graph_entry(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the tensors as outputs of one node that saves nothing and whose backward raises. One requires grad.

    The node is torch's guard for functions that are differentiable only once; an `autograd.Function` is slower.
    """
    make: Any = _GraphEntry.apply if _DelayedError is None else _DelayedError(_ENTRY_MESSAGE, len(tensors))
    outputs: Sequence[torch.Tensor] = make(*tensors)
    return outputs


class _StageBackward(threading.local):
    """A block in which this thread runs the backward of a stage."""

    is_open = False

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *error: object) -> None:
        self.is_open = False


stage_backward = _StageBackward()


def refuse_other_backwards(tensors: Iterable[Any]) -> None:
    """Makes every backward through these tensors, except the backward of their stage, raise `StateError`."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(_check_backward)  # else copies of parameters would get gradients


def _check_backward(gradient: torch.Tensor) -> None:
    if not stage_backward.is_open:
        raise StateError(KEPT_TENSOR)


def output_shape(node: Any, number: int) -> torch.Size | None:
    """Returns the shape of an output of the function whose backward `node` is; None if it has no such output."""
    try:
        outputs = node._input_metadata  # the node's inputs are the gradients of these outputs
    except AttributeError as error:
        raise missing_name(str(error)) from error
    return outputs[number].shape if number < len(outputs) else None


def saved_reduction(node: Any) -> int | None:
    """Returns the `reduction` of a node's loss function as torch's number; None if it has no reduction."""
    _require_saved_reduction()
    reduction: int | None = getattr(node, "_saved_reduction", None)
    return reduction


def saved_total_weight(node: Any) -> torch.Tensor:
    """Returns the divisor of the mean of `nll_loss`, saved by its node."""
    weight: torch.Tensor = node._saved_total_weight
    return weight


@functools.cache
def _require_saved_reduction() -> None:
    """Checks a node class with a reduction. Other nodes lack the attribute, so a renaming would go unnoticed."""
    with required_names():
        functions: Any = torch._C._functions
        require_attributes(functions.NllLossBackward0, "_saved_reduction", "_saved_total_weight")


def saved_names(node: Any) -> list[str]:
    return [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]


class HiddenStateError(Exception):
    """A function of autograd's graph does not show all that its backward depends on."""


def backward_state(node: Any) -> list[Any]:
    """Returns all that the backward of a function of torch depends on. Raises `HiddenStateError` if unknown."""
    _require_saved_reduction()
    kind, metadata, names = type(node), getattr(node, "_input_metadata", None), saved_names(node)
    has_hooks = any(_has_hooks(getattr(node, f"_raw{name}", None)) for name in names)
    if metadata is None or has_hooks or not _SHOWN_CLASS.fullmatch(kind.__name__):
        raise HiddenStateError(kind.__name__)
    return [kind, [(one.shape, one.dtype, one.device) for one in metadata], *(getattr(node, name) for name in names)]


def _has_hooks(saved: Any) -> bool:
    """Returns whether reading saved tensors calls Python, which may recompute or forget them, or differ in backward."""
    if isinstance(saved, tuple):
        return any(map(_has_hooks, saved))
    return getattr(saved, "unpack_hook", saved) is not None


def forward_class_of(node: Any) -> type[torch.autograd.Function]:
    function: type[torch.autograd.Function] = type(node)._forward_cls
    return function


def backward_id() -> int:
    """Returns the id of the backward run that calls a hook; 0 if torch does not provide it."""
    return 0 if _current_graph_task_id is None else int(_current_graph_task_id())


def is_jit_tracing() -> bool:
    return _get_tracing_state() is not None


def is_in_forward_mode() -> bool:
    return forward_ad._current_level >= 0
