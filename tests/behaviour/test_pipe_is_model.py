"""A pipe is a model of its model's class: what scripts ask of a model they get, and its methods call the pipe."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import types
import weakref
from typing import Any, ClassVar

import pytest
import torch
from helpers.oracle import assert_step
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fxpipe
from fxpipe.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own

WIDTH = 6
CALLS: list[str] = []  # by which ways the pipe of these tests was called


def x(samples: int = 8) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(samples))


def pipe_of(model: nn.Module, *args: Any) -> Any:
    return fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=args or (x(),), progress=False)


def runs_as_pipe(pipe: Any) -> Any:
    """A pipe that notes its runs."""
    run = pipe._fxpipe.engine.call

    def noted(*args: Any) -> Any:
        CALLS.append("pipe")
        return run(*args)

    CALLS.clear()
    pipe._fxpipe.engine.call = noted
    return pipe


class Config:
    hidden = WIDTH


class Model(nn.Module):
    """Layers, with what models of libraries have besides."""

    made_by = "a library"

    def __init__(self, layers: int = 4):
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("seen", torch.zeros(()))
        self.scale = 1.0

    def forward(self, h: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the layers."""
        self.seen += 1
        for layer in self.layers:
            h = torch.tanh(layer(h)) * self.scale
        return h if labels is None else h + labels

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def factor(self) -> float:
        return self.scale

    @factor.setter
    def factor(self, value: float) -> None:
        self.scale = value

    @functools.cached_property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @classmethod
    def from_config(cls, layers: int) -> Model:
        return cls(layers)

    def generate(self, h: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            h = self(h)
        return h

    def head(self) -> nn.Module:
        return self.layers[-1]


def test_attributes_methods_signature_state_and_prints_are_the_models():
    model = Model()
    with pipe_of(model) as pipe:
        assert {*vars(model)} == {*vars(Model())}  # nothing of the pipe is in the model
        assert isinstance(pipe, Model)
        assert isinstance(pipe, fxpipe.Pipeline)
        assert type(pipe).__name__ == "Model"
        assert type(pipe).__module__ == __name__
        assert pipe.config is model.config
        assert pipe.device == torch.device("cpu")
        assert pipe.size == model.size
        assert pipe.head() is model.layers[-1]
        assert pipe.made_by == "a library"
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            pipe.nothing_of_the_kind  # noqa: B018
        assert inspect.signature(pipe.forward) == inspect.signature(model.forward)
        assert inspect.signature(type(pipe).forward) == inspect.signature(Model.forward)
        assert pipe.forward.__doc__ == "Runs the layers."
        assert pipe.forward.__name__ == "forward"
        assert [*map(id, pipe.parameters())] == [*map(id, model.parameters())]
        assert [*pipe.state_dict()] == [*Model().state_dict()]
        pipe.load_state_dict(Model().state_dict())
        assert repr(pipe).startswith("Pipeline(\n  Model on [cpu, cpu], 2 micro-batches")
        assert "(layers): ModuleList" in repr(pipe)


def test_what_is_set_on_either_is_set_on_both():
    plain = copy.deepcopy(model := Model())
    with pipe_of(model) as pipe:
        pipe.factor = 2.0
        pipe.note = "mine"
        plain.scale = 2.0
        assert model.scale == 2.0
        assert model.note == "mine"
        torch.testing.assert_close(pipe(x()), plain(x()))
        del pipe.note
        assert not hasattr(model, "note")
        pipe.eval()
        assert not model.training
        model.train()
        assert pipe.training


def test_methods_call_the_pipe_and_class_methods_and_slices_make_plain_models():
    plain = copy.deepcopy(model := Model())
    with pipe_of(model) as pipe:
        torch.testing.assert_close(runs_as_pipe(pipe).generate(x(), 3), plain.generate(x(), 3))
        assert CALLS == ["pipe"] * 3
        other = pipe.from_config(2)
        assert type(other) is Model
        assert len(other.layers) == 2
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with pipe_of(model) as pipe:
        assert type(pipe[:2]) is nn.Sequential
        torch.testing.assert_close(pipe[2:](pipe[:2](x())), pipe(x()))
        head = nn.Linear(WIDTH, 2)
        pipe[3] = head
        assert pipe(x()).shape == (8, 2)
        torch.testing.assert_close(pipe(x()), model(x()))
        assert len(pipe) == 4
        assert [*pipe][3] is head


def test_forward_of_one_model_that_was_replaced_is_shown_and_run():
    model = Model()
    original = model.forward
    model.forward = lambda h, times=2: original(h) * times  # type: ignore[method-assign]
    with pipe_of(model) as pipe:
        assert [*inspect.signature(pipe.forward).parameters] == ["h", "times"]
        want = model(x(), times=3)
        torch.testing.assert_close(runs_as_pipe(pipe)(x(), times=3), want)
        assert CALLS == ["pipe"]


def test_forward_of_the_pipe_that_was_replaced_runs_around_it():
    """Trainers wrap `forward` so, for autocast or to cast outputs."""
    model = Model()
    want = model(x()) + 1
    with pipe_of(model) as pipe:
        run = pipe.forward
        pipe.forward = lambda *args, **kwargs: run(*args, **kwargs) + 1
        torch.testing.assert_close(runs_as_pipe(pipe)(x()), want)
        assert CALLS == ["pipe"]
        assert "forward" not in model.__dict__
        del pipe.forward
        torch.testing.assert_close(pipe(x()), want - 1)


def test_hooks_on_the_pipe_and_on_the_model_run_once_for_a_mini_batch():
    model, seen = Model(), []
    with pipe_of(model) as pipe:
        handles = [
            pipe.register_forward_hook(lambda module, inputs, output: seen.append(("pipe", len(output)))),
            model.register_forward_hook(lambda module, inputs, output: seen.append(("model", len(output)))),
            pipe.register_forward_pre_hook(lambda module, inputs: seen.append(("before", len(inputs[0])))),
        ]
        pipe(x())
        assert seen == [("before", 8), ("model", 8), ("pipe", 8)]
        assert len(model._forward_hooks) == 1
        for handle in handles:
            handle.remove()
        pipe(x())
        assert len(seen) == 3


def test_a_models_own_call_runs_once():
    class Doubling(Model):
        def __call__(self, h: torch.Tensor) -> Any:
            return super().__call__(h * 2)

    plain = copy.deepcopy(model := Doubling())
    with pipe_of(model) as pipe:
        torch.testing.assert_close(pipe(x()), plain(x()))
        model.register_forward_hook(lambda module, inputs, output: None)
        with pytest.raises(StateError, match="its class a __call__ of its own"):
            pipe(x())


class WithChild(Model):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(self.model(h))


def test_a_child_called_model_is_the_pipes_too():
    plain = copy.deepcopy(model := WithChild())
    with pipe_of(model) as pipe:
        assert pipe.model is model.model
        assert fxpipe.unwrap(pipe) is model
        torch.testing.assert_close(pipe(x()), plain(x()))
    other = Model()
    with pipe_of(other) as pipe:
        assert pipe.model is other
        assert fxpipe.unwrap(other) is other


class Slotted(Model):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3


class Registered(Model):
    subclasses: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.subclasses.append(cls)


class Metaclass(type):
    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        if "forward" in namespace and not inspect.isfunction(namespace["forward"]):
            raise TypeError("forward has to be a function")
        return super().__new__(cls, name, bases, namespace)


class OfMetaclass(Model, metaclass=Metaclass):
    pass


@pytest.mark.parametrize("kind", [Slotted, Registered, OfMetaclass])
def test_classes_of_every_make(kind):
    plain = copy.deepcopy(model := kind())
    with pipe_of(model) as pipe:
        assert isinstance(pipe, kind)
        torch.testing.assert_close(pipe(x()), plain(x()))
        if kind is Slotted:
            pipe.extra += 1
            assert model.extra == 4
    assert Registered.subclasses == []


def test_nothing_keeps_a_pipe_its_model_or_its_class():
    class Passing(Model):
        pass

    model = Passing()
    pipe = pipe_of(model)
    pipe(x()).sum().backward()
    references = [weakref.ref(one) for one in (pipe, model, type(pipe), Passing)]
    pipe.close()
    del pipe, model, Passing
    for _ in range(2):  # a class goes after what was of it
        gc.collect()
    assert [reference() for reference in references] == [None] * 4


class Single(nn.Linear):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(h)) * 2


