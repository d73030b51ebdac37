"""Values that forward reads: real ones while it is recorded, and questions asked in every step on the mini-batch."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_step, closing
from helpers.traced_models import Forward
from torch import nn

import fxpipe
from fxpipe.errors import DecisionError
from fxpipe.tracing import trace
from fxpipe.tracing.node_info import info


def make_reading(between: Any, **held: Any) -> nn.Module:
    """Two layers, and what is to be tested between them."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.second(m.between(m, m.lin(x), x))

    return Forward(forward, second=nn.Linear(6, 6), between=between, **held)


def graphs(pipe: fxpipe.Pipeline) -> int:
    return len(pipe._fxpipe.graphs)


def positive(batch: int = 8) -> torch.Tensor:
    return torch.rand(batch, 6) + 0.1


def mixed_signs(batch: int = 8) -> torch.Tensor:
    """The first half is positive, the second is not: micro-batches disagree."""
    return torch.cat([positive(batch // 2), -positive(batch - batch // 2)])


def pipe_of(model: nn.Module, **options: Any) -> Any:
    return closing(fxpipe.pipeline(model, **{"devices": ["cpu", "cpu"], "chunks": 4} | options))


def _assert(m, h, x):
    assert (x.abs() < 1e9).all()
    return h


READS: dict[str, tuple[Any, str]] = {
    "if": (lambda m, h, x: h.relu() if (x > 0).all() else h * 3, "bool"),
    "item": (lambda m, h, x: h * x.sum().item(), "item"),
    "array": (lambda m, h, x: h + torch.as_tensor(np.asarray(x).mean(0)), "array"),
    "contains": (lambda m, h, x: h * 2 if 3.0 in x else h, "contains"),
    "equal": (lambda m, h, x: h * 2 if torch.equal(x, x.abs()) else h, "equal"),
    "allclose": (lambda m, h, x: h * 2 if torch.allclose(x, x.abs()) else h, "allclose"),
    "assert": (_assert, "bool"),
    "function that asserts": (lambda m, h, x: torch._assert((x < 1e9).all(), "large") or h, "bool"),
    "index": (lambda m, h, x: h * [1.0, 2.0][(x > 0).all().long()], "index"),
    "after a write": (lambda m, h, x: h.relu() if (x.clone().sub_(0.05) > 0).all() else h, "bool"),
    "after a write to a view": (lambda m, h, x: _write_to_view(h, x.clone()), "bool"),
    "after a module that writes": (lambda m, h, x: h * 2 if bool(F.relu6(x.clone(), True).sum() > 3) else h, "bool"),
    "without gradients": (lambda m, h, x: _without_gradients(h, x), "bool"),
    "several": (lambda m, h, x: (h.relu() if (x > 0).any() else h) * (2 if (x > 0).all() else 1), "bool"),
    "nested": (lambda m, h, x: (h.relu() if (x > 0).all() else h * 2) if (x > -9).any() else h, "bool"),
}


def _write_to_view(h, x):
    x[4:].neg_()
    return h.relu() if (x > 0).all() else h


def _without_gradients(h, x):
    with torch.no_grad():
        mask = x > 0
        if mask.all():
            return h.relu() + 1
    return h


@pytest.mark.parametrize("name", READS)
def test_reads_of_inputs(name):
    between, text = READS[name]
    plain = copy.deepcopy(model := make_reading(between))
    with pipe_of(model) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (positive(), mixed_signs(), -positive(), mixed_signs()):
            assert_step(pipe, plain, x)
            assert_step(pipe, plain, x, one_pass=True)
        assert pipe.plan.why == ()
        assert any(guard.startswith(text) and "test_guards.py:" in guard for guard in pipe.plan.guards), (
            pipe.plan.guards
        )


@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "never"), ("gpipe", "always")])
def test_each_answer_is_a_graph_and_is_kept(schedule, checkpoint):
    plain = copy.deepcopy(model := make_reading(lambda m, h, x: h.relu() if (x > 0).all() else h.tanh()))
    with pipe_of(model, schedule=schedule, checkpoint=checkpoint) as pipe:
        counts = []
        for x in (positive(), mixed_signs(), positive(6), mixed_signs(9), positive()):
            assert_step(pipe, plain, x)
            assert_step(pipe, plain, x, one_pass=True)
            counts.append(graphs(pipe))
        assert counts == [1, 2, 2, 2, 2]


