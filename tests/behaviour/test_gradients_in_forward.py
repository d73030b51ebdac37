"""`torch.autograd.grad` in the forward of the model: a node that is cut like any other, and is the plain model."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared_steps import assert_trains
from helpers.layered import Layered
from torch import Tensor, nn
from torch.autograd import grad

import fxpipe
from fxpipe.errors import ArgumentError, TraceError


def samples(count: int = 4) -> Tensor:
    return torch.randn(count, 8)


def layers(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))


class Forces(Layered, body=lambda: layers(8, 16, 16), head=(16, 1)):
    """An energy, and the forces as its gradients at the positions."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.requires_grad = True
            energy = self.head(self.body(x))
            return torch.cat([energy, -grad(energy.sum(), x, create_graph=True)[0]], 1)


class Critic(
    Layered,
    encoder=8,
    critic=lambda: nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 16), nn.Tanh()),
    head=(16, 1),
):
    """A gradient penalty of hidden values, each sample's weighed; the critic writes to its own values."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        score = self.head(self.critic(h))
        (slope,) = grad([score], [h], grad_outputs=[torch.ones_like(score)], create_graph=True)
        return score + (slope.norm(dim=1, keepdim=True) - 1).square()


class Curvature(Layered, body=lambda: layers(8, 16), head=(16, 1)):
    """A gradient of a gradient (a residual of a differential equation)."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.autograd.Variable(x, requires_grad=True)
        (first,) = grad(self.head(self.body(x)).sum() / len(x), x, create_graph=True)
        first = first * len(x)
        return first + grad(first.square().sum(), x, create_graph=True)[0]


class Guided(Layered, first=8, energy=lambda: layers(8, 16, 1), last=8):
    """A step along a gradient that has no gradients itself, and one of a value that is not used."""

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.first(x), self.last(x)
        slope, none = grad(self.energy(h).sum(), [h, other], retain_graph=True, allow_unused=True)
        assert none is None
        return self.last(h - slope) + self.energy(h)


class Chained(Layered, first=8, second=8, energy=lambda: layers(8, 1)):
    """Gradients at two values, of which one is computed from the other, and one that is named twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        g = self.second(h).tanh()
        of_h, of_g, again = grad([self.energy(h).sum(), self.energy(g).sum()], [h, g, h], create_graph=True)
        return of_h * of_g + again


EAGER = {"backend": "eager"}
MODELS = [Forces, Critic, Curvature, Guided, Chained]


@pytest.mark.anywhere
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("options", [{"schedule": "zero_bubble"}, {"checkpoint": "always", "compile": EAGER}])
@pytest.mark.parametrize("model", MODELS)
def test_each_is_one_node_and_the_plain_model(model: Any, options: dict[str, Any]) -> None:
    def check(pipe: Any) -> None:
        assert not pipe.plan.whole

    assert assert_trains(model(), [samples(), samples(), samples(6)], check=check, **options) == 1


def test_forces_in_evaluation_are_those_of_the_plain_model() -> None:
    model, x = Forces().eval(), samples()
    with torch.no_grad(), fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        torch.testing.assert_close(pipe(x.clone()), model(x.clone()))


def test_nodes_that_only_a_gradient_uses_run_in_it_alone() -> None:
    class Penalty(Critic):
        def forward(self, x: Tensor) -> Tensor:
            h = self.encoder(x)
            return h + grad(self.head(F.linear(h.tanh(), self.critic[0].weight)).sum(), h, create_graph=True)[0]

    traced = fxpipe.trace(Penalty(), (samples(),))
    assert [node.name for node in traced.nodes if node.op != "get_attr"] == ["encoder", "grad", "grad_0", "add"]


class Learner(Layered, net=lambda: layers(8, 8)):
    """A gradient step on its own weights, by the loss of all samples."""

    def forward(self, x: Tensor) -> Tensor:
        names, weights = zip(*self.net.named_parameters(), strict=True)
        slopes = grad(self.net(x).square().mean(), weights, create_graph=True)
        steps = {name: w - 0.1 * slope for name, w, slope in zip(names, weights, slopes, strict=True)}
        return torch.func.functional_call(self.net, steps, (x,))


def test_a_gradient_of_all_samples_is_refused_unless_the_mini_batch_is_whole() -> None:
    with pytest.raises(ArgumentError, match=r"samples act on each other at .*test_gradients_in_forward"):
        fxpipe.pipeline(Learner(), ["cpu", "cpu"], 2, example_args=(samples(),))
    assert_trains(Learner(), [samples(), samples(6)], chunks=1)


class Dropped(Guided):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + grad(F.dropout(self.energy(h)).sum(), h)[0]


class Normalized(Layered, first=8, norm=lambda: nn.BatchNorm1d(8)):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + grad(self.norm(h).square().sum(), h)[0]


class Written(Guided):
    """Writes to a buffer between its use and the gradient, which would find the new value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        energy = (self.energy(h) * self.scale).square()
        self.scale.mul_(0.5)
        return h + grad(energy.sum(), h)[0]


@pytest.mark.parametrize("model", [Dropped, Normalized, Written])
def test_what_would_be_something_else_a_second_time_is_refused(model: Any) -> None:
    with pytest.raises(TraceError, match=r"runs autograd inside forward at .*test_gradients_in_forward"):
        fxpipe.trace(model(), (samples(),))


class Slope(Layered, body=8):
    """Returns a gradient, and nothing that it is the gradient of."""

    function = staticmethod(torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return self.body(grad(self.function(x).sum(), x, create_graph=True)[0])


def test_a_plan_knows_what_a_gradient_is_of() -> None:
    """The nodes in between are in no other place of the graph."""
    graphs = [fxpipe.trace(Slope(function=one), (samples(),)) for one in (torch.tanh, torch.tanh, torch.sin)]
    first, same, other = (graph.fingerprint() for graph in graphs)
    assert first == same != other