@pytest.mark.parametrize("which", ["pipe", "model"])
def test_parametrizing_either_parametrizes_both(which):
    plain = copy.deepcopy(model := Single(WIDTH, WIDTH))
    with pipe_of(model) as pipe:
        for m in (plain, pipe if which == "pipe" else model):
            parametrizations.weight_norm(m)
        assert parametrize.is_parametrized(model)
        assert isinstance(pipe, fxpipe.Pipeline)
        assert_step(pipe, plain, x())
        torch.testing.assert_close(pipe.weight, plain.weight)
        for m in (plain, pipe):
            m.weight = torch.ones(WIDTH, WIDTH)
        torch.testing.assert_close(pipe(x()), plain(x()))
        with copy.deepcopy(pipe) as copied:
            torch.testing.assert_close(copied(x()), plain(x()))
        parametrize.remove_parametrizations(pipe if which == "pipe" else model, "weight")
        assert type(model) is Single
        torch.testing.assert_close(pipe(x()), plain(x()))


def test_a_pipes_class_becomes_no_other():
    class Mixin:
        pass

    with pipe_of(Single(WIDTH, WIDTH)) as pipe:
        with pytest.raises(StateError, match=r"fully_shard and replicate cannot have a pipe; .* data_parallel="):
            pipe.__class__ = type("Sharded", (Mixin, pipe.__class__), {})
        pipe(x())