def test_reads_of_constants_are_no_guards():
    table = torch.tensor([1.0, 2.0])

    def between(m, h, x):
        scale = float(torch.tensor([3.0]).sum())
        if (torch.arange(6) < 9).all() and bool(torch.ones(x.shape[0]).sum() > 0):
            return h * scale * m.table[0][1].item()
        return h

    plain = copy.deepcopy(model := make_reading(between, table=[table]))
    with pipe_of(model) as pipe:
        for x in (positive(), mixed_signs(5)):
            assert_step(pipe, plain, x)
        assert len(pipe.plan.guards) == 1  # of the batch size
        assert graphs(pipe) == 1


def test_a_read_that_depends_on_the_batch_size_is_asked_for_the_whole_batch():
    plain = copy.deepcopy(model := make_reading(lambda m, h, x: h * 2 if x.sum() / x.shape[0] > 8 else h))
    with pipe_of(model) as pipe:
        for x in (positive(8), positive(8) * 9, positive(5), positive(6) * 9):
            assert_step(pipe, plain, x)
        assert graphs(pipe) == 2


def test_the_first_answer_that_differs_ends_the_questions():
    """What is computed after a read may not be possible where the answer is another one."""

    def between(m, h, x):
        width = int((x[0] > 0).sum())
        if width != 6:
            return h
        return h * 2 if x[:, :width].reshape(-1, 3, 2).sum() > 0 else h

    plain = copy.deepcopy(model := make_reading(between))
    narrow = positive()
    narrow[0, 0] = -1
    with pipe_of(model) as pipe:
        for x in (positive(), narrow, positive(), narrow):
            assert_step(pipe, plain, x)
        assert graphs(pipe) == 2


def test_what_is_read_after_a_write_is_what_was_written():
    class Model(Layered, first=6, second=6):
        def forward(self, x):
            x.add_(1)
            return self.second(self.first(x).relu() if (x > 0.5).all() else self.first(x))

    plain = copy.deepcopy(model := Model())
    low = torch.full((8, 6), -0.2)
    lower = torch.cat([low[:4], low[4:] - 1])
    with pipe_of(model) as pipe:
        for x in (low, lower, low):
            assert_step(pipe, plain, x)
        assert graphs(pipe) == 2


class Bare(Layered, first=lambda: nn.Parameter(torch.randn(6, 6)), second=lambda: nn.Parameter(torch.randn(6, 6))):
    """Holds its weights itself, and looks at a hidden value."""

    def forward(self, x):
        h = F.linear(x, self.first)
        return F.linear(self.looked_at(h), self.second)

    def looked_at(self, h):
        return h.relu() if torch.isfinite(h).all() else h.nan_to_num()


class Checks(Bare):
    """Its distribution checks its mean, and raises where that is none."""

    def looked_at(self, h):
        return torch.distributions.Normal(h, 1.0, validate_args=True).log_prob(h + 1)


class Asserts(Bare):
    def looked_at(self, h):
        assert torch.isfinite(h).all(), "infinite"
        return h.relu()


class Raises(Bare):
    def looked_at(self, h):
        if h.sum() > 0:
            pass
        elif torch.isfinite(h).all() == False:  # noqa: E712
            message = f"{h} is infinite"
            raise ValueError(message)
        return h.relu()


class RaisesLast(Bare):
    def looked_at(self, h):
        if torch.isfinite(h).all():
            h = h.relu()
        else:
            raise ValueError("infinite")
        return h


