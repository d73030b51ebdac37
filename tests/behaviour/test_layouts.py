"""Nested and sparse tensors, and tensors that have lost their values: kept where they can be, else refused by name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_step
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, StateError, TraceError

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR tensor support)")


def from_jagged(h: torch.Tensor) -> torch.Tensor:
    offsets = torch.arange(0, h.shape[0] * h.shape[1] + 1, h.shape[1])
    return torch.nested.nested_tensor_from_jagged(h.reshape(-1, 4), offsets, max_seqlen=h.shape[1])


NESTED = {
    "of offsets": from_jagged,
    "of a list": lambda h: torch.nested.as_nested_tensor(list(h), layout=torch.jagged),
    "strided": lambda h: torch.nested.as_nested_tensor(list(h)),
}


class Nesting(Layered, a=4, b=4):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.nest(self.a(x))).to_padded_tensor(0.0).view_as(x)


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("is_module", [True, False])
def test_a_module_that_makes_nested_tensors_is_kept_whole_and_a_model_runs(kind: str, is_module: bool) -> None:
    """Torch's own errors came out: 'All fake tensor modes must be the same', 'NestedTensorImpl doesn't support ...'."""
    plain: nn.Module = Nesting(nest=NESTED[kind])
    if is_module:
        plain = nn.Sequential(nn.Linear(4, 4), plain, nn.Linear(4, 4))
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 2, 2, example_args=(torch.randn(6, 3, 4),)) as pipe:
        assert_step(pipe, plain, torch.randn(5, 3, 4))
        assert not is_module or pipe._fxpipe.first.traced.whole.keys() == {"1"}


OTHERS = {
    "jagged": (lambda: torch.nested.nested_tensor(list(torch.randn(6, 4)), layout=torch.jagged), "nested.*pad it"),
    "strided": (lambda: torch.nested.nested_tensor(list(torch.randn(6, 4))), "nested.*pad it"),
    "sparse": (lambda: torch.randn(6, 4).to_sparse(), r"sparse_coo.*to_dense\(\)"),
    "compressed": (lambda: torch.randn(6, 4).to_sparse_csr(), r"sparse_csr.*to_dense\(\)"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_inputs_and_targets_that_cannot_be_cut_are_refused_by_name(kind: str) -> None:
    make, message = OTHERS[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match=f"input input .*{message}"):
        fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(make(),))
    with fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(torch.randn(6, 4),)) as pipe:
        with pytest.raises(ArgumentError, match=f"input input .*{message}"):
            pipe(make())
        with pytest.raises(ArgumentError, match=f"target .*{message}"):
            pipe.forward_backward(torch.randn(6, 4), target=make(), loss_fn=F.mse_loss)
        assert pipe(torch.randn(6, 4)).shape == (6, 4)


class Sparse(Layered, layers=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))):
    """A model that returns a sparse tensor."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": self.layers(x).to_sparse()}


def test_a_sparse_output_is_refused_with_its_line() -> None:
    with pytest.raises(TraceError, match=r"layout torch\.sparse_coo, made at .*test_layouts.py:\d+; .*to_dense\(\)"):
        fxpipe.pipeline(Sparse(), ["cpu"] * 2, 2, example_args=(torch.randn(6, 4),))


class Scaled(Layered, a=4, b=4):
    """A model that looks for an attribute of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * getattr(x, "scale", 1.0)


def test_attributes_of_an_input_are_refused_at_planning_and_in_each_step() -> None:
    x = torch.randn(6, 4)
    with fxpipe.pipeline(Scaled(), ["cpu"] * 2, 2, example_args=(x,)) as pipe:
        x.scale = 3.0  # type: ignore[attr-defined]
        for step in (pipe, lambda x: pipe.forward_backward(x, loss_fn=torch.sum)):
            with pytest.raises(ArgumentError, match=r"input x .*\['scale'\].*pass them as arguments"):
                step(x)
        torch.testing.assert_close(pipe(x.clone()), fxpipe.unwrap(pipe)(x.clone()))
    with pytest.raises(ArgumentError, match=r"input x .*\['scale'\]"):
        fxpipe.pipeline(Scaled(), ["cpu"] * 2, 2, example_args=(x,))


def test_a_model_that_was_moved_to_meta_behind_the_pipes_back_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    values = copy.deepcopy(model.state_dict())
    x = torch.randn(6, 4)
    with fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(x,)) as pipe:
        model.to("meta")
        for step in (pipe, lambda x: pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)):
            with pytest.raises(StateError, match=r"'0.weight' is on the meta device.*to_empty, load_state_dict"):
                step(x)
        model.to_empty(device="cpu").load_state_dict(values)
        torch.testing.assert_close(pipe.eval()(x), copy.deepcopy(model).eval()(x))
