"""A traced graph is the model, at sizes it has never seen: outputs, gradients, buffers. Tracing leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import enum
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.models import CASES
from helpers.traced_models import Forward, assert_same_as_model, is_graph_of, run, x
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import trace
from fxpipe._torch.module_internals import module_flags
from fxpipe.errors import TraceError
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import info, state_of


def names(traced: Traced) -> list[str]:
    return [node.name for node in traced.nodes]


@pytest.mark.parametrize(("case", "training"), each_once(CASES, [True, False]))
def test_graph_equals_model_at_another_size(case, training):
    model = case.make().train(training)
    args, kwargs = case.inputs(6)
    traced = trace(model, args, kwargs)
    args, kwargs = case.inputs(5)
    assert_same_as_model(traced, *args, **kwargs)


TABLE: dict[str, Any] = {
    "methods": lambda m, x: m.lin(x).relu().clamp(max=1.0).t().t(),
    "operators": lambda m, x: (2 - m.lin(x)) / 3 * x**2 + 1,
    "slices": lambda m, x: m.lin(x)[:, None, ..., ::2].squeeze(1)[..., [0, 2]] + x[..., -1:],
    "index tensors": lambda m, x: m.lin(x)[:, torch.tensor([1, 2])] + m.lin(x)[torch.arange(x.shape[0]), 0, None],
    "attributes": lambda m, x: m.lin(x).mT.mT + x.T.T.data,
    "casts": lambda m, x: m.lin(x).double().to(x.device, torch.float32).type(x.type()).type_as(x).cpu(),
    "dtypes of Python": lambda m, x: (
        m.lin(x) + torch.ones(6, dtype=int).to(bool).to(dtype=complex).real.to(float).mean()
    ),
    "a module moved to where it is": lambda m, x: m.lin.to(x.device, x.dtype).float()(x),
    "constants": lambda m, x: m.lin(x) * torch.Tensor([1, 2]).sum() + torch.Tensor(6).fill_(2) + torch.eye(6)[0],
    "numpy scalars": lambda m, x: m.lin(x) * np.float32(2) + np.sqrt(x.shape[1]) + np.int64(3),
    "numpy arrays": lambda m, x: m.lin(x) * torch.from_numpy(np.arange(6.0)).float(),
    "enumeration": lambda m, x: m.lin(x).sum(_Axis.FEATURES),
    "parameter without grad": lambda m, x: F.linear(x, m.lin.weight.data) + m.lin(x),
    "functional_call": lambda m, x: torch.func.functional_call(m.lin, {"weight": m.lin.weight * 2}, (x,)),
    "parameter itself": lambda m, x: (m.lin(x), m.lin.weight),
    "no grad": lambda m, x: _without_grad(m, x),
    "inference mode": lambda m, x: (m.lin(x), _in_inference_mode(m, x)),
    "autocast": lambda m, x: _in_autocast(m, x),
    "random": lambda m, x: F.dropout(m.lin(x)) + torch.rand_like(x) + torch.randn(x.shape[0], 1),
}


class _Axis(enum.IntEnum):
    FEATURES = 1


def _without_grad(m, x):
    with torch.no_grad():
        y = m.lin(x)
    return m.lin(y)


def _in_inference_mode(m, x):
    with torch.inference_mode():
        return m.lin(x).argmax(1)


def _in_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.lin(x)
        with torch.autocast("cpu", enabled=False):
            z = m.lin(y.float())
    return y, z


@pytest.mark.parametrize("name", TABLE)
def test_what_forward_may_do(name):
    traced = trace(Forward(TABLE[name]), (x(),))
    assert not traced.why
    assert_same_as_model(traced, x(7))


TORCH_MODULES = {
    "batch norm without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (4, 6)),
    "instance norm": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 5)),
    "pruned": (lambda: _pruned(nn.Linear(6, 6)), (4, 6)),
    "parameter list": (lambda: _ParameterList(), (4, 6)),
}


class _ParameterList(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(6) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": torch.randn(6)})

    def forward(self, x):
        return x * self.list[0] + self.list[1] - self.dict["a"]


def _pruned(module):
    prune.l1_unstructured(module, "weight", amount=0.5)
    return module


@pytest.mark.parametrize(("name", "training"), each_once(TORCH_MODULES, [True, False]))
def test_modules_of_torch(name, training):
    make, shape = TORCH_MODULES[name]
    model = make().train(training)
    traced = trace(model, (torch.randn(shape),))
    larger = torch.randn(shape[0] + 2, *shape[1:])
    if name == "pruned":  # its tensors that are no leaves cannot be copied
        torch.testing.assert_close(run(traced, larger)[0], model(larger))
    else:
        assert_same_as_model(traced, larger)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def test_autograd_function_is_named_after_itself_and_known_to_be_random():
    traced = trace(Forward(lambda m, x: Noise.apply(m.lin(x))), (x(),))
    assert names(traced) == ["lin", "Noise"]
    assert [info(node).is_random for node in traced.nodes] == [False, True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_called_through(reentrant):
    traced = trace(Forward(lambda m, x: checkpoint(m.lin, m.lin(x), use_reentrant=reentrant)), (x(),))
    assert names(traced) == ["lin", "lin_1"]


def test_random_nodes_are_found():
    def forward(m, x):
        y = F.dropout(m.lin(x), 0.5) + torch.randn(x.shape[0], 1) + torch.zeros(x.shape[0], 6).normal_()
        return y[torch.randperm(x.shape[0])] + F.dropout(y, 0.5, training=False)

    traced = trace(Forward(forward), (x(),), out_dims=0)  # the order of samples is that of a micro-batch
    assert [n.name for n in traced.nodes if info(n).is_random] == ["dropout", "randn", "normal", "randperm"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caller_without_grad(mode):
    model = Forward(lambda m, x: m.lin(x) * m.n.add_(1), n=torch.zeros(6))
    with mode():
        traced = trace(model, (x(),))
        assert is_graph_of(traced, [x()])
    assert not any(state_of(node).grad for node in traced.nodes)
    assert not is_graph_of(traced, [x()])
    assert not model.n.any()


def test_nodes_are_named_after_module_paths_and_know_their_lines():
    traced = trace(nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(6))), (x(),))
    assert names(traced) == ["_0", "_1_0", "_1_1_num_batches_tracked_add", "_1_1"]
    assert [info(node).module for node in traced.nodes] == ["0", "1.0", "1.1", "1.1"]
    encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    assert names(trace(encoder, (torch.randn(4, 5, 6),)))[-3:] == ["dropout2", "add_1", "norm2"]
    for node in trace(Forward(TABLE["slices"]), (x(),)).nodes:
        path, _, line = info(node).source.rpartition(":")
        assert path == __file__
        assert int(line) > 0


def _set(module, **values):
    for name, value in values.items():
        setattr(module, name, value)
    return 0


BUFFERS: dict[str, tuple[Any, list[str]]] = {
    "in place": (lambda m, x: m.lin(x) * m.a.add_(1), []),
    "augmented": (lambda m, x: _set(m, a=m.a.__iadd__(x.detach().mean(0))) + m.lin(x) * m.a, []),
    "by data": (lambda m, x: m.lin(x) * m.a.data.add_(1), []),
    "an item": (lambda m, x: m.a.__setitem__(0, x.detach().mean()) or m.lin(x) * m.a, []),
    "set anew": (lambda m, x: _set(m, a=m.a + x.detach().mean(0)) + m.lin(x) * m.a, ["a"]),
    "swapped": (lambda m, x: _set(m, a=m.b, b=m.a) + m.lin(x) * m.a, ["a", "b"]),
    "swapped and not read": (lambda m, x: _set(m, a=m.b, b=m.a) + m.lin(x), ["a", "b"]),
    "NaN": (lambda m, x: m.lin(x) + m.nan.nan_to_num(), []),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_changed_buffers(name):
    forward, assigned = BUFFERS[name]
    model = Forward(forward, a=torch.ones(6), b=torch.zeros(6), nan=torch.full((1,), float("nan")).expand(6))
    before = {key: (value, value.clone()) for key, value in model.named_buffers()}
    traced = trace(model, (x(),), out_dims=0)  # state changes with each micro-batch
    assert list(traced.assigned) == assigned
    for key, value in model.named_buffers():
        assert value is before[key][0]
        torch.testing.assert_close(value, before[key][1], equal_nan=True)
    if name == "NaN":
        assert traced.effects is not None
        assert not any(traced.effects.written_classes)
    else:
        assert_same_as_model(traced, x(5))


def test_tensor_attributes_that_forward_sets():
    model = Forward(lambda m, x: _set(m, last=x.detach().mean(), current=m.tables[1]) + m.lin(x) * m.current)
    model.tables = [torch.ones(6), torch.full((6,), 2.0)]
    traced = trace(model, (x(),))
    assert set(traced.assigned) == {"last", "current"}
    assert torch.equal(model.current, model.tables[1])  # forward makes it, and every later call has it
    assert list(traced.constants) == ["tables.1"]


def _add_class(m: Any) -> None:
    m[0].__class__ = type("Other", (nn.Linear,), {})


def _take_attribute(m: Any) -> None:
    del m.gain


FLAGS: dict[str, Any] = {
    "training": lambda m: m[1].eval(),
    "module": lambda m: m.__setitem__(1, nn.Dropout(0.5)),
    "one module more": lambda m: m.append(nn.ReLU()),
    "one module less": lambda m: m.__delitem__(1),
    "class": _add_class,
    "attribute": lambda m: setattr(m[0], "forward", m[0].forward),
    "attribute less": _take_attribute,
    "parameter": lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(6))),
    "parameter less": lambda m: setattr(m[2], "weight", None),
    "buffer": lambda m: m.register_buffer("mask", torch.ones(6)),
    "buffer less": lambda m: setattr(m[2], "running_var", None),
    "hook": lambda m: m[0].register_forward_hook(print),
    "hook before": lambda m: m[0].register_forward_pre_hook(print),
    "hook of backward": lambda m: m[0].register_full_backward_hook(print),
    "hook before backward": lambda m: m[0].register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("change", FLAGS.values(), ids=FLAGS)
def test_flags_tell_whatever_decides_which_python_runs(change):
    model: Any = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Dropout(0.5), nn.BatchNorm1d(6))
    model.gain = 1.0
    before = module_flags(model)
    model.gain = 2.0  # is what forward reads, and no matter of flags
    model.register_buffer("mask", None)
    model[0].weight = nn.Parameter(torch.ones(6, 6))
    assert module_flags(model) == before
    change(model)
    assert module_flags(model) != before


def _everything(model: nn.Module) -> dict[str, Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "state": [(name, t, t.data_ptr(), t._version, t.clone(), t.requires_grad, t.grad) for name, t in tensors],
        "attributes": [{k: (id(v), copy.copy(v)) for k, v in vars(m).items()} for m in model.modules()],
        "flags": [m.training for m in model.modules()],
        "torch": torch.get_rng_state().clone(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "patches": (nn.Module.__call__, torch.autograd.Function.__dict__["apply"]),
    }


def _assert_nothing_changed(before: dict[str, Any], model: nn.Module) -> None:
    after = _everything(model)
    for old, new in zip(before["state"], after["state"], strict=True):
        assert (old[0], old[2], old[5]) == (new[0], new[2], new[5])
        assert old[1] is new[1]
        assert old[6] is new[6]
        torch.testing.assert_close(new[4], old[4])
    assert torch.equal(before["torch"], after["torch"])
    for key in ("attributes", "flags", "python", "numpy", "dtype", "patches"):
        assert str(before[key]) == str(after[key]), key


def _careless(m, x):
    """Everything at once that tracing must undo."""
    m.count += 1
    m.log.append(m.count)
    m._private["key"] = x
    m.nested[0][0] = m.count
    m.new = x.shape
    m.buffer.add_(1)
    m.buffer = m.buffer + 1
    m.lin.eval()
    random.random()
    np.random.rand()
    torch.rand(2)
    return m.lin(x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.dropout(m.lin(x)) * m.buffer.add_(1),
        lambda m, x: m.lin(x).repeat_interleave(2, 0),  # compared once more, part by part
        lambda m, x: _careless(m, x),
        lambda m, x: m.lin.weight.data.add_(1) and m.lin(x),
        lambda m, x: m.lin.requires_grad_(False)(x),
        lambda m, x: torch.set_default_dtype(torch.float64) or m.lin(x),
        lambda m, x: m.lin(x) @ torch.ones(3),
        lambda m, x: _set(m, lin=nn.Linear(6, 6)) + m.lin(x),
        lambda m, x: _set(m.lin, weight=nn.Parameter(m.lin.weight * 2)) + m.lin(x),
    ],
    ids="buffer gather careless parameter requires_grad dtype raises module replaced".split(),
)
def test_tracing_leaves_no_trace(forward):
    model = Forward(forward, buffer=torch.zeros(6), count=0, log=[1], _private={}, nested=[[0]])
    model.lin.weight.grad = torch.ones(6, 6)
    inputs = (x(),)
    before = _everything(model)
    with contextlib.suppress(TraceError, RuntimeError):
        trace(model, inputs, chunks=2)
    _assert_nothing_changed(before, model)


def test_inputs_stay_as_they_were():
    for given in (x(), x().requires_grad_() * 1):
        before = given.detach().clone()
        trace(Forward(lambda m, x: m.lin(x.mul_(2))), (given,))
        assert torch.equal(given, before)
        assert given._version == 0


def test_two_threads_trace_at_once():
    found: list[list[str]] = []
    barrier = threading.Barrier(2)

    def work():
        barrier.wait()
        for _ in range(3):
            found.append(names(trace(Forward(lambda m, x: Noise.apply(m.lin(x))), (x(),))))

    before = nn.Module.__call__
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["lin", "Noise"]] * 6
    assert nn.Module.__call__ is before


def _scaled(x, factor):
    """Times `factor`, which no recording sees."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    return Scaled.apply(x)