@pytest.mark.parametrize("kind", [Checks, Asserts, RaisesLast])
def test_what_only_raises_is_compared_in_the_stages(kind):
    plain = copy.deepcopy(model := kind())
    with pipe_of(model, example_args=(positive(),)) as pipe:
        assert re.search(r"compared in the stages: .*test_guards.py:\d+ is True", pipe.plan.why[-1])
        for x in (mixed_signs(), positive()):
            assert_step(pipe, plain, x)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        infinite = mixed_signs()
        infinite[-1] = torch.nan
        with pytest.raises(DecisionError, match=r"which is False for these samples; it was True") as caught:
            pipe.forward_backward(infinite, target=None, loss_fn=lambda y: y.square().mean())
        assert "micro-batch" in caught.value.__notes__[0]
        assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
        assert_step(pipe, plain, mixed_signs())


class Drawn(Checks):
    def looked_at(self, h):
        z = torch.distributions.Normal(h, 1.0, validate_args=True).rsample()
        if torch.isnan(z).any():
            raise ValueError("no number")
        return z + torch.randn(len(h), 1)


def test_drawn_values_that_are_checked_are_drawn_as_the_model_draws_them():
    with pipe_of(Drawn(), chunks=8, example_args=(positive(),)) as pipe:  # micro-batches of one sample
        for x in (positive(), mixed_signs()):
            assert fxpipe.verify(pipe, x)


class ChecksTwo(Bare):
    """One of two may be wrong."""

    def looked_at(self, h):
        if torch.isnan(h).any() and (h < 0).any():
            raise ValueError
        return h


class Mends(Bare):
    def looked_at(self, h):
        if torch.isnan(h).any():
            h = h.nan_to_num()
        return h


@pytest.mark.parametrize("kind", [Bare, ChecksTwo, Mends, Raises])
def test_a_method_with_an_answer_after_which_forward_may_go_on_is_kept_whole(kind):
    with pipe_of(kind(), example_args=(positive(),)) as pipe:
        assert pipe.plan.why[-1].startswith("method 'looked_at' is kept whole: the model reads the value of a tensor")
        for x in (positive(), mixed_signs()):
            assert fxpipe.verify(pipe, x)


class Masked(nn.Module):
    """Looks into a mask like a library: not while a compiler is at work."""

    def __init__(self, hidden: bool):
        super().__init__()
        self.lin, self.out, self.hidden = nn.Linear(6, 6), nn.Linear(6, 6), hidden

    def forward(self, x):
        h = self.lin(x)
        mask = (h if self.hidden else x) > 0
        if not torch.compiler.is_compiling() and mask.all():
            return self.out(h)
        return self.out(h.masked_fill(~mask, 0.0))


def test_general_paths_only_where_something_stands_in_the_way():
    for hidden in (False, True):
        plain = copy.deepcopy(model := Masked(hidden))
        with pipe_of(model) as pipe:
            for x in (positive(), mixed_signs()):
                assert_step(pipe, plain, x)
            assert graphs(pipe) == (1 if hidden else 2)
            assert len(pipe.plan.guards) == (0 if hidden else 1)
            assert [why.startswith("by the general paths of libraries: ") for why in pipe.plan.why] == [True] * hidden
            if hidden:
                assert "test_guards.py:" in pipe.plan.why[0]
    assert not torch.compiler.is_compiling()


def test_what_a_general_path_raises_is_not_the_models():
    class Raising(Masked):
        def forward(self, x):
            if torch.compiler.is_compiling():
                raise RuntimeError("not here")
            return super().forward(x)

    found = trace(Raising(True), (positive(),))
    assert "depends on the inputs and 'lin" in found.why[0]
    assert "forward of the model behind its call of 'lin' is kept whole" in found.why[-1]


class LayerDrop(Layered, layers=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), last=6):
    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = F.dropout(torch.tanh(layer(x)), 0.0, self.training)
        return self.last(x)


def layers_taken(model: LayerDrop) -> list[bool]:
    return [layer.weight.grad is not None for layer in model.layers]


def taking(model: LayerDrop, taken: list[bool], x: torch.Tensor) -> torch.Tensor:
    for layer, is_taken in zip(model.layers, taken, strict=True):
        x = torch.tanh(layer(x)) if is_taken else x
    return model.last(x)


