"""Attributes that forward sets before it reads them carry nothing to the next call: steps do without them."""

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from helpers.oracle import assert_same_gradients
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, StateError


class Model(nn.Module):
    count = 0

    def __init__(self, forward: Any, **held: Any):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), forward
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self, x)
        return result


def _spiking(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.potential = [torch.zeros_like(x) for _ in range(2)]
    for k, layer in enumerate((m.first, m.second)):
        m.potential[k] = 0.9 * m.potential[k] + layer(x)
        x = torch.sigmoid(5 * (m.potential[k] - 0.5))
    return x


def _kan(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.acts, m.scales = [x], {}
    for layer in (m.first, m.second):
        m.acts.append(layer(m.acts[-1]).relu())
        m.scales[len(m.acts)] = m.acts[-1].detach().std()
    return m.acts[-1] + m.acts[1]


def _sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.first.rows = len(x)
    return m.second(m.first(x)).view(m.first.rows, 2, -1).flatten(1)


class Context:
    pass


def _context(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.context = Context()
    m.context.hidden = m.first(x)
    return m.second(m.context.hidden.tanh())


SET: dict[str, tuple[Any, dict[str, Any], str]] = {
    "spiking": (_spiking, {"potential": []}, "potential"),
    "lists, a dict": (_kan, {"acts": None, "scales": None}, "acts"),
    "new names": (_kan, {}, "scales"),
    "number of samples, of a module inside": (_sizes, {}, "first.rows"),
    "an object": (_context, {}, "context"),
}


@pytest.mark.parametrize("name", SET)
def test_it_is_recorded(name: str) -> None:
    forward, held, attribute = SET[name]
    plain, x = copy.deepcopy(model := Model(forward, **held)), torch.randn(4, 8)
    path, _, key = attribute.rpartition(".")
    owner = model.get_submodule(path)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        assert not pipe.plan.whole
        assert getattr(owner, key, None) == held.get(key)
        for samples in (4, 6, 4):
            x = torch.randn(samples, 8)
            model.zero_grad()
            plain.zero_grad()
            want = torch.cat([plain(part) for part in x.chunk(2)])
            want.square().mean().backward()
            torch.testing.assert_close(pipe(x), want)
            pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
            assert_same_gradients(pipe, plain, loose=[n for n, _ in plain.named_parameters()])
            for use in (bool, len, list, lambda value: value[0], lambda value: value * 2, lambda value: value.hidden):
                with pytest.raises(StateError, match=rf"'{attribute}' in each call.*let forward return it"):
                    use(getattr(owner, key))
        assert attribute in repr(pickle.loads(pickle.dumps(copy.deepcopy(getattr(owner, key)))))
        assert model(x).shape == (4, 8)
        assert type(getattr(owner, key)).__name__ != "NotKept"


class Counter(nn.Module):
    """Counts calls and samples, as right-hand sides of differential equations do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.samples = nn.Linear(8, 8), 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.samples = self.samples + len(x)
        y: torch.Tensor = self.layer(x).tanh()
        return y


def test_a_counter_that_forward_does_not_use_is_not_kept() -> None:
    plain = copy.deepcopy(model := Model(lambda m, x: m.second(m.first(m.first(x))), first=Counter()))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 8),)) as pipe:
        assert (model.first.calls, pipe.plan.whole) == (0, ())
        for samples in (4, 6, 4):
            x = torch.randn(samples, 8)
            torch.testing.assert_close(pipe(x), plain(x))
            with pytest.raises(StateError, match=r"'first.calls' in each call.*let forward return it"):
                int(model.first.calls)
            model.first.calls = 0


def _uses(use: Any) -> Any:
    return lambda: Model(lambda m, x: m.first(x) * use(m.first), first=Counter())


def _compares(counter: Any) -> float:
    try:
        return 1.0 + (counter.calls < 2)
    except StateError:
        return 3.0


def _counts_in_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps = m.__dict__.get("steps", 0) + 1
    return m.second(m.first(x)) / m.steps


def _counts_if_there(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "steps"):
        m.steps = 0
    m.steps += 1
    return m.second(m.first(x)) / m.steps


def _counts_from_the_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count = m.count + 1
    return m.second(m.first(x)) / m.count


def _counts_unseen(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps = object.__getattribute__(m, "steps") + 1
    return m.second(m.first(x)) / m.steps


def _alias(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.current = m.history
    m.current.append(1)
    return m.second(m.first(x)) * len(m.history)


def _read_by_a_hook() -> nn.Module:
    model = Model(_kan, acts=None, scales=None)
    model.second.register_forward_hook(lambda module, args, output: output * len(model.acts))
    return model


COUNTS = {
    "in the dict": lambda: Model(_counts_in_dict),
    "if there is none": lambda: Model(_counts_if_there),
    "a class attribute": lambda: Model(_counts_from_the_class),
    "unseen": lambda: Model(_counts_unseen, steps=0),
    "under another name": lambda: Model(_alias, history=[], current=None),
    "read by a hook": _read_by_a_hook,
    "as a factor": _uses(lambda counter: counter.calls),
    "by its type": _uses(lambda counter: 1 + isinstance(counter.calls, int)),
    "by its text": _uses(lambda counter: len(f"{counter.calls}")),
    "with errors caught": _uses(_compares),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_the_next_call_or_a_node_reads_is_refused(name: str) -> None:
    model = COUNTS[name]()
    with pytest.raises(FxpipeError, match=r"changes the attribute|sets .* in each call|differs from the model's"):
        fxpipe.trace(model, (torch.randn(4, 8),))


# -- a loss function that reads what forward changes -------------------------------------------------------------------


class Changes(nn.Module):
    def __init__(self, has_attribute: bool = True) -> None:
        super().__init__()
        self.has_attribute = has_attribute
        self.layer, self.norm, self.scale = nn.Linear(8, 8), nn.BatchNorm1d(8), torch.ones(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layer(x))
        if self.has_attribute:
            self.scale = h.detach().abs()
            self.mean.lerp_(h.detach().mean(0), 0.5)
        else:
            self.mean = self.mean.lerp(h.detach().mean(0), 0.5)
        return h


LOSSES = {
    "an attribute": lambda model: lambda y: (y * model[1].scale.mean()).mean(),
    "a buffer": lambda model: lambda y: (y - model[1].mean).square().mean(),
    "a number of it": lambda model: lambda y: y.mean() * float(model[1].mean[0]),
    "statistics": lambda model: lambda y: (y - model[1].norm.running_mean).square().mean(),
}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "forward_backward") for name in LOSSES), ("a buffer", "micro_batches")]
)
def test_a_loss_does_not_read_values_of_before_the_step(name: str, way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Changes(), nn.Linear(8, 8))
    x, loss_fn = torch.randn(4, 8), LOSSES[name](model)
    batch = ((x,), {}) if way == "forward_backward" else ((), {"micro_batches": [x[:2], x[2:]]})
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        pipe.forward_backward(
            *batch[0], **batch[1], loss_fn=lambda y: y.mean() + sum(p.square().sum() for p in model.parameters())
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(StateError, match="in each call, and loss_fn would read its value of before the step"):
            pipe.forward_backward(*batch[0], **batch[1], loss_fn=loss_fn)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        loss_fn(pipe(x)).backward()  # behind the step, the values are the mini-batch's


def _stream(loss_fn: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Changes(False), nn.Linear(8, 8), Changes(False), nn.Linear(8, 8))
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(6)]
    with fxpipe.pipeline(model, ["cpu", "cpu"], schedule="pipedream", balance=["2"], example_args=data[0][:1]) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        losses = [*pipe.train_stream(data, loss_fn=loss_fn(model), optimizer=optimizer)]
    return [loss.item() for loss in losses], model.state_dict()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "an attribute"])
def test_a_loss_of_a_stream_reads_no_older_values(name: str) -> None:
    with pytest.raises(StateError, match="in each call, and loss_fn would read its value of before the step"):
        _stream(lambda model: lambda y, _: LOSSES[name](model)(y))


def test_other_mini_batches_change_what_a_loss_of_a_stream_hides() -> None:
    class Names:
        mean = running_mean = 1.0

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)  # the next mini-batches come meanwhile
        return (y - target).square().mean() * Names.mean * Names.running_mean

    losses, state = _stream(lambda _: loss_fn)
    wanted, wanted_state = _stream(lambda _: lambda y, target: (y - target).square().mean() * 1.0)
    assert losses == wanted
    for name, value in wanted_state.items():
        assert torch.equal(state[name], value), name
