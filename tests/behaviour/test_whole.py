"""Modules and functions that are kept whole: one node each, whose Python runs for every micro-batch."""

import copy
import functools
import gc
import operator
import random
import re
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.devices import workers
from helpers.every_cut import EveryCut
from helpers.layered import Layered
from helpers.oracle import assert_same_state, assert_step, closing, draw_seed, seeded_opaque_call
from helpers.traced_models import Forward
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import ArgumentError, StateError, TraceError


class Inner(nn.Module):
    """What is kept whole in most tests."""

    def __init__(self, function: Any = None, **held: Any):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.function = function
        for name, value in held.items():
            is_buffer = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            self.register_buffer(name, value) if is_buffer else setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lin(x).tanh() if self.function is None else self.function(self, x)


class Model(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.inner(self.first(x)))


def x(batch: int = 6) -> torch.Tensor:
    return torch.randn(batch, 6)


def whole(model: nn.Module, *args: Any, leaf_modules: Any = ("inner",)) -> fxpipe.tracing.Traced:
    traced = fxpipe.trace(model, args or (x(),), leaf_modules=list(leaf_modules))
    assert [*traced.whole] == list(leaf_modules), traced.whole
    return traced


def pipe_of(model: nn.Module, **options: Any) -> Any:
    given = {"devices": workers(2), "chunks": 3, "leaf_modules": ["inner"]} | options
    return closing(fxpipe.pipeline(model, **given))


# -- which modules ---------------------------------------------------------------------------------------------------


class Nested(Layered, a=Inner, b=lambda: Model(Inner())):
    def forward(self, x):
        return self.b(self.a(x))


def test_by_name_and_by_class():
    assert [*fxpipe.trace(Nested(), (x(),), leaf_modules=["b.inner"]).whole] == ["b.inner"]
    assert [*fxpipe.trace(Nested(), (x(),), leaf_modules=[Inner]).whole] == ["a", "b.inner"]
    assert [*fxpipe.trace(Nested(), (x(),), leaf_modules=["b", "b.inner", Inner]).whole] == ["a", "b"]


def test_each_is_one_node_of_its_class_and_line():
    traced = fxpipe.trace(Nested(), (x(),), leaf_modules=["b"])
    (row,) = (line.split() for line in str(traced).splitlines() if " Model(" in line)
    assert row[-2] == "b"
    assert row[-1].startswith("test_whole.py:")
    assert traced.whole == {"b": "asked for by leaf_modules"}
    assert traced.why == ("module 'b' is kept whole: asked for by leaf_modules",)
    assert 0.5 < max(traced.opaque_shares.values()) < 0.9


def test_unknown_name():
    with pytest.raises(ArgumentError, match=r"Nested has no module 'c'; expected names \(a, a.lin, b, b.first"):
        fxpipe.trace(Nested(), (x(),), leaf_modules=["c"])
    with pytest.raises(ArgumentError, match=r"Nested has no module <class .*LSTM"):
        fxpipe.trace(Nested(), (x(),), leaf_modules=[nn.LSTM])


# -- right, whatever they do -----------------------------------------------------------------------------------------


class Bound(Layered, lin=6, other=6):
    """Methods kept in `__init__` belong to the replica, too; and modules in plain lists."""

    def __init__(self):
        super().__init__()
        self.run, self.partial = self._run, functools.partial(self._run, scale=3.0)
        self.layers = [self.lin, self.other]
        self.by_name = {"one": (self.lin, [self.other])}

    def _run(self, x, scale=2.0):
        return self.lin(x) * scale

    def forward(self, x):
        x = self.run(x) + self.partial(x)
        for layer in self.layers:
            x = layer(x)
        return self.by_name["one"][1][0](x)


def _patched() -> Inner:
    inner = Inner()
    inner.forward = functools.partial(lambda module, x: module.lin(x) * 2, inner)
    return inner


class Named(nn.Module):
    def forward(self, x, *, scale, shift=None, options=None):
        return {"y": (x * scale, [None, 3, "text"]), "z": x + (0 if shift is None else shift), "o": options["k"] * x}


class Calling(Layered, inner=Named, last=6):
    def forward(self, x):
        made = self.inner(x, scale=self.last.bias, options={"k": x * 2, "n": None, "b": x.shape[1]})
        assert made["y"][1] == [None, 3, "text"]
        return self.last(made["y"][0] + made["z"]) + made["o"]


class Twice(Layered, first=6, inner=Inner, last=6):
    def forward(self, x):
        return self.last(self.inner(self.first(self.inner(x))))