def test_layer_drop_decides_once_for_a_step_and_by_chance():
    plain = copy.deepcopy(model := LayerDrop())
    seen = []
    with pipe_of(model) as pipe:
        for step in range(60):
            x = mixed_signs()
            for m in (model, plain):
                m.zero_grad()
            if step % 2:
                have = pipe(x)
                have.square().mean().backward()
            else:
                pipe.forward_backward(x, target=torch.zeros(8, 6), loss_fn=F.mse_loss)
            seen.append(layers_taken(model))
            want = taking(plain, seen[-1], x)
            if step % 2:
                torch.testing.assert_close(have, want)
            want.square().mean().backward()
            for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert (p.grad is None) == (q[1].grad is None), name
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, q[1].grad)
        assert graphs(pipe) <= 8
        for layer in range(3):  # 60 throws of a coin: 30 ± 4 standard deviations
            assert 14 < sum(taken[layer] for taken in seen) < 46
        assert len({tuple(taken) for taken in seen}) > 4


def test_a_lot_that_goes_on_into_the_computation_is_no_guard():
    """A stage would draw another number than the one that was read: the same lines have to do both."""

    def between(m, h, x):
        keep = torch.rand(())
        return h / keep if keep > 0.5 else h * keep

    traced = trace(make_reading(between), (positive(),))
    assert not traced.guards.guards
    assert "depends on random numbers" in traced.whole[""]


def test_guards_are_in_the_plan_and_on_disk(tmp_path):
    model = make_reading(lambda m, h, x: h.relu() if (x > 0).all() else h)
    with pipe_of(model, example_args=(positive(),)) as pipe:
        (guard,) = pipe.plan.guards
        line = model.between.__code__.co_firstlineno
        assert guard == f"bool of all_1 was True at test_guards.py:{line}"
        pipe.plan.save(tmp_path / "plan.json")
        assert fxpipe.Plan.load(tmp_path / "plan.json") == pipe.plan
        again = fxpipe.pipeline(model, example_args=(positive(),), plan=fxpipe.Plan.load(tmp_path / "plan.json"))
        with closing(again):
            assert again.plan.guards == pipe.plan.guards


def test_reads_that_change_in_each_step_are_warned_of_once():
    plain = copy.deepcopy(model := make_reading(lambda m, h, x: h * x.sum().item()))
    line = model.between.__code__.co_firstlineno
    with pipe_of(model) as pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            assert_step(pipe, plain, mixed_signs())
            assert len(caught) == (step >= 8)
    (text,) = {str(w.message) for w in caught}
    assert "9 graphs of Forward differ only in values that forward has read (item of sum_1 at " in text
    assert f"test_guards.py:{line}" in text
    assert "leaf_modules=" in text


def test_other_threads_run_modules_and_draw_while_a_model_is_recorded():
    """They are not recorded, keep `is_compiling` False, and do not make a draw of what is none."""
    stop, wrong = threading.Event(), []
    other = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def work() -> None:
        while not stop.is_set():
            other(torch.ones(2, 6))
            torch.rand(())
            if torch.compiler.is_compiling() or torch.compiler.is_exporting():
                wrong.append("compiling")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            traced = trace(Masked(True), (positive(),))
            assert [info(n).module for n in traced.nodes if n.target is F.linear] == ["lin", "out"]
            assert traced.why
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert not torch.compiler.is_compiling()


def test_a_guard_that_cannot_be_asked_does_not_hold():
    """For such inputs the graph is another one, or the model itself says what is wrong with them."""
    model = make_reading(lambda _, h, x: h * 2 if x[5].sum() > 0 else h - 1)
    x = torch.ones(8, 6)
    traced = trace(model, (x,))
    assert traced.guards.guards
    assert traced.guards.hold(traced, [x], 0)
    assert not traced.guards.hold(traced, [-x], 0)
    assert not traced.guards.hold(traced, [x[:4]], 0)  # has no x[5]
