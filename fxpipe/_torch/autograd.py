"""Graphs of autograd: where they begin and end, and where there is no way back.

Versions and views of tensors, hooks on leaves and what nodes know of their inputs are required, and the same from torch
2.11 to 2.14. Optional are the engine called directly (`torch.autograd.grad` does the same in more time), the classes of
nodes in C (the public ways take longer), and which run of backward calls a hook.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe._torch.function_modes import without_torch_function
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


def gradients_of(
    inputs: Sequence[Any], roots: Sequence[Any], gradients: Sequence[torch.Tensor], keep_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` for tensors and gradient edges; None where no root depends on an input.

    What torch does in Python around its engine takes longer than to go back through several small nodes: it looks for
    classes that override the function, compares shapes, which the engine does as well, and prepares for threads of the
    engine's own, which there are none: whoever calls has set `torch.autograd.set_multithreading_enabled(False)`.

    And not `.backward()`: AccumulateGrad would give each gradient the strides of its leaf, and the next kernel other
    bits.
    """
    ends, starts = tuple(roots), tuple(inputs)
    if _engine is None:
        return torch.autograd.grad(ends, starts, tuple(gradients), retain_graph=keep_graph, allow_unused=True)
    results: tuple[torch.Tensor | None, ...] = _engine.run_backward(
        ends, tuple(gradients), keep_graph, False, starts, True, accumulate_grad=False
    )
    return results


def call_after_backward(function: Callable[[], None]) -> None:
    """Registers `function` for autograd to call when the backward that runs in this thread has ended well.

    Raises:
        TorchVersionError: torch has no engine that takes such calls.
    """
    if _engine is None or not hasattr(_engine, "queue_callback"):
        raise missing_name("Variable._execution_engine has no attribute 'queue_callback'")
    _engine.queue_callback(function)


def gradient_edge_of(tensor: torch.Tensor) -> GradientEdge:
    """`get_gradient_edge`, in a third of the time if a function of torch has made the tensor.

    Raises:
        InternalError: the edge of a leaf is not where its gradient arrives.
    """
    node = tensor.grad_fn
    # A leaf; or a node in Python, which owns no graph; or torch does not tell which nodes these are.
    if node is None or _PythonNode is None or isinstance(node, _PythonNode):
        with without_torch_function():  # torch takes a view, to which the class of the tensor would add a node
            edge = get_gradient_edge(tensor)
        if node is None and getattr(edge.node, "variable", None) is not tensor:
            raise InternalError(f"a {type(tensor).__name__} whose gradient would be lost: its edge is {edge.node}")
        return edge
    return GradientEdge(node, tensor.output_nr)