def _tied() -> Model:
    model = Model(Inner())
    model.last.weight = model.inner.lin.weight
    model.inner.also = model.first
    return model


def _of_grad(module, x):
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        h = module.lin(given).square()
        h[:, 0] = 0  # a gradient of what was written to is not recorded
        (found,) = torch.autograd.grad(h.sum(), given, create_graph=True)
    return x + found


def _with_hooks(module, x):
    h = module.lin(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return h.tanh()


def _in_place(module, x):
    x.mul_(2)
    return F.relu(module.lin(x), inplace=True)


def _no_grad(module, x):
    with torch.no_grad():
        scale = module.lin(x).std(1, keepdim=True)
    return module.lin(x) * scale


MODELS: dict[str, Any] = {
    "plain": lambda: Model(Inner()),
    "bound methods": lambda: Model(Bound()),
    "patched forward": lambda: Model(_patched()),
    "keyword arguments and any output": Calling,
    "called twice": Twice,
    "tied": _tied,
    "autograd.grad": lambda: Model(Inner(_of_grad)),
    "hook on a tensor": lambda: Model(Inner(_with_hooks)),
    "in place": lambda: Model(Inner(_in_place)),
    "no_grad": lambda: Model(Inner(_no_grad)),
    "checkpoint": lambda: Model(Inner(lambda m, x: checkpoint(m.lin, x, use_reentrant=False).tanh())),
    "frozen": lambda: Model(Inner().requires_grad_(False)),
    "parametrized": lambda: Model(_parametrized()),
    "lock": lambda: Model(Inner(_locked, lock=threading.Lock())),
    "list of tensors": lambda: Model(Inner(lambda m, x: m.lin(x) * m.table[0], table=[torch.ones(6) * 3])),
}  # fmt: skip


# Whose memory comes and goes in ways of its own: arguments, replicas, several calls, writes, gradients of gradients.
ON_DEVICES = ("bound methods", "keyword arguments and any output", "called twice", "in place", "autograd.grad", "lock")


def _parametrized() -> Inner:
    inner = Inner()
    nn.utils.parametrizations.weight_norm(inner.lin)
    return inner


def _locked(module, x):
    with module.lock:
        return module.lin(x)


def _copy(model: nn.Module) -> nn.Module:
    locks = [m.lock for m in model.modules() if hasattr(m, "lock")]
    return copy.deepcopy(model, {id(lock): lock for lock in locks})


RECOMPUTED = [("tied", "always"), ("checkpoint", "except_last"), ("hook on a tensor", "always")]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.anywhere if name in ON_DEVICES or mode != "never" else ())
        for name, mode in (*((name, "never") for name in MODELS), *RECOMPUTED)
    ],
)
def test_steps_are_those_of_the_plain_model(name, mode):
    model = MODELS[name]()
    plain = _copy(model)
    with pipe_of(model, checkpoint=mode) as pipe:
        for batch in (6, 5, 2):
            given = x(batch)
            assert_step(pipe, plain, given)
            assert_step(pipe, plain, given, one_pass=True)
        assert pipe.plan.why == ("module 'inner' is kept whole: asked for by leaf_modules",)


CHANGED_BUFFERS = {"norm": lambda: nn.BatchNorm1d(6), "count": lambda: torch.zeros(()), "mean": lambda: torch.zeros(6)}


class Changing(Layered, lin=6, **CHANGED_BUFFERS):
    """Buffers changed in place and set anew; and a batch norm."""

    def forward(self, x):
        self.count += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.lin(self.norm(x)) + self.mean * self.count


CUT = {
    "plain": lambda: Model(Inner()),
    "called twice": Twice,
    "tied": _tied,
    "in place": lambda: Model(Inner(_in_place)),
    "buffers": lambda: Model(Changing()),
    "dropout": lambda: Model(Inner(lambda m, x: F.dropout(m.lin(x), 0.3, m.training))),
}


@pytest.mark.parametrize("name", CUT)
def test_every_cut(name):
    loose = ("inner.lin.weight", "inner.lin.bias", "last.weight")
    every = EveryCut(CUT[name](), x(), loose=loose, leaf_modules=("inner",))
    assert every.traced.whole
    for stages in (2, 3):
        for k, starts in enumerate(every.cuts(stages)):
            for checkpoint_mode in ("never", "always"):
                every.check(starts, 3, ("1f1b", "gpipe", "drop-in")[k % 3], checkpoint_mode)


@dataclass(frozen=True)
class Tokens:
    values: torch.Tensor
    scale: float = 2.0
    parts: tuple[torch.Tensor, ...] = ()


