"""What a graph that others have made may have lost, and only the model's own run shows.

Export and symbolic tracing drop hooks on tensors, what forward keeps in attributes, and numbers that were drawn while
they looked. The recorder sees all of it; for its own graphs there is nothing to look for. Gradients and state of every
graph are compared elsewhere (`two_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.tracing.checking.witness import witnessed
from fxpipe.tracing.evaluation import evaluated, leaf_copy, run, writable
from fxpipe.tracing.recording.containers_changed import changed_container, changed_item
from fxpipe.tracing.recording.draws import generator_states, same_states
from fxpipe.tracing.recording.hooks import run_model
from fxpipe.tracing.snapshot import forked_random, undone
from fxpipe.tracing.traced import Traced, lookup
from fxpipe.trees import flatten_output, untouched


@dataclass(frozen=True, slots=True)
class _Run:
    spec: pytree.TreeSpec  # of the outputs
    generators: list[Any]  # where torch's random generators stand after the outputs


def check_nothing_lost(traced: Traced, leaves: Sequence[Any]) -> None:
    """Watches the model on the example inputs. The graph's output gets the model's structure.

    Raises:
        TraceError: the model does what the graph has lost, or what no graph carries; names it.
    """
    seed = torch.default_generator.initial_seed() % 2**31
    with undone(traced.model) as snapshot, untouched(traced.in_spec):
        torch.manual_seed(seed)
        want = _run_model(traced, leaves)
        snapshot.assigned(_read(traced))
    snapshot.refuse_changes()
    if want.spec != traced.out_spec:
        if want.spec.num_leaves != traced.out_spec.num_leaves:
            raise TraceError(
                f"the graph that {traced.tracer!r} made returns {traced.out_spec.num_leaves} values and the model "
                f"{want.spec.num_leaves}; leave it to recording (tracer='record')"
            )
        traced.out_spec = want.spec  # fx makes plain dicts of all kinds of dicts
    with forked_random():
        torch.manual_seed(seed)
        generators = _run_graph(traced, leaves)
    if not same_states(want.generators, generators):
        raise TraceError(
            f"forward draws random numbers that the graph which {traced.tracer!r} made does not draw: what was made of "
            "them, or decided by them, would be the same in every step; leave it to recording (tracer='record')"
        )


def _read(traced: Traced) -> set[str]:
    """Names of the model's tensors that the graph reads."""
    return {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _run_model(traced: Traced, leaves: Sequence[Any]) -> _Run:
    inputs = list(map(leaf_copy, leaves))
    values = list(map(writable, inputs))
    args, kwargs = pytree.tree_unflatten(values, traced.in_spec)
    with witnessed(traced.model, inputs):
        result = run_model(traced.model, args, kwargs)
    if changed := changed_item(traced.model, (args, kwargs), traced.leaves, values, traced.in_spec):
        raise changed_container(changed)
    spec = pytree.tree_structure(result)
    if spec != traced.out_spec:  # there may be objects in it
        spec = flatten_output(result, _is_tensor)[1]
    return _Run(spec, generator_states())


def _run_graph(traced: Traced, leaves: Sequence[Any]) -> list[Any]:
    """Where torch's random generators stand after it."""
    inputs = list(map(leaf_copy, leaves))

    def given(node: fx.Node) -> Any:
        return writable(inputs[traced.place_of(node)])

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = lookup(traced, node)
        return tensor if tensor.requires_grad else tensor.detach().clone()

    evaluated(traced.graph.nodes, given, attribute, run)
    return generator_states()