def takes_gradient(tensor: torch.Tensor) -> bool:
    """Returns True if a gradient goes in at a tensor. A view made without gradients has its base's requires_grad."""
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    return not (tensor._base is not None and tensor._base.requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that one is a view of, as autograd sees it."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor, or a view of its memory, was written to. Inference tensors have none and raise."""
    return tensor._version


def has_gradient_hooks(leaf: Any) -> bool:
    """Returns True if autograd calls somebody when it hands out the gradient of this leaf."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _is_leaf_node(node: Any) -> bool:
    return hasattr(node, "variable") if _AccumulateGrad is None else type(node) is _AccumulateGrad


def leaves_below(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a tensor depends on: of a loss, the outputs and whatever parameters its function uses."""
    leaves: list[torch.Tensor] = []
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_leaf_node(node):  # a leaf has one, and it leads no further
            leaves.append(node.variable)
        else:
            for below, _ in node.next_functions:
                todo.append(below)
    return leaves


@contextmanager
def suspend_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which hooks on these tensors do not run: they are of a step, and `autograd.grad` runs them."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves]
    try:
        for leaf, _ in hooks:
            leaf._backward_hooks = None
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own


# -- The first node of a graph ---------------------------------------------------------------------------------------

KEPT_TENSOR = (
    "backward through a tensor that a forward hook, or a module kept whole, has kept. In a pipe it is of one "
    "micro-batch, or of planning, and its graph is the pipe's own, which goes back through it once. Let forward return "
    "the tensor, and take the loss of what the pipe returns; or keep it without its graph (tensor.detach())"
)
_ENTRY_MESSAGE = f"fxpipe: {KEPT_TENSOR}".encode()


class _GraphEntry(torch.autograd.Function):
    """A node whose outputs are its inputs, and which no backward goes past; in Python."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StateError(KEPT_TENSOR)


def graph_entry(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same tensors as outputs of one node that keeps nothing and that no backward goes past; one requires grad.

    To torch the node is the guard behind derivatives that exist once only. Where torch has none, an autograd.Function
    does the same in three times the time.
    """
    if _DelayedError is None:
        outputs: Sequence[torch.Tensor] = _GraphEntry.apply(*tensors)
    else:
        outputs = _DelayedError(_ENTRY_MESSAGE, len(tensors))(*tensors)
    return outputs


class _ThreadBackward(threading.local):
    is_of_stage = False  # does this thread run the backward of a stage


_thread_backward = _ThreadBackward()


class StageBackward:
    """A block that runs the backward of a stage."""

    def __enter__(self) -> None:
        _thread_backward.is_of_stage = True

    def __exit__(self, *error: object) -> None:
        _thread_backward.is_of_stage = False


def refuse_other_backwards(tensors: Iterable[Any]) -> None:
    """Makes any backward through these tensors raise `StateError`, but for that of their stage.

    Torch would say that a graph cannot be gone through twice; or where the stage has not gone through it yet, put the
    gradients into copies of the parameters.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(_check_backward)


def _check_backward(gradient: torch.Tensor) -> None:
    if not _thread_backward.is_of_stage:
        raise StateError(KEPT_TENSOR)


# -- Attributes of autograd nodes ------------------------------------------------------------------------------------


def output_shape(node: Any, number: int) -> torch.Size | None:
    """The shape of an output of the function that `node` goes back through; None where it has no such output.

    Raises:
        TorchVersionError: nodes no longer tell.
    """
    try:
        outputs = node._input_metadata  # inputs of the node: gradients of those outputs
    except AttributeError as error:
        raise missing_name(str(error)) from error
    return outputs[number].shape if number < len(outputs) else None


def saved_reduction(node: Any) -> int | None:
    """The `reduction` that the loss function behind a node was given, as torch's number; None where it takes none."""
    _require_saved_reduction()
    reduction: int | None = getattr(node, "_saved_reduction", None)
    return reduction


def saved_total_weight(node: Any) -> torch.Tensor:
    """Returns the divisor of the mean of `nll_loss`, which its node saves."""
    weight: torch.Tensor = node._saved_total_weight
    return weight


@functools.cache
def _require_saved_reduction() -> None:
    """Checks the class of a node that has a reduction: others have none, so that a renamed one would go unseen."""
    with required_names():
        functions: Any = torch._C._functions
        require_attributes(functions.NllLossBackward0, "_saved_reduction", "_saved_total_weight")


def saved_names(node: Any) -> list[str]:
    """The attributes of a node in which autograd keeps what its backward needs."""
    return [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]


def forward_class_of(node: Any) -> type[torch.autograd.Function]:
    """The class of the `autograd.Function` that a node in Python goes back through."""
    function: type[torch.autograd.Function] = type(node)._forward_cls
    return function


# -- The state around a call: the backward run, tracing, forward mode ------------------------------------------------


def backward_id() -> int:
    """Returns the id of the backward run that calls a hook; always the same where torch does not tell it."""
    return 0 if _current_graph_task_id is None else int(_current_graph_task_id())


def is_jit_tracing() -> bool:
    """Returns True if `torch.jit.trace` is at work in this thread."""
    return _get_tracing_state() is not None


def is_in_forward_mode() -> bool:
    """Returns True within `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0
