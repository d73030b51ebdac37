"""Stages on RPC workers, stepped by `DistributedOptimizer`, train as the plain model does."""

import contextlib
import importlib.util
import io
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from helpers.ranks import Ranks
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError

EXAMPLE = Path(__file__).parents[2] / "examples" / "rpc_optimizer.py"
HAS_RPC = torch.distributed.is_available() and torch.distributed.rpc.is_available()
pytestmark = pytest.mark.skipif(not HAS_RPC, reason="this build of torch has no torch.distributed.rpc")
if HAS_RPC:
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc

    from fxpipe.distributed.rpc import RpcPipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts its optimizers when it is imported
        from torch.distributed.optim import DistributedOptimizer


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        return self.layers(x)


class Skipping(nn.Module):
    """A value that skips a stage, two inputs of which one is used late, two outputs, batch norm, a frozen weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm, self.head = nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.third.bias.requires_grad_(False)

    def forward(self, x, scale):
        early = torch.tanh(self.first(x))
        late = self.norm(torch.tanh(self.second(early)))
        late = torch.tanh(self.third(late)) + early
        return self.head(late) * scale, late.mean(1)


class Failing(nn.Module):
    """Fails where the sum of a micro-batch is negative, on the stage behind the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(checked(self.first(x)))


@fxpipe.leaf
def checked(x):
    if bool((x.detach() > 1e3).any()):
        raise ValueError("a value is too large")
    return x * 1


MODELS = {"plain": Plain, "skipping": Skipping}
CUTS = {("plain", 2): [3, 2], ("plain", 3): [2, 2, 1]}


def model_of(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def batches_of(kind):
    """Mini-batches, of other sizes than that of the plan, too."""
    generator = torch.Generator().manual_seed(1)
    for size in (8, 8, 6, 8):
        x, t = (torch.randn(size, width, generator=generator) for width in (6, 3))
        yield ((x,) if kind == "plain" else (x, torch.rand(size, 1, generator=generator))), t


def loss_of(output, t):
    return F.mse_loss(output, t) if isinstance(output, torch.Tensor) else F.mse_loss(output[0], t) + output[1].mean()


def plain_steps(kind, chunks):
    """The plain model on micro-batches whose outputs go together, as batch norm has it."""
    model = model_of(kind)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
    results = []
    for args, t in batches_of(kind):
        parts = [model(*part) for part in zip(*(a.tensor_split(chunks) for a in args), strict=True)]
        output = torch.cat(parts) if kind == "plain" else tuple(map(torch.cat, zip(*parts, strict=True)))
        loss = loss_of(output, t)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), output, {name: g.clone() for name, g in gradients.items()}))
        optimizer.step()
        optimizer.zero_grad()
    return results, model.state_dict()


# -- In the processes --------------------------------------------------------------------------------------------------


def begin(mesh, path):
    warnings.simplefilter("ignore", DeprecationWarning)  # optimizers are scripted on all of them
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # of init_rpc and shutdown
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", num_worker_threads=8)
    rpc.init_rpc(f"w{mesh.get_rank()}", rank=mesh.get_rank(), world_size=mesh.size(), rpc_backend_options=options)


def end(mesh):
    rpc.shutdown()


def gradients_of(context_id, parameters):
    """The gradients of parameters that this process has, in a context."""
    held = dist_autograd.get_gradients(context_id)
    return [held.get(parameter.local_value()) for parameter in parameters]


