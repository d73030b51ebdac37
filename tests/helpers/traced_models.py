"""A module made of a function, and the comparison of a graph with its model."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe._torch.thread_state import ThreadState, set_thread_state
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.programs import GraphInputs
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import state_of
from fxpipe.tracing.traced import CALL_OPS, GraphKey, attribute_tensor, call_node, inputs_key


class Forward(nn.Module):
    """A linear layer, buffers and attributes by name, and a forward to be written where it is used."""

    def __init__(self, forward: Any, **held: Any):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.function = forward
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def x(samples: int = 4) -> torch.Tensor:
    return torch.randn(samples, 6)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def run(traced: Traced, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The graph as a function of the model's own tensors: (outputs, buffers after it)."""
    leaves = [_copy(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
    values: dict[fx.Node, Any] = {node: leaves[place] for place, node in traced.placeholders.items()}
    buffers = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            tensor = attribute_tensor(traced, node)
            values[node] = tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
            buffers[node.target] = values[node]
        elif node.op in CALL_OPS:
            with set_thread_state(state_of(node)):
                values[node] = call_node(node, values.__getitem__)
    buffers |= {name: values[node] for name, node in traced.assigned.items()}
    outputs = [values[o] if isinstance(o, fx.Node) else o for o in traced.outputs]
    return pytree.tree_unflatten(outputs, traced.out_spec), buffers


def assert_same_as_model(traced: Traced, *args: Any, **kwargs: Any) -> None:
    """Outputs, gradients and buffers of graph and model, on the same inputs and random numbers."""
    model = traced.model
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    own_args, own_kwargs = pytree.tree_map(_copy, (args, kwargs))
    want = twin(*own_args, **own_kwargs)
    torch.manual_seed(1)
    have, buffers = run(traced, *args, **kwargs)
    assert pytree.tree_structure(want) == pytree.tree_structure(have)
    for w, h in zip(pytree.tree_leaves(want), pytree.tree_leaves(have), strict=True):
        torch.testing.assert_close(h, w) if isinstance(w, torch.Tensor) else None
        assert isinstance(w, torch.Tensor) or w == h
    for name, value in twin.named_buffers():
        if name in buffers:
            torch.testing.assert_close(buffers[name], value)
    sums = [
        sum(t.float().square().sum() for t in pytree.tree_leaves(o) if isinstance(t, torch.Tensor) and t.requires_grad)
        for o in (want, have)
    ]
    if isinstance(sums[0], torch.Tensor):
        model.zero_grad()
        for total in sums:
            total.backward()
        for (name, theirs), ours in zip(twin.named_parameters(), model.parameters(), strict=True):
            assert (theirs.grad is None) == (ours.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
        model.zero_grad()


def is_graph_of(traced: Traced, leaves: Sequence[Any], flags: tuple[Any, ...] | None = None) -> bool:
    """Does a pipe run this graph for these inputs? `flags`: of the model's modules now; by default the graph's."""
    key = GraphKey(inputs_key(traced.in_spec, leaves), traced.flags if flags is None else flags, ThreadState.now())
    return GraphInputs(ModelCall((), {}, ()), leaves, key, 0, {}).match(traced)