class Passes(Model):
    """Gives the inner module a dataclass and takes one."""

    def forward(self, x: torch.Tensor) -> Any:
        first = self.first(x)
        found = self.inner(Tokens(first, 3.0, (first * 2,)))
        return self.last(found.values * found.scale + found.parts[0])


def _of_tokens(m, tokens):
    return Tokens(m.lin(tokens.values).tanh() * tokens.scale, 0.5, (tokens.parts[0] + 1,))


@pytest.mark.anywhere
def test_dataclasses_go_in_and_out():
    plain = copy.deepcopy(model := Passes(Inner(_of_tokens)))
    assert str(whole(model)).count(" Inner(") == 1
    with pipe_of(model, example_args=(x(),)) as pipe:
        for _ in range(2):
            assert_step(pipe, plain, x())


def test_a_dataclass_that_is_changed_is_refused():
    @dataclass
    class Changing:
        values: torch.Tensor

    class Changes(Model):
        def forward(self, x):
            given = Changing(self.first(x))
            return self.last(self.inner(given) + given.values)

    def change(m, given):
        given.values = m.lin(given.values)
        return given.values * 2

    with pytest.raises(TraceError, match=r"kept whole, which changes an object that it is given.*make a new one"):
        whole(Changes(Inner(change)))


# -- buffers, random numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda m, x: m.count.new_zeros(2), lambda m, x: m.count.double()])
def test_a_buffer_set_to_another_kind_is_refused(make):
    def forward(m, x):
        m.count = make(m, x)
        return m.lin(x)

    with pytest.raises(TraceError, match="sets its buffer 'count' to one of another shape or dtype"):
        whole(Model(Inner(forward, count=torch.zeros(()))))


DRAWING = [
    (lambda m, x: m.lin(x) * random.uniform(0.5, 2.0), "never"),
    (lambda m, x: m.lin(x) * float(np.random.rand()), "always"),
    (lambda m, x: F.dropout(m.lin(x), 0.4, m.training) + torch.rand_like(x) * torch.rand(()), "always"),
]


