"""The simulated machine reports what is not ordered, of each kind, and nothing that is."""

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.simulated


def _stream(device="sim:0"):
    return torch.Stream(device)


def _event(stream):
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def _current(device="sim:0"):
    return torch.accelerator.current_stream(device)


def _only_race(simulated):
    (race,) = simulated.races()
    simulated.begin()  # the test ends in order
    return race.partition(":")[0]


# -- accesses ----------------------------------------------------------------------------------------------------------


def test_a_read_that_does_not_wait_for_its_write_is_reported_and_gets_nan(simulated):
    with torch.sim.stream(_stream()):
        x = torch.ones(3, device="sim:0")
    y = x + 1
    assert _only_race(simulated) == "read too early"
    assert y.isnan().all()


def test_waiting_for_an_event_that_nobody_has_recorded_orders_nothing(simulated):
    side = _stream()
    with torch.sim.stream(side):
        x = torch.ones(3, device="sim:0")
    _current().wait_event(torch.Event("sim"))
    x.add(1)
    assert _only_race(simulated) == "read too early"


def test_a_write_that_does_not_wait_for_a_read_is_reported(simulated):
    x = torch.ones(3, device="sim:0")
    side = _stream()
    side.wait_event(_event(_current()))
    with torch.sim.stream(side):
        y = x + 1
    x.zero_()
    assert _only_race(simulated) == "written too early"
    _current().wait_event(_event(side))
    x.zero_()
    assert y.device.index == 0


def test_two_writes_without_an_order_are_reported(simulated):
    x = torch.ones(3, device="sim:0")
    with torch.sim.stream(_stream()):
        x.zero_()
    assert _only_race(simulated) == "written too early"


def test_batch_norm_writes_to_its_buffers(simulated):
    """Its kernel's schema does not say so."""
    norm = nn.BatchNorm1d(3).to("sim:0")
    mean = norm.running_mean
    side = _stream()
    side.wait_event(_event(_current()))
    with torch.sim.stream(side):
        mean.clone()
    norm(torch.randn(4, 3, device="sim:0"))
    assert _only_race(simulated) == "written too early"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_recorded_memory_stays_reserved_until_the_host_has_waited(simulated):
    side, size = _stream("sim:3"), 1 << 20
    side.wait_event(_event(_current("sim:3")))
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats("sim:3")
    before = torch.accelerator.memory_reserved("sim:3"), torch.accelerator.memory_allocated("sim:3")

    def step():
        x = torch.zeros(size, dtype=torch.uint8, device="sim:3")
        side.wait_event(_event(_current("sim:3")))
        with torch.sim.stream(side):
            x.add_(1)
        x.record_stream(side)

    for _ in range(3):
        step()
    assert torch.accelerator.max_memory_reserved("sim:3") - before[0] == 3 * size
    assert torch.accelerator.max_memory_allocated("sim:3") - before[1] == size
    side.synchronize()
    for _ in range(3):
        step()
    assert torch.accelerator.max_memory_reserved("sim:3") - before[0] == 3 * size
    side.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved("sim:3") <= before[0]


def test_a_device_has_no_endless_memory(simulated):
    before = torch.accelerator.memory_allocated("sim:2")
    with pytest.raises(torch.OutOfMemoryError, match="sim:2 out of memory"):
        torch.empty(2**45, device="sim:2")
    assert torch.accelerator.memory_allocated("sim:2") == before
    assert torch.accelerator.get_memory_info("sim:2")[1] == simulated.device_bytes


# -- the host ----------------------------------------------------------------------------------------------------------


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(simulated):
    x = torch.ones(3, device="sim:0")
    pinned = torch.empty(3, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    torch.accelerator.synchronize("sim:0")
    assert pinned.tolist() == [1, 1, 1]


def test_what_a_thread_has_waited_for_another_one_does_not_know(simulated):
    """Unless something orders the two: here nothing does, but that one happens to run first."""
    side = _stream()
    with torch.sim.stream(side):
        x = torch.ones(3, device="sim:0")
    first = threading.Thread(target=side.synchronize)
    first.start()
    while first.is_alive():
        pass
    second = threading.Thread(target=lambda: x.add(1))
    second.start()
    second.join()
    assert _only_race(simulated) == "read too early"


def test_what_the_host_may_not_wait_for_can_be_forbidden(simulated):
    x, pinned = torch.ones(3, device="sim:0"), torch.ones(3).pin_memory()
    torch.sim.set_sync_debug_mode("error")
    try:
        for wait in (x.cpu, x.sum().item, x.nonzero):
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()
        x.copy_(pinned, non_blocking=True)
        _current().wait_event(_event(_current()))
    finally:
        torch.sim.set_sync_debug_mode("default")


def test_an_event_that_has_passed_is_waited_for(simulated):
    """Asking an event is as good as waiting for it, once it says yes; now and then it does not."""
    answers = set()
    for _ in range(50):
        side = _stream()
        with torch.sim.stream(side):
            x = torch.ones(3, device="sim:0")
        event = _event(side)
        answers.add(first := event.query())
        if not first:
            event.synchronize()
        assert x.add(1).tolist() == [2, 2, 2]
    assert answers == {False, True}


def test_times_of_events_are_those_of_events_with_time_that_are_over(simulated):
    first, last = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    first.record()
    torch.ones(3, device="sim:0")
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        _event(_current()).elapsed_time(last)


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_operands_on_two_devices_are_refused(simulated, other):
    x = torch.ones(2, 2, device="sim:0")
    for operation in (torch.add, torch.mm, lambda a, b: torch.cat([a, b])):
        with pytest.raises(RuntimeError, match="same device"):
            operation(x, torch.ones(2, 2, device=other))
    assert (x + torch.tensor(1.0)).tolist() == [[2, 2], [2, 2]]  # a number is at home everywhere


def test_each_device_has_a_generator(simulated):
    torch.manual_seed(3)
    first = torch.rand(4, device="sim:1")
    assert torch.sim.default_generators[0].get_offset() == 0
    assert torch.sim.default_generators[1].get_offset() == 1
    torch.manual_seed(3)
    state = torch.sim.get_rng_state(1)
    assert torch.equal(torch.rand(4, device="sim:1"), first)
    torch.sim.set_rng_state(state, 1)
    assert torch.equal(torch.rand(4, device="sim:1"), first)
    own = torch.Generator("sim:1").manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim:1", generator=own), first)
    torch.sim.set_rng_state(state, 1)
    dropped = torch.native_dropout(torch.ones(8, device="sim:1"), 0.5, True)[0]
    torch.sim.set_rng_state(state, 1)
    assert torch.equal(torch.native_dropout(torch.ones(8, device="sim:1"), 0.5, True)[0], dropped)
    with FakeTensorMode():
        inside = torch.sim.get_rng_state(1)
    assert type(inside) is torch.Tensor
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="sim:0", generator=torch.Generator("sim:1"))


def test_autograd_has_a_thread_for_each_device_and_orders_their_streams(simulated):
    threads = {}

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.device = x.device
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            threads[ctx.device] = threading.get_ident()
            return gradient * 2

    x = torch.ones(3, device="sim:0", requires_grad=True)
    with torch.sim.stream(_stream("sim:1")):
        y = Watch.apply(Watch.apply(x).to("sim:1"))
        loss = y.sum()
    loss.backward()
    assert x.grad.tolist() == [4, 4, 4]
    assert len({*threads.values(), threading.get_ident()}) == 3
