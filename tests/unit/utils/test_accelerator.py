"""What is asked of a device, of whatever make; devices that are none stand for it."""

import types

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, StateError
from fxpipe.planning import cost_model
from fxpipe.planning.options.parse import parse_devices
from fxpipe.planning.options.pipeline_options import PipelineOptions, make_settings
from fxpipe.profiling import backward_timing as clock_module
from fxpipe.profiling.backward_timing import Clock, HeadStart
from fxpipe.utils import accelerator

CPU = torch.device("cpu")


class CurrentDevice:
    """Stands for `torch.accelerator.device_index`: the current device of a backend, and which ever were."""

    index, were_current = 0, list[int]()

    def __init__(self, index):
        self._index = index

    def __enter__(self):
        self._before = CurrentDevice.index
        if self._index is not None:
            CurrentDevice.index = self._index
            CurrentDevice.were_current.append(self._index)

    def __exit__(self, *exception):
        CurrentDevice.index = self._before


@pytest.fixture
def backend(monkeypatch):
    """Two devices "xpu:0" and "xpu:1", of which torch knows nothing but what a test puts into their module."""
    module = types.SimpleNamespace(
        is_initialized=lambda: True, default_generators=(torch.Generator(), torch.Generator())
    )
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(accelerator, "device_count", lambda kind=None: 2 if kind in (None, "xpu") else 0)
    monkeypatch.setattr(accelerator, "missing_support", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "device_index", CurrentDevice)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: CurrentDevice.index)
    CurrentDevice.index, CurrentDevice.were_current = 0, []
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    for cached in (accelerator._memory_function, accelerator._has_generators):
        cached.cache_clear()
    yield module
    for cached in (accelerator._memory_function, accelerator._has_generators):
        cached.cache_clear()


# -- devices -----------------------------------------------------------------------------------------------------------


def test_without_an_accelerator_stages_run_on_two_cpu_workers(monkeypatch):
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: None)
    assert parse_devices(None) == (CPU, CPU)


def test_a_device_that_is_not_here_and_a_backend_that_lacks_something_are_refused_by_name(backend, monkeypatch):
    for device, count in (("xpu:2", "2 XPU"), ("cuda:0", "0 CUDA")):
        with pytest.raises(ArgumentError, match=f"devices: '{device}' is not available: there are {count} devices"):
            parse_devices([device])
    monkeypatch.setattr(accelerator, "missing_support", lambda device: f"torch's backend {device.type!r} lacks streams")
    with pytest.raises(ArgumentError, match="'xpu:0' is not supported: torch's backend 'xpu' lacks streams"):
        parse_devices(["xpu:0"])
    assert parse_devices(None) == (CPU, CPU)


def test_what_is_lacking_is_found_by_trying(monkeypatch):
    """`torch.Stream` of a backend that has none raises what its backend says."""
    monkeypatch.setattr(accelerator, "_missing_support", {})
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)

    def refuse(device):
        raise RuntimeError("Backend doesn't support create a new Stream\nfrom priority")

    monkeypatch.setattr(accelerator, "new_stream", refuse)
    words = "torch's backend 'xpu' lacks streams (torch.Stream): Backend doesn't support create a new Stream"
    assert accelerator.missing_support(torch.device("xpu:1")) == words
    assert "one at a time" in accelerator.missing_support(torch.device("cuda:0"))


def test_a_step_inside_a_capture_of_a_graph_is_refused(backend):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(4, 4)
    backend.is_current_stream_capturing = lambda: True
    with pytest.raises(StateError, match=r"captured on the current stream of xpu:0 .* outside the capture"):
        fxpipe.plan(model, devices=["cpu", "cpu"], example_args=(x,))
    backend.is_current_stream_capturing = lambda: False
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        output = pipe(x)
        backend.is_current_stream_capturing = lambda: True
        for step in (
            lambda: pipe(x),
            lambda: pipe.forward_backward(x, loss_fn=torch.sum, reduction="sum"),
            output.sum().backward,
        ):
            with pytest.raises(StateError, match="a graph is being captured"):
                step()
        backend.is_current_stream_capturing = lambda: False
        pipe(x).sum().backward()


def test_no_device_but_the_pipes_is_made_current(backend, monkeypatch):
    """Of eight that are visible: there a process that makes it current takes memory for a context."""
    monkeypatch.setattr(accelerator, "device_count", lambda kind=None: 8)
    backend.is_current_stream_capturing = lambda: False
    backend.default_generators = tuple(torch.Generator() for _ in range(8))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(4, 4)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        pipe(x).sum().backward()
        assert CurrentDevice.were_current == []
        pipe._fxpipe.engine.devices = [torch.device("xpu", index) for index in (2, 5, 2)]
        pipe.forward_backward(x, loss_fn=torch.sum, reduction="sum")
        assert CurrentDevice.were_current == [2, 5]
        backend.is_current_stream_capturing = lambda: CurrentDevice.index == 5
        with pytest.raises(StateError, match="captured on the current stream of xpu:5"):
            pipe(x)
    fxpipe.plan(model, devices=["xpu:6", "xpu:9"], example_args=(x,), hardware="cpu")
    assert {*CurrentDevice.were_current} == {2, 5}


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_for_further_tensors_is_what_is_free_and_what_torch_keeps_unused(backend):
    device = torch.device("xpu:0")
    assert accelerator.memory_figures(CPU) is None
    backend.mem_get_info = lambda device: (60, 80)
    backend.memory_allocated, backend.memory_reserved = lambda device: 10, lambda device: 15
    assert accelerator.memory_figures(device) == accelerator.MemoryFigures(60, 80, 10, 15)
    assert accelerator.memory_figures(device).available == 65