def train(mesh, kind, workers, chunks):
    if mesh.get_rank():
        return None
    model = model_of(kind)
    (args, _), *_ = batches_of(kind)
    results = []
    with RpcPipeline(model, workers, chunks, example_args=args, balance="block", check=False) as pipe:
        names, parameters = zip(*pipe.named_parameter_rrefs().items(), strict=True)
        optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
        for args, t in batches_of(kind):
            with dist_autograd.context() as context_id:
                output = pipe(*args)
                loss = loss_of(output, t)
                dist_autograd.backward(context_id, [loss])
                gradients = []
                for rref in parameters:
                    gradients += rpc.rpc_sync(rref.owner(), gradients_of, (context_id, [rref]))
                optimizer.step(context_id)
            output = output.detach() if kind == "plain" else tuple(o.detach() for o in output)
            results.append((loss.detach(), output, gradients))
        stages = [len(stage.nodes) for stage in pipe.plan.stages]
        return results, names, pipe.state_dict(), stages


def evaluate(mesh):
    if mesh.get_rank():
        return None
    model = model_of("skipping")
    (args, _), *_ = batches_of("skipping")
    with RpcPipeline(model, ["w0", "w1"], 2, example_args=args) as pipe, torch.no_grad():
        trained = pipe(*args)
        pipe.eval()
        return trained, pipe(*args), pipe.state_dict()


def message(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", ())])
    return None, ""


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.between, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.between(self.one(x)))


