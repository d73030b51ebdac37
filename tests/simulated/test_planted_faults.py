"""What the simulated devices would tell of a runtime that forgets to wait: a fault at a time, each of which is seen."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.delayed_updates import rounds_of_replicas, rule_of_replicas, train_delayed
from helpers.devices import forced_copies
from helpers.layered import Layered
from helpers.planted import with_fault
from torch import nn

import fxpipe
from fxpipe.optim import StageOptimizer
from fxpipe.runtime import engine, run, transport
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.stream import StageWeights
from fxpipe.runtime.transport import Transport
from fxpipe.utils import accelerator

pytestmark = pytest.mark.simulated
WIDTH = 6


class Skipping(Layered, shared=WIDTH, inner=WIDTH, outer=WIDTH):
    """A weight of two stages, a value that skips one, and values with gaps between them."""

    def forward(self, x):
        left, right = self.shared(x).relu().view(-1, 2, WIDTH // 2).unbind(1)
        inner = self.inner(torch.cat([left, right * 2], 1)).relu()
        outer = self.outer(inner)
        return self.shared(outer + torch.cat([right, left], 1)).view(-1, 2, WIDTH // 2)[:, 0]


@pytest.fixture(autouse=True)
def _host_far_ahead(monkeypatch):
    """A host that waits for its devices hides some faults."""
    monkeypatch.setattr(run, "HOST_AHEAD", 100)


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return Skipping()


@pytest.fixture(scope="module")
def pipes(plain):
    """Pipelines by their devices, planned once."""
    with contextlib.ExitStack() as stack:
        made = {}
        for devices in (("sim:0", "sim:1"), ("sim:0", "cpu"), ("sim:0", "sim:0")):
            pipe = fxpipe.pipeline(
                copy.deepcopy(plain),
                list(devices),
                3,
                balance=["outer"],
                checkpoint="never",
                example_args=(torch.randn(6, WIDTH),),
            )
            made[devices] = stack.enter_context(pipe)
            for way in (step_in_one, step_with_pinned_inputs):
                way(pipe, devices)  # starts its threads, and verifies the loss
        yield made


# -- ways to run a step ------------------------------------------------------------------------------------------------


def _batch(devices, is_pinned=False):
    torch.manual_seed(3)
    x, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH // 2)
    if is_pinned:
        return x.pin_memory(), target.pin_memory()
    return x.to(devices[0]), target.to(devices[-1])


def _gradients(model):
    return [p.grad for p in model.parameters()]


def step_in_one(pipe, devices):
    x, target = _batch(devices)
    pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
    return _gradients(pipe)


def step_with_pinned_inputs(pipe, devices):
    """They are written to at once behind the step."""
    x, target = _batch(devices, is_pinned=True)
    pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
    x.zero_()
    target.zero_()
    return _gradients(pipe)


def step_on_side_streams(pipe, devices):
    """Forward is called on other streams than backward, with inputs that have gaps and come from the other device."""
    x, target = _batch(devices[::-1])
    x, target = torch.stack([x, x], 1)[:, 0].requires_grad_(), target.to(devices[-1])
    sides = [accelerator.new_stream(d) for d in map(torch.device, dict.fromkeys(devices)) if d.type != "cpu"]
    for side in sides:
        side.wait_event(accelerator.record_event(accelerator.current_stream(side.device)))
    with accelerator.current_streams(*reversed(sides)):
        loss = F.mse_loss(pipe(x), target)
    loss.backward()
    return [gradient.clone() for gradient in _gradients(pipe)]


def several_steps(pipe, devices):
    for _ in range(2):
        pipe.zero_grad()
        gradients = step_in_one(pipe, devices)
    return gradients


# A step that goes through the streams of the devices, of the devices and the CPU, of one device twice.
WAYS = [
    (step_in_one, ("sim:0", "sim:1")),
    (step_with_pinned_inputs, ("sim:0", "sim:1")),
    (step_on_side_streams, ("sim:0", "sim:1")),
    (step_in_one, ("sim:0", "cpu")),
    (step_on_side_streams, ("sim:0", "sim:0")),
    (several_steps, ("sim:0", "sim:1")),
]


def _evidence(way, devices, pipes, plain, simulated):
    """What is wrong with a step: races, or gradients that are not those of the plain model; empty for a right one."""
    pipe = pipes[devices]
    pipe.zero_grad()
    simulated.begin(host_ahead=True)
    try:
        with forced_copies():
            gradients = way(pipe, devices)
        for device in dict.fromkeys(devices):
            accelerator.synchronize(torch.device(device))
        have = [gradient.cpu() for gradient in gradients]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    races = simulated.races()
    plain.zero_grad()
    x, target = _batch(("cpu", "cpu"))
    F.mse_loss(plain(x), target).backward()
    wrong = [
        "a gradient is wrong"
        for h, p in zip(have, plain.parameters(), strict=True)
        if not torch.allclose(h, p.grad, atol=1e-5)
    ]
    return races + wrong


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0].__name__} on {' '.join(way[1])}")
def test_a_runtime_without_faults_shows_nothing(way, pipes, plain, simulated):
    assert _evidence(*way, pipes, plain, simulated) == []


# -- streams -----------------------------------------------------------------------------------------------------------

STREAM_DEVICES = (("sim:0", "sim:1"), ("sim:2",))


@pytest.fixture(scope="module")
def streaming():
    """A pipe with replicas of its first stage, planned once."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    example, options = (torch.randn(6, WIDTH),), {"balance": ["0"], "checkpoint": "never", "progress": False}
    plan = fxpipe.plan(model, devices=["sim:0", "sim:2"], chunks=1, example_args=example, **options)
    devices = [device for own in STREAM_DEVICES for device in own]
    plan = replace(plan, replica_devices=STREAM_DEVICES)
    with fxpipe.pipeline(model, devices, plan=plan, schedule="pipedream", progress=False) as pipe:
        list(_stream(pipe, [(torch.randn(6, WIDTH), torch.randn(6, WIDTH))]))  # starts its threads
        yield pipe


