"""What fxpipe knows of a node: typed, shared by copies until one of them learns more."""

from __future__ import annotations

import ast
import pathlib

import pytest
from torch import fx

import fxpipe
from fxpipe.errors import InternalError
from fxpipe.tracing.node_info import (
    NodeInfo,
    RandomDraws,
    number_of,
    opaque_call_of,
    random_draws_of,
    state_of,
    value_read_of,
)

TORCHS_OWN = {"val", "nn_module_stack", "stack_trace"}


def a_node() -> fx.Node:
    return fx.Graph().placeholder("x")


@pytest.mark.parametrize(
    ("accessor", "what"),
    [
        (state_of, "state of the thread"),
        (number_of, "number"),
        (value_read_of, "value that forward has read"),
        (opaque_call_of, "opaque call"),
        (random_draws_of, "draws of random numbers"),
    ],
)
def test_what_a_pass_expects_and_a_node_has_not_is_an_error_that_names_both(accessor, what):
    with pytest.raises(InternalError, match=f"the node x has no {what}"):
        accessor(a_node())


def test_a_node_that_is_added_beside_another_is_of_the_same_line_and_draws_nothing():
    beside = NodeInfo(source="model.py:3", module="block", rng=RandomDraws(), storages=frozenset({1})).beside()
    assert beside == NodeInfo(source="model.py:3", module="block")


def test_no_file_keeps_other_keys_in_the_meta_of_nodes():
    found = set()
    for path in pathlib.Path(fxpipe.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.Subscript(value=ast.Attribute(attr="meta"), slice=ast.Constant(value=str(key)))
                    | ast.Call(func=ast.Attribute(value=ast.Attribute(attr="meta")), args=[ast.Constant(str(key)), *_])
                    | ast.Compare(left=ast.Constant(str(key)), comparators=[ast.Attribute(attr="meta")])
                ):
                    found.add(key)
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="meta")), keywords=[_, *_] as keywords):
                    found.update(keyword.arg for keyword in keywords)
    assert found == TORCHS_OWN
