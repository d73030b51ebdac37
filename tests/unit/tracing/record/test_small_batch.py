"""A slow model is recorded on a few samples, where that gives the graph of all of them, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from helpers.layered import Layered
from helpers.traced_models import Forward, is_graph_of
from helpers.unseen_list import UnseenList
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record import other_sizes as on_a_part
from fxpipe.tracing.tensors import has_values

EXAMPLE = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _all_are_slow(monkeypatch):
    monkeypatch.setattr(on_a_part, "LONG_RECORDING", 0.0)


def calling(function):
    return Forward(lambda m, x: function(m.lin(x)))


def asking(m, x):
    return m.lin(x) if (x == 0).all() else m.lin(x).tanh()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def test_same_graph_as_on_all_samples(monkeypatch):
    model = mlp()
    part = fxpipe.trace(model, (EXAMPLE,), chunks=4)
    monkeypatch.setattr(on_a_part, "LONG_RECORDING", 1e9)
    whole = fxpipe.trace(model, (EXAMPLE,), chunks=4)
    assert (part.recorded_samples, whole.recorded_samples) == (3, None)
    assert part.fingerprint() == whole.fingerprint()
    assert part.leaves == whole.leaves
    assert [str(info(n).shapes[0]) for n in part.nodes] == [str(info(n).shapes[0]) for n in whole.nodes]
    assert part.effects.written_classes == whole.effects.written_classes


def count(x: torch.Tensor) -> int:
    """The number of samples, as a plain number that nothing follows."""
    return sum(1 for _ in [0] * x.shape[0])


def unseen_count(x: torch.Tensor) -> int:
    """The number of samples, read without the recording's knowledge."""
    with torch._C.DisableTorchFunction():
        return x.shape[0]


def test_no_run_on_more_samples_than_a_micro_batch():
    seen, have_products = UnseenList(), UnseenList()

    def noting(x):
        if has_values(x):
            seen.append(unseen_count(x))
        with torch._C.DisableTorchFunction():
            have_products.append(bool(x.detach().any()))
        return x.tanh()

    assert fxpipe.trace(calling(noting), (EXAMPLE,), chunks=4).recorded_samples == 3
    assert {*seen} == {2, 3}  # gradients and two calls are compared on two
    assert [*have_products].count(False) == 3  # recordings for the same samples, and for two other numbers of samples


def by_parts(x):
    """Four samples at a time: the same as all at once for up to four, and another graph for more."""
    return torch.cat([x[n : n + 4].tanh() for n in range(0, len(x), 4)])


def test_loop_that_goes_once_for_a_part():
    with pytest.raises(TraceError, match="other functions"):
        fxpipe.trace(calling(by_parts), (EXAMPLE,), chunks=4)


def at_the_size_of_the_example(x):
    return x.relu() if count(x) == 12 else x.tanh()


def above_the_size_of_the_example(x):
    return x.relu() if count(x) > 12 else x.tanh()


@pytest.mark.parametrize("function", [at_the_size_of_the_example, above_the_size_of_the_example])
def test_branch_on_the_number_of_samples(function):
    with pytest.raises((TraceError, ArgumentError), match="samples"):
        fxpipe.trace(calling(function), (EXAMPLE,), chunks=4)


def test_value_that_is_read_is_that_of_all_samples():
    x = EXAMPLE.clone()
    x[:6] = 0.0
    traced = fxpipe.trace(Forward(asking), (x,), chunks=4)
    assert traced.recorded_samples is None
    assert not is_graph_of(traced, [torch.zeros(12, 6)])


def test_value_that_is_read_for_nothing_is_that_of_all_samples():
    """The graphs are alike, but the guard would be that of a part, and the example not the graph's."""

    def look(m, x):
        bool((x == 0).all())
        return m.lin(x)

    x = EXAMPLE.clone()
    x[:6] = 0.0
    traced = fxpipe.trace(Forward(look), (x,), chunks=4)
    assert traced.recorded_samples is None
    assert is_graph_of(traced, [x])


def at_five_in_all(x):
    """A plain number that depends on the samples, and is the same for any few of them."""
    return x * torch.full((x.shape[0],), 5).sum().item()


def test_value_that_depends_on_the_number_of_samples():
    traced = fxpipe.trace(calling(at_five_in_all), (EXAMPLE,), chunks=4)
    assert [guard.expected for guard in traced.guards.guards] == [5 * len(EXAMPLE)]


@pytest.mark.parametrize("is_of_samples", [False, True])
def test_value_that_all_samples_give_as_well(is_of_samples):
    """Of the inputs, or of as many rows as there are samples (transformers ask whether positions are packed)."""

    def ask(m, x):
        rows = x if is_of_samples else torch.arange(6).expand(len(x), -1)
        return m.lin(x).tanh() if (rows.diff(dim=1) != 7).all() else m.lin(x)

    traced = fxpipe.trace(Forward(ask), (EXAMPLE,), chunks=4)
    assert traced.recorded_samples == 3
    assert is_graph_of(traced, [EXAMPLE])
    assert len(traced.guards.guards) == 1


def test_what_is_remembered_is_computed():
    met: dict[int, torch.Tensor] = {}

    class Squared(Layered, weight=lambda: nn.Parameter(torch.ones(6))):
        def forward(self, x):
            """Squares its weight once for each number of samples."""
            if len(x) not in met:
                met[len(x)] = self.weight.detach().square()
            return x * met[len(x)]

    assert fxpipe.trace(Squared(), (EXAMPLE,), chunks=4).recorded_samples is None


def inverses(x):
    """Of zeros there is none."""
    y = x.view(-1, 2, 3, 1).squeeze()
    return torch.linalg.inv(y @ y.transpose(1, 2))


@pytest.mark.parametrize("function", [lambda x: x.reshape(-1, 6, 1).squeeze().relu_(), inverses])
def test_part_that_is_only_watched(monkeypatch, function):
    """A single sample, with which the model would take out the batch as well."""
    model = calling(function)
    part = fxpipe.trace(model, (EXAMPLE,), chunks=12)
    assert part.recorded_samples == 2
    monkeypatch.setattr(on_a_part, "LONG_RECORDING", 1e9)
    whole = fxpipe.trace(model, (EXAMPLE,), chunks=12)
    assert whole.recorded_samples is None
    assert [n.name for n in part.nodes] == [n.name for n in whole.nodes]
    assert part.effects.written_classes == whole.effects.written_classes
    names = [{n.name: alias for n, alias in one.effects.alias.items()} for one in (part, whole)]
    assert names[0] == names[1]


@pytest.mark.parametrize("function", [lambda x: x - x[8:].sum(0), lambda x: x - x[4:].mean(0)])
def test_late_samples_that_act_on_all_are_seen(function):
    """A few samples have none of these."""

    model = Forward(lambda m, x: m.lin(function(m.lin(x))))  # without the second it would run once, on all samples
    with pytest.raises((ArgumentError, TraceError), match=r"put together|samples"):
        fxpipe.trace(model, (EXAMPLE,), chunks=4)


def test_mean_that_depends_on_late_samples():
    """Of samples that are all alike any mean is right; those at the end are not."""

    class Weighted(nn.Module):
        def forward(self, x, weight):
            return torch.dot(x.mean(1), weight) / weight.sum()

    weight = torch.tensor([1.0] * 9 + [5.0, 0.0, 3.0])
    assert fxpipe.trace(Weighted(), (EXAMPLE, weight), chunks=4).out_dims == ("combined",)
