"""Portals: a value that skips stages goes directly from its maker to the stages that use it.

    stage 0                       stage 1            stage 2
    x = relu(in_0)                y = linear(x)      x_popped = pop(x, 'x')
    x_stashed = stash(x, 'x')     return y           return y + x_popped
    return x_stashed

No stage in between holds a value that it does not use. `stash` and `pop` only mark the value in stage code: the runtime
sends it once to every device that uses it.

Portals are from torchgpipe (C. Kim et al., arXiv 2004.09910, 2020), where users mark skips; here they are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from torch import fx

from fxpipe.rewriting.program import PIPE_INPUT, Skip

T = TypeVar("T")


def skips_of(table: Sequence[Mapping[fx.Node, int]]) -> Iterator[Skip]:
    """Yields the values that skip the next stage.

    `table`: for each receiving stage its values, and the stage that sends each (`PIPE_INPUT`: inputs of the pipe).
    """
    for target, row in enumerate(table):
        for node, source in row.items():
            if PIPE_INPUT < source < target - 1:
                yield Skip(node.name, source, target)


# -- Marks in stage code ---------------------------------------------------------------------------------------------


def stash(value: T, name: str) -> T:
    """Marks, in its maker, a value that skips stages."""
    return value


def pop(value: T, name: str) -> T:
    """Marks, in its user, a value that has skipped stages."""
    return value


def insert_stash(graph: fx.Graph, value: fx.Node, name: str) -> fx.Node:
    """Inserts `stash` of the value with this name in the model's graph."""
    return graph.create_node("call_function", stash, (value, name), name=f"{name}_stashed")


def insert_pop(graph: fx.Graph, value: fx.Node, name: str) -> fx.Node:
    """Inserts `pop` of a received value with this name in the model's graph."""
    return graph.create_node("call_function", pop, (value, name), name=f"{name}_popped")