# -- compiled ----------------------------------------------------------------------------------------------------------


def test_compiled_code_around_a_pipe_runs_it_as_it_is():
    plain = copy.deepcopy(model := Model())
    pipe = fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False)  # not planned yet
    try:
        compiled = torch.compile(pipe, backend="eager")
        torch.testing.assert_close(compiled(x()), plain(x()))

        @functools.partial(torch.compile, backend="eager")
        def step(h: torch.Tensor) -> torch.Tensor:
            return pipe(h * 2).square().mean() + pipe.forward_backward(h + 1, loss_fn=lambda y: y.square().mean())

        want = plain(x() * 2).square().mean() + plain(x() + 1).square().mean()
        torch.testing.assert_close(step(x()), want)
    finally:
        pipe.close()
        torch._dynamo.reset()


def test_compile_of_a_pipe_compiles_its_stages():
    plain = copy.deepcopy(model := Model())
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(graph)
        return graph.forward

    with pipe_of(model) as pipe:
        pipe.compile(backend=backend)
        assert_step(pipe, plain, x())
        assert len(seen) >= 2  # at least one for each stage
        with pytest.raises(fxpipe.errors.ArgumentError, match=r"torch\.compile has no keyword 'backends'"):
            pipe.compile(backends=1)
    torch._dynamo.reset()


def test_a_forward_in_the_place_of_the_pipes_that_runs_no_pipeline_is_warned_of_once():
    """SFTTrainer of trl puts one there that calls the backbone and the head."""
    model = Model()
    want = model.layers[0](x())
    with pipe_of(model) as pipe:

        def past_it(self: Any, h: torch.Tensor) -> torch.Tensor:
            return self.layers[0](h)

        pipe.forward = types.MethodType(past_it, pipe)
        with pytest.warns(UserWarning, match=r"past_it \(.*test_pipe_is_model.py:\d+\), which .* has not run the pipe"):
            torch.testing.assert_close(pipe(x()), want)
        pipe(x())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            pipe(x()[:, 1:])
        assert "has not run the pipeline" in caught.value.__notes__[-1]
        pipe.forward = lambda h: pipe.forward_backward(h, loss_fn=lambda y: y.square().mean())
        pipe(x())


def test_forward_backward_inside_forward_of_distributed_data_parallel_is_refused(tmp_path):
    """Its gradients would not be summed: the reducer waits for a backward behind forward."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        with pipe_of(Model()) as pipe:
            run = pipe.forward
            pipe.forward = lambda h: pipe.forward_backward(h, loss_fn=lambda y: y.square().mean())
            replica = nn.parallel.DistributedDataParallel(pipe)
            with pytest.raises(StateError, match=r"forward_backward runs backward inside forward of a Distributed"):
                replica(x())
            pipe.forward = run
            replica(x()).sum().backward()
            assert all(p.grad is not None for p in pipe.layers.parameters())
            pipe.forward_backward(x(), loss_fn=lambda y: y.square().mean())
    finally:
        torch.distributed.destroy_process_group()