def refused(mesh):
    if mesh.get_rank():
        return None
    x = torch.randn(8, 6)
    local = type("Local", (Plain,), {})
    good = {"example_args": (x,)}
    answers = {
        "unknown": message(RpcPipeline, Plain(), ["w1", "nobody"], **good),
        "twice": message(RpcPipeline, Plain(), ["w1", "w1"], **good),
        "none": message(RpcPipeline, Plain(), [], **good),
        "text": message(RpcPipeline, Plain(), "w1", **good),
        "option": message(RpcPipeline, Plain(), ["w0", "w1"], schedule="1f1b", **good),
        "example": message(RpcPipeline, Plain(), ["w0", "w1"]),
        "chunks": message(RpcPipeline, Plain(), ["w0", "w1"], 0, **good),
        "model": message(RpcPipeline, "model", ["w0", "w1"], **good),
        "meta": message(RpcPipeline, Plain().to("meta"), ["w0", "w1"], **good),
        "local": message(RpcPipeline, local(), ["w0", "w1"], **good),
        "tied": message(RpcPipeline, Tied(), ["w0", "w1"], balance=["between"], **good),
    }
    pipe = RpcPipeline(Plain(), ["w0", "w1"], 2, **good)
    answers["context"] = message(pipe, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxpipe.distributed.rpc.is_in_distributed_context", lambda: None)  # torch does not say
        answers["graph"] = message(pipe, x)
    pipe.close()
    answers["closed"] = message(pipe, x)
    return answers


def fail_and_go_on(mesh):
    if mesh.get_rank():
        return None
    model = Failing()
    x = torch.randn(8, 6)
    with RpcPipeline(model, ["w0", "w1"], 4, example_args=(x,), balance=["first"]) as pipe, torch.no_grad():
        pipe(x)  # records the graph
        large = x.clone()
        large[5] = 1e6
        failed = message(pipe, large)
        return failed, pipe(x), model(x)


# -- Tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3])
def rpc_ranks(request):
    with Ranks(request.param) as ranks, tempfile.TemporaryDirectory() as folder:
        ranks.run(begin, os.path.join(folder, "rpc"))
        yield ranks
        ranks.run(end)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_outputs_gradients_and_weights_are_those_of_the_plain_model(rpc_ranks, kind, chunks):
    workers = ["w0", "w1"] if rpc_ranks.size == 2 else ["w1", "w2"]
    expected, state = plain_steps(kind, chunks)
    results, names, own_state, stages = rpc_ranks.run(train, kind, workers, chunks)[0]
    assert len(stages) == 2
    for (loss, output, gradients), (plain_loss, plain_output, plain_gradients) in zip(results, expected, strict=True):
        torch.testing.assert_close(loss, plain_loss)
        torch.testing.assert_close(output, plain_output)
        assert {*names} == {*plain_gradients}
        for name, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(gradient, plain_gradients[name])
    assert own_state.keys() == state.keys()
    for key, value in state.items():
        if not key.endswith("num_batches_tracked"):  # which counts mini-batches
            torch.testing.assert_close(own_state[key], value)


def test_the_driver_may_have_a_stage_beside_two_workers(rpc_ranks):
    if rpc_ranks.size < 3:
        pytest.skip("needs three processes; it runs where the fixture has them")
    expected, state = plain_steps("plain", 3)
    results, _, own_state, stages = rpc_ranks.run(train, "plain", ["w0", "w1", "w2"], 3)[0]
    assert len(stages) == 3
    torch.testing.assert_close([loss for loss, *_ in results], [loss for loss, *_ in expected])
    for key, value in state.items():
        torch.testing.assert_close(own_state[key], value)


def test_evaluation_follows_modes_and_needs_no_context(rpc_ranks):
    trained, evaluated, state = rpc_ranks.run(evaluate)[0]
    model = model_of("skipping")
    (args, _), *_ = batches_of("skipping")
    parts = [model(*part) for part in zip(*(a.tensor_split(2) for a in args), strict=True)]
    torch.testing.assert_close(trained, tuple(map(torch.cat, zip(*parts, strict=True))))
    model.eval()
    torch.testing.assert_close(evaluated, model(*args))
    torch.testing.assert_close(state["norm.running_mean"], model.norm.running_mean)


def test_bad_input_is_refused_with_what_helps(rpc_ranks):
    answers = rpc_ranks.run(refused)[0]
    expected = {
        "unknown": (ArgumentError, "RPC knows no worker 'nobody'"),
        "twice": (ArgumentError, "has 'w1' several times"),
        "none": (ArgumentError, "workers is empty"),
        "text": (ArgumentTypeError, "expected a list of names"),
        "option": (ArgumentTypeError, "schedule is no option of a pipe over RPC"),
        "example": (ArgumentError, "give example_args"),
        "chunks": (ArgumentError, "chunks=0"),
        "model": (ArgumentTypeError, "model is a str"),
        "meta": (ArgumentError, "has no values (meta device)"),
        "local": (ArgumentTypeError, "cannot be sent to the RPC worker 'w0'"),
        "tied": (ArgumentError, "is used by stages 0, 1, on the workers 'w0', 'w1'"),
        "context": (StateError, "with torch.distributed.autograd.context() as context_id:"),
        "graph": (StateError, "with torch.distributed.autograd.context() as context_id:"),
        "closed": (StateError, "the pipe is closed"),
    }
    assert answers.keys() == expected.keys()
    for name, (kind, text) in expected.items():
        assert answers[name][0] is kind, answers[name]
        assert text in answers[name][1], answers[name]


def test_a_call_that_fails_names_stage_and_worker_and_the_next_one_begins_anew(rpc_ranks):
    (kind, text), output, plain = rpc_ranks.run(fail_and_go_on)[0]
    assert kind is ValueError
    assert "a value is too large" in text
    assert "in stage 1, micro-batch 2, on the RPC worker 'w1'" in text
    torch.testing.assert_close(output, plain)


def test_without_rpc_it_is_said_what_to_call(monkeypatch):
    with pytest.raises(StateError, match="init_rpc"):
        RpcPipeline(Plain(), ["w0"], example_args=(torch.randn(8, 6),))
    monkeypatch.setattr("fxpipe.distributed.rpc.rpc", None)
    with pytest.raises(StateError, match=r"is_available\(\) is False"):
        RpcPipeline(Plain(), ["w0"], example_args=(torch.randn(8, 6),))


def run_example(mesh):
    if mesh.get_rank():
        return None
    spec = importlib.util.spec_from_file_location("rpc_optimizer", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.WORKERS[:] = ["w0", "w1"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.train(4)
    return printed.getvalue()


def test_the_example_trains(rpc_ranks):
    lines = rpc_ranks.run(run_example)[0].splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