def test_a_backend_without_figures_of_memory_has_none(backend, monkeypatch):
    def no_allocator(device):
        raise RuntimeError("Allocator is not a DeviceAllocator")

    for name in ("get_memory_info", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, no_allocator, raising=False)
    assert accelerator.memory_figures(torch.device("xpu:0")) is None
    assert not accelerator.counts_memory(torch.device("xpu:0"))


def test_memory_that_the_model_has_already_is_at_hand_for_it(monkeypatch):
    """A plan counts parameters and gradients wherever they are."""
    monkeypatch.setattr(cost_model, "local_memory", lambda device: 1000)
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    settings = make_settings(PipelineOptions(devices=["cpu", "cpu"]))
    assert cost_model.with_memory_at_hand(settings, model).memory_at_hand == {CPU: 1000 + 4 * (16 + 4 + 16)}
    shared = nn.Sequential(model, model)
    assert cost_model.with_memory_at_hand(settings, shared).memory_at_hand == {CPU: 1000 + 4 * (16 + 4 + 16)}
    elsewhere = nn.Linear(4, 4, device="meta")
    assert cost_model.with_memory_at_hand(settings, elsewhere).memory_at_hand == {CPU: 1000}


def test_a_generator_is_that_of_the_backend_or_the_state_that_it_shows(backend):
    device, states = torch.device("xpu:1"), {1: torch.zeros(2)}
    del backend.default_generators
    backend.get_rng_state = lambda device: states[device.index]
    backend.set_rng_state = lambda state, device: states.__setitem__(device.index, state)
    with accelerator.restore_generators([accelerator.default_generator(device)]):
        backend.set_rng_state(torch.ones(2), device)
        torch.rand(1)
    assert torch.equal(states[1], torch.zeros(2))
    backend.default_generators = (torch.Generator(), torch.Generator())
    assert accelerator.default_generator(device) is backend.default_generators[1]
    assert accelerator.used_generators() == [*backend.default_generators]
    backend.is_initialized = lambda: False
    assert accelerator.used_generators() == []


def test_a_backend_that_shows_no_state_of_its_generators_is_left_alone(backend):
    del backend.default_generators
    backend.get_rng_state = lambda: torch.zeros(2)  # of the only device
    assert accelerator.used_generators() == []


class SlowHost:
    """A device that is given its work by a slow host; times are in seconds, and events are times."""

    def __init__(self, launch):
        self.launch, self.host, self.device = launch, 0.0, 0.0

    def run(self, kernel):
        self.host += self.launch
        self.device = max(self.device, self.host) + kernel

    def synchronize(self, *devices):
        self.host = max(self.host, self.device)

    def record_event(self, stream, timing=False):
        self.host += 1e-6
        return max(self.device, self.host)


@pytest.fixture
def slow_host(monkeypatch):
    machine = SlowHost(launch=1e-5)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(accelerator, "synchronize", machine.synchronize)
    monkeypatch.setattr(accelerator, "record_event", machine.record_event)
    monkeypatch.setattr(accelerator, "seconds_between", lambda earlier, later: later - earlier)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: machine.run(a.shape[0] ** 3 * 1e-12))
    return machine


@pytest.mark.parametrize("kernel", [1e-6, 3e-6, 5e-5])
def test_a_node_shorter_than_its_launch_takes_as_long_as_its_kernels(slow_host, kernel):
    clock = clock_module._event_clock(CPU)
    seconds, _ = clock.seconds(slow_host.run, kernel)
    assert seconds == pytest.approx(kernel, rel=1e-3)
    seconds, _ = clock.seconds(lambda: [slow_host.run(kernel) for _ in range(10)])
    assert seconds == pytest.approx(10 * kernel, rel=1e-3)


def test_a_head_start_lasts_long_enough_and_not_much_longer(slow_host):
    head_start = HeadStart(CPU)
    head_start.give()
    ahead = slow_host.device - slow_host.host
    assert 0.5 * clock_module._HEAD_START < ahead < 2 * clock_module._HEAD_START


class SeesThreads(torch.autograd.Function):
    seen = None

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        SeesThreads.seen = torch._C._is_multithreading_enabled()
        return gradient * 2


def test_backward_is_measured_as_stages_run_it_in_the_calling_thread():
    x = torch.ones(3, requires_grad=True)
    Clock.on(CPU).backward_seconds([SeesThreads.apply(x)], [x], [torch.ones(3)], [None])
    assert SeesThreads.seen is False
