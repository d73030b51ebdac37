"""Python state that forward reads and the user changes: before the first step, and between steps.

Each way changes what the plain model computes. A pipe follows, or refuses with an error of fxpipe's.
"""

import contextlib
import contextvars
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import assert_step
from torch import nn

import fxpipe
from fxpipe.errors import TraceError

SCALE = 1.0
TABLE = {"scale": [1.0, 1.0], "steps": 0}
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
NAMESPACE = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))
MODULE = types.ModuleType("settings")
MODULE.scale, MODULE.__file__ = 1.0, __file__
sys.modules["settings_of_attacks"] = MODULE


class Config:
    kind = "plain"

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.steps, self.nested = scale, 0, {"scale": (1.0, [1.0])}

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    def factor(self) -> float:
        return self.scale


@dataclass
class Options:
    scale: float = 1.0
    more: list[float] = field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


def helper(h: torch.Tensor) -> torch.Tensor:
    return h * 2


def with_default(h: torch.Tensor, scale: float = 1.0, *, shift: float = 0.0) -> torch.Tensor:
    return h * scale + shift


def imported(block: Any, h: torch.Tensor) -> torch.Tensor:
    from settings_of_attacks import scale

    return h * scale


def over(scale: float) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def act(block: Any, h: torch.Tensor) -> torch.Tensor:
        return h * scale

    return act


def decorated(function: Any) -> Any:
    def call(*args: Any) -> Any:
        return function(*args) * CALLED["factor"]

    return call


CALLED = {"factor": 1.0}


