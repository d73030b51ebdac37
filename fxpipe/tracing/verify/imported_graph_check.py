"""Checks an imported graph for losses that only a run of the model shows.

Export and symbolic tracing run the model on fake tensors or proxies. The outputs of their graph may be correct although
it lost hooks and `backward`, or made constants of Python's random numbers and of tensors outside the model that require
grad. `training_equivalence` compares gradients and state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.functions import opname
from fxpipe.errors import TraceError
from fxpipe.tracing.forward_rng import OwnGenerators, generator_states, same_generator_states
from fxpipe.tracing.interpreter import copy_as_leaf, writable_copy
from fxpipe.tracing.model_state import (
    container_tensors,
    preserve_rng,
    preserve_state,
    python_rng_state,
    same_python_rng_state,
    slots_of,
    without_gradients,
)
from fxpipe.tracing.record.grad_fn import NODE_HOOK_PROBLEM, NODE_HOOK_REMEDY, GradFnProxy, is_grad_fn_access
from fxpipe.tracing.record.input_containers import changed_container_error, changed_input_item
from fxpipe.tracing.record.module_hooks import run_model
from fxpipe.tracing.record.unrecordable import OPAQUE_REMEDY, CannotRecord, lost_by_import, python_rng_error
from fxpipe.tracing.source_lines import user_line
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import InputLeaf, Traced
from fxpipe.tracing.verify.effects import observe_run
from fxpipe.utils.pytree import flatten_output, preserve_objects
from fxpipe.utils.random_generators import comparison_seed


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
        if loss is not None:
            self._note(*loss)
        if any(t.requires_grad and t.is_leaf and id(t) not in self._known for t in tensors_in((args, keywords))):
            self._note(
                "uses a tensor that requires grad and is not the model's", "make it an nn.Parameter of the model"
            )
        result = func(*args, **keywords)
        if result is not None and is_grad_fn_access(func, opname(func)):
            return GradFnProxy(result, lambda: self._note(NODE_HOOK_PROBLEM, NODE_HOOK_REMEDY + OPAQUE_REMEDY))
        return result

    def _note(self, what: str, remedy: str) -> None:
        self.error = self.error or CannotRecord(f"the model {what} at {user_line()}; {remedy}", is_final=True)


@contextlib.contextmanager
def detect_losses(model: nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """A block in which the model runs on `inputs`, leaves whose `grad` shows whether backward reached them.

    Raises `CannotRecord` if the model does what only a recording can represent.
    """
    before, own_generators = python_rng_state(), OwnGenerators(model)
    witness = _LossDetector([*slots_of(model).values(), *container_tensors(model).values(), *inputs])
    with without_gradients(model):
        with witness:
            yield
        leaves = [*model.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
        has_run_backward = any(leaf.grad is not None for leaf in leaves)
    if witness.error is not None:
        raise witness.error
    if has_run_backward:
        raise CannotRecord(
            "forward runs backward, which puts gradients into the model's parameters or inputs; do so outside forward",
            is_final=True,
        )
    if not same_python_rng_state(before, python_rng_state()):
        raise python_rng_error()
    own_generators.refuse_drawn()


def observe_model(
    model: nn.Module,
    leaves: Sequence[InputLeaf],
    spec: pytree.TreeSpec,
    values: Sequence[Any],
    read: Collection[str] = (),
    seed: int = 0,
) -> tuple[Any, list[Any]]:
    """Runs the model on flattened inputs; returns its output, and the states of torch's random generators after it.

    Raises `CannotRecord` if the model does what only a recording, or no graph, can represent. `read`: names of the
    tensors that the graph reads.
    """
    inputs = list(map(copy_as_leaf, values))
    copies = list(map(writable_copy, inputs))
    args, kwargs = pytree.tree_unflatten(copies, spec)
    with preserve_state(model) as snapshot, preserve_objects(spec):
        torch.manual_seed(seed)
        with detect_losses(model, inputs):
            result = run_model(model, args, kwargs)
        if changed := changed_input_item(model, (args, kwargs), leaves, copies, spec):
            raise changed_container_error(changed)
        generators = generator_states()
        snapshot.assigned(read)
    snapshot.refuse_changes()
    return result, generators


def check_imported_graph(traced: Traced, values: Sequence[Any]) -> Traced:
    """Observes the model on the example inputs. Returns the graph with the structure of the model's output.

    Raises `TraceError` if the model does something that the graph has lost, or that no graph represents.
    """
    seed, read = comparison_seed(), {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    result, generators = observe_model(traced.model, traced.leaves, traced.in_spec, values, read, seed)
    spec = pytree.tree_structure(result)
    if spec != traced.out_spec:
        spec = flatten_output(result, lambda value: isinstance(value, torch.Tensor))[1]
    if spec.num_leaves != traced.out_spec.num_leaves:
        raise TraceError(
            f"the graph that {traced.tracer!r} made returns {traced.out_spec.num_leaves} values and the model "
            f"{spec.num_leaves}; leave it to recording (tracer='record')"
        )
    with preserve_rng():
        torch.manual_seed(seed)
        observe_run(traced, values)
        of_graph = generator_states()
    if not same_generator_states(generators, of_graph):
        raise TraceError(
            f"forward draws random numbers that the graph which {traced.tracer!r} made does not draw: what was made of "
            "them, or decided by them, would be the same in every step; leave it to recording (tracer='record')"
        )
    return replace(traced, out_spec=spec)  # fx returns plain dicts for all kinds of dicts
