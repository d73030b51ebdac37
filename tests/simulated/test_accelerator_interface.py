"""What is asked of a device, of a backend that torch knows."""

import pytest
import torch

from fxpipe._torch.thread_state import ThreadState, autocast_devices
from fxpipe.errors import ArgumentError
from fxpipe.hardware import _measure_link, local_link, local_memory
from fxpipe.planning.options.parse import parse_devices
from fxpipe.utils import accelerator

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("simulated")]
CPU = torch.device("cpu")


@pytest.fixture
def one(simulated):
    return torch.device("sim:0")  # a name that torch knows once there is a machine


@pytest.fixture
def two(simulated):
    return torch.device("sim:1")


def test_any_backend_of_torch_has_what_stages_need(one):
    assert accelerator.missing_support(torch.device("sim:3")) is None
    assert parse_devices(None) == tuple(torch.device("sim", index) for index in range(4))
    assert accelerator.with_index(torch.device("sim")) == one
    with pytest.raises(ArgumentError, match="'sim:4' is not available: there are 4 SIM devices"):
        parse_devices(["sim:4"])
    with pytest.raises(ArgumentError, match="'cuda:0' is not available: there are 0 CUDA devices"):
        parse_devices(["cuda:0"])


def test_streams_are_current_in_a_block_and_those_of_before_behind_it(one, two):
    before = [accelerator.current_stream(device) for device in (one, two)]
    side, other = accelerator.new_stream(one), accelerator.new_stream(two)
    with accelerator.current_streams(other, side), accelerator.current_streams(side):
        assert accelerator.current_stream(one) == side
        assert accelerator.current_stream(two) == other
        assert torch.accelerator.current_device_index() == 0
        with accelerator.current_device(two):
            assert torch.accelerator.current_device_index() == 1
    assert [accelerator.current_stream(device) for device in (one, two)] == before
    assert torch.accelerator.current_device_index() == 0


def test_figures_of_memory(two):
    before = accelerator.memory_figures(two)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=two)
    assert accelerator.memory_figures(two).allocated >= before.allocated + tensor.nbytes
    assert accelerator.counts_memory(two)
    assert accelerator.allocation_unit(two) >= 1
    assert local_memory(two) == accelerator.memory_figures(two).available
    assert local_memory(CPU) is None


def test_the_way_to_a_device_is_measured_through_pinned_memory(two, monkeypatch):
    _measure_link.cache_clear()  # other tests may have measured it
    pinned = []
    own = accelerator.copy_to
    monkeypatch.setattr("fxpipe.hardware._LARGE_COPY", 1 << 16)
    monkeypatch.setattr(
        accelerator,
        "copy_to",
        lambda memory, target: pinned.append([memory.is_pinned(), (copy := own(memory, target)).is_pinned()]) or copy,
    )
    assert local_link(CPU, two).bytes_per_second > 0
    assert local_link(two, CPU).bytes_per_second > 0
    assert {tuple(ends) for ends in pinned} == {(True, False), (False, True)}


def test_autocast_is_that_of_the_accelerator():
    assert autocast_devices() == ("cpu", "sim")
    with torch.autocast("sim", torch.bfloat16):
        inside = ThreadState.now()
    assert [(state.device, state.enabled) for state in inside.autocast] == [("cpu", False), ("sim", True)]


def test_generators_of_all_devices_are_restored(two):
    generators = accelerator.used_generators()
    assert len(generators) == 4
    with accelerator.restore_generators(generators):
        want = torch.rand(3, device=two)
        positions = [accelerator.generator_position(generator) for generator in generators]
    assert torch.equal(torch.rand(3, device=two), want)
    assert positions == [accelerator.generator_position(generator) for generator in generators]