@pytest.mark.parametrize(("forward", "mode"), DRAWING)
def test_random_numbers_are_those_of_the_micro_batch(forward, mode):
    """The same whatever the cut, the schedule and recompute; others in each step and micro-batch."""
    given = x()
    model = Model(Inner(forward))
    found = []
    for schedule in ("1f1b", "gpipe"):
        for _ in range(2):
            torch.manual_seed(2)
            random.seed(5)
            with pipe_of(copy.deepcopy(model), checkpoint=mode, schedule=schedule) as pipe:
                pipe.forward_backward(given, target=torch.ones(6, 6), loss_fn=F.mse_loss)
                found.append({name: p.grad.clone() for name, p in pipe.named_parameters()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    torch.manual_seed(2)
    seed = draw_seed(True)
    plain = copy.deepcopy(model)
    for i, part in enumerate(given.tensor_split(3)):
        h = plain.first(part)
        with seeded_opaque_call(seed, i):
            h = plain.inner(h)
        (F.mse_loss(plain.last(h), torch.ones(2, 6)) / 3).backward()
    torch.testing.assert_close(found[0], {name: p.grad for name, p in plain.named_parameters()})


class Draws(Model):
    def forward(self, x):  # one number scales, one decides
        h = self.first(x) * (1 + self.inner.function())
        return self.last(self.inner.lin(h) if self.inner.function() < 0.5 else h)


def set_back(state, number):
    np.random.set_state(state[0])
    random.setstate(state[1])
    return number


DRAWS = [lambda: random.random(), lambda: random.uniform(0, 1), lambda: np.random.rand(), lambda: np.random.uniform()]
DRAWS += [lambda draw=draw: set_back((np.random.get_state(), random.getstate()), draw()) for draw in DRAWS[::2]]


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_that_the_model_itself_draws_by_python_are_torchs(draw):
    found = []
    for one in (draw, lambda: torch.rand(())):
        torch.manual_seed(0)
        with pipe_of(Draws(Inner(one)), example_args=(given := x(),), leaf_modules=(), checkpoint="always") as pipe:
            losses = [pipe.forward_backward(given, target=given, loss_fn=F.mse_loss) for _ in range(6)]
            found.append([*losses, *(p.grad for p in pipe.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("draw", [lambda: np.random.beta(0.4, 0.4), lambda: random.betavariate(1, 0.5)])
def test_mixup_in_forward(draw):
    def loss_of(m, x):
        share, order = draw(), torch.randperm(len(x))
        mixed = m.lin(share * x + (1 - share) * x[order])
        return share * F.mse_loss(mixed, x) + (1 - share) * F.mse_loss(mixed, x[order])

    with pipe_of(Forward(loss_of), chunks=1, leaf_modules=()) as pipe:
        assert all(fxpipe.verify(pipe, x()) for _ in range(2))
        assert pipe(given := x()) != pipe(given)


def test_random_numbers_drawn_for_some_inputs_only_cannot_be_recomputed():
    model = Model(Inner(lambda m, x: F.dropout(x) if x.abs().max() > 50 else m.lin(x)))
    with pipe_of(copy.deepcopy(model)) as pipe:
        pipe(x())
        pipe(x() * 1000).sum().backward()
        assert len(pipe._fxpipe.graphs) == 1
    with pipe_of(model, checkpoint="always") as pipe:
        assert_step(pipe, copy.deepcopy(model), x())
        with pytest.raises(StateError, match="Inner, kept whole, draws random numbers"):
            pipe(x() * 1000)
        assert_step(pipe, copy.deepcopy(model), x())


# -- what changes between steps --------------------------------------------------------------------------------------


@dataclass
class Options:
    scale: float


def assert_followed(model, plain, changes, **options):
    with pipe_of(model, **options) as pipe:
        for change in changes:
            for m in (model, plain):
                change(m)
            assert_step(pipe, plain, x())


@pytest.mark.parametrize("is_whole", [True, False])
def test_attributes_set_after_planning_are_followed(is_whole):
    def forward(m, x):
        x = F.dropout(m.act(m.lin(x)), m.p) * m.options.scale * m.scales[0] * m.by_name["a"][0]
        for part in m.parts:
            x = part(x)
        x = x if m.training else x * 3
        return x if m.extra is None else x + m.extra

    parts = [nn.LeakyReLU(0.1), nn.Dropout(1.0).eval()]
    held: dict[str, Any] = {"scales": [1.0], "extra": None, "act": F.relu, "by_name": {"a": (1.0,)}, "parts": parts}
    plain = copy.deepcopy(model := Model(Inner(forward, p=0.0, options=Options(1.0), **held)))

    changes: list[Any] = [
        lambda m: None,
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: setattr(m, "p", 1.0),
        lambda m: setattr(m, "p", 0.0),
        # A recorded graph does not see what is changed inside of an object.
        lambda m: setattr(m.options, "scale", 0.5 if is_whole else 1.0),
        lambda m: setattr(m, "options", Options(0.7)),
        lambda m: operator.setitem(m.scales, 0, 0.6),
        lambda m: setattr(m, "scales", [0.8]),
        lambda m: setattr(m, "extra", 2.0),
        lambda m: setattr(m, "extra", torch.ones(6)),
        lambda m: setattr(m, "act", torch.tanh),
        lambda m: m.by_name.update(a=(0.9,)),
        lambda m: setattr(m.parts[0], "negative_slope", 0.7),
        lambda m: m.parts[1].train(),
        lambda m: operator.setitem(m.parts, 1, nn.Tanh()),
        lambda m: m.parts.reverse(),
    ]
    own = [lambda m, change=change: change(m.inner) for change in changes]
    assert_followed(model, plain, own, leaf_modules=["inner"] if is_whole else [])


class Seldom(Layered, norm=lambda: nn.BatchNorm1d(6), count=lambda: torch.ones(()), sum=lambda: torch.ones(())):
    """Changes its buffers for some inputs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() < 50:
            return x * self.count
        self.count += 1
        self.sum = self.sum * 2
        return self.norm(x) * self.count / self.sum


@pytest.mark.anywhere
@pytest.mark.parametrize("mode", ["never", "always"])
def test_buffers_that_did_not_change_when_it_was_traced_may_change_later(mode):
    plain = copy.deepcopy(model := Model(Seldom()))
    with pipe_of(model, chunks=1, checkpoint=mode) as pipe:
        for given in (x(), x() * 1000, x() * 1000, x()):
            assert_step(pipe, plain, given)
            assert_same_state(pipe, plain, exact=False)
        assert len(pipe._fxpipe.graphs) == 1


class Unique(nn.Module):
    """Cannot be copied, so that it runs itself."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.parts = [self.lin, torch.Generator()]

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is but one")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.lin(x)
        time.sleep(0.001)
        return self.lin(inside).tanh()


class Calls(Layered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.inner(x) * 2
        return x


@pytest.mark.anywhere
def test_what_cannot_be_copied_runs_in_one_stage_at_a_time():
    model, plain = Calls(inner=Unique()), Calls(inner=Unique())
    plain.load_state_dict(model.state_dict())
    with pipe_of(model, chunks=6, balance=[6, 6]) as pipe:
        for one_pass in (False, True, False, True):
            assert_step(pipe, plain, x(12), one_pass=one_pass)


def test_a_guard_on_what_a_module_kept_whole_changes_is_no_guard():
    """It would be asked before the module runs."""

    class Reads(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(self.first(x))
            return self.last(x * 2 if self.inner.running_mean.abs().sum() > 5 else x)

    traced = fxpipe.trace(Reads(nn.BatchNorm1d(6)), (x(),), leaf_modules=["inner"])
    assert not traced.guards.guards
    assert "forward of the model behind its call of 'inner' is kept whole" in traced.why[-1]


@pytest.mark.anywhere
def test_a_parameter_replaced_or_frozen_after_planning_is_followed():
    model = Model(Inner())
    plain, other = copy.deepcopy(model), Inner(lambda m, x: m.lin(x) * 7)
    changes: list[Any] = [
        lambda m: None,
        lambda m: setattr(m.inner.lin, "weight", nn.Parameter(torch.full((6, 6), 0.1))),
        lambda m: m.inner.lin.weight.requires_grad_(False),
        lambda m: setattr(m, "inner", copy.deepcopy(other)),
    ]
    assert_followed(model, plain, changes)


def test_nothing_of_a_step_stays_alive():
    made: list[Any] = []

    def forward(m, x):
        h = m.lin(x).tanh()
        made.append(weakref.ref(h))
        return h * 2

    with pipe_of(Model(Inner(forward))) as pipe:
        pipe(x()).sum().backward()
        made.clear()
        pipe.forward_backward(x(), target=torch.ones(6, 6), loss_fn=F.mse_loss)
        gc.collect()
        assert len(made) == 3
        assert not [r for r in made if r() is not None]


# -- what is refused -------------------------------------------------------------------------------------------------

_outside = nn.Linear(6, 6)
_own = nn.Parameter(torch.ones(6))


def _count(m, x):
    m.count += 1
    return m.lin(x)


def _cache(m, x):
    m.cache["x"] = x.shape
    return m.lin(x)


def _write(m, x):
    with torch.no_grad():
        m.lin.weight.mul_(0.5)
    return m.lin(x)


def _backward(m, x):
    with torch.enable_grad():
        m.lin(x.detach()).sum().backward()
    return m.lin(x)


def _set_data(m, x):
    m.lin.weight.data = m.lin.weight.data * 2
    return m.lin(x)


class _Cache:
    def __init__(self, tensor):
        self.tensor = tensor


REFUSED: dict[str, tuple[Any, str]] = {
    "parameter from elsewhere": (lambda m, x: m.lin(x) * _own, "uses a tensor of its own from outside"),
    "attribute": (_count, "sets its attribute 'count'.*register_buffer"),
    "cache": (_cache, "forward changes the attribute 'inner.cache'"),
    "parameter written": (_write, "writes to the parameter 'inner.lin.weight'"),
    "backward": (_backward, "runs backward"),
    "data set": (_set_data, "sets the data of a tensor|writes to the parameter"),
    "tensor deep in objects": (
        lambda m, x: (m.lin(x), _Cache([_Cache({"state": _Cache((_Cache([x]),))})])),
        "returns an object that holds tensors",
    ),
    "reentrant checkpoint": (
        lambda m, x: checkpoint(m.lin, x, use_reentrant=True),
        r"checkpoint\(use_reentrant=True\).*use_reentrant=False",
    ),
}


class First(Model):
    """Takes the first of what its module gives."""

    def forward(self, x):
        made = self.inner(self.first(x))
        return self.last(made[0] if isinstance(made, tuple) else made)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    forward, message = REFUSED[name]
    model = First(Inner(forward, count=0, cache={}))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TraceError, match=message):
        fxpipe.trace(model, (x(),), leaf_modules=["inner"])
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert model.inner.count == 0
    assert not model.inner.cache
    assert all(p.grad is None for p in model.parameters())


def test_a_write_to_a_buffer_outside_is_refused_and_undone():
    model = Model(Inner())
    model.register_buffer("steps", torch.zeros(()))

    def forward(m, x):
        model.steps.add_(1)
        return m.lin(x)

    model.inner.function = forward
    with pytest.raises(TraceError, match=r"uses 'steps' from outside"):
        fxpipe.trace(model, (x(),), leaf_modules=["inner"])
    assert model.steps == 0


OUTPUTS: dict[str, Any] = {"number": lambda m: 1 if m.training else 2, "none": lambda m: None if m.training else 2}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_no_tensor_may_not_change(name):
    """`State` stands for anything that the pipe cannot follow."""

    class Flagged(Layered, lin=6):
        def forward(self, x):
            return self.lin(x), OUTPUTS[name](state)

    class State:
        training = True

    state = State()
    model = First(Flagged())
    with pipe_of(model, example_args=(x(),)) as pipe:
        pipe(x())
        state.training = False
        with pytest.raises(StateError, match="Flagged gives another kind of output than when it was traced"):
            pipe(x())
        state.training = True
        pipe(x())


class LayerDrop(Layered, one=6, two=6, three=6):
    """Skips layers by chance; the result has a tuple of what each layer that ran has made."""

    probability = 0.5

    def forward(self, x):
        states = []
        for layer in (self.one, self.two, self.three):
            if not self.training or random.random() >= self.probability:
                x = layer(x).tanh()
                states.append(x)
        return {"last": x, "states": tuple(states)}


class Reads(Layered, first=6, inner=LayerDrop):
    def forward(self, x):
        result = self.inner(self.first(x))
        return self.read(result["last"], result["states"])


def test_a_tuple_that_nobody_reads_may_have_another_length_in_each_call():
    plain = copy.deepcopy(model := Reads(read=lambda last, states: last * 2 if states is not None else last))
    with pipe_of(model, chunks=2, example_args=(x(),)) as pipe:
        for seed in range(4):
            random.seed(seed)
            assert fxpipe.verify(pipe, x())
        assert_step(pipe.eval(), plain.eval(), x())


READERS = {
    "length": lambda last, states: last * len(states),
    "sum": lambda last, states: sum(states, last),
    "last": lambda last, states: states[-1],
    "returned": lambda last, states: (last, states),
    "given on": lambda last, states: torch.stack(states).sum(0),
    "truth": lambda last, states: last if states else -last,
    "type": lambda last, states: last if isinstance(states, tuple) else -last,
}


@pytest.mark.parametrize("name", READERS)
def test_a_tuple_that_forward_reads_keeps_its_length(name):
    model = Reads(read=READERS[name])
    model.inner.probability = 0.0
    with pipe_of(model, chunks=2, example_args=(x(),)) as pipe:
        assert fxpipe.verify(pipe, x())
    model.inner.probability = 0.5

    def call():
        with pipe_of(model, chunks=2, example_args=(x(),)) as pipe:
            return pipe(x())

    with pytest.raises((StateError, TraceError), match="another kind of output"):
        [call() for _ in range(20)]


# -- methods ---------------------------------------------------------------------------------------------------------


class Masked(Layered, one=6, two=6, mask=lambda: nn.Parameter(torch.randn(6))):
    """Most of the model. A method masks rows by numpy's random numbers, as SpecAugment does."""

    def forward(self, x):
        x = self._masked(self.one(x).sin())
        return F.dropout(self.two(x), 0.5, self.training)

    def _masked(self, x):
        x[torch.from_numpy(np.random.permutation(x.shape[0]) < self._count(x))] = self.mask
        return x

    def _count(self, x):
        return x.shape[0] // 2


class MaskedByLayer(Masked):
    """The method uses a module inside, so it cannot be kept whole alone."""

    def _masked(self, x):
        return self.two(x) * float(np.random.uniform(0.5, 1.0, 2)[0])


class MaskedByCount(Masked):
    """The method goes over values of the samples in Python."""

    def _masked(self, x):
        return torch.stack([row if float(row.sum()) > 0 else self.mask for row in x])


class MaskedByRow(Masked):
    def _masked(self, x):
        return torch.stack([row * self.mask for row in x])


class MaskedByStatic(Masked):
    @staticmethod
    def _masked(x):
        return x * float(np.random.uniform(0.5, 1.0, 2)[0])


class MaskedByDecision(Masked):
    """The method returns what forward decides by, which is no tensor."""

    def forward(self, x):
        x = self.one(x).sin()
        return self.two(x) if self._is_deep() else x

    def _is_deep(self):
        return random.choice([True, False])


class MaskedByLayerDecision(MaskedByDecision):
    def _is_deep(self):
        return self.two.bias is not None and random.choice([True, False])


class Named(Layered, tail=6):
    def forward(self, x):
        return self.tail(self.inner(x))


@pytest.mark.parametrize(
    ("model", "whole"),
    [
        pytest.param(lambda: Named(inner=Masked()), "inner._masked", id="inside"),
        pytest.param(Masked, "_masked", id="the model's own"),
        pytest.param(MaskedByRow, "_masked", id="rows"),
        pytest.param(lambda: Named(inner=MaskedByCount()), "inner._masked", id="values"),
        pytest.param(lambda: Named(inner=MaskedByLayer()), "inner", id="of modules"),
        pytest.param(lambda: Named(inner=MaskedByStatic()), "inner", id="static"),
        pytest.param(lambda: Named(inner=MaskedByLayerDecision()), "inner", id="none"),
    ],
)
@pytest.mark.filterwarnings("ignore:module .inner. is one node")
def test_a_method_of_a_large_module_is_kept_whole_in_its_place(model, whole):
    torch.manual_seed(2)
    with closing(fxpipe.pipeline(model(), workers(2), 2, example_args=(x(),))) as pipe:
        assert [module.name for module in pipe.plan.whole] == [whole]
        for seed in range(3):
            np.random.seed(seed)
            report = fxpipe.verify(pipe, x())
            assert report, report
        pipe.eval()
        assert fxpipe.verify(pipe, x(4))


def test_a_method_that_returns_no_tensor_decides_in_each_micro_batch():
    torch.manual_seed(1)
    model = Named(inner=MaskedByDecision()).eval()
    rows, first = x(), model.inner.one
    ways = [model.tail(h) for h in (first(rows).sin(), model.inner.two(first(rows).sin()))]
    with closing(fxpipe.pipeline(model, workers(2), 2, example_args=(rows,))) as pipe, torch.no_grad():
        taken = {
            (place, way)
            for part in (pipe(rows) for _ in range(8))
            for place in (0, 3)
            for way, want in enumerate(ways)
            if torch.allclose(part[place : place + 3], want[place : place + 3], atol=1e-6)
        }
    assert taken == {(0, 0), (0, 1), (3, 0), (3, 1)}


CHANGES = {
    "a number": lambda m: setattr(m, "part", 3),
    "a method of the class": lambda m: setattr(type(m), "_masked", lambda m, x: x * float(np.random.uniform(2, 3))),
    "a method that it calls": lambda m: setattr(type(m), "_count", lambda m, x: x.shape[0] - 1),
    "a method of the object": lambda m: setattr(m, "_masked", lambda x: x * float(np.random.uniform(2, 3))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_method_that_changes_later_is_the_one_that_runs(name):
    class Own(Masked):
        part = 2
        _masked, _count = Masked._masked, lambda m, x: x.shape[0] // m.part

    with closing(fxpipe.pipeline(Named(inner=Own()), workers(2), 2, example_args=(x(),))) as pipe:
        CHANGES[name](fxpipe.unwrap(pipe).inner)
        assert fxpipe.verify(pipe, x())
        assert pipe.plan.whole


# -- functions -------------------------------------------------------------------------------------------------------


@fxpipe.leaf
def route(values: torch.Tensor, weights: dict[str, torch.Tensor], power: int = 1) -> dict[str, Any]:
    """Reads values, as a library might."""
    large = values.max().item() > 1e9
    return {"y": values**power * (2 if large else 1) @ weights["w"], "n": power, "none": None}


@fxpipe.leaf
def outside(values: torch.Tensor) -> torch.Tensor:
    return _outside(values)


class Routing(Layered, first=6, last=6, function=lambda: None):
    def forward(self, x):
        h = self.first(x)
        if self.function is not None:
            return self.last(self.function(h))
        made = route(h, {"w": self.last.weight}, power=2)
        assert made["n"] == 2
        assert made["none"] is None
        return self.last(made["y"])


@pytest.mark.anywhere
def test_leaf_functions():
    plain = copy.deepcopy(model := Routing())
    traced = fxpipe.trace(model, (x(),))
    assert [n.name for n in traced.nodes if n.target.__name__ == "route"] == ["route"]
    with fxpipe.pipeline(model, workers(2), 3) as pipe:
        assert_step(pipe, plain, x())
        assert_step(pipe, plain, x(5), one_pass=True)


def test_leaf_functions_outside_of_a_recording_are_themselves():
    assert route.__name__ == "route"
    assert route.__doc__ == "Reads values, as a library might."
    assert torch.equal(route(torch.ones(2, 2), {"w": torch.eye(2)})["y"], torch.ones(2, 2))


def test_leaf_functions_in_a_module_kept_whole_are_part_of_it():
    traced = whole(Model(Inner(lambda m, x: route(m.lin(x), {"w": m.lin.weight})["y"])))
    assert not [n for n in traced.nodes if "route" in n.name]


def test_leaf_functions_that_use_what_they_are_not_given_are_refused():
    with pytest.raises(TraceError, match="outside, kept whole, which uses a tensor of its own from outside"):
        fxpipe.trace(Routing(function=outside), (x(),))


def test_another_thread_calls_leaf_functions_as_they_are():
    """While a model is recorded in this one."""
    inside, go_on = threading.Event(), threading.Event()
    found: list[Any] = []

    def waiting(h):
        inside.set()
        assert go_on.wait(10)
        return h

    def other() -> None:
        assert inside.wait(10)
        try:
            found.append(route(torch.ones(2, 2), {"w": torch.eye(2)})["y"])
        finally:
            go_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    traced = fxpipe.trace(Routing(function=waiting), (x(),))
    thread.join()
    assert torch.equal(found[0], torch.ones(2, 2))
    assert not [n for n in traced.nodes if "route" in n.name]


# -- modules that the tracer keeps whole by itself ------------------------------------------------------------------


class Hidden(Layered, lin=6):
    """Reads what only the stages know."""

    def forward(self, x):
        h = self.lin(x)
        return h if h.abs().max() < 1e9 else h * 0


class Drawing(nn.Module):
    def forward(self, x):
        return x * (2.0 if torch.rand(()) < 0.5 else 3.0)


class Sorts(Layered, lin=6):
    def forward(self, x):
        kinds = self.lin(x).argmax(1) % 2
        return kinds.argsort(), kinds.bincount(minlength=2).tolist()


def _by_counts(m, x):
    order, counts = m.router(x)
    rows, others = x[order].split(counts)
    return torch.zeros_like(x).index_copy(0, order, torch.cat([m.lin(rows), others.tanh()]))


BY_ITSELF: dict[str, tuple[Any, str]] = {
    "hidden value": (Hidden, r"\(bool\) that depends on the inputs and 'first.bias'"),
    "counts": (lambda: Inner(_by_counts, router=Sorts()), "uses numbers that module 'inner.router', kept whole, makes"),
    "hook on a tensor": (lambda: Inner(_with_hooks), "puts a hook on a tensor"),
    "autograd.grad": (lambda: Inner(_of_grad), "runs autograd inside forward"),
    "a transform": (
        lambda: Inner(lambda m, x: x * torch.func.grad(lambda h: m.lin(h).sin().sum())(x)),
        "transform of torch.func",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.anywhere if name == "hidden value" else ()) for name in BY_ITSELF]
)
def test_kept_whole_by_itself(name):
    make, why = BY_ITSELF[name]
    plain = copy.deepcopy(model := Model(make()))
    with fxpipe.pipeline(model, workers(2), 3) as pipe:
        for batch in (6, 5):
            given = x(batch)
            assert_step(pipe, plain, given)
            assert_step(pipe, plain, given, one_pass=True)
        (reason,) = pipe.plan.why
        assert reason.startswith("module 'inner' is kept whole: the model in module 'inner")
        assert re.search(why, reason), reason
        assert "test_whole.py:" in reason


class Attends(Layered, query=6, key=6, weight=lambda: nn.Parameter(torch.randn(6))):
    """Functions with tensors of forward and of the module in closures, as masks of Gemma 3 have them."""

    def forward(self, x):
        query, key = self.query(x), self.key(x)

        def score(one, other):
            return (query[one] * key[one] * self.weight).sum() + (query[one, other] > 0)

        scores = torch.vmap(torch.vmap(score, (None, 0)), (0, None))(torch.arange(len(x)), torch.arange(x.shape[1]))
        return scores * torch.func.vmap(lambda row: row * self.weight)(key)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_functions_of_vmap_have_the_tensors_of_the_micro_batch_in_their_closures(chunks):
    plain = copy.deepcopy(model := Attends())
    with fxpipe.pipeline(model, workers(2), chunks, example_args=(x(),)) as pipe:
        assert pipe.plan.why == ()
        for batch in (6, 4, 6):
            assert_step(pipe, plain, x(batch))
            for one in (model, plain):  # the closure holds the module, which has another parameter now
                one.weight = nn.Parameter(one.weight.detach() * 2)


def test_draws_inside_of_a_module_kept_whole_are_its_own():
    """They are no decisions of the mini-batch, and what is drawn after them is."""

    class Dropping(Layered, inner=Drawing, layers=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3))):
        def forward(self, x):
            x = self.inner(x)
            for layer in self.layers:
                if torch.rand(()) < 0.5:
                    x = layer(x)
            return x

    for seed in range(6):
        traced = fxpipe.trace(Dropping(), (x(),), leaf_modules=["inner"], seed=seed)
        assert [*traced.whole] == ["inner"]
        assert traced.draws_from_stream == (False, True, True, True)
        assert traced.guards.hold(traced, [x()], seed)
