"""What a function depends on, and whether it has changed."""

import contextvars
import functools
import types
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from torch import nn

from fxpipe.utils.python_state import PythonState

SCALE = 2.0
TABLE = {"scale": [1.0, 2.0]}
VARIABLE = contextvars.ContextVar("VARIABLE", default=1)
SETTINGS = types.SimpleNamespace(scale=1.0, steps=0)


@dataclass
class Config:
    scale: float = 1.0
    steps: int = 0
    inner: dict = field(default_factory=lambda: {"scale": 1.0})
    weights: numpy.ndarray = field(default_factory=lambda: numpy.ones(2))


class Slotted:
    __slots__ = ("scale",)
    default = 3.0

    @property
    def doubled(self):
        return 2 * self.scale


class Trainer:
    def __init__(self):
        self.criterion, self.config, self.step = nn.CrossEntropyLoss(), Config(), 0
        self.slotted = Slotted()
        self.slotted.scale = 1.0

    def loss(self, x):
        config = self.config
        return self.criterion(x, x) * config.scale * config.inner["scale"] * config.weights[0] + self.slotted.doubled


def of_globals(x, factors=(1.0,), *, table=TABLE):
    return doubled(x) * SCALE * factors[0] * table["scale"][0] * VARIABLE.get() * SETTINGS.scale


def doubled(x):
    return 2 * x


def over(factor):
    return lambda x: factor * doubled(x)


def _set(owner, name, value):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


CHANGES = {
    "a global": _set(__import__(__name__, fromlist="x"), "SCALE", 3.0),
    "a function": _set(__import__(__name__, fromlist="x"), "doubled", lambda x: 3 * x),
    "code": _set(doubled, "__code__", (lambda x: 3 * x).__code__),
    "defaults": _set(of_globals, "__defaults__", ((2.0,),)),
    "a list in a dict": lambda monkeypatch: monkeypatch.setitem(TABLE, "scale", [2.0, 2.0]),
    "a namespace": _set(SETTINGS, "scale", 2.0),
    "a number of another kind": _set(SETTINGS, "scale", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_globals_are_followed(monkeypatch, change):
    state = PythonState(values=(of_globals,))
    assert state.holds()
    CHANGES[change](monkeypatch)
    assert not state.holds()
    monkeypatch.undo()
    assert state.holds()


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "criterion": nn.CrossEntropyLoss(),
        "criterion.reduction": "sum",
        "config": Config(),
        "config.scale": 2.0,
        "config.inner": {"scale": 2.0},
        "config.weights": 2 * numpy.ones(2),
        "slotted.scale": 2.0,
    }.items(),
)
def test_objects_are_followed(name, value):
    trainer = Trainer()
    state = PythonState(values=(trainer.loss,))
    trainer.step, trainer.config.steps = 1, 1  # which the code does not name
    trainer.config.scale = float("1.0")  # another object
    trainer.config.inner = {"scale": 1.0}
    assert state.holds()
    path, _, last = f"trainer.{name}".rpartition(".")
    setattr(eval(path), last, value)
    assert not state.holds()


def test_classes_and_variables_are_followed(monkeypatch):
    trainer = Trainer()
    state = PythonState(values=(trainer.loss, of_globals))
    monkeypatch.setattr(Slotted, "doubled", property(lambda self: 3 * self.scale))
    assert not state.holds()
    monkeypatch.undo()
    assert state.holds()
    token = VARIABLE.set(2)
    assert not state.holds()
    VARIABLE.reset(token)
    assert state.holds()


def test_functions_that_do_the_same_have_the_same_facts():
    def facts(function):
        return PythonState(values=(function,)).facts

    assert facts(over(2.0)) == facts(over(2.0)) != facts(over(3.0))
    assert facts(functools.partial(over(2.0), 1)) != facts(functools.partial(over(2.0), 2))
    assert facts(lambda: nan) != facts(over(2.0))
    nan = float("nan")
    assert facts(over(nan)) == facts(over(float("nan")))


def test_what_grows_in_a_container_is_seen_and_code_of_libraries_is_not_followed():
    rows = [1]
    state = PythonState(values=(lambda: rows, torch.nn.functional.cross_entropy))
    rows.append(2)
    assert not state.holds()
    state.take()
    assert state.holds()


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (10**9, int("1000000000"), True),  # equal, and another object
        ("name" * 50, "".join(["name"] * 50), True),
        (1, True, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # forward may go over it
        ([1, [2, 3]], [1, [2, 3]], True),
        ([1, [2, 3]], [1, [2, 4]], False),
        ([1, 2], [1, 2, 3], False),
        ({1, 2}, {2, 1}, True),
        (numpy.array([1, 2]), numpy.array([1, 2]), True),
        (numpy.array([1, 2]), numpy.array([1, 3]), False),
        (numpy.array([1, 2]), numpy.array([[1, 2]]), False),
    ],
)
def test_attributes_that_forward_reads(before, after, is_same):
    owner = {"x": before}
    kept = PythonState(places=[(owner, "x")])
    assert kept.holds()
    owner["x"] = after
    assert kept.holds() is is_same


def test_an_array_that_is_written_to_is_another():
    owner = {"x": numpy.zeros(3)}
    kept = PythonState(places=[(owner, "x")])
    owner["x"][1] = 1
    assert not kept.holds()
