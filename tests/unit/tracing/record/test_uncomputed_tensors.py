"""Under `UncomputedMode` a model runs as it would, without arithmetic on what depends on its parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from fxpipe.errors import TraceError
from fxpipe.tracing.record.record_model import record
from fxpipe.tracing.record.uncomputed_tensors import UncomputedMode, is_uncomputed, refuse_uncomputed
from fxpipe.tracing.tensors import has_values


class Lines(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("table", torch.arange(6.0))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def norm_and_attention(model, x):
    h = F.batch_norm(x @ model.weight, model.table, model.table.clone(), training=True)
    q = h.view(-1, 1, 2, 3)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


def parts(model, x):
    first, second = (x @ model.weight).chunk(2, -1)
    return torch.cat([first.T, second.T]), first.argmax(-1), first.sort(-1)


def images(model, x):
    h = x.view(len(x), 1, 2, 3).to(memory_format=torch.channels_last)
    return F.conv2d(h, model.weight.view(1, 1, 6, 6)[..., :1, :1])


def in_place(model, x):
    h = F.linear(x, model.weight)
    h.relu_().mul_(2)
    h[:, 0] = 1.0
    return h.t_()


def autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, model.weight)


def numbers(model, x):
    total = (x @ model.weight).sum()
    return total * 2.0, total + torch.tensor(1.0, dtype=torch.float64), total > 0, total.long() / 2


def equal_numbers(model, x):
    """Of other types: what is made of them is, too."""
    h = (x @ model.weight).long()
    return h * 1, h * 1.0, h * True, (h > 0) * 1, (h > 0) * True


def complex_numbers(model, x):
    h = torch.fft.fft(x @ model.weight).conj()
    return h.real, h.imag.neg(), h * h, torch.view_as_real(h.resolve_conj())


def recurrent(model, x):
    lstm = nn.LSTM(6, 3, batch_first=True, bidirectional=True)
    return lstm((x @ model.weight)[None])


def gradients(model, x):
    h = (x @ model.weight).tanh()
    (found,) = torch.autograd.grad(h.sum(), model.weight, create_graph=True)
    return found * 2


MODELS = [
    norm_and_attention,
    parts,
    images,
    in_place,
    autocast,
    numbers,
    equal_numbers,
    complex_numbers,
    recurrent,
    gradients,
]


def described(value):
    leaves = torch.utils._pytree.tree_leaves(value)
    return [(t.shape, t.stride(), t.dtype, t.requires_grad, t._version) for t in leaves]


@pytest.mark.parametrize("function", MODELS, ids=lambda f: f.__name__)
def test_shapes_strides_and_gradients_are_those_of_the_model(function):
    model, x = Lines(function), torch.randn(4, 6)
    with UncomputedMode(model):
        outputs = model(x)
        assert all(map(is_uncomputed, torch.utils._pytree.tree_leaves(outputs)))
    assert described(outputs) == described(model(x))


@pytest.mark.parametrize("function", MODELS, ids=lambda f: f.__name__)
def test_nothing_is_computed_and_nothing_changed(function):
    model = Lines(function)
    before, calls = copy.deepcopy(model.state_dict()), []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if all(map(has_values, torch.utils._pytree.tree_leaves((args, kwargs)))):
                calls.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Counting(), UncomputedMode(model):
        model(torch.randn(4, 6))
    assert set(calls).isdisjoint(("aten::mm", "aten::addmm", "aten::convolution", "aten::native_batch_norm"))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_what_depends_on_inputs_and_buffers_alone_is_computed():
    def forward(model, x):
        decided = bool((x > model.table).any())
        return (x * model.table).sum(), decided, x @ model.weight

    model, x = Lines(forward), torch.randn(4, 6)
    with UncomputedMode(model):
        total, decided, product = model(x)
        assert not is_uncomputed(total)
        assert is_uncomputed(product)
    assert torch.equal(total, (x * model.table).sum())
    assert decided == bool((x > model.table).any())


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, lambda t: torch.equal(t, t), lambda t: t.nonzero()])
def test_values_of_a_hollow_tensor_are_refused(read):
    model = Lines(lambda model, x: read((x @ model.weight).sum()))
    with UncomputedMode(model), pytest.raises(Exception, match=r"local_scalar_dense|equal|nonzero"):
        model(torch.randn(4, 6))


def test_values_that_no_mode_sees_can_be_asked_for():
    model = Lines(lambda model, x: x @ model.weight)
    with UncomputedMode(model):
        refuse_uncomputed([torch.ones(2)])
        with pytest.raises(DataDependentOutputException):
            refuse_uncomputed([torch.ones(2), model(torch.randn(4, 6))])
    refuse_uncomputed([model.weight])  # outside nothing is


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_such_values_are_refused_while_recording(read):
    def forward(model, x):
        read((x @ model.weight).detach())
        return x

    with pytest.raises(TraceError, match="needs the values of tensors"):
        record(Lines(forward), (torch.randn(4, 6),), {}, uncomputed=True)


def test_memory_that_is_written_to_keeps_its_values_and_has_none_meanwhile():
    def forward(model, x):
        model.table += (x @ model.weight).sum(0)
        model.weight.data.mul_(2)
        return is_uncomputed(model.table), is_uncomputed(model.weight.view(-1)[1:])

    model = Lines(forward)
    weight = model.weight.detach().clone()
    with UncomputedMode(model):
        assert model(torch.randn(4, 6)) == (True, True)
    assert torch.equal(model.table, torch.arange(6.0))
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize(("p", "moves"), [(0.5, True), (0.0, False)])
def test_random_functions_move_the_generator_as_they_would(p, moves):
    model = Lines(lambda model, x: F.dropout(x @ model.weight, p))
    before = torch.get_rng_state()
    with UncomputedMode(model):
        model(torch.randn(4, 6, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state()) != moves


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda model, x: (x @ model.weight).to_sparse(), "torch.sparse_coo"),
        (lambda model, x: x.as_subclass(Mine) @ model.weight, "Mine"),
    ],
)
def test_tensors_of_other_kinds_are_refused(function, what):
    model = Lines(function)
    with UncomputedMode(model), pytest.raises(TraceError, match=rf"{what}.*; record it with values"):
        model(torch.randn(4, 6))