def test_branch_that_a_recording_cannot_see_is_found():
    with pytest.raises(TraceError, match=r"output 0 .*differs from the model's with 2 samples.*keep these in tensor"):
        trace(Forward(lambda m, x: _scaled(m.lin(x), len(x))), (x(),))


def test_other_sizes_are_checked_for_a_single_sample_too():
    with pytest.raises(TraceError, match="with 2 samples"):
        trace(Forward(lambda m, x: _scaled(m.lin(x), len(x))), (x(1),))


def test_other_sizes_are_checked_where_the_model_refuses_smaller_ones():
    model = nn.Sequential(Forward(lambda m, x: _scaled(m.lin(x), len(x))), nn.BatchNorm1d(6))
    with pytest.raises(TraceError, match="with 3 samples instead of the example's 2"):
        trace(model, (x(2),))
    trace(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (x(2),))


def test_buffer_that_differs_is_named():
    def forward(m, x):
        m.n.copy_(_scaled(m.n + 1, len(x)))
        return m.lin(x)

    with pytest.raises(TraceError, match="buffer 'n' after the traced graph differs"):
        trace(Forward(forward, n=torch.zeros(())), (x(),))


def test_output_that_requires_grad_in_the_model_only_is_found():
    def forward(m, x):
        with torch.set_grad_enabled(sum(1 for _ in [0] * x.shape[0]) == 4):  # a number that nothing follows
            return m.lin(x)

    with pytest.raises(TraceError, match="requires grad in the traced graph only"):
        trace(Forward(forward), (x(),))


