"""Errors of torch that have no type are told by their text, in one file; errors of fxpipe by types and fields."""

import ast
import pathlib
import re
from collections.abc import Callable

import pytest
import torch
from helpers.partition_problems import partition
from torch.autograd.graph import saved_tensors_hooks

import fxpipe
from fxpipe._torch.error_messages import allocator_error, forbids_saved_tensor_hooks, has_no_way_back, requested_bytes
from fxpipe.errors import PartitionError, TooManyStagesError


def raised_by(function: Callable[[], object]) -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        function()
    return raised.value


def written_before_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    h = x.exp()
    loss = h.sin().sum() + h.sum()
    h.detach().zero_()
    loss.backward()


def draws_of_a_shape() -> None:
    torch.bernoulli(torch.rand(3, requires_grad=True), p=0.5).sum().backward()


def without_derivative() -> None:
    torch.igamma(torch.rand(3, requires_grad=True), torch.ones(3)).sum().backward()


def grad_under_hooks() -> None:
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        torch.func.grad(lambda x: x.sin().sum())(torch.randn(3))


def an_exabyte() -> None:
    torch.empty(2**58)


def other() -> None:
    torch.randn(3) @ torch.randn(4)


@pytest.mark.parametrize(
    ("recognises", "cause"),
    [
        (has_no_way_back, written_before_backward),
        (has_no_way_back, without_derivative),
        (has_no_way_back, draws_of_a_shape),
        (forbids_saved_tensor_hooks, grad_under_hooks),
        (allocator_error, an_exabyte),
    ],
)
def test_errors_of_torch_are_recognised(recognises, cause):
    assert recognises(raised_by(cause))
    assert not recognises(raised_by(other))


def test_a_memory_error_of_python_is_an_allocators():
    assert allocator_error(MemoryError())


def test_the_bytes_asked_for_are_read_where_the_allocator_says_them():
    assert requested_bytes(raised_by(an_exabyte)) == 2**60
    assert requested_bytes(raised_by(other)) is None


def test_too_many_stages_is_an_error_with_its_facts():
    with pytest.raises(PartitionError) as raised:
        partition([1.0] * 6, 7)
    assert isinstance(raised.value, TooManyStagesError)
    assert (raised.value.most, raised.value.remedy) == (6, "")
    assert str(raised.value) == f"{raised.value.problem}. Use stages=6 or fewer"


def decisions_by_text(path: pathlib.Path) -> list[int]:
    """Lines that compare or search the text of an exception."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    errors = [node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name]
    annotated = [node for node in nodes if isinstance(node, ast.arg) and node.annotation is not None]
    errors += [node.arg for node in annotated if re.search("Error|Exception", ast.unparse(node.annotation))]
    text = re.compile(rf"\b(str|repr)\(({'|'.join(errors)})\)")
    searches = ("startswith", "endswith", "find", "search", "match")
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Compare)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in searches)
        if errors and text.search(ast.unparse(node))
    ]


def test_no_other_file_goes_by_the_text_of_an_exception():
    root = pathlib.Path(fxpipe.__file__).parent
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if decisions_by_text(path)}
    assert found == {"_torch/error_messages.py"}