class Block(nn.Module):
    factor = 1.0

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act
        self.config, self.options, self.slotted = Config(), Options(), Slotted()
        self.attributes, self.name = Attributes(scale=1.0), "scale"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h if self.act is None else self.act(self, h)

    def method(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.config.factor()

    @staticmethod
    def static(h: torch.Tensor) -> torch.Tensor:
        return h + 1


closed = over(1.0)
PATCHES: list[pytest.MonkeyPatch] = []  # of the test that runs


def _set(name: str, value: Any) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        owner, _, last = name.rpartition(".")
        PATCHES[-1].setattr(eval(owner, globals(), {"block": block}), last, value, raising=False)

    return change


def _item(name: str, key: Any, value: Any) -> Callable[[Block], None]:
    return lambda block: PATCHES[-1].setitem(eval(name, globals(), {"block": block}), key, value)


def _cell(block: Block) -> None:
    closed.__closure__[0].cell_contents = 3.0  # type: ignore[attr-defined]


# what forward does with h; what changes
WAYS: dict[str, tuple[Any, Callable[[Block], None]]] = {
    "an attribute of a config": (lambda b, h: h * b.config.scale, _set("block.config.scale", 3.0)),
    "a computed name": (lambda b, h: h * getattr(b.config, b.name), _set("block.config.scale", 3.0)),
    "vars": (lambda b, h: h * vars(b.config)["scale"], _set("block.config.scale", 3.0)),
    "a property": (lambda b, h: h * b.config.doubled, _set("block.config.scale", 3.0)),
    "a method of an object": (lambda b, h: h * b.config.factor(), _set("block.config.scale", 3.0)),
    "a method of the module": (lambda b, h: b.method(h), _set("block.config.scale", 3.0)),
    "deep in a config": (
        lambda b, h: h * b.config.nested["scale"][1][0],
        lambda b: b.config.nested["scale"][1].__setitem__(0, 3.0),
    ),
    "another config": (lambda b, h: h * b.config.scale, lambda b: setattr(b, "config", Config(3.0))),
    "a new attribute": (lambda b, h: h * getattr(b.config, "gain", 1.0), _set("block.config.gain", 3.0)),
    "another kind": (lambda b, h: h * isinstance(b.config.scale, float), _set("block.config.scale", 1)),
    "a dataclass": (lambda b, h: h * b.options.scale, _set("block.options.scale", 3.0)),
    "a list in a dataclass": (lambda b, h: h * sum(b.options.more), lambda b: b.options.more.append(2.0)),
    "slots": (lambda b, h: h * b.slotted.scale, _set("block.slotted.scale", 3.0)),
    "a dict with attributes": (lambda b, h: h * b.attributes.scale, _item("block.attributes", "scale", 3.0)),
    "a namespace": (lambda b, h: h * NAMESPACE.scale, _set("NAMESPACE.scale", 3.0)),
    "a namespace in another": (lambda b, h: h * NAMESPACE.inner.scale, _set("NAMESPACE.inner.scale", 3.0)),
    "a global": (lambda b, h: h * SCALE, _item("globals()", "SCALE", 3.0)),
    "a global dict": (lambda b, h: h * TABLE["scale"][0], lambda b: TABLE["scale"].__setitem__(0, 3.0)),
    "an attribute of a Python module": (lambda b, h: h * MODULE.scale, _set("MODULE.scale", 3.0)),
    "what forward imports": (imported, _set("MODULE.scale", 3.0)),
    "a closure": (closed, _cell),
    "a default": (lambda b, h: with_default(h), _set("with_default.__defaults__", (3.0,))),
    "a keyword's default": (lambda b, h: with_default(h), _item("with_default.__kwdefaults__", "shift", 3.0)),
    "the code of a function": (lambda b, h: helper(h), _set("helper.__code__", (lambda h: h * 3).__code__)),
    "a function": (lambda b, h: helper(h), _item("globals()", "helper", lambda h: h * 3)),
    "an attribute of a function": (lambda b, h: h * helper.scale, _set("helper.scale", 3.0)),
    "what a decorator reads": (decorated(lambda b, h: h * 2), _item("CALLED", "factor", 3.0)),
    "a patched function of torch": (lambda b, h: F.relu(h), _set("F.relu", lambda h: h * 3)),
    "a class attribute": (lambda b, h: h * b.factor, _set("Block.factor", 3.0)),
    "a class attribute by the class": (lambda b, h: h * type(b).factor, _set("Block.factor", 3.0)),
    "a class attribute of an object": (lambda b, h: h * len(b.config.kind), _set("Config.kind", "another")),
    "an attribute that hides the class's": (lambda b, h: h * len(b.config.kind), _set("block.config.kind", "another")),
    "a patched method": (lambda b, h: b.method(h), _set("Block.method", lambda self, h: h * 3)),
    "a patched static method": (lambda b, h: b.static(h), _set("Block.static", staticmethod(lambda h: h * 3))),
    "a patched property": (lambda b, h: h * b.config.doubled, _set("Config.doubled", property(lambda self: 3.0))),
    "a patched forward": (None, _set("Block.forward", lambda self, x: self.linear(x) * 3)),
    "another forward of one": (None, lambda b: setattr(b, "forward", lambda x: b.linear(x) * 3)),
    "a context variable": (lambda b, h: h * VARIABLE.get(), lambda b: VARIABLE.set(3.0) and None),
    "the environment": (lambda b, h: h * float(os.environ.get("GAIN", "1")), _item("os.environ", "GAIN", "3")),
    "os.getenv": (lambda b, h: h * float(os.getenv("GAIN", "1")), _item("os.environ", "GAIN", "3")),
    "the default dtype": (
        lambda b, h: h * (3 if torch.get_default_dtype() == torch.float64 else 1),
        lambda b: torch.set_default_dtype(torch.float64),
    ),
    "deterministic algorithms": (
        lambda b, h: h * (3 if torch.are_deterministic_algorithms_enabled() else 1),
        lambda b: torch.use_deterministic_algorithms(True),
    ),
    "a kernel of attention": (
        lambda b, h: h * (3 if torch.backends.cuda.flash_sdp_enabled() else 1),
        lambda b: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "the fast path of attention": (
        lambda b, h: h * (3 if torch.backends.mha.get_fastpath_enabled() else 1),
        lambda b: torch.backends.mha.set_fastpath_enabled(False),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    PATCHES.append(monkeypatch)
    helper.scale = 1.0  # type: ignore[attr-defined]
    yield
    PATCHES.clear()
    TABLE["scale"] = [1.0, 1.0]
    closed.__closure__[0].cell_contents = 1.0  # type: ignore[attr-defined]
    VARIABLE.set(1.0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.mha.set_fastpath_enabled(True)


def _models(act: Any) -> tuple[nn.Module, Block]:
    torch.manual_seed(0)
    block = Block(act)
    return nn.Sequential(block, nn.Linear(4, 4)), block


def _changes_result(model: nn.Module, x: torch.Tensor, before: torch.Tensor) -> bool:
    with torch.no_grad():
        return not torch.allclose(model(x), before)


@pytest.mark.parametrize("way", WAYS)
def test_changes_between_steps_are_followed(way: str) -> None:
    act, change = WAYS[way]
    model, block = _models(act)
    x = torch.randn(4, 4)
    before = model(x).detach()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        assert_step(pipe, model, x)
        assert_step(pipe, model, x, one_pass=True)
        change(block)
        assert _changes_result(model, x, before), "the change has no effect"
        assert_step(pipe, model, x)
        assert_step(pipe, model, x, one_pass=True)


@pytest.mark.parametrize("way", [*WAYS][::5])
def test_changes_before_the_first_step_are_followed(way: str) -> None:
    act, change = WAYS[way]
    model, block = _models(act)
    x = torch.randn(4, 4)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        change(block)
        assert_step(pipe, model, x, one_pass=True)
        assert_step(pipe, model, x)


def _count_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    recorded: list[int] = []
    output = torch.fx.Graph.output
    monkeypatch.setattr(torch.fx.Graph, "output", lambda *args: recorded.append(1) or output(*args))
    return recorded


def _count(block: Block, step: int) -> None:
    block.config.steps = TABLE["steps"] = step
    block.options.more = [1.0]  # equal
    block.config.scale = float("1.0")
    block.config.last = torch.zeros(1)  # type: ignore[attr-defined]
    SESSION.append(step)


SESSION: list[int] = []


def test_earlier_graphs_are_used_again_and_what_is_not_read_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, block = _models(lambda b, h: h * b.config.scale * sum(b.options.more) * with_default(h))
    x = torch.randn(4, 4)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        _count(block, 0)
        for scale in (2.0, 1.0):
            block.config.scale = scale
            assert_step(pipe, model, x)
        recorded = _count_graphs(monkeypatch)
        for step in range(1, 5):
            _count(block, step)
            assert_step(pipe, model, x)
        for scale in (2.0, 1.0):
            block.config.scale = scale
            assert_step(pipe, model, x)
        assert not recorded


ASKING = [
    lambda block, h: h * (3 if torch.is_inference_mode_enabled() else 1),
    lambda block, h: h * (3 if h.is_inference() else 1),
]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("ask", ASKING)
def test_inference_mode_is_refused_where_forward_asks_for_it(ask: Any, is_first: bool) -> None:
    model, _ = _models(ask)
    x = torch.randn(4, 4)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        if not is_first:
            assert_step(pipe, model, x)
        with torch.inference_mode(), pytest.raises(TraceError, match="call the pipe under torch"):
            pipe(x)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x))


def test_global_hooks_put_on_after_planning_are_refused() -> None:
    model, _ = _models(None)
    x = torch.randn(4, 4)
    register = [
        lambda: nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2),
        lambda: nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda: nn.modules.module.register_module_full_backward_hook(lambda module, g, o: None),
        lambda: nn.modules.module.register_module_full_backward_pre_hook(lambda module, o: None),
    ]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        for put_on in register:
            assert_step(pipe, model, x)
            handle = put_on()
            with contextlib.closing(types.SimpleNamespace(close=handle.remove)):
                with pytest.raises(TraceError, match="put on all modules"):
                    pipe(x)
                with pytest.raises(TraceError, match="put on all modules"):
                    pipe.forward_backward(x, loss_fn=lambda y: y.mean())
        assert_step(pipe, model, x, one_pass=True)


def test_a_switch_while_a_forward_of_another_kind_has_run_is_followed() -> None:
    """Settings that the library changes while it trains: hidden states on for one batch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, bos_token_id=1, eos_token_id=1)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 16, (4, 5))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        for hidden in (False, True, False):
            model.config.output_hidden_states = hidden
            have, want = pipe(ids, use_cache=False), model(ids, use_cache=False)
            torch.testing.assert_close(have.logits, want.logits)
            assert (have.hidden_states is None) == (want.hidden_states is None) == (not hidden)


@pytest.mark.parametrize("one_pass", [False, True], ids=["drop-in", "forward_backward"])
def test_a_value_that_changes_in_each_step_is_reported_once(one_pass: bool) -> None:
    model, block = _models(lambda b, h: h * b.config.scale)
    line = block.act.__code__.co_firstlineno
    x = torch.randn(4, 4)

    def train(pipe: Any) -> None:
        for step in range(7):
            block.config.scale = 1.0 + step
            assert_step(pipe, model, x, one_pass=one_pass)

    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        with pytest.warns(UserWarning, match=f"reads 'config.scale' at {__file__}:{line}, which had 5 values") as seen:
            train(pipe)
        assert len(seen) == 1
