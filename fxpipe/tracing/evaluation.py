"""A graph run node by node on real values: by checks, observations and guards, which differ in what they give it.

Each says what an input is, what a tensor of the model is (itself, or a copy), and what to do for a working node; and
looks at what has been made after each node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import fx

from fxpipe.thread_state import applied
from fxpipe.tracing.traced import WORKING, Traced, call

Values = dict[fx.Node, Any]


def evaluate(
    nodes: Iterable[fx.Node],
    values: Values,
    given: Callable[[fx.Node], Any],
    attribute: Callable[[fx.Node], Any],
    work: Callable[[fx.Node, Values], Any],
) -> Iterator[fx.Node]:
    """Runs nodes in turn, and yields each when its value is in `values`, from which those may go that nobody needs.

    Args:
        nodes: of a graph, or some of them.
        values: what was made, by node; empty at the start.
        given: the value of a placeholder.
        attribute: the value of a `get_attr` node. Asked when its turn comes: what ran before may have changed it.
        work: the value of a working node, such as `run`.
    """
    for node in nodes:
        if node.op == "placeholder":
            values[node] = given(node)
        elif node.op == "get_attr":
            values[node] = attribute(node)
        elif node.op in WORKING:
            values[node] = work(node, values)
        else:
            continue
        yield node


def last_uses(nodes: Sequence[fx.Node], asked: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node: the values that no other needs after it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen = {*asked}
    for node in reversed(nodes):
        if node.op in WORKING:
            found[node] = [n for n in (*node.all_input_nodes, node) if n not in seen]
            seen.update((*node.all_input_nodes, node))
    return found


def evaluated(
    nodes: Iterable[fx.Node],
    given: Callable[[fx.Node], Any],
    attribute: Callable[[fx.Node], Any],
    work: Callable[[fx.Node, Values], Any],
) -> Values:
    """What all nodes make; see `evaluate`."""
    values: Values = {}
    for _ in evaluate(nodes, values, given, attribute, work):
        pass
    return values


def run(node: fx.Node, values: Values) -> Any:
    """What a working node makes, in the state of the thread in which it was recorded."""
    with applied(node.meta["state"]):
        return call(node, values.__getitem__)


def outputs_in(traced: Traced, values: Values) -> list[Any]:
    """The leaves of the model's output."""
    return [values[o] if isinstance(o, fx.Node) else o for o in traced.outputs]


# -- what is given ---------------------------------------------------------------------------------------------------


def leaf_copy(value: Any) -> Any:
    """A copy of an input, where a backward ends; what is no tensor is given as it is, unless it can be changed."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    is_changeable = isinstance(value, (set, bytearray)) or type(value).__module__ == "numpy"
    return copy(value) if is_changeable else value


def writable(leaf: Any) -> Any:
    """The same for forward, which may write to it, and autograd lets nobody write to a leaf."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def copy_of_input(value: Any) -> Any:
    """A copy that forward may write to, and an object of its own should one tensor stand in two places."""
    return writable(leaf_copy(value))