def test_a_list_that_forward_fills_and_then_reads():
    """For a later module to take, as deep supervision does."""

    def forward(m, x):
        y = m.lin(x) + (m.heads[1].mean() if m.takes_before else 0)
        m.heads[1] = y
        return m.second(y).relu() + m.heads[1]

    def make_model(takes_before):
        heads = [torch.rand(1)] * 2
        return Forward(forward, second=nn.Linear(6, 6), heads=heads, takes_before=takes_before)

    model, inputs = make_model(False), x()
    before = model.heads[1]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(inputs,)) as pipe:
        assert model.heads[1] is before
        torch.testing.assert_close(pipe(inputs), model(inputs))
    with pytest.raises(TraceError, match=r"takes tensors out of 'heads' and puts others in"):
        trace(make_model(True), (inputs,))


class Nested(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layer(h)
        return h if self.inner is None else self.inner(h)


class Recursion(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self._add(h * 2, 880)

    def _add(self, h: torch.Tensor, times: int) -> torch.Tensor:
        return self._add(h, times - 1) if times else h + 1


@pytest.mark.parametrize("model", [Nested(200), Recursion()], ids=["modules", "functions"])
def test_what_python_recurses_through_in_the_model_is_recorded(model: nn.Module):
    limit, inputs = sys.getrecursionlimit(), torch.randn(4, 3)
    want = model(inputs)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(inputs,)) as pipe:
        torch.testing.assert_close(pipe(inputs), want)
    assert sys.getrecursionlimit() == limit


class Endless(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.forward(h + 1)


def test_endless_recursion_is_the_models_error():
    with pytest.raises(RecursionError) as raised:
        trace(Endless(), (torch.randn(4, 3),))
    assert any("the model raised this" in note for note in raised.value.__notes__), raised.value.__notes__
