"""What the first forward makes and no later one changes is made once, before the model is traced, or it is refused."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared_steps import assert_trains, refusal_of
from helpers.devices import workers
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import TraceError


class Model(Layered, first=4, second=4):
    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def _attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.padding is None:
        m.padding = (0, -x.shape[1] % 3)
    return F.pad(m.second(m.first(x)), m.padding)


def _missing_attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "scale"):
        m.scale = x.shape[1] ** -0.5
    return m.second(m.first(x)) * m.scale


def _missing_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    if "positions" not in m._buffers:
        m.register_buffer("positions", torch.arange(x.shape[1]) * 0.1, persistent=False)
    return m.second(m.first(x) + m.positions)


def _by(key_of: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if (key := key_of(x)) not in m.cache:
            m.cache[key] = torch.arange(x.shape[1], device=x.device) * 0.1
        return m.second(m.first(x) + m.cache[key])

    return forward


def _empty_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.positions.numel():
        m.positions = torch.arange(x.shape[1]) * 0.1
    return m.second(m.first(x) + m.positions)


def _lists_that_are_new_in_each_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As the caches of causal convolutions in diffusers' VAEs."""

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        place = m.next_place[0]
        m.next_place[0] += 1
        m.features[place] = m.get_submodule(("first", "second")[number])(x)
        return m.features[place]

    def clear() -> None:
        m.next_place, m.features, m.sizes = [0], [None] * 2, {"all": (2, 1.5)}

    clear()
    x = layer(1, layer(0, x))
    clear()
    return x


MAKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "attribute": (_attribute, {"padding": None}),
    "missing attribute": (_missing_attribute, {}),
    "missing buffer": (_missing_buffer, {}),
    "empty buffer": (_empty_buffer, {"positions": torch.empty(0)}),
    "lists": (_lists_that_are_new_in_each_call, {}),
    "dict by device": (_by(lambda x: str(x.device)), {"cache": {}}),
    "dict by length": (_by(lambda x: x.shape[1]), {"cache": {}}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.anywhere] if "buffer" in name else []) for name in MAKES]
)
def test_it_is_made_without_a_call_by_hand(name: str) -> None:
    forward, held = MAKES[name]
    twin = copy.deepcopy(model := Model(function=forward, **copy.deepcopy(held)))
    assert assert_trains(model, [torch.randn(n, 4) for n in (4, 7, 5)], lr=0.1, evaluates=True) == 1
    twin.eval()(torch.randn(4, 4))
    assert all(getattr(model, k) == v for k, v in twin.__dict__.items() if isinstance(v, (int, float, tuple)))


def _first_statistics(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "mean"):
        m.mean = x.detach().mean(0)
    m.mean = m.mean * 0.9 + x.detach().mean(0) * 0.1
    return m.second(m.first(x - m.mean))


def _first_scale(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.is_ready:
        m.scale.copy_(1 / x.detach().std(0))
        m.is_ready = True
    return m.second(m.first(x * m.scale))


def _first_state(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.is_ready:
        m.count += 3
        m.is_ready = True
    return m.second(m.first(x)) + m.count


def _first_spread(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Of samples that are all alike it is zero."""
    y = m.second(m.first(x))
    if not m.is_ready:
        y = y + x.detach().std(0)
        m.is_ready = True
    return y


DATA: dict[str, tuple[Any, dict[str, Any]]] = {
    "first statistics": (_first_statistics, {}),
    "first scale": (_first_scale, {"is_ready": False, "scale": torch.ones(4)}),
    "first spread": (_first_spread, {"is_ready": False}),
    "state that counts": (_first_state, {"is_ready": False, "count": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", DATA)
def test_what_counts_is_asked_for_a_call_by_hand_and_then_is_right(name: str) -> None:
    forward, held = DATA[name]
    model = Model(function=forward, **copy.deepcopy(held))
    before = set(model.__dict__), {key: value.clone() for key, value in model.named_buffers()}
    with pytest.raises(TraceError, match=r"makes '\w+' when it is first called.*call the model once"):
        fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 4),))
    assert set(model.__dict__) == before[0]
    assert all(torch.equal(value, before[1][key]) for key, value in model.named_buffers())
    model(torch.randn(4, 4))
    twin = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 4),)) as pipe:
        for _ in range(2):
            x = torch.randn(4, 4)
            torch.testing.assert_close(pipe(x), torch.cat([twin(x[:2]), twin(x[2:])]))


def test_a_cache_that_grows_is_that_of_the_longest_samples() -> None:
    """A graph that makes it anew is that of a cache which is too short, and of no longer one."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m.cache is None or m.cache.shape[0] < x.shape[1]:
            m.cache = torch.arange(x.shape[1])[:, None].cos()
        return m.second(m.first(x) * m.cache[: x.shape[1]])

    twin = copy.deepcopy(model := Model(function=forward, cache=None))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 3, 4),)) as pipe:
        for length in (3, 7, 4, 9, 7, 3):
            x = torch.randn(4, length, 4)
            torch.testing.assert_close(pipe(x), twin(x))
            torch.testing.assert_close(model.cache, twin.cache)


def test_samples_that_are_nothing_do_not_tell_what_a_first_call_makes_of_them() -> None:
    with pytest.raises(TraceError, match=r"makes 'mean' when it is first called.*cannot be told from these samples"):
        fxpipe.trace(model := Model(function=_first_statistics), (torch.zeros(4, 4),))
    assert not hasattr(model, "mean")


