"""Portals: a value that skips stages goes straight from its maker to the stages that use it.

    stage 0                       stage 1            stage 2
    x = relu(in_0)                y = linear(x)      x_popped = pop(x, 'x')
    x_stashed = stash(x, 'x')     return y           return y + x_popped
    return x_stashed

Stages in between pass nothing on, so no stage holds a value that it does not use. `skips_of` finds the skips in the
table of what each stage receives from which; `stash` and `pop` in stage code are marks for people, which do nothing.
The runtime sends each value to every device that uses it, once, whether there are stages in between or not; its
gradient goes back from each user to the next earlier one and from the first user to the maker, as for any value.

Portals are those of torchgpipe (C. Kim et al., arXiv 2004.09910, 2020). There the model is written with `@skippable`,
`stash` and `pop`; here skips are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from torch import fx

from fxpipe.rewriting.program import PIPE_INPUT, Skip

T = TypeVar("T")


def skips_of(table: Sequence[Mapping[fx.Node, int]]) -> Iterator[Skip]:
    """The values that go past the next stage.

    Args:
        table: by receiving stage, what it receives and from which stage (`PIPE_INPUT`: the inputs of the pipe).
    """
    for target, row in enumerate(table):
        for node, source in row.items():
            if PIPE_INPUT < source < target - 1:
                yield Skip(node.name, source, target)


# -- Marks in stage code ---------------------------------------------------------------------------------------------


def stash(value: T, name: str) -> T:
    """Marks, in its maker, a value that skips stages. The runtime sends it straight to the stages that `pop` it."""
    return value


def pop(value: T, name: str) -> T:
    """Marks, in its user, a value that has skipped stages."""
    return value


def insert_stash(graph: fx.Graph, value: fx.Node, name: str) -> fx.Node:
    """Inserts what the maker returns of the value that is called `name` in the model's graph."""
    return graph.create_node("call_function", stash, (value, name), name=f"{name}_stashed")


def insert_pop(graph: fx.Graph, value: fx.Node, name: str) -> fx.Node:
    """Inserts what a user that has received `value` goes on with."""
    return graph.create_node("call_function", pop, (value, name), name=f"{name}_popped")