def _stream(pipe, data):
    return pipe.train_stream(data, loss_fn=F.mse_loss, optimizer=StageOptimizer(pipe, torch.optim.SGD, lr=0.1))


def _evidence_of_stream(pipe, simulated):
    """What is wrong with a stream that the caller begins on streams of its own; empty for a right one."""
    torch.manual_seed(1)
    state = {name: torch.randn_like(value, device="cpu") for name, value in pipe.state_dict().items()}
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    plain.load_state_dict(state)
    for name, parameter in pipe.named_parameters():  # in memory of the default streams
        parameter.data = state[name].to(parameter.device)
    data = [(torch.randn(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(8)]
    devices = [torch.device(device) for own in STREAM_DEVICES for device in own]
    simulated.begin(host_ahead=True)
    try:
        with accelerator.current_streams(*map(accelerator.new_stream, devices)):
            losses = torch.stack([*_stream(pipe, data)]).cpu()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    counts = tuple(map(len, STREAM_DEVICES))
    rule, rounds = rule_of_replicas(counts), rounds_of_replicas(counts)
    want, _ = train_delayed([*plain], data, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), rule, 1, counts, rounds)
    wrong = [] if torch.allclose(losses, torch.stack(want), atol=1e-4) else ["a loss is wrong"]
    return simulated.races() + wrong


FAULTS_OF_STREAMS = {
    "weights go to a replica before they are made": (
        (Transport, "_copied", "streams[0].wait_event(accelerator.record_event(self._stream(source)))", "pass"),
        "read too early",
    ),
    "a replica does not wait for its weights": (
        (Transport, "open", "self._stream(target).wait_event(value.arrived)", "pass"),
        "read too early",
    ),
    "the first version is given back while stages read it": (
        (StageWeights, "keep_first_version", "if stream is not None:", "if False:"),
        "given back too early",
    ),
    "an update overwrites a version that is needed": (
        (StageWeights, "begin_update", "if self.newest in self._views:", "if False:"),
        "a loss is wrong",
    ),
    "an update divides by one mini-batch of its round": (
        (engine, "_mean_gradient", "total / len(mini_batches)", "total"),
        "a loss is wrong",
    ),
}


def test_a_stream_without_faults_shows_nothing(streaming, simulated):
    assert _evidence_of_stream(streaming, simulated) == []
    simulated.begin()


@pytest.mark.parametrize("name", FAULTS_OF_STREAMS)
def test_a_planted_fault_in_a_stream_is_seen(name, streaming, simulated, monkeypatch):
    (owner, function, *lines), kind = FAULTS_OF_STREAMS[name]
    monkeypatch.setattr(owner, function, with_fault(getattr(owner, function), *lines))
    seen = _evidence_of_stream(streaming, simulated)
    assert any(text.startswith(kind) for text in seen), seen
    simulated.begin()


# -- steps -------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a stage does not wait for what it receives": (
        (Transport, "open", "self._stream(target).wait_event(value.arrived)", "pass"),
        "read too early",
    ),
    "a stage on the CPU does not wait for what it receives": (
        (Transport, "open", "accelerator.wait_on_host(value.arrived)", "pass"),
        "a gradient is wrong",
    ),
    "the host asks once whether an event has passed, and goes on": (
        (Transport, "open", "accelerator.wait_on_host(value.arrived)", "value.arrived.query()"),
        "a gradient is wrong",
    ),
    "a copy does not wait for who makes its value": (
        (Transport, "_copied", "streams[0].wait_event(accelerator.record_event(self._stream(source)))", "pass"),
        "read too early",
    ),
    "the end of a copy is marked before it begins": (
        (
            Transport,
            "_copied",
            "with accelerator.current_streams(*streams):",
            "arrived = accelerator.record_event(streams[-1])\n    with accelerator.current_streams(*streams):",
            "        arrived = accelerator.record_event(streams[-1])",
            "",
        ),
        "read too early",
    ),
    "no stream is recorded for what arrives": (
        (Transport, "_copied", "accelerator.keep_for_stream(copy, self._stream(target))", "pass"),
        "given back too early",
    ),
    "nothing holds what a copy reads": (
        (Transport, "_copied", "self._hold(source, target, arrived, memory)", "pass"),
        "given back too early",
    ),
    "what a copy reads is held until the next copy": (
        (Transport, "_hold", "held[0][0].query()", "len(held) > 1"),
        "given back too early",
    ),
    "what copies have read is given back before they end": (
        (Transport, "settle", "self._stream(source).wait_event(last)", "pass"),
        "given back too early",
    ),
    "the caller may write to its inputs before they are read": (
        (Transport, "settle", "accelerator.wait_on_host(last)", "pass"),
        "written while read",
    ),
    "the caller may write to its target before it is read": (
        (transport, "leaves_on_device", "transport.settle()", "pass"),
        "written while read",
    ),
    "gradients are summed on other streams than the step's": (
        (Transport, "on_step_streams", "with accelerator.current_streams(*self._compute.values()):", "if True:"),
        "read too early",
    ),
    "stages run on the streams that are current in their threads": (
        (Transport, "at", "stream = self._compute.get(device)", "stream = None"),
        "read too early",
    ),
    "values with gaps are gathered on the stream of who asks for them": (
        (Transport, "_send", "with self.at(source) if has_gaps(tensor) else _NO_STREAM:", "if True:"),
        "read too early",
    ),
    "a gradient of another stage is summed before it has come": (
        (
            MiniBatch,
            "parameter_gradient",
            "self.transport.bring(gradient, home)",
            "(gradient if gradient.device == home else (lambda sent: sent.form.unpack(sent.memory))("
            "self.transport._send(gradient, home)))",
        ),
        "read too early",
    ),
    "the gradient of an input is read before it has come": (
        (Exchange, "input_gradients", "self.transport.open(g, device)", "g.form.unpack(g.memory)"),
        "read too early",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, pipes, plain, simulated, monkeypatch):
    (owner, function, *lines), kind = FAULTS[name]
    replaced = with_fault(getattr(owner, function), *lines)
    monkeypatch.setattr(owner, function, replaced)
    if owner is transport:  # others have it by name
        monkeypatch.setattr(engine, function, replaced)
    seen: list[str] = []
    for way in WAYS:
        seen += _evidence(*way, pipes, plain, simulated)
        if any(text.startswith(kind) for text in seen):
            break
    else:
        pytest.fail(f"{kind!r} is not among what was seen: {seen}")
    simulated.begin()