def test_modules_made_in_forward_are_not_kept() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "late"):
            m.late = nn.Linear(4, 4)
        return m.late(m.first(x))

    with pytest.raises(TraceError):
        fxpipe.trace(model := Model(function=forward), (torch.randn(4, 4),))
    assert not hasattr(model, "late")


class Observer(Layered, largest=lambda: torch.empty(0)):
    """As those of quantization for each channel: no shape before there is a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().amax(0)
        if self.largest.numel() == 0:
            self.largest.resize_(largest.shape).copy_(largest)
        else:
            self.largest.copy_(torch.maximum(self.largest, largest))
        return x / self.largest.abs().clamp(min=1)


class SetsItsBuffer(Observer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().amax(0)
        self.largest = largest if self.largest.numel() == 0 else torch.maximum(self.largest, largest)
        return x / self.largest.abs().clamp(min=1)


@pytest.mark.parametrize("kind", [Observer, SetsItsBuffer])
def test_a_buffer_that_gets_its_shape_in_the_first_forward_is_asked_for_a_call_by_hand(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r"'1\.largest'.*call the model once"):
        fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 4),))
    assert model[1].largest.shape == (0,)
    model(torch.randn(4, 4))
    twin = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 4),)) as pipe:
        for _ in range(2):
            x = torch.randn(4, 4) * 3
            torch.testing.assert_close(pipe(x), torch.cat([twin(x[:2]), twin(x[2:])]))
            torch.testing.assert_close(model[1].largest, twin[1].largest)


class OfWeights(Layered, lin=4, largest=lambda: torch.empty(0)):
    """An observer of a weight, as for each channel: the samples make no difference to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = self.lin.weight.detach().abs().amax(1)
        if self.largest.numel() == 0:
            self.largest.resize_(largest.shape).copy_(largest)
        else:
            self.largest.lerp_(largest, 0.5)
        return self.lin(x) / self.largest


def quantized() -> nn.Module:
    import torch.ao.quantization as quantization

    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min:UserWarning")
def test_a_buffer_that_gets_its_shape_from_weights_is_made_without_a_call_by_hand() -> None:
    batches = [torch.randn(n, 4) for n in (4, 6, 8)]
    assert_trains(quantized(), batches, lr=0.1)
    assert not refusal_of(lambda: nn.Sequential(nn.Linear(4, 4), OfWeights()), lambda step: (batches[step],))


def test_a_first_call_that_writes_something_else_to_its_input_is_refused():
    """Its output is that of later calls: only the input that it has written to tells."""

    def forward(m, x, state):
        h = m.first(x)
        state.copy_(h.detach() if m.previous is None else h.detach() + m.previous)
        m.previous = h.detach().mean(0)
        return h

    model, inputs = Model(function=forward, previous=None), (torch.randn(6, 4), torch.zeros(6, 4))
    with pytest.raises(TraceError, match=r"makes 'previous' when it is first called.*call the model once"):
        fxpipe.trace(model, inputs)
    assert model.previous is None


class Scaled(nn.Linear):
    """Computes a number of the module alone when it is first needed."""

    @functools.cached_property
    def factor(self) -> float:
        return self.in_features**0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def test_a_cached_property_may_be_computed_in_any_call():
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        return x if torch.rand(()) < 0.5 else m.second(m.scaled(x))

    for seed in range(4):
        torch.manual_seed(seed)
        model = Model(function=forward, scaled=Scaled(4, 4))
        with fxpipe.pipeline(model, workers(2), 2, example_args=(torch.randn(4, 4),)) as pipe:
            for _ in range(4):
                assert fxpipe.verify(pipe, torch.randn(4, 4))
            assert len(pipe._fxpipe.graphs) <= 3  # the first may be without the number


@pytest.mark.parametrize("size", [lambda x: x.shape[0], lambda x: int(x.shape[0])])
def test_a_cached_property_of_what_forward_sets_is_not_left_from_planning(size):
    """Planning runs the model with other numbers of samples; the plain model would keep the number of one of them."""

    class OfInput(Scaled):
        @functools.cached_property
        def factor(self) -> float:
            return float(self.length)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.length = size(x)
            return super().forward(x)

    model = Model(function=lambda m, x: m.second(m.scaled(m.first(x))), scaled=OfInput(4, 4))
    with pytest.raises(TraceError):
        fxpipe.pipeline(model, workers(2), 2, example_args=(torch.randn(6, 4),))
    assert "factor" not in model.scaled.__dict__


def _teaches(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.training and len(x) > 4:
        m.teacher.eval()
    return m.second(m.first(x)) - m.teacher(x)


def test_a_mode_that_forward_sets_is_set_before_its_graph_is_looked_up() -> None:
    """Trainers call `train()` before each step. If forward sets no mode, the teacher keeps its own."""
    plain = copy.deepcopy(model := Model(function=_teaches, teacher=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))))
    x = torch.randn(6, 4)
    with fxpipe.pipeline(model, workers(2), 2, example_args=(x,)) as pipe:
        for _ in range(4):
            torch.testing.assert_close(pipe.train()(x), plain.train()(x))
            assert not model.teacher.training
        assert len(pipe._fxpipe.graphs) == 2
        for small in (pipe.train(), pipe.eval()):
            model.teacher.train()
            assert not torch.equal(small(x[:4]), small(x[:4]))
        pipe.eval()
        torch.testing.assert_close(pipe(x), plain.eval()(x))
