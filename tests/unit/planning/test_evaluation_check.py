"""A pipe that trains and will be refused when it is evaluated says so when it is planned, and no other pipe does."""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.unseen_list import UnseenList
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError


class Model(nn.Module):
    """One that does something else in evaluation."""

    def __init__(self, evaluate: Any = None, train: Any = None, **held: Any):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.functions = {False: evaluate, True: train}
        for name, value in held.items():
            self.register_buffer(name, value) if isinstance(value, torch.Tensor) else setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(torch.tanh(self.first(x)))
        function = self.functions[self.training]
        return y if function is None else function(self, y)


def _pipeline(model: nn.Module, x: torch.Tensor | None = None, **options: Any) -> fxpipe.Pipeline:
    options = {"devices": ["cpu", "cpu"], "chunks": 2, "profile_budget": 0.0, "progress": False} | options
    return fxpipe.pipeline(model, example_args=(torch.randn(6, 4) if x is None else x,), **options)


def _quiet(model: nn.Module, x: torch.Tensor | None = None, **options: Any) -> fxpipe.Pipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _pipeline(model, x, **options)


def _writes_to_a_parameter(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.first.weight.data.mul_(0.5)
    return y


def _counts(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return y * m.count


def _counts_without_gradients(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y if torch.is_grad_enabled() else _counts(m, y)


REFUSED: dict[str, Any] = {
    "a map of what samples share": lambda m, y: m.second(y.t() @ y),
    "a parameter is written": _writes_to_a_parameter,
    "a counter": _counts,
    "a counter, without gradients": _counts_without_gradients,
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_is_the_one_that_evaluation_gives(name: str) -> None:
    model = Model(REFUSED[name], count=0)
    with pytest.warns(UserWarning, match=r"Model can be trained as a pipe, but its evaluation") as told:
        pipe = _pipeline(model)
    (warning,) = told
    assert warning.filename == __file__
    with pipe:
        pipe(torch.randn(6, 4)).sum().backward()
        pipe.eval()
        with torch.no_grad(), pytest.raises(FxpipeError) as refused:
            pipe(torch.randn(6, 4))
    assert str(warning.message).endswith(f"will be refused: {refused.value}")


def test_a_pipe_that_plans_at_its_first_call_says_it_there() -> None:
    pipe = fxpipe.pipeline(Model(REFUSED["a counter"], count=0), ["cpu", "cpu"], 2, profile_budget=0.0)
    x = torch.randn(6, 4)
    with pytest.warns(UserWarning, match="its evaluation .* will be refused") as told:
        y = pipe(x)
    with pipe:
        y.sum().backward()
        pipe(x).sum().backward()
    assert [warning.filename for warning in told] == [__file__]


class Rolls(Layered, linear=4):
    """Drawn in Python, so that it is kept whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if random.random() < 0.5 else 1)


def _grows_lazily(m: Any, y: torch.Tensor) -> torch.Tensor:
    if m.scale is None:
        m.scale = y.shape[1] ** -0.5
    if not hasattr(m, "positions"):
        m.positions = torch.arange(4.0)
    return y * m.scale + m.positions


def _is_not_for_two(m: Any, y: torch.Tensor) -> torch.Tensor:
    if y.shape[0] < 3:
        raise ValueError("too few samples")
    return y


def _is_not_for_evaluation(m: Any, y: torch.Tensor) -> torch.Tensor:
    raise ValueError("only for training")


WORKING: dict[str, Any] = {
    "nothing else": lambda: Model(),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "a softmax in evaluation": lambda: Model(lambda m, y: (y, y.softmax(-1))),
    "a module kept whole": lambda: nn.Sequential(nn.Linear(4, 4), Rolls(), nn.Linear(4, 4)),
    "the batch size as a number": lambda: Model(lambda m, y: y.view(int(f"{len(y)}"), 2, 2)),
    "state that evaluation makes": lambda: Model(_grows_lazily, scale=None),
    "not of two samples": lambda: Model(_is_not_for_two),
    "only for training": lambda: Model(_is_not_for_evaluation),
}


@pytest.mark.parametrize("name", WORKING)
def test_nothing_is_said_of_models_that_are_not_refused(name: str) -> None:
    _quiet(WORKING[name]()).close()


def test_only_a_pipe_that_trains_and_plans_for_itself_is_asked() -> None:
    model, x = Model(REFUSED["a map of what samples share"]), torch.randn(6, 4)
    with pytest.warns(UserWarning, match="its evaluation"):
        pipe = _pipeline(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pipe, copy.deepcopy(pipe) as copied:
            copied(x).sum().backward()
        plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, profile_budget=0.0)
        fxpipe.pipeline(model, example_args=(x,), plan=plan).close()
        with torch.device("meta"):
            without_values = Model(REFUSED["a map of what samples share"])
        fxpipe.pipeline(without_values, ["cpu", "cpu"], 2, example_args=(x,)).close()
        _quiet(Model().eval()).close()


SEEN = UnseenList()  # modes in which it ran


def _leaves_things(m: Any, y: torch.Tensor) -> torch.Tensor:
    SEEN.append(torch.is_grad_enabled())
    print("evaluating")
    warnings.warn("evaluating", stacklevel=2)
    m.running += 1
    if 4 not in m.cache:
        m.cache[4] = torch.ones(4)
    if not hasattr(m, "made"):
        m.made = torch.ones(4)
    m.number = 3
    return m.extra(y + torch.rand(4)) + m.made + m.cache[4]


def _leaves_things_and_is_refused(m: Any, y: torch.Tensor) -> torch.Tensor:
    random.random()
    y = _leaves_things(m, y)
    return y @ y.t()


@pytest.mark.parametrize("evaluate", [_leaves_things, _leaves_things_and_is_refused])
def test_it_leaves_no_trace(evaluate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(evaluate, running=torch.zeros(2), cache={}, number=0)
    model.extra = nn.Linear(4, 4)
    model.second.eval()  # frozen
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    held, flags = dict(model.__dict__), [module.training for module in model.modules()]
    x, dice, states = torch.randn(6, 4), random.getstate(), torch.get_rng_state()
    if evaluate is _leaves_things:
        _quiet(model, x).close()
    else:
        with pytest.warns(UserWarning, match="its evaluation") as told:
            _pipeline(model, x).close()
        assert len(told) == 1
    seen = [*SEEN]
    assert seen
    assert not any(seen)
    assert capsys.readouterr() == ("", "")
    assert random.getstate() == dice
    assert torch.equal(torch.get_rng_state(), states)
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(bool((gradient == 1).all()) for gradient in gradients)
    assert model.__dict__.keys() == held.keys()
    assert model.number == 0
    assert model.cache == {}
    assert not model.running.any()
