"""Where gradients of tensors come out of a graph, also of tensors of a class of their own."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fxpipe._torch import autograd
from fxpipe._torch.autograd import gradient_edge_of
from fxpipe.errors import InternalError


class Plain(torch.Tensor):
    """A class that adds nothing."""


LEAVES = {
    "plain": lambda: torch.ones(3),
    "subclass": lambda: torch.ones(3).as_subclass(Plain),
    "wrapper": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_the_edge_of_a_leaf_is_where_its_gradient_arrives(kind):
    leaf = LEAVES[kind]().requires_grad_()
    (gradient,) = torch.autograd.grad((leaf * 2).sum(), [gradient_edge_of(leaf)])
    assert gradient.tolist() == [2.0] * 3 if kind != "wrapper" else gradient.a.tolist() == [2.0] * 3


def test_an_edge_at_which_no_gradient_arrives_is_an_error(monkeypatch):
    monkeypatch.setattr(autograd, "get_gradient_edge", lambda x: torch.autograd.graph.get_gradient_edge(x.view_as(x)))
    with pytest.raises(InternalError, match="a Plain whose gradient would be lost"):
        gradient_edge_of(torch.ones(3).as_subclass(Plain).requires_grad_())
