"""What forward changes besides tensors of the model: a graph cannot, and so the step is refused with the line."""

import collections
import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.oracle import assert_step
from torch import nn

import fxpipe
from fxpipe.errors import TraceError

LOG: list[Any] = []
VALUES: dict[str, Any] = {}
COUNTS = collections.Counter[str]()
NUMBER, LAST = 0, None
NAMESPACE = types.SimpleNamespace(count=0)
SEEN: set[int] = set()
CACHE: dict[Any, Any] = {}
READY = False


@dataclass
class Statistics:
    count: int = 0
    rows: list[Any] = field(default_factory=list)
    total = 0

    def add(self, h: torch.Tensor) -> None:
        self.count += 1


STATISTICS = Statistics()


class Block(Layered, linear=4, statistics=Statistics):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.act(self, h)
        return h


def _put(block: Block, h: torch.Tensor) -> None:
    VALUES["mean"] = h.mean()


def _update(block: Block, h: torch.Tensor) -> None:
    COUNTS.update(["calls"])


def _set_global(block: Block, h: torch.Tensor) -> None:
    global NUMBER
    NUMBER += 1


def _set_global_tensor(block: Block, h: torch.Tensor) -> None:
    global LAST
    LAST = h


def _set_namespace(block: Block, h: torch.Tensor) -> None:
    NAMESPACE.count += 1


def _add_to_set(block: Block, h: torch.Tensor) -> None:
    SEEN.add(len(SEEN))


def _count_on_object(block: Block, h: torch.Tensor) -> None:
    block.statistics.count += 1


def _count_by_method(block: Block, h: torch.Tensor) -> None:
    block.statistics.add(h)


def _append_on_object(block: Block, h: torch.Tensor) -> None:
    block.statistics.rows.append(h)


def _count_on_global_object(block: Block, h: torch.Tensor) -> None:
    STATISTICS.count += 1


def _count_on_class(block: Block, h: torch.Tensor) -> None:
    Block.calls += 1


def _count_on_function(block: Block, h: torch.Tensor) -> None:
    _count_on_function.calls += 1  # type: ignore[attr-defined]


_count_on_function.calls = 0  # type: ignore[attr-defined]


def counter() -> Callable[[Block, torch.Tensor], None]:
    count = 0

    def act(block: Block, h: torch.Tensor) -> None:
        nonlocal count
        count += 1

    return act


def appending() -> Callable[[Block, torch.Tensor], None]:
    rows: list[int] = []

    def act(block: Block, h: torch.Tensor) -> None:
        rows.append(1)

    return act


EFFECTS = [
    lambda block, h: LOG.append(h.detach()),
    lambda block, h: COUNTS.update(["calls"]),
    lambda block, h: SEEN.add(len(SEEN)),
    lambda block, h: block.statistics.rows.append(h),
    _put, _set_global, _set_global_tensor, _set_namespace, _count_on_object, _count_by_method,
    _count_on_global_object, _count_on_class, _count_on_function, counter(), appending(),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    LOG.clear()
    VALUES.clear()
    CACHE.clear()


def _model(act: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(act=act), nn.Linear(4, 4))


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__qualname__)
def test_what_each_forward_changes_is_refused_with_its_line(effect: Any) -> None:
    code = effect.__code__
    with pytest.raises(TraceError, match=f"forward changes .*{__file__}:") as error:
        fxpipe.pipeline(_model(effect), ["cpu", "cpu"], 2, example_args=(torch.randn(4, 4),), progress=False)
    line = int(str(error.value).partition(f"{__file__}:")[2].partition(",")[0])
    lines = {line for _, _, line in code.co_lines()}
    assert line in lines or effect is _count_by_method


@pytest.mark.parametrize("is_one_pass", [False, True])
def test_what_is_changed_later_is_refused_then(is_one_pass: bool) -> None:
    """A branch that the first batches do not take."""
    statistics = types.SimpleNamespace(is_on=False)

    def act(block: Block, h: torch.Tensor) -> None:
        if statistics.is_on:
            LOG.append(h.detach())

    x, model = torch.randn(4, 4), _model(act)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
        assert_step(pipe, model, x, one_pass=is_one_pass)
        statistics.is_on = True
        with pytest.raises(TraceError, match="forward changes 'LOG'"):
            pipe.forward_backward(x, loss_fn=lambda y: y.mean()) if is_one_pass else pipe(x)


def _fill(block: Block, h: torch.Tensor) -> None:
    if h.shape[1] not in CACHE:
        CACHE[h.shape[1]] = torch.ones(h.shape[1])


def _make_ready(block: Block, h: torch.Tensor) -> None:
    global READY
    READY = True


def _set_the_same(block: Block, h: torch.Tensor) -> None:
    block.statistics.count = 1000 + 1


def _keep_own(block: Block, h: torch.Tensor) -> None:
    rows: list[Any] = []

    def add(value: torch.Tensor) -> None:
        nonlocal last
        last = value
        rows.append(value)

    last = h
    add(h)
    add(last)


def _change_and_put_back(block: Block, h: torch.Tensor) -> None:
    before, NAMESPACE.count = NAMESPACE.count, 1
    NAMESPACE.count = before


@pytest.mark.parametrize("effect", [_fill, _make_ready, _set_the_same, _keep_own, _change_and_put_back])
def test_what_later_forwards_do_not_change_is_accepted(effect: Any) -> None:
    x, model = torch.randn(4, 4), _model(effect)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        for _ in range(2):
            assert_step(pipe, model, x)
            assert_step(pipe, model, x, one_pass=True)


def test_a_hook_and_a_module_kept_whole_may_change_what_they_like() -> None:
    x, model = torch.randn(4, 4), _model(lambda block, h: None)
    model[0].register_forward_hook(lambda module, args, output: LOG.append(1))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        LOG.clear()
        pipe(x)
    assert LOG == [1, 1]


def _count_collections(phase: str, info: dict[str, int]) -> None:
    global NUMBER
    NUMBER += 1


def test_what_the_garbage_collector_calls_is_not_of_forward() -> None:
    thresholds, x = gc.get_threshold(), torch.randn(8, 4)
    gc.callbacks.append(_count_collections)
    gc.set_threshold(1)
    try:
        model = nn.Sequential(*(Block(act=lambda block, h: [{}, {}, {}]) for _ in range(2)))
        with fxpipe.pipeline(model, ["cpu", "cpu"], 2, progress=False) as pipe:
            for _ in range(3):
                pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
            assert len(pipe._fxpipe.graphs) == 1
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(_count_collections)
