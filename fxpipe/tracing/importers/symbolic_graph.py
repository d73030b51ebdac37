"""The graph of a model for which there are no inputs, by symbolic tracing: to be printed, not to be run.

It goes into every module; one in which a proxy does not do (it asks for sizes or values) stays whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import module_flags
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import TraceError
from fxpipe.tracing.importers.graph_module import node_origin
from fxpipe.tracing.model_state import preserve_state
from fxpipe.tracing.node_info import NodeInfo, info, set_info, update_info
from fxpipe.tracing.record.patches import PATCH_TURN
from fxpipe.tracing.source_lines import line_of_error, user_line
from fxpipe.tracing.traced import InputLeaf, Traced, TracedGraph
from fxpipe.utils.python_state import PythonState


class _DeepTracer(fx.Tracer):
    """Goes into every module where proxies get through, and keeps the others whole. Its nodes know their lines."""

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

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        update_info(node, source=user_line())
        return node


def symbolic_graph(model: nn.Module) -> Traced:
    """The symbolic graph of a model for which there are no inputs. Without shapes.

    Raises:
        TraceError: forward does what a proxy cannot do; the message names the user's line.
    """
    graph = TracedGraph()
    copies: dict[fx.Node, fx.Node] = {}
    leaves: list[InputLeaf] = []
    paths = {path for path, _ in model.named_modules()}
    for node in _symbolic_trace(model).nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            copy.name = f"in_{len(leaves)}"
            leaves.append(InputLeaf(True, str(node.target), str(node.target)))
        path = str(node.target) if node.op == "call_module" else (node_origin(node, paths) or ("",))[0]
        copy.meta.clear()
        set_info(copy, NodeInfo(source=info(node).source, module=path, state=ThreadState.now()))
    output = graph.output_node()
    result, out_spec = pytree.tree_flatten(output.args[0])
    output.args = ((tuple(result), {}),)
    _, in_spec = pytree.tree_flatten((tuple(leaf.head for leaf in leaves), {}))
    state = ThreadState.now()
    traced = Traced(model, graph, tuple(leaves), in_spec, out_spec, module_flags(model), state, {}, (), PythonState())
    return replace(traced, tracer="fx", is_recorded=False)


def _symbolic_trace(model: nn.Module) -> fx.Graph:
    with PATCH_TURN, preserve_state(model):
        try:
            return _DeepTracer().trace(model)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise TraceError(
                f"{type(model).__name__} has no graph without inputs: {type(error).__name__}: {first} (at "
                f"{line_of_error(error)}); give example inputs, as in fxpipe.trace(model, (x,))"
            ) from error
