"""Models without values, on the meta device or fake, give the graphs and plans of those that have some."""

from __future__ import annotations

import functools
import resource

import pytest
import torch
from helpers.layered import Layered
from helpers.models import GPT, ResNet, UNet
from helpers.oracle import assert_step
from helpers.traced_models import Forward
from helpers.unseen_list import UnseenList
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import fxpipe
from fxpipe.errors import ArgumentError, StateError, TraceError
from fxpipe.hardware import HARDWARE
from fxpipe.tracing.fake_tensors import mute_fake_tensor_logs
from fxpipe.tracing.node_info import info

A100 = HARDWARE["a100-80gb"]


class Made(nn.Module):
    """Tensors made in forward, held in lists and tuples, views of one another, re-assigned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept = [torch.ones(4), (torch.zeros(4), {"deep": torch.ones(4)})]
        self.register_buffer("whole", torch.zeros(2, 4))
        self.part = self.whole[0]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        positions = torch.arange(x.shape[1], device=x.device) + torch.zeros(4)
        noise = torch.rand(x.shape) + torch.rand_like(x) * torch.empty(4).fill_(2.0)
        a, (b, c) = self.kept
        return self.linear(x) * positions + noise + a + b + c["deep"] + self.part + self.whole[1]


MODELS = {
    "batch norm, in place": (ResNet, lambda: torch.randn(4, 3, 8, 8)),
    "tied, dropout in attention": (lambda: GPT(layers=1), lambda: torch.randint(0, 17, (4, 8))),
    "skips": (UNet, lambda: torch.randn(4, 3, 16, 16)),
    "made in forward": (Made, lambda: torch.randn(3, 4)),
    "lstm": (lambda: nn.LSTM(4, 5, batch_first=True), lambda: torch.randn(4, 3, 4)),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: torch.randn(4, 4, requires_grad=True),
    ),
}


def _held(model):
    """Every object that a model holds: their identities, by place."""
    stores = [(m, s) for m in model.modules() for s in (m._parameters, m._buffers, m.__dict__)]
    held = [(key, value) for _, store in stores for key, value in store.items()]
    inner = [(key, list(v.values() if isinstance(v, dict) else v)) for key, v in held if type(v) in (list, tuple, dict)]
    return [(key, id(value)) for key, value in held], [(key, list(map(id, values))) for key, values in inner]


def _facts(traced):
    effects = traced.effects
    nodes = list(traced.graph.nodes)
    return {
        "graph": fx.Graph.__str__(traced.graph),
        "fingerprint": traced.fingerprint(),
        "shapes": [str(info(n).shapes) for n in nodes],
        "random": [info(n).is_random for n in nodes],
        "dims": (traced.in_dims, traced.out_dims),
        "alias": list(effects.alias.values()),
        "writes": effects.written_classes,
        "same": {n.name: m.name for n, m in effects.same.items()},
        "requires grad": list(effects.requires_grad.values()),
        "assigned": {name: node.name for name, node in traced.assigned.items()},
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_the_model_with_values(name):
    make, make_input = MODELS[name]
    x = make_input()
    want = _facts(fxpipe.trace(make(), (x,), check=False))
    with torch.device("meta"):
        meta = make()
    with FakeTensorMode():
        fake, fake_x = make(), make_input()
    for what, model, value in (("meta", meta, x), ("fake", fake, fake_x)):
        before = _held(model)
        assert _facts(fxpipe.trace(model, (value,))) == want, what
        assert _held(model) == before, what
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))


def test_values_may_be_missing_in_model_or_inputs_whatever_the_user_has_active():
    x, model = torch.randn(3, 4), Made()
    want = _facts(fxpipe.trace(model, (x,), check=False))
    with torch.device("meta"):
        meta, meta_x = Made(), torch.randn(3, 4)
    with FakeTensorMode() as mode:
        fake, fake_x = Made(), torch.randn(3, 4)
    with torch.device("meta"):
        assert _facts(fxpipe.trace(meta, (meta_x,))) == want
    with mode:
        assert _facts(fxpipe.trace(fake, (x,))) == want
    assert _facts(fxpipe.trace(model, (fake_x,))) == want
    assert fxpipe.trace(model, (x,)).fingerprint() == fxpipe.trace(meta, (fake_x,)).fingerprint()


def test_ties_stay_ties_and_classes_of_parameters_stay():
    seen = UnseenList()

    def look(m, x):
        weight = m.lin.weight
        seen.append((weight is m.b.weight, isinstance(weight, nn.Parameter), m.lin.bias.requires_grad, x.device.type))
        return m.b(m.lin(x))

    with torch.device("meta"):
        model = Forward(look, b=nn.Linear(6, 6))
    model.b.weight = model.lin.weight
    model.lin.bias.requires_grad_(False)
    traced = fxpipe.trace(model, (torch.randn(4, 6),))
    assert set(seen) == {(True, True, False, "cpu")}
    assert sum(n.op == "get_attr" for n in traced.graph.nodes) == 3
    assert len(list(model.parameters())) == 3


def test_everything_is_in_its_place_also_after_an_error():
    class Fails(Made):
        def forward(self, x):
            raise KeyError("no")

    with torch.device("meta"):
        model = Fails()
    before = _held(model)
    with pytest.raises(KeyError):
        fxpipe.trace(model, (torch.randn(3, 4),))
    assert _held(model) == before


# -- values that are not there ---------------------------------------------------------------------------------------


def reading(read):
    return Forward(lambda m, x: m.lin(x) * (2.0 if read(x) else 3.0))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: (x > 0).all(),
        lambda x: x.sum().item() > 0,
        lambda x: x.tolist(),
        lambda x: x.detach().numpy()[0, 0] > 0,
        lambda x: torch.equal(x, x),
        lambda x: len(x[x > 0]) > 2,
        lambda x: x.nonzero().shape[0] > 2,
    ],
)
def test_a_value_that_is_read_is_named_with_its_line(read):
    with torch.device("meta"):
        model = nn.Sequential(reading(read))
    with pytest.raises(
        TraceError, match=r"module '0' needs the values of tensors .*test_fake_tensors\.py:\d+; trace it with"
    ):
        fxpipe.trace(model, (torch.randn(4, 6),))


def test_a_swallowed_error_does_not_hide_that_values_are_missing():
    def read(x):
        try:
            return bool(x.sum())
        except RuntimeError:
            return True

    with torch.device("meta"):
        model = reading(read)
    with pytest.raises(TraceError, match="needs the values"):
        fxpipe.trace(model, (torch.randn(4, 6),))


def test_the_general_paths_of_libraries_may_do_without_the_value():
    with torch.device("meta"):
        model = reading(lambda x: torch.compiler.is_compiling() or x.sum() > 0)
    traced = fxpipe.trace(model, (torch.randn(4, 6),))
    assert "needs the values" in traced.why[0]


def test_a_plan_of_a_model_without_values_runs_the_one_with_values(tmp_path):
    with torch.device("meta"):
        meta = GPT(dropout=0.0, layers=2)
    ids = torch.randint(0, 17, (8, 8))
    plan = fxpipe.plan(meta, 3, example_args=(ids,), chunks=4)
    assert "estimates for NVIDIA A100" in str(plan)
    assert all(stage.forward_seconds > 0 for stage in plan.stages)
    plan.save(tmp_path / "plan.json")
    assert fxpipe.Plan.load(tmp_path / "plan.json") == plan
    model = GPT(dropout=0.0, layers=2)
    want = model(ids)
    with fxpipe.pipeline(model, plan=fxpipe.Plan.load(tmp_path / "plan.json")) as pipe:
        torch.testing.assert_close(pipe(ids), want)
        assert [s.nodes for s in pipe.plan.stages] == [s.nodes for s in plan.stages]
        assert pipe.plan.estimated_for == A100.name  # a plan is taken as it is


def test_planning_a_model_of_more_than_a_terabyte():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(200_000, 200_000) for _ in range(8)))
    assert sum(p.nbytes for p in model.parameters()) > 1e12
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = fxpipe.plan(model, 4, example_args=(torch.zeros(8, 200_000, device="meta"),), chunks=4)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB
    assert [len(s.nodes) for s in plan.stages] == [2, 2, 2, 2]
    assert plan.stages[0].parameter_bytes == 2 * 4 * (200_000**2 + 200_000)


# -- pipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_pipe_of_a_model_that_gets_its_values_later(assign):
    source = GPT(dropout=0.0, layers=1)
    with torch.device("meta"):
        model = GPT(dropout=0.0, layers=1)
    ids = torch.randint(0, 17, (8, 8))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(ids,)) as pipe:
        assert pipe.plan.estimated_for == A100.name
        needs_values = r"no values to run with: 'tokens.weight'.*distributed.load.*load_state_dict"
        with pytest.raises(StateError, match=needs_values):
            pipe(ids)
        with pytest.raises(StateError, match="no values to run with"):
            pipe.forward_backward(ids, loss_fn=lambda y: y.mean())
        if assign:
            pipe.load_state_dict(source.state_dict(), assign=True)
        else:
            assert pipe.to_empty(device="cpu") is pipe
            model.load_state_dict(source.state_dict())
        model.head.weight = model.tokens.weight  # torch unties in both
        assert_step(pipe, source, ids)
        assert pipe.plan.estimated_for == ""


def test_a_pipe_does_not_run_on_inputs_without_values():
    with fxpipe.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["cpu", "cpu"], 2) as pipe:
        with pytest.raises(ArgumentError, match="the inputs have no values"):
            pipe(torch.zeros(4, 4, device="meta"))
        assert pipe(torch.zeros(4, 4)).shape == (4, 4)


def test_torch_logs_nothing_of_what_fake_tensors_cannot_do(caplog):
    """A refusal says it in its own words, and not behind a hundred lines of torch's log."""

    def fail():
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)

    fail()
    assert len(caplog.records) == 1
    caplog.clear()
    with mute_fake_tensor_logs():
        fail()
    assert not caplog.records


def test_caches_keep_no_tensors_without_values():
    @functools.lru_cache
    def table(size):
        return torch.linspace(0, 1, size)

    @functools.cache
    def tables(size):
        return torch.ones(size), {"more": [torch.linspace(0, 1, size)]}

    class ReadsCaches(Layered, first=6, last=6):
        def forward(self, x):
            one, others = tables(6)
            return self.last((self.first(x) + table(6) + one + others["more"][0]).relu())

    other = functools.lru_cache(torch.ones)
    kept = other(5)
    with torch.device("meta"):
        model = ReadsCaches()
    fxpipe.plan(model, 2, example_args=(torch.empty(4, 6, device="meta"),), chunks=2)
    assert other(5) is kept
    assert type(table(6)) is torch.Tensor
    assert type(ReadsCaches()(torch.zeros(4, 6))) is torch.Tensor
